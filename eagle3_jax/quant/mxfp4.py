"""MXFP4 weights: E2M1 numbers, two in a byte, with one power of two (E8M0) for 32 of them.

A weight is its E2M1 number times 2^(scale - 127); scale byte 255 makes its whole block NaN. The element with the
even index is in the low four bits.

Source: OCP Microscaling Formats (MX) Specification 1.0; Quark's "even" rule for the scale.
"""

from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from eagle3_jax.quant.scales import block_maxima, spread

GROUP = 32
"""Elements that share a scale."""

E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
E2M1 = np.dtype(ml_dtypes.float4_e2m1fn)
_MINUS_ZERO = 8
_LARGEST_EXPONENT = 2  # of E2M1, whose greatest number is 6 = 1.5 * 2^2


def even_scales(maxima: np.ndarray) -> np.ndarray:
    """The scale of blocks from their largest magnitudes, as Quark's mode "even" chooses it.

    It is the power of two that brings the magnitude to E2M1's top binade. From seven eighths of the next power
    on the magnitude counts as that power, which it would be rounded to; else it would be clipped to 6.

    Args:
        maxima: finite, >= 0, float32.

    Returns:
        E8M0 scales; the least but one for zero, as Quark stores it.

    Example:
        >>> even_scales(np.float32([6, 7, 0])).view(np.uint8)
        array([127, 128,   1], dtype=uint8)
    """
    exponent = ((maxima.view(np.int32) + 0x200000) >> 23) - _LARGEST_EXPONENT
    return np.where(maxima == 0, 1, exponent.clip(0, 254)).astype(np.uint8).view(E8M0)


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
    if isinstance(codes, np.ndarray):
        pairs = np.stack([codes & 15, codes >> 4], axis=-1).view(E2M1)
    else:
        pairs = lax.bitcast_convert_type(codes, jnp.float4_e2m1fn)
    return pairs.astype(np.float32).reshape(*codes.shape[:-1], -1)


def from_blocks(blocks: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """gpt-oss's layout in ours: blocks uint8 [..., N, K/32, 16] and scales uint8 [..., N, K/32]."""
    return blocks.reshape(*blocks.shape[:-2], -1), scales.view(E8M0)
