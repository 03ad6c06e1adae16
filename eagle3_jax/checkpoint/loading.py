"""Reading a model's weights out of a checkpoint, tensor by tensor, each straight to its place.

Plain tensors are converted to the format the model declares. Narrow ones (see `eagle3_jax.checkpoint.narrow`) are
widened to it, or kept as they are.
"""

import dataclasses
import logging
import re
from collections.abc import Collection, Iterator
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from eagle3_jax.checkpoint.names import Fused, HeadRows, KeyMap, Place, check_finite
from eagle3_jax.checkpoint.narrow import StoredMatrix, find_matrix
from eagle3_jax.checkpoint.quant_config import QuantConfig
from eagle3_jax.checkpoint.tensors import DTYPES, TensorSource
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.quant.formats import FLOAT_FORMATS
from eagle3_jax.quant.products import WISHES, chosen_mode
from eagle3_jax.quant.quantize import dequantize_tree
from eagle3_jax.quant.weight import Weight, WeightFormats, is_weight, named_weights, tree_path
from eagle3_jax.sharding import AnyMesh, shard_weights

log = logging.getLogger("eagle3_jax")

_PLAIN_DTYPES = [DTYPES[name] for name in ("F64", "F32", "F16", "BF16")]


@dataclasses.dataclass(frozen=True)
class NarrowPolicy:
    """What becomes of narrow weights.

    Attributes:
        widen: to the model's float format; else they stay as they are stored.
        activations: how those they meet are rounded, see `eagle3_jax.quant.products.chosen_mode`.
        config: what config.json says of them; None if nothing.
    """

    widen: bool = True
    activations: str | None = None
    config: QuantConfig | None = None

    @classmethod
    def default(cls, widen: bool | None, activations: str | None) -> "NarrowPolicy":
        """The policy of a loader's arguments: None widens on CPU only, where XLA has no narrow products.

        Raises:
            Eagle3Error: activations that are not known, or `widen` that is no truth value.
        """
        if not isinstance(widen, bool | None):
            raise Eagle3Error(f"widen is {widen!r:.80}; True, False or None is needed")
        if activations not in WISHES:
            raise Eagle3Error(f"activations {activations!r} are not known; use 'wide', 'fake_quant' or 'mxfp8'")
        return cls(jax.default_backend() == "cpu" if widen is None else widen, activations)

    def applied(self, params: Any, formats: WeightFormats) -> Any:
        """A tree of weights that are narrow still, treated so; those that stay narrow keep their modes unless told.

        Args:
            params: the tree. formats: what wide weights have.
        """

        def treated(leaf: Any) -> Any:
            if not is_weight(leaf) or leaf.scale is None or (self.activations is None and not self.widen):
                return leaf
            mode = chosen_mode(leaf.format, self.activations, not self.widen, leaf.input_scale is not None)
            return leaf.replace(activations=mode, input_scale=leaf.input_scale if mode == "fp8_static" else None)

        params = jax.tree.map(treated, params, is_leaf=is_weight)
        return dequantize_tree(params, formats.format, formats.layout) if self.widen else params


WIDE = NarrowPolicy()


