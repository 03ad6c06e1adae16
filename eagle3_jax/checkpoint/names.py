"""Which tensor of a checkpoint is which weight of a model, as data, and the loading that follows it.

`jax.eval_shape` of a model describes its weights (see `eagle3_jax.quant.weight`); loading walks that tree.
Files hold matrices as PyTorch does, [out, in]; `Weight.layout` says how they are kept here.
"""

import dataclasses
import logging
import re
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax.checkpoint.tensors import DTYPES, TensorSource
from eagle3_jax.config import Eagle3Config
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.models.decoder import Decoder
from eagle3_jax.models.eagle3 import Eagle3, SharedWeights
from eagle3_jax.quant.formats import FLOAT_FORMATS
from eagle3_jax.quant.weight import Weight, is_weight, named_weights, tree_path

log = logging.getLogger("eagle3_jax")

FORMATS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
"""Weight format of each dtype a checkpoint can be loaded in or saved as."""

_PLAIN_DTYPES = [DTYPES[name] for name in ("F64", "F32", "F16", "BF16")]


@dataclasses.dataclass(frozen=True)
class Fused:
    """One tensor of a file that holds a stack of experts, and perhaps several of the model's weights.

    Attributes:
        name: its name; "{i}" is a number.
        part, parts: the weight is every `parts`-th output from `part` on, as gpt-oss lays out gate and up.
    """

    name: str
    part: int = 0
    parts: int = 1


@dataclasses.dataclass(frozen=True)
class HeadRows:
    """One [out, in] tensor in which several of the model's weights take turns, head by head.

    Attributes:
        name: its name; "{i}" is a number.
        first, count, period: the weight is rows `first` to `first + count` of every `period` rows.
    """

    name: str
    first: int
    count: int
    period: int


Place = str | Fused | HeadRows
"""Where a weight lies in a file: a tensor, one tensor an expert with "{e}" in its name, or a part of a tensor."""


@dataclasses.dataclass(frozen=True)
class KeyMap:
    """Names of a dialect's tensors.

    Attributes:
        modules: path of a module in the parameter tree -> its name in the file; "{i}" is a number. The last
            part, "weight" or "bias", is the same on both sides. A name with "{e}" stands for one tensor an
            expert. The path of a weight itself may be there too: it has a name of its own, or is a part.
        ignored: regular expressions of tensors that a file may hold besides.
    """

    modules: Mapping[str, Place]
    ignored: tuple[str, ...] = ()

    def place(self, path: str) -> Place:
        """Where the weight at `path` of the tree lies, e.g. "layers_3/attention/q/weight"; may hold "{e}"."""
        number = re.search(r"(?<=_)\d+", path)
        text = number[0] if number else ""
        pattern = re.sub(r"(?<=_)\d+", "{i}", path)
        if (found := self.modules.get(pattern)) is None:
            module, _, leaf = pattern.rpartition("/")
            found = f"{self.modules[module]}.{leaf}"
        if isinstance(found, str):
            return found.replace("{i}", text)
        return dataclasses.replace(found, name=found.name.replace("{i}", text))

    def file_name(self, path: str) -> str:
        """Name in the file of the weight at `path`, where that is one tensor."""
        place = self.place(path)
        return place if isinstance(place, str) else place.name

    def file_names(self, path: str, weight: Weight) -> list[str]:
        """Names in the file of all tensors of the weight at `path`, a stack's in the order of the experts."""
        name = self.file_name(path)
        return [name.replace("{e}", str(e)) for e in range(weight.shape[0])] if "{e}" in name else [name]


def layer_names(path: str, name: str, norms: Mapping[str, str]) -> dict[str, Place]:
    """One decoder layer in `KeyMap.modules`: its norms, its attention and its MLP."""
    parts = {**norms, **{f"attention/{x}": f"self_attn.{x}_proj" for x in "qkvo"}}
    parts |= {f"mlp/{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")}
    return {path + ours: name + theirs for ours, theirs in parts.items()}


