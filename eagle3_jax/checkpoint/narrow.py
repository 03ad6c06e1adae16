"""Narrow weights in checkpoints: which tensors one consists of, and its format from their dtypes and shapes.

| tensors | dtype | format |
|---|---|---|
| weight, weight_scale [], [1] (, input_scale) | F8_E4M3 | fp8_tensor |
| weight, weight_scale [out] or [out, 1] | F8_E4M3 | fp8_channel (PTPC) |
| weight, weight_scale_inv or weight_scale [out/128, in/128] | F8_E4M3 | fp8_block |
| the same | F8_E4M3FNUZ | fnuz_* |
| weight [out, in/2], weight_scale [out, in/32] | U8 | mxfp4 (Quark) |
| *_blocks [..., out, in/32, 16], *_scales [..., out, in/32] | U8 | mxfp4 (gpt-oss) |
| weight_packed [out, in/8], weight_scale [out, in/32], weight_shape | I32 | int4 (compressed-tensors) |

Nothing is read from a config alone; a scale without narrow weights, and narrow weights without a scale, are errors.
"""

import dataclasses
import math
from functools import cached_property

import numpy as np

from eagle3_jax.checkpoint.files import quote
from eagle3_jax.checkpoint.tensors import TensorSource
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.quant import fp8, mxfp4
from eagle3_jax.quant.formats import NARROW_FORMATS, NarrowFormat

_FP8 = {"F8_E4M3": "fp8", "F8_E4M3FNUZ": "fnuz"}
_SCALES = ("_scale", "_scale_inv", "_scales")
_KINDS = {"fp8": "fp8", "fnuz": "fp8", "mxfp4": "mxfp4", "int4": "int4"}


@dataclasses.dataclass(frozen=True)
class StoredMatrix:
    """A matrix, or a stack of them, as a checkpoint holds it.

    Attributes:
        source: the checkpoint.
        name: what the matrix is called there; narrow ones may have tensors of other names only.
        format: key of `NARROW_FORMATS`; None where it is one plain tensor.
        codes, scale, input_scale: names of its tensors; the last two may be None.
        others: names of tensors that say nothing more.
    """

    source: TensorSource
    name: str
    format: str | None
    codes: str
    scale: str | None = None
    input_scale: str | None = None
    others: tuple[str, ...] = ()

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of all its tensors."""
        return tuple(name for name in (self.codes, self.scale, self.input_scale, *self.others) if name is not None)

    @property
    def module(self) -> str:
        """The module it is the weight of."""
        return self.name.removesuffix(".weight")

    @property
    def kind(self) -> str | None:
        """Kind of its format as configs name it: "fp8", "mxfp4" or "int4"; None if plain."""
        return None if self.format is None else _KINDS[self.format.partition("_")[0]]

    @property
    def narrow(self) -> NarrowFormat:
        """Its narrow format."""
        assert self.format is not None
        return NARROW_FORMATS[self.format]

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix: [..., out, in]; of a plain tensor its own."""
        shape = self.source.shape(self.codes)
        if self.format is None:
            return shape
        if self.codes.endswith("_blocks"):
            shape = (*shape[:-2], shape[-2] * shape[-1])
        return (*shape[:-1], shape[-1] * self.narrow.pack)

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """Codes and scales of a narrow matrix, as `NarrowFormat` has them.

        Raises:
            Eagle3Error: scales that are not finite or negative; NaN among the codes.
        """
        assert self.scale is not None
        codes, scale = self.source.read(self.codes), self.source.read(self.scale)
        if self.codes.endswith("_blocks"):
            codes = codes.reshape(*codes.shape[:-2], -1)
        if self.narrow.scale_dtype == mxfp4.E8M0:
            scale = scale.view(mxfp4.E8M0)
        else:
            scale = scale.astype(self.narrow.scale_dtype)
        scale = scale.reshape(self.narrow.scale_shape(self.shape))
        self._check(codes, scale)
        return codes, scale

    def read_input_scale(self) -> np.ndarray | None:
        """The calibrated scale of its activations, float32 [1]; None where there is none."""
        if self.input_scale is None:
            return None
        scale = self.source.read(self.input_scale).astype(np.float32).reshape(1)
        if not (np.isfinite(scale).all() and scale[0] > 0):
            raise Eagle3Error(f"{self.source.path}: tensor {self.input_scale} is {scale[0]}; it must be positive")
        return scale

    def _check(self, codes: np.ndarray, scale: np.ndarray) -> None:
        wide = scale.astype(np.float32)
        if not (np.isfinite(wide).all() and (wide >= 0).all()):
            raise Eagle3Error(
                f"{self.source.path}: tensor {self.scale} holds scales that are NaN, infinite or negative; "
                "fetch the checkpoint again"
            )
        nan = {fp8.E4M3FN: (0x7F, 0xFF), fp8.E4M3FNUZ: (0x80,)}.get(codes.dtype, ())
        if any((codes.view(np.uint8) == code).any() for code in nan):
            raise Eagle3Error(f"{self.source.path}: tensor {self.codes} holds NaN; fetch the checkpoint again")