def load_params(
    abstract: Any,
    source: TensorSource,
    names: KeyMap,
    ignored: Collection[str] = (),
    config: str = "config.json",
    policy: NarrowPolicy = WIDE,
    mesh: AnyMesh | None = None,
) -> Any:
    """Read every weight of a model, with a progress bar on a terminal.

    Where weights stay narrow or round their activations, the model's config must be told by
    `eagle3_jax.quant.weight.formats_of`.

    Args:
        abstract: the tree of `abstract_params`, all float; leaves that are not a `Weight` are kept as they are.
        source: the checkpoint.
        names: how it names its tensors.
        ignored: tensors that may be there and are not read.
        config: what described the model, for messages.
        policy: what becomes of narrow weights.
        mesh: where the weights go, each device's part straight to it; None is JAX's default device.

    Raises:
        Eagle3Error: a tensor is missing, has another shape, fits no format, contradicts the config, or holds NaN
            or infinity; or there is one that the model has no place for.
    """
    weights = named_weights(abstract)
    wanted = {name for path, weight in weights.items() for name in names.file_names(path, weight)}
    found = {name: find_matrix(source, name) for name in wanted}
    if missing := sorted(name for name, matrix in found.items() if matrix is None):
        raise Eagle3Error(
            f"{source.path}: tensor {missing[0]} is missing{_more(missing)}; {config} describes a model that has it"
        )
    matrices = {name: matrix for name, matrix in found.items() if matrix is not None}
    known = {tensor for matrix in matrices.values() for tensor in matrix.tensors}.union(ignored)
    unread = [n for n in source if n not in known]
    extra = [n for n in unread if not any(re.fullmatch(p, n) for p in names.ignored)]
    if extra:
        raise Eagle3Error(
            f"{source.path}: tensor {extra[0]} is not part of the model that {config} describes"
            f"{_more(extra)}; without it the result could be wrong"
        )
    if unread:
        log.info("%s: tensor %s is not needed and not read%s", source.path, unread[0], _more(unread))
    _check_config(policy.config, matrices.values())
    loaded = {}
    with tqdm(desc=source.path.name, total=len(wanted), unit="tensor", disable=None, leave=False) as bar:
        # Largest first: what converting the largest takes besides is then not on top of all the others.
        for path in sorted(weights, key=lambda path: -np.prod(weights[path].shape)):
            parts = [matrices[name] for name in names.file_names(path, weights[path])]
            loaded[path] = shard_weights(_read_weight(parts, names.place(path), weights[path], config, policy), mesh)
            bar.update(len(parts))
    return jax.tree_util.tree_map_with_path(
        lambda keys, leaf: loaded.get(tree_path(keys), leaf), abstract, is_leaf=is_weight
    )


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _check_config(config: QuantConfig | None, matrices: Collection[StoredMatrix]) -> None:
    if config is None:
        return
    kinds = {matrix.module: matrix.kind for matrix in matrices if matrix.kind is not None}
    for module, kind in kinds.items():
        config.check(module, kind)
    if config.kinds and not kinds:
        raise Eagle3Error(
            f"{config.where}: quantization_config names {' and '.join(sorted(config.kinds))} weights, but all are "
            "stored wide; remove it if they were dequantised"
        )


def _read_weight(parts: list[StoredMatrix], place: Place, weight: Weight, config: str, policy: NarrowPolicy) -> Weight:
    """One weight with NumPy arrays, of one tensor or of one an expert; a stack never lies in memory twice."""
    formats = {part.format for part in parts}
    if len(formats) > 1 and not policy.widen:
        raise Eagle3Error(
            f"{parts[0].source.path}: {parts[0].name} and others of its stack are stored in several formats; "
            "load them with widen=True"
        )
    format = formats.pop()
    # Rows of heads do not lie on the edges of blocks, and are multiplied head by head.
    narrow = format is not None and not policy.widen and not isinstance(place, HeadRows)
    mode, input_scale = "wide", None
    if format is not None and not formats:
        scales = [scale for part in parts if (scale := part.read_input_scale()) is not None]
        mode = chosen_mode(format, policy.activations, narrow, static=len(scales) == len(parts))
        if mode == "fp8_static":
            stacked = len(weight.shape) == 3
            input_scale = np.stack(scales) if stacked else scales[0]
    if format is not None and narrow:
        value, scale = _read_codes(parts, place, weight, config)
        described = Weight(weight.value, None, format, "nk", weight.axes, None, mode)
        return dataclasses.replace(described, value=value, scale=scale, input_scale=input_scale)
    value = _read_values(parts, place, weight, config)
    return dataclasses.replace(weight, value=value, input_scale=input_scale, activations=mode)


