"""Attention of a few new tokens over a paged prefix and each other.

Models do not know the cache: they call an `Attend` function with a layer's queries, keys, values and cache and
get the mixed values and the new cache back. Decoding passes `paged_attention`, training and scoring their own.

Dimension letters: B rows, T new tokens, N query heads, G query heads per key-value head, D width of queries and
keys, Dv width of values, R x W what the cache keeps of a token, C tokens of a chunk.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import jax.numpy as jnp
from jax import Array, lax

from eagle3_jax.cache.paged import Fp8Pool, Pool, Step, as_kept, read_chunk, write
from eagle3_jax.models import few_queries
from eagle3_jax.sharding import each_row_on_cpu, in_step

Expand = Callable[[Array], tuple[Array, Array]]
"""What the cache keeps, [B, C, R, W], to (keys [B, C, N/G, D], values [B, C, N/G, Dv])."""


class Attend(Protocol):
    """How a layer's queries meet the keys of the prefix and of the new tokens."""

    def __call__(
        self,
        q: Array,
        k: Array,
        v: Array | Expand,
        cache: Any,
        *,
        scale: float | None = None,
        window: int | None = None,
        sinks: Array | None = None,
    ) -> tuple[Array, Any]:
        """Mix the values that each query sees.

        Args:
            q: [B, T, N, D].
            k: keys [B, T, N/G, D]. With an `Expand` as `v`: what the cache keeps instead, [B, T, R, W].
            v: values [B, T, N/G, D], which the cache keeps behind their keys (R = N/G, W = 2 D: on a mesh a head's
                lie together), or the function that makes keys and values of what it keeps.
            cache: the layer's cache.
            scale: multiplier of the scores; None is D ** -0.5.
            window: tokens that a query sees, itself among them, counted back from it; None is all.
            sinks: [N], a score of each head that takes weight and has no value (gpt-oss).

        Returns:
            [B, T, N*Dv] in q's dtype, and the new cache.
        """
        ...


MASKED = -1e30
"""Score of an invisible token; finite, so that a chunk in which a row sees nothing leaves no NaN."""

CHUNK_SIZE = 128
"""Prefix tokens gathered at a time (rounded to whole blocks)."""


def causal_attention(
    q: Array,
    k: Array,
    v: Array | Expand,
    cache: None,
    *,
    scale: float | None = None,
    window: int | None = None,
    sinks: Array | None = None,
) -> tuple[Array, None]:
    """Plain causal attention over the T tokens themselves, without a cache; an `Attend`."""
    k, v = keys_and_values(k, v)
    offset = jnp.arange(q.shape[1], dtype=jnp.int32)[None]
    visible = offset[:, :, None] >= offset[:, None]
    visible &= _within(window, offset, offset)
    state = _attend_chunk(_grouped(q, k, scale), *_contained(k, v), visible)
    return _finish(_sunk(state, sinks), q), cache


