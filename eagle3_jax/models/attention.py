"""Attention of a few new tokens over a paged prefix and each other.

Models do not know the cache: they call an `Attend` function with a layer's queries, keys, values and cache and
get the mixed values and the new cache back. Decoding passes `paged_attention`, training and scoring their own.

Dimension letters: B rows, T new tokens, N query heads, G query heads per key-value head, D head width,
C tokens of a chunk.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from eagle3_jax.cache.paged import Step, read_chunk, write

Attend = Callable[[Array, Array, Array, Any], tuple[Array, Any]]
"""(queries [B, T, N, D], keys [B, T, N/G, D], values [B, T, N/G, D], cache) -> (mixed [B, T, N*D], cache)."""

MASKED = -1e30
"""Score of an invisible token; finite, so that a chunk in which a row sees nothing leaves no NaN."""

CHUNK_SIZE = 128
"""Prefix tokens gathered at a time (rounded to whole blocks)."""


def causal_attention(q: Array, k: Array, v: Array, cache: None) -> tuple[Array, None]:
    """Plain causal attention over the T tokens themselves, without a cache."""
    length = q.shape[1]
    visible = jnp.tril(jnp.ones((length, length), bool))
    _, total, mixed = _attend_chunk(_grouped(q, k), *_contained(k, v), visible[None])
    return _finish(total, mixed, q), cache


def paged_attention(step: Step, chunk_size: int = CHUNK_SIZE) -> Attend:
    """Attention over a pool's prefix and the new tokens, which it writes into the pool.

    The prefix is walked in chunks up to the longest row's length with an online softmax (arXiv 1805.02867), so
    no buffer as long as the context exists.
    """
    chunk_size = max(chunk_size // step.block_size, 1) * step.block_size

    def attend(q: Array, k: Array, v: Array, pool: Array) -> tuple[Array, Array]:
        heads = k.shape[2]
        queries = _grouped(q, k)
        chunks = (jnp.max(step.start) + chunk_size - 1) // chunk_size

        # Written before the prefix is read: were it the other way, XLA would copy the pool to order the two.
        pool = write(pool, step.slots, jnp.concatenate([k, v], axis=2))

        def body(carry: tuple) -> tuple:
            chunk, state = carry
            tokens = read_chunk(pool, step, chunk, chunk_size).astype(q.dtype)
            position = chunk * chunk_size + jnp.arange(chunk_size, dtype=jnp.int32)
            seen = position < step.start[:, None]
            # A weight of zero does not silence a NaN in a slot that nobody owns.
            tokens = jnp.where(seen[:, :, None, None], tokens, 0)
            part = _attend_chunk(queries, tokens[:, :, :heads], tokens[:, :, heads:], seen[:, None, :])
            return chunk + 1, _merge(state, part)

        state = _attend_chunk(queries, *_contained(k, v), step.visible[None])
        _, (_, total, mixed) = lax.while_loop(lambda carry: carry[0] < chunks, body, (jnp.int32(0), state))
        return _finish(total, mixed, q), pool

    return attend


def _contained(k: Array, v: Array) -> tuple[Array, Array]:
    """Keys and values [B, T, N/G, D] in which a value that is not finite spoils only the queries that see it.

    A weight of zero does not silence a NaN among the values; a masked score silences one among the keys. So a
    rejected draft or padding cannot reach the tokens before it.
    """
    spoilt = ~jnp.isfinite(jnp.sum(v, axis=-1, keepdims=True))
    return jnp.where(spoilt, jnp.nan, k), jnp.where(spoilt, 0, v)


def _grouped(q: Array, k: Array) -> Array:
    """Scaled queries by key-value head: [B, T, N, D] -> [B, N/G, G, T, D]."""
    batch, length, heads, width = q.shape
    grouped = q.reshape(batch, length, k.shape[2], heads // k.shape[2], width)
    return grouped.transpose(0, 2, 3, 1, 4) * jnp.asarray(width**-0.5, q.dtype)


def _attend_chunk(queries: Array, k: Array, v: Array, visible: Array) -> tuple[Array, Array, Array]:
    """Softmax statistics over one chunk of keys: (maximum, total weight, weighted values), float32.

    Args:
        queries: [B, N/G, G, T, D]. k, v: [B, C, N/G, D]. visible: bool [B or 1, T or 1, C].
    """
    scores = jnp.einsum("bngtd,bcnd->bngtc", queries, k, preferred_element_type=jnp.float32)
    scores = jnp.where(visible[:, None, None], scores, MASKED)
    maximum = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.where(visible[:, None, None], jnp.exp(scores - maximum), 0.0)
    mixed = jnp.einsum("bngtc,bcnd->bngtd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return maximum, jnp.sum(weights, axis=-1, keepdims=True), mixed


def _merge(a: tuple[Array, Array, Array], b: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
    maximum = jnp.maximum(a[0], b[0])
    scale_a, scale_b = jnp.exp(a[0] - maximum), jnp.exp(b[0] - maximum)
    return maximum, a[1] * scale_a + b[1] * scale_b, a[2] * scale_a + b[2] * scale_b


def _finish(total: Array, mixed: Array, q: Array) -> Array:
    """Normalise and return to [B, T, N*D] in the queries' dtype."""
    batch, length, heads, width = q.shape
    out = (mixed / total).transpose(0, 3, 1, 2, 4).reshape(batch, length, heads * width)
    return out.astype(q.dtype)