EAGLE3 = KeyMap(
    modules={
        "embed": "embed_tokens",
        "fc": "fc",
        "fc_norms_{i}": "fc_norm.{i}",
        **layer_names(
            "",
            "midlayer.",
            {
                "embed_norm": "input_layernorm",
                "hidden_norm": "hidden_norm",
                "mlp_norm": "post_attention_layernorm",
            },
        ),
        "final_norm": "norm",
        "head": "lm_head",
    },
    ignored=(r"(.*\.)?rotary_emb\.inv_freq", "d2t", "t2d"),
)
"""EAGLE-3 drafts, as SafeAILab, SGLang and SpecForge name them. d2t and t2d are read by the draft loader."""


def abstract_params(model: Decoder | Eagle3) -> Any:
    """The parameter tree of a model without its values: `Weight`s of `jax.ShapeDtypeStruct`.

    Example:
        >>> abstract_params(model)["embed"]["weight"].shape  # doctest: +SKIP
        (576, 49152)
    """
    ids = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    inputs: tuple[Any, ...] = (ids,)
    if isinstance(model, Eagle3):
        c: Eagle3Config = model.config
        features = jax.ShapeDtypeStruct((1, 1, len(c.taps) * c.target_hidden_size), c.dtype)
        shared: Any = Weight(jax.ShapeDtypeStruct((c.target_hidden_size, c.vocab_size), c.dtype))  # pyright: ignore[reportArgumentType]
        norm: Any = Weight(jax.ShapeDtypeStruct((c.target_hidden_size,), "float32"), layout="n")  # pyright: ignore[reportArgumentType]
        inputs = (features, ids, SharedWeights(shared, shared, norm))

    def init(*inputs: Any) -> Any:
        return model.init(jax.random.key(0), *inputs, method="describe")["params"]

    return jax.eval_shape(init, *inputs)