def find_matrix(source: TensorSource, name: str) -> StoredMatrix | None:
    """The tensors that a matrix consists of, and its format; None where there are none.

    Args:
        source: the checkpoint.
        name: the tensor's name if it were plain, e.g. "model.layers.0.mlp.up_proj.weight".

    Raises:
        Eagle3Error: tensors that contradict each other: no scale or two, a scale beside a plain tensor, or shapes
            and dtypes that fit no format.
    """
    where = f"{source.path}: tensor"
    scales = [name + suffix for suffix in _SCALES if name + suffix in source]
    codes = [n for n in (name, f"{name}_packed", f"{name}_blocks") if n in source]
    if len(codes) != 1:
        if codes:
            raise Eagle3Error(f"{where} {codes[0]} is there beside {codes[1]}; one of the two is needed")
        return None
    kind = source.format(codes[0])
    narrow = codes[0] != name or kind == "U8" or kind in _FP8
    if not narrow:
        if scales:
            raise Eagle3Error(
                f"{where} {scales[0]} is a scale, but {name} is stored as {kind}, which has none; one is wrong"
            )
        return StoredMatrix(source, name, None, name)
    if len(scales) != 1:
        fault = f"scales {scales[0]} and {scales[1]}" if scales else f"no {name}_scale"
        raise Eagle3Error(f"{where} {codes[0]} is stored as {kind} with {fault}; one scale is needed")
    found = StoredMatrix(source, name, _format(source, codes[0], scales[0], kind), codes[0], scales[0])
    input_scale = f"{found.module}.input_scale"
    if found.kind == "fp8" and input_scale in source:
        if (shape := source.shape(input_scale)) not in ((), (1,)):
            raise Eagle3Error(f"{where} {input_scale} has shape {shape}; one number is needed")
        found = dataclasses.replace(found, input_scale=input_scale)
    if codes[0].endswith("_packed"):
        found = dataclasses.replace(found, others=(_checked_shape(source, name, found),))
    return found


@dataclasses.dataclass(frozen=True)
class StoredBytes:
    """Bytes of a checkpoint's tensors.

    Attributes:
        weights: of all of them.
        quantized: of the narrow matrices, scales included. quantized_as_bfloat16: what these would take in bfloat16.
    """

    weights: int
    quantized: int
    quantized_as_bfloat16: int

    @property
    def ratio(self) -> float | None:
        """Share of their bfloat16 bytes that the narrow matrices take; None where there is none."""
        return self.quantized / self.quantized_as_bfloat16 if self.quantized else None


def stored_bytes(source: TensorSource) -> StoredBytes:
    """What a checkpoint's tensors take.

    Raises:
        Eagle3Error: tensors that contradict each other, as in `find_matrix`.
    """
    sizes = {name: math.prod(source.shape(name)) * source.dtype(name).itemsize for name in source}
    codes = (".weight", "_packed", "_blocks")
    names = {name.removesuffix("_packed").removesuffix("_blocks") for name in source if name.endswith(codes)}
    narrow = [found for name in names if (found := find_matrix(source, name)) and found.format is not None]
    return StoredBytes(
        sum(sizes.values()),
        sum(sizes[name] for matrix in narrow for name in matrix.tensors),
        sum(2 * math.prod(matrix.shape) for matrix in narrow),
    )


def _format(source: TensorSource, codes: str, scale: str, kind: str) -> str:
    """The format that dtypes and shapes of codes and scales mean."""
    shape, scales, scale_kind = source.shape(codes), source.shape(scale), source.format(scale)
    wanted = "a matrix [out, in] with floating scales"
    if codes.endswith("_blocks"):
        wanted = "U8 blocks [..., out, in/32, 16] with U8 scales [..., out, in/32]"
        if kind == scale_kind == "U8" and len(shape) >= 3 and shape[-1] == 16 and scales == shape[:-1]:
            return "mxfp4"
    elif kind == "U8":
        wanted = "U8 codes [out, in/2] with U8 scales [out, in/32]"
        if scale_kind in ("U8", "F8_E8M0") and len(shape) == 2 and (*shape[:1], shape[1] / 16) == scales:
            return "mxfp4"
    elif codes.endswith("_packed"):
        wanted = "I32 codes [out, in/8] with floating scales [out, in/32]"
        groups = kind == "I32" and len(shape) == 2 and (shape[0], shape[1] / 4) == scales
        if groups and scale_kind in ("BF16", "F32"):
            return "int4" if scale_kind == "BF16" else "int4_f32"
    elif len(shape) == 2 and scale_kind in ("F32", "BF16", "F16"):
        prefix = _FP8[kind]
        blocks = tuple(-(-size // fp8.BLOCK) for size in shape)
        if scales in ((), (1,)):
            return f"{prefix}_tensor"
        if scales in ((shape[0],), (shape[0], 1)) and not scale.endswith("_inv"):
            return f"{prefix}_channel"
        if scales == blocks:
            return f"{prefix}_block"
        wanted = f"scales of shape [], [{shape[0]}], [{shape[0]}, 1] or {list(blocks)}"
    raise Eagle3Error(
        f"{source.path}: tensor {codes} is {kind} {list(shape)} with {scale_kind} scales {list(scales)}; "
        f"{wanted} are needed"
    )


def _checked_shape(source: TensorSource, name: str, found: StoredMatrix) -> str:
    """The tensor with a packed matrix's shape, which must say what the codes do."""
    if (shape := f"{name}_shape") not in source:
        raise Eagle3Error(f"{source.path}: tensor {shape} is missing; packed INT4 weights have one")
    if source.dtype(shape).kind != "i" or source.shape(shape) != (2,):
        raise Eagle3Error(f"{source.path}: tensor {shape} must hold two whole numbers, [out, in]")
    if (said := tuple(source.read(shape).tolist())) != found.shape:
        raise Eagle3Error(f"{source.path}: tensor {shape} says {quote(said)}, the codes are {found.shape}")
    return shape