def _read_values(parts: list[StoredMatrix], place: Place, weight: Weight, config: str) -> np.ndarray:
    """The wide values of a weight, in its format and layout."""
    # An owned copy in its final order and dtype: a view of the mapped file would change with the file.
    stored = np.empty(weight.value.shape, FLOAT_FORMATS[weight.format])
    targets = stored if _stacked(place) else [stored]
    for target, (name, tensor) in zip(targets, _matrices(parts, place, weight, config), strict=True):
        with np.errstate(over="ignore"):  # refused below, by name
            target[...] = tensor.T if weight.layout == "kn" else tensor
        if target.dtype.itemsize < tensor.dtype.itemsize:
            check_finite(target, f"{parts[0].source.path}: tensor {name}, converted to {target.dtype},")
    return stored


def _matrices(
    parts: list[StoredMatrix], place: Place, weight: Weight, config: str
) -> Iterator[tuple[str, np.ndarray]]:
    """Each matrix [out, in], or vector, of a weight and the name of its tensor, plain or decoded."""
    for part in parts:
        if part.format is not None:
            codes, scale = _codes(part, place, weight, config)
            pairs = zip(codes, scale, strict=True) if isinstance(place, Fused) else [(codes, scale)]
            for pair in pairs:
                with np.errstate(over="ignore"):
                    matrix = part.narrow.decode(*pair)
                check_finite(matrix, f"{part.source.path}: tensor {part.codes}, dequantised,")
                yield part.codes, place.take(matrix) if isinstance(place, HeadRows) else matrix
            continue
        _check_shape(part, place, weight, config)
        if part.source.dtype(part.name) not in _PLAIN_DTYPES:
            raise Eagle3Error(
                f"{part.source.path}: tensor {part.name} is stored as {part.source.format(part.name)}; F32, BF16, "
                "F16, FP8, MXFP4 and INT4 weights can be loaded"
            )
        tensor = part.source.read(part.name)
        check_finite(tensor, f"{part.source.path}: tensor {part.name}")
        if isinstance(place, Fused):
            yield from ((part.name, one[..., place.part :: place.parts].T) for one in tensor)
        else:
            yield part.name, place.take(tensor) if isinstance(place, HeadRows) else tensor


def _read_codes(parts: list[StoredMatrix], place: Place, weight: Weight, config: str) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of a weight that stays narrow."""
    narrow, (*stack, inputs, outputs) = parts[0].narrow, weight.shape
    shape = (*stack, outputs, inputs)
    values = np.empty(narrow.code_shape(shape), narrow.dtype)
    scales = np.empty(narrow.scale_shape(shape), narrow.scale_dtype)
    targets = zip(values, scales, strict=True) if _stacked(place) and len(parts) > 1 else [(values, scales)]
    for (value, scale), part in zip(targets, parts, strict=True):
        value[...], scale[...] = _codes(part, place, weight, config)
    return values, scales


def _codes(part: StoredMatrix, place: Place, weight: Weight, config: str) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of one tensor, of a `Fused` one the rows that are the weight's."""
    _check_shape(part, place, weight, config)
    codes, scale = part.read()
    if isinstance(place, Fused):
        rows = slice(place.part, None, place.parts)
        return codes[:, rows], scale[:, rows]
    return codes, scale


def _stacked(place: Place) -> bool:
    """Whether the weight is a stack of experts'."""
    return isinstance(place, Fused) or (isinstance(place, str) and "{e}" in place)


def _check_shape(part: StoredMatrix, place: Place, weight: Weight, config: str) -> None:
    """Refuse a tensor of another shape than the model has."""
    if isinstance(place, HeadRows):
        needed = place.stored_shape(weight)
    elif isinstance(place, Fused):
        *stack, outputs = weight.shape
        needed = (*stack, outputs * place.parts)
        # Plain stacks are stored [E, in, out], the other way round than single matrices and narrow stacks.
        if part.format is not None:
            needed = (*needed[:-2], needed[-1], needed[-2])
    else:
        needed = (weight.shape[1:] if _stacked(place) else weight.shape)[::-1]
    if part.shape != needed:
        hint = "; it is transposed: files hold [out, in]" if part.shape == needed[::-1] else ""
        raise Eagle3Error(
            f"{part.source.path}: tensor {part.name} has shape {part.shape}; {config} needs {needed}{hint}"
        )
