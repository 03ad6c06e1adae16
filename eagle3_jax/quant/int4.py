"""INT4 weights in groups of 32, eight in an int32, as compressed-tensors packs them ("pack-quantized").

A weight is (nibble - 8) times its group's scale. Element i of eight is in the bits 4i .. 4i + 3.

Source: the compressed-tensors format, as Kimi-K2.5 is published in it.
"""

from typing import Any

import numpy as np

from eagle3_jax.quant.scales import block_maxima, spread

GROUP = 32
"""Elements that share a scale."""

PACK = 8
"""Elements in an int32."""

_LEAST, _MOST = -8, 7
_SHIFTS = np.arange(0, 4 * PACK, 4, dtype=np.int32)


def encode(matrix: np.ndarray, scale_dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Quantise with scales amax / 7.5, half of the range of sixteen numbers, as compressed-tensors chooses them.

    Args:
        matrix: finite, float32 [..., N, K].
        scale_dtype: dtype of the scales, bfloat16 or float32.

    Returns:
        Codes int32 [..., N, K/8] and scales [..., N, K/32].
    """
    maxima = block_maxima(matrix, 1, GROUP)
    scale = np.where(maxima > 0, maxima / np.float32(7.5), np.float32(1)).astype(scale_dtype)
    scaled = matrix / spread(scale.astype(np.float32), 1, GROUP, matrix.shape)
    nibbles = np.rint(scaled).clip(_LEAST, _MOST).astype(np.int32) - _LEAST
    # Disjoint bits: the sum is their union.
    packed = (nibbles.reshape(*matrix.shape[:-1], -1, PACK) << _SHIFTS).sum(axis=-1, dtype=np.int32)
    return packed, scale


def elements(codes: Any) -> Any:
    """Codes int32 [..., K/8] of NumPy or JAX as float32 numbers [..., K]."""
    nibbles = (codes[..., None] >> _SHIFTS) & 15
    return (nibbles + _LEAST).reshape(*codes.shape[:-1], -1).astype(np.float32)
