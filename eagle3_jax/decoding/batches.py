"""Rows of token ids as padded arrays, and back.

Dimension letters: B rows, P padded length.
"""

from collections.abc import Sequence

import numpy as np
from jax import Array

from eagle3_jax.decoding.loop import ERROR, Generation
from eagle3_jax.errors import Eagle3Error

SMALLEST_BUCKET = 32


def bucket(length: int, context: int) -> int:
    """The padded length of prompts of up to `length` tokens: a power of two from 32 up to the context.

    Example:
        >>> bucket(33, 8192)
        64
    """
    return min(max(SMALLEST_BUCKET, 1 << (length - 1).bit_length()), context)


def pad_rows(rows: Sequence[Sequence[int]], width: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Rows padded at the end with 0.

    Args:
        rows: token ids of each row. width: P; None is the longest row's length.

    Returns:
        int32 [B, P] ids and int32 [B] lengths.

    Example:
        >>> pad_rows([[5, 6], [7]])[0].tolist()
        [[5, 6], [7, 0]]
    """
    lengths = np.asarray([len(row) for row in rows], np.int32)
    ids = np.zeros((len(rows), int(lengths.max()) if width is None else width), np.int32)
    for padded, row in zip(ids, rows, strict=True):
        padded[: len(row)] = row
    return ids, lengths


def unpad_rows(ids: Array | np.ndarray, lengths: Array | np.ndarray) -> list[list[int]]:
    """The rows of int [B, P] ids without what lies past int [B] lengths.

    Example:
        >>> unpad_rows(np.array([[5, 6], [7, 0]]), np.array([2, 1]))
        [[5, 6], [7]]
    """
    return [row[:length].tolist() for row, length in zip(np.asarray(ids), np.asarray(lengths), strict=True)]


def answers(out: Generation, target_name: str) -> list[list[int]]:
    """The tokens of each row of a generation.

    Raises:
        Eagle3Error: a row's logits have no finite maximum.
    """
    if np.any(np.asarray(out.finish_reason) == ERROR):
        raise Eagle3Error(f"{target_name}: the logits have no finite maximum; the weights or their dtype are at fault")
    return unpad_rows(out.tokens, out.lengths)