def load_params(
    abstract: Any,
    source: TensorSource,
    names: KeyMap,
    ignored: Collection[str] = (),
    config: str = "config.json",
) -> Any:
    """Read every weight of a model, tensor by tensor, into the format and layout the model declares.

    Args:
        abstract: the tree of `abstract_params`; leaves that are not a `Weight` are kept as they are.
        source: the checkpoint.
        names: how it names its tensors.
        ignored: tensors that may be there and are not read.
        config: what described the model, for messages.

    Raises:
        Eagle3Error: a tensor is missing, has another shape, is quantised, or holds NaN or infinity; or there
            is one that the model has no place for.
    """
    weights = named_weights(abstract)
    wanted = {name for path, weight in weights.items() for name in names.file_names(path, weight)}
    if missing := sorted(name for name in wanted if name not in source):
        raise Eagle3Error(
            f"{source.path}: tensor {missing[0]} is missing{_more(missing)}; {config} describes a model that has it"
        )
    known = wanted.union(ignored)
    unread = [n for n in source if n not in known]
    extra = [n for n in unread if not any(re.fullmatch(p, n) for p in names.ignored)]
    if extra:
        raise Eagle3Error(
            f"{source.path}: tensor {extra[0]} is not part of the model that {config} describes"
            f"{_more(extra)}; without it the result could be wrong"
        )
    if unread:
        log.info("%s: tensor %s is not needed and not read%s", source.path, unread[0], _more(unread))
    loaded = {}
    # Largest first: what converting the largest takes besides is then not on top of all the others.
    for path in sorted(weights, key=lambda path: -np.prod(weights[path].shape)):
        loaded[path] = _read_weight(source, names, path, weights[path], config)
    return jax.tree_util.tree_map_with_path(
        lambda keys, leaf: loaded.get(tree_path(keys), leaf), abstract, is_leaf=is_weight
    )


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _read_weight(source: TensorSource, names: KeyMap, path: str, weight: Weight, config: str) -> Weight:
    """One weight, tensor by tensor into its place: a stack never lies in memory twice."""
    place, files = names.place(path), names.file_names(path, weight)
    # An owned copy in its final order and dtype: a view of the mapped file would change with the file.
    stored = np.empty(weight.value.shape, FLOAT_FORMATS[weight.format])
    if isinstance(place, Fused):
        # Stacks are stored [E, in, out], the other way round than single matrices.
        shape = (*weight.shape[:-1], weight.shape[-1] * place.parts)
        tensor = _read_tensor(source, place.name, shape, config)[..., place.part :: place.parts]
        _store(stored, tensor, weight.layout == "nk", f"{source.path}: tensor {place.name}")
    elif isinstance(place, HeadRows):
        columns, rows = weight.shape
        shape = (rows // place.count * place.period, columns)
        heads = _read_tensor(source, place.name, shape, config).reshape(-1, place.period, columns)
        tensor = heads[:, place.first : place.first + place.count].reshape(rows, columns)
        _store(stored, tensor, weight.layout == "kn", f"{source.path}: tensor {place.name}")
    else:
        shape = weight.shape[1:] if "{e}" in place else weight.shape
        targets = stored if "{e}" in place else [stored]
        for target, name in zip(targets, files, strict=True):
            tensor = _read_tensor(source, name, shape[::-1], config)
            _store(target, tensor, weight.layout == "kn", f"{source.path}: tensor {name}")
    return dataclasses.replace(weight, value=jax.device_put(stored))


def _read_tensor(source: TensorSource, name: str, needed: tuple[int, ...], config: str) -> np.ndarray:
    """A tensor of the shape that is needed, without NaN or infinity."""
    shape = source.shape(name)
    if shape != needed:
        hint = "; it is transposed: files hold [out, in]" if shape == needed[::-1] else ""
        raise Eagle3Error(f"{source.path}: tensor {name} has shape {shape}; {config} needs {needed}{hint}")
    if source.dtype(name) not in _PLAIN_DTYPES:
        raise Eagle3Error(
            f"{source.path}: tensor {name} is stored as {source.format(name)}; "
            "only plain F32, BF16 and F16 weights can be loaded yet"
        )
    tensor = source.read(name)
    check_finite(tensor, f"{source.path}: tensor {name}")
    return tensor


def _store(target: np.ndarray, tensor: np.ndarray, transposed: bool, what: str) -> None:
    """Convert a tensor into its place."""
    with np.errstate(over="ignore"):  # refused below, by name
        target[...] = tensor.swapaxes(-1, -2) if transposed else tensor
    if target.dtype.itemsize < tensor.dtype.itemsize:
        check_finite(target, f"{what}, converted to {target.dtype},")


def check_finite(tensor: np.ndarray, what: str) -> None:
    """Refuse NaN and infinity.

    Raises:
        Eagle3Error: with `what` as its subject.
    """
    # Extremes keep NaN and need no array of booleans.
    if tensor.size and not (np.isfinite(np.max(tensor)) and np.isfinite(np.min(tensor))):
        raise Eagle3Error(f"{what} holds NaN or infinity; fetch the checkpoint again or load it as float32")


def to_file(weight: Weight, dtype: str) -> np.ndarray:
    """A weight as files hold it: [out, in] or [n], contiguous, in a dtype of `FORMATS`; may overflow."""
    value = np.asarray(weight.value)
    with np.errstate(over="ignore"):  # the caller checks the result
        return np.array(
            value.T if weight.layout == "kn" else value, np.dtype(FLOAT_FORMATS[FORMATS[dtype]]), order="C"
        )


def check_dtype(dtype: object) -> str:
    """A dtype name that weights can have.

    Raises:
        Eagle3Error: any other.
    """
    if not isinstance(dtype, str) or dtype not in FORMATS:
        raise Eagle3Error(f"dtype {dtype!r} is not supported; use {', '.join(FORMATS)}")
    return dtype
