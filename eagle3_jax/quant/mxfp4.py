"""MXFP4 weights: E2M1 numbers, two in a byte, with one power of two (E8M0) for 32 of them.

A weight is its E2M1 number times 2^(scale - 127); scale byte 255 makes its whole block NaN. The element with the
even index is in the low four bits.

Source: OCP Microscaling Formats (MX) Specification 1.0; Quark's "even" rule for the scale.
"""

from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from eagle3_jax.quant.scales import block_maxima, spread

GROUP = 32
"""Elements that share a scale."""

E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
E2M1 = np.dtype(ml_dtypes.float4_e2m1fn)
_NUMBERS = np.arange(16, dtype=np.uint8).view(E2M1).astype(np.float32)
_SHIFTS = np.array([0, 4], np.uint8)
_MINUS_ZERO = 8
_LARGEST_EXPONENT = 2  # of E2M1, whose greatest number is 6 = 1.5 * 2^2


def even_scales(maxima: Any) -> Any:
    """The scale of blocks from their largest magnitudes, as Quark's mode "even" chooses it.

    It is the power of two that brings the magnitude to E2M1's top binade. From seven eighths of the next power
    on the magnitude counts as that power, which it would be rounded to; else it would be clipped to 6.

    Args:
        maxima: finite, >= 0, float32 of NumPy or JAX.

    Returns:
        E8M0 scales; 2^-126 for zero, as Quark stores it.

    Example:
        >>> even_scales(np.float32([6, 7, 0])).view(np.uint8)
        array([127, 128,   1], dtype=uint8)
    """
    exponent = ((maxima.view(np.int32) + 0x200000) >> 23) - _LARGEST_EXPONENT
    return exponent.clip(1, 254).astype(np.uint8).view(E8M0)


def encode(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantise: float32 [..., N, K], finite -> codes uint8 [..., N, K/2] and scales e8m0 [..., N, K/32].

    Numbers are rounded to the nearest, ties to even, and clipped to +-6; there is no minus zero.
    """
    scale = even_scales(block_maxima(matrix, 1, GROUP))
    scaled = matrix / spread(scale.astype(np.float32), 1, GROUP, matrix.shape)
    codes = scaled.clip(-6, 6).astype(E2M1).view(np.uint8)
    codes = np.where(codes == _MINUS_ZERO, 0, codes).astype(np.uint8)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), scale


def elements(codes: Any) -> Any:
    """Codes uint8 [..., K/2] of NumPy or JAX as float32 numbers [..., K]."""
    # By table: a bitcast to E2M1 is one instruction, but XLA's CPU back end gets that of a constant wrong.
    numbers = _NUMBERS if isinstance(codes, np.ndarray) else jnp.asarray(_NUMBERS)
    return numbers[(codes[..., None] >> _SHIFTS) & 15].reshape(*codes.shape[:-1], -1)


def from_blocks(blocks: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """gpt-oss's layout in ours: blocks uint8 [..., N, K/32, 16] and scales uint8 [..., N, K/32]."""
    return blocks.reshape(*blocks.shape[:-2], -1), scales.view(E8M0)
