"""Scales of narrow weights: one for each block of `rows` x `columns` elements of a matrix [..., N, K].

None means the whole dimension, so that per tensor is (None, None), per output channel (1, None), groups of 32
(1, 32) and blocks (128, 128). Scales are always [..., ceil(N / rows), ceil(K / columns)]; blocks at the edges may
be partial.

Dimension letters: N output width, K contracting (input) width.
"""

from typing import Any

import numpy as np


def scale_shape(shape: tuple[int, ...], rows: int | None, columns: int | None) -> tuple[int, ...]:
    """Shape of the scales of a matrix of shape [..., N, K]."""
    *stack, outputs, inputs = shape
    return (*stack, -(-outputs // (rows or outputs)), -(-inputs // (columns or inputs)))


def block_maxima(matrix: np.ndarray, rows: int | None, columns: int | None) -> np.ndarray:
    """Largest magnitude of each block: [..., N, K] -> `scale_shape`, in the matrix's dtype."""
    maxima = np.abs(matrix)
    for axis, size in ((-1, columns), (-2, rows)):
        starts = np.arange(0, maxima.shape[axis], size or maxima.shape[axis])
        maxima = np.maximum.reduceat(maxima, starts, axis=axis)
    return maxima


def spread(scale: Any, rows: int | None, columns: int | None, shape: tuple[int, ...]) -> Any:
    """Scales of NumPy or JAX as something that broadcasts against their matrix of shape [..., N, K]."""
    if rows not in (None, 1):
        scale = scale.repeat(rows, axis=-2)[..., : shape[-2], :]
    if columns not in (None, 1):
        scale = scale.repeat(columns, axis=-1)[..., : shape[-1]]
    return scale
