"""Attention of a few new tokens over a paged prefix by the native kernel, where `few_rows.use` turned that on.

Dimension letters: B rows, T new tokens, N query heads, R key-value heads, D width of a head, S slots, M blocks a row.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from eagle3_jax.cache.paged import Step
from eagle3_jax.quant import few_rows

TARGET = "eagle3_few_queries"
"""Name of the kernel among XLA's foreign functions."""


def fits(q: Array, v: Array, pool: Array) -> bool:
    """Whether attention is for the kernel: few queries, values as wide as they, all in float32."""
    batch, length, _, width = q.shape
    same = v.shape[-1] == width and all(x.dtype == jnp.float32 for x in (q, v, pool))
    return few_rows.in_use() and same and 0 < batch * length <= few_rows.AT_ONCE


def attend(
    q: Array,
    k: Array,
    v: Array,
    pool: Array,
    step: Step,
    scale: float | None,
    window: int | None,
    default: Callable[[], Array],
) -> Array:
    """Mix the values that each query sees: float32 [B, T, N*D].

    Args:
        q: [B, T, N, D]. k, v: [B, T, R, D]. pool: [S, R, 2 D], in which the prefix lies.
        step, scale, window: as in `eagle3_jax.models.attention.paged_attention`.
        default: the same on other platforms.
    """
    batch, length, heads, width = q.shape
    result = jax.ShapeDtypeStruct((batch, length, heads * width), jnp.float32)
    kernel = jax.ffi.ffi_call(TARGET, result, vmap_method="sequential")
    settings = {
        "scale": np.float32(width**-0.5 if scale is None else scale),
        "block_size": np.int64(step.block_size),
        "window": np.int64(window or 0),
    }
    arrays = (q, k, v, pool, step.table, step.start, step.visible)
    return lax.platform_dependent(*arrays, cpu=lambda *x: kernel(*x, **settings), default=lambda *_: default())