def paged_attention(step: Step, chunk_size: int = CHUNK_SIZE) -> Attend:
    """Attention over a pool's prefix and the new tokens, which it writes into the pool.

    The prefix is walked in chunks up to the longest row's length with an online softmax (arXiv 1805.02867), so
    no buffer as long as the context exists. A window starts the walk where the shortest row's begins. Few queries go
    to the native kernel where that is in use, which keeps their scores over the whole context.
    """
    chunk_size = max(chunk_size // step.block_size, 1) * step.block_size
    # Once for all layers: on a mesh the groups of rows exchange these.
    lowest, highest = -in_step(-step.start), in_step(step.start)

    def attend(
        q: Array,
        k: Array,
        v: Array | Expand,
        cache: Pool,
        *,
        scale: float | None = None,
        window: int | None = None,
        sinks: Array | None = None,
    ) -> tuple[Array, Pool]:
        kept, expand = (k, v) if callable(v) else (jnp.concatenate([k, v], axis=-1), _halves)
        # A token sees the same of another whether both are new or one is read back: else passes of several
        # tokens, as speculation has them, would differ from passes of one.
        k, v = expand(as_kept(cache, kept)) if isinstance(cache, Fp8Pool) else keys_and_values(k, v)
        # Written before the prefix is read: were it the other way, XLA would copy the pool to order the two.
        pool = write(cache, step.slots, kept)

        def walk(rows: tuple) -> tuple[Array, Array, Array]:
            queries, k, v, table, start, positions, lowest, highest = rows
            here = replace(step, table=table)
            first = jnp.int32(0) if window is None else jnp.maximum(jnp.min(lowest) - window + 1, 0) // chunk_size
            visible = step.visible[None] & _within(window, positions, positions)
            state = _attend_chunk(queries, *_contained(k, v), visible)

            def body(carry: tuple) -> tuple:
                chunk, state = carry
                tokens = read_chunk(pool, here, chunk, chunk_size).astype(q.dtype)
                position = chunk * chunk_size + jnp.arange(chunk_size, dtype=jnp.int32)[None]
                owned = position < start[:, None]
                # A weight of zero does not silence a NaN in a slot that nobody owns.
                tokens = jnp.where(owned[:, :, None, None], tokens, 0)
                visible = owned[:, None] & _within(window, positions, position)
                return chunk + 1, _merge(state, _attend_chunk(queries, *expand(tokens), visible))

            chunks = (jnp.max(highest) + chunk_size - 1) // chunk_size
            return lax.while_loop(lambda carry: carry[0] < chunks, body, (first, state))[1]

        def walked() -> Array:
            queries = _grouped(q, k, scale)
            state = each_row_on_cpu(walk, (queries, k, v, step.table, step.start, step.positions, lowest, highest))
            return _finish(_sunk(state, sinks), q)

        if isinstance(pool, Array) and expand is _halves and sinks is None and few_queries.fits(q, v, pool):
            return few_queries.attend(q, k, v, pool, step, scale, window, walked), pool
        return walked(), pool

    return attend


def keys_and_values(k: Array, v: Array | Expand) -> tuple[Array, Array]:
    """The keys [B, T, N/G, D] and values [B, T, N/G, Dv] that an `Attend` was given."""
    return v(k) if callable(v) else (k, v)


def _halves(kept: Array) -> tuple[Array, Array]:
    width = kept.shape[3] // 2
    return kept[..., :width], kept[..., width:]


def _within(window: int | None, queries: Array, keys: Array) -> Array | bool:
    """Whether keys at positions [B or 1, C] are in the window of queries at [B or 1, T]: [B or 1, T, C]."""
    return True if window is None else queries[:, :, None] - keys[:, None] < window


def _contained(k: Array, v: Array) -> tuple[Array, Array]:
    """Keys and values in which a value that is not finite spoils only the queries that see it.

    A weight of zero does not silence a NaN among the values; a masked score silences one among the keys. So a
    rejected draft or padding cannot reach the tokens before it.
    """
    spoilt = ~jnp.isfinite(jnp.sum(v, axis=-1, keepdims=True))
    return jnp.where(spoilt, jnp.nan, k), jnp.where(spoilt, 0, v)


def _grouped(q: Array, k: Array, scale: float | None) -> Array:
    """Scaled queries by key-value head: [B, T, N, D] -> [B, N/G, G, T, D]."""
    batch, length, heads, width = q.shape
    grouped = q.reshape(batch, length, k.shape[2], heads // k.shape[2], width).transpose(0, 2, 3, 1, 4)
    factor = width**-0.5 if scale is None else scale
    # In float32: a factor rounded to bfloat16 would be off in every score alike.
    return (grouped.astype(jnp.float32) * factor).astype(q.dtype)


def _attend_chunk(queries: Array, k: Array, v: Array, visible: Array) -> tuple[Array, Array, Array]:
    """Softmax statistics over one chunk of keys: (maximum, total weight, weighted values), float32.

    Args:
        queries: [B, N/G, G, T, D]. k: [B, C, N/G, D]. v: [B, C, N/G, Dv]. visible: bool [B or 1, T or 1, C].
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


def _sunk(state: tuple[Array, Array, Array], sinks: Array | None) -> tuple[Array, Array, Array]:
    """Softmax statistics with the heads' sinks [N] among the scores."""
    if sinks is None:
        return state
    maximum, total, mixed = state
    scores = sinks.astype(jnp.float32).reshape(1, *maximum.shape[1:3], 1, 1)
    return _merge(state, (scores, jnp.ones_like(total), jnp.zeros_like(mixed)))


def _finish(state: tuple[Array, Array, Array], q: Array) -> Array:
    """Normalise and return to [B, T, N*Dv] in the queries' dtype."""
    _, total, mixed = state
    batch, length, heads = q.shape[:3]
    out = (mixed / total).transpose(0, 3, 1, 2, 4).reshape(batch, length, heads * mixed.shape[-1])
    return out.astype(q.dtype)
