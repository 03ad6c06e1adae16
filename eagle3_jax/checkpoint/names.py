"""Which tensor of a checkpoint is which weight of a model, as data.

`jax.eval_shape` of a model describes its weights (see `eagle3_jax.quant.weight`); loading walks that tree.
Files hold matrices as PyTorch does, [out, in]; `Weight.layout` says how they are kept here.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax.config import Eagle3Config
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.models.decoder import Decoder
from eagle3_jax.models.eagle3 import Eagle3, SharedWeights
from eagle3_jax.quant.formats import FLOAT_FORMATS
from eagle3_jax.quant.weight import Weight, WeightFormats

FORMATS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
"""Weight format of each dtype a checkpoint can be loaded in or saved as."""


def weight_formats(dtype: str, tied: bool = False, layout: str | None = None) -> WeightFormats:
    """Formats and layouts in which a model's weights are kept when nothing else is said.

    Args:
        dtype: a key of `FORMATS`.
        tied: whether the embedding is the head as well.
        layout: of matrices, "kn" or "nk"; None is `default_layout`.
    """
    # Single rows are gathered from an embedding; a tied one is also the head, whose layout matters more.
    exceptions = () if tied else (("embed/weight", FORMATS[dtype], "nk"),)
    return WeightFormats(FORMATS[dtype], default_layout() if layout is None else layout, exceptions=exceptions)


def default_layout() -> str:
    """The layout of matrices: "kn" on CPU, where it is 1.2-3 times faster for few rows, and "nk" elsewhere.

    XLA multiplies a single row by a "kn" matrix through a float32 copy of the matrix on gfx950 (docs/rocm.md).
    """
    return "kn" if jax.default_backend() == "cpu" else "nk"


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

    def stored_shape(self, weight: Weight) -> tuple[int, int]:
        """Shape [out, in] of the tensor in which a weight (K, N) lies."""
        columns, rows = weight.shape
        return rows // self.count * self.period, columns

    def take(self, matrix: np.ndarray) -> np.ndarray:
        """The weight's own rows of a matrix [out, in]."""
        heads = matrix.reshape(-1, self.period, matrix.shape[1])
        return heads[:, self.first : self.first + self.count].reshape(-1, matrix.shape[1])


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


def lay(tensors: dict[str, np.ndarray], place: Place, value: np.ndarray) -> None:
    """Put a weight, [..., out, in] or [..., n], where a file has it."""
    if isinstance(place, Fused):
        if value.ndim == 3:  # stacks are stored [E, in, out]
            value = value.swapaxes(-1, -2)
        shape = (*value.shape[:-1], value.shape[-1] * place.parts)
        tensors.setdefault(place.name, np.empty(shape, value.dtype))[..., place.part :: place.parts] = value
    elif isinstance(place, HeadRows):
        heads = len(value) // place.count
        whole = tensors.setdefault(place.name, np.empty((heads * place.period, value.shape[1]), value.dtype))
        rows = whole.reshape(heads, place.period, -1)
        rows[:, place.first : place.first + place.count] = value.reshape(heads, place.count, -1)
    elif "{e}" in place:
        tensors |= {place.replace("{e}", str(e)): np.ascontiguousarray(part) for e, part in enumerate(value)}
    else:
        tensors[place] = np.ascontiguousarray(value)


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
