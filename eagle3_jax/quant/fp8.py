"""FP8 weights: e4m3fn (OCP: gfx950, NVIDIA) and e4m3fnuz (gfx942) codes with float32 scales.

A weight is its code times its scale. Per output channel with dynamic scales per token is what Quark calls
ptpc_fp8; blocks of 128 x 128 are DeepSeek's, whose `weight_scale_inv` is a multiplier despite its name.

Source: OCP 8-bit Floating Point Specification (OFP8) 1.0; "FP8 Formats for Deep Learning" (arXiv 2209.05433).
"""

from typing import Any

import ml_dtypes
import numpy as np

from eagle3_jax.errors import Eagle3Error
from eagle3_jax.quant.scales import block_maxima, spread

E4M3FN = np.dtype(ml_dtypes.float8_e4m3fn)
E4M3FNUZ = np.dtype(ml_dtypes.float8_e4m3fnuz)
BLOCK = 128
"""Rows and columns of a block of DeepSeek's format."""

LEAST_SCALE = 2.0**-23
"""The scale of a block of zeros, and the least of any: float32's epsilon, as Quark and PyTorch have it."""

_NEGATIVE_ZERO = 0x80


def largest(dtype: np.dtype) -> float:
    """The greatest finite number of an FP8 dtype: 448 for e4m3fn, 240 for e4m3fnuz."""
    return float(ml_dtypes.finfo(dtype).max)


def saturating_cast(values: Any, dtype: np.dtype = E4M3FN) -> Any:
    """Round to the nearest FP8 number (ties to even), clipping to the finite range; NaN stays NaN.

    The clip is not optional: a plain cast in JAX turns everything above 464 into NaN.

    Args:
        values: an array of NumPy or JAX, float32 or bfloat16.
        dtype: `E4M3FN` or `E4M3FNUZ`.

    Example:
        >>> saturating_cast(np.float32([464, 1e9, -np.inf])).astype(np.float32)
        array([ 448.,  448., -448.], dtype=float32)
    """
    return values.clip(-largest(dtype), largest(dtype)).astype(dtype)


def encode(matrix: np.ndarray, rows: int | None, columns: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Quantise to e4m3fn with one scale, amax / 448, for each block of `rows` x `columns`.

    Args:
        matrix: finite, float32 [..., N, K].
        rows, columns: as in `eagle3_jax.quant.scales`.

    Returns:
        Codes e4m3fn [..., N, K] and scales float32, `scale_shape`.
    """
    maxima = block_maxima(matrix, rows, columns)
    scale = np.maximum(maxima / np.float32(largest(E4M3FN)), np.float32(LEAST_SCALE))
    return saturating_cast(matrix / spread(scale, rows, columns, matrix.shape)), scale


def elements(codes: Any) -> Any:
    """Codes of NumPy or JAX as float32 numbers."""
    return codes.astype(np.float32)


def fn_to_fnuz(codes: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same weights in e4m3fnuz: the codes kept, their numbers halved, the scales doubled.

    Args:
        codes: e4m3fn, any shape. scale: float32.

    Raises:
        Eagle3Error: a code is NaN, which would turn into a number.

    Example:
        >>> codes, scale = fn_to_fnuz(saturating_cast(np.float32([448, -0.0])), np.float32([1]))
        >>> codes.astype(np.float32) * scale
        array([448.,   0.], dtype=float32)
    """
    bits = codes.view(np.uint8)
    if ((bits & 0x7F) == 0x7F).any():
        raise Eagle3Error("e4m3fn codes hold NaN, which e4m3fnuz codes of the same bits are not; use finite weights")
    # The bits of minus zero are NaN there.
    return np.where(bits == _NEGATIVE_ZERO, np.uint8(0), bits).view(E4M3FNUZ), scale * np.float32(2)


def fnuz_to_fn(codes: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same weights in e4m3fn: the codes kept, their numbers doubled, the scales halved.

    Args:
        codes: e4m3fnuz, any shape. scale: float32.

    Raises:
        Eagle3Error: a code is NaN, or is +-240, whose double e4m3fn cannot hold.
    """
    bits = codes.view(np.uint8)
    if (bits == _NEGATIVE_ZERO).any():
        raise Eagle3Error("e4m3fnuz codes hold NaN, which e4m3fn codes of the same bits are not; use finite weights")
    if ((bits & 0x7F) == 0x7F).any():
        raise Eagle3Error("e4m3fnuz codes hold 240, whose double e4m3fn lacks; quantise the wide weights again")
    return bits.view(E4M3FN), scale * np.float32(0.5)
