"""The number formats of weights: which dtypes they are stored in, and their codecs.

A narrow matrix is kept as its codes [..., N, K / pack] and scales [..., ceil(N / rows), ceil(K / columns)], with
the contracting dimension last. Leading dimensions stack matrices (experts).

Dimension letters: N output width, K contracting (input) width.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from eagle3_jax.errors import Eagle3Error
from eagle3_jax.quant import fp8, int4, mxfp4
from eagle3_jax.quant.scales import scale_shape, spread

FLOAT_FORMATS: dict[str, Any] = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}
"""Formats whose stored values are the weights themselves (no scale)."""


@dataclasses.dataclass(frozen=True)
class NarrowFormat:
    """A format of codes and scales.

    Attributes:
        dtype: of the codes. pack: weights in one code.
        scale_dtype: of the scales.
        rows, columns: weights that share a scale (see `eagle3_jax.quant.scales`).
        encode: finite float32 [..., N, K] -> (codes, scales), NumPy.
        elements: codes of NumPy or JAX -> float32 numbers [..., N, K], before scaling.
    """

    dtype: np.dtype
    pack: int
    scale_dtype: np.dtype
    rows: int | None
    columns: int | None
    encode: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
    elements: Callable[[Any], Any]

    def decode(self, codes: Any, scale: Any) -> Any:
        """The weights of codes and scales, NumPy or JAX: float32 [..., N, K].

        NumPy's are exact; XLA may take subnormal scales and products for zero.
        """
        numbers = self.elements(codes)
        return numbers * spread(scale.astype(np.float32), self.rows, self.columns, numbers.shape)

    def code_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the codes of a matrix [..., N, K]."""
        return (*shape[:-1], shape[-1] // self.pack)

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the scales of a matrix [..., N, K]."""
        return scale_shape(shape, self.rows, self.columns)

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a matrix [..., N, K] can be in this format: packed ones need whole groups."""
        return self.pack == 1 or shape[-1] % (self.columns or 1) == 0


def _fp8(dtype: np.dtype, rows: int | None, columns: int | None) -> NarrowFormat:
    def encode(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        codes, scale = fp8.encode(matrix, rows, columns)
        return (codes, scale) if dtype == fp8.E4M3FN else fp8.fn_to_fnuz(codes, scale)

    return NarrowFormat(dtype, 1, np.dtype(np.float32), rows, columns, encode, fp8.elements)


def _int4(scale_dtype: Any) -> NarrowFormat:
    dtype = np.dtype(scale_dtype)
    encode = partial(int4.encode, scale_dtype=dtype)
    return NarrowFormat(np.dtype(np.int32), int4.PACK, dtype, 1, int4.GROUP, encode, int4.elements)


_GRANULARITIES = {"tensor": (None, None), "channel": (1, None), "block": (fp8.BLOCK, fp8.BLOCK)}

NARROW_FORMATS: dict[str, NarrowFormat] = {
    **{f"fp8_{name}": _fp8(fp8.E4M3FN, *size) for name, size in _GRANULARITIES.items()},
    **{f"fnuz_{name}": _fp8(fp8.E4M3FNUZ, *size) for name, size in _GRANULARITIES.items()},
    "mxfp4": NarrowFormat(np.dtype(np.uint8), 2, mxfp4.E8M0, 1, mxfp4.GROUP, mxfp4.encode, mxfp4.elements),
    "int4": _int4(ml_dtypes.bfloat16),
    "int4_f32": _int4(np.float32),
}
"""Formats with scales: e4m3fn and e4m3fnuz per tensor, output channel and block; MXFP4; INT4 with scales in
bfloat16 (as published) or float32."""


def check_format(name: str) -> None:
    """Refuse a format that is not known.

    Raises:
        Eagle3Error: neither in `FLOAT_FORMATS` nor in `NARROW_FORMATS`.
    """
    known = [*FLOAT_FORMATS, *NARROW_FORMATS]
    if name not in known:
        raise Eagle3Error(f"weight format {name!r} is not known; known formats are {', '.join(known)}")
