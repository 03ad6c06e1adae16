"""Who proposes the next tokens: EAGLE-3, nobody, or (for tests) an oracle that knows the answer."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax.numpy as jnp
from flax import struct
from jax import Array

from eagle3_jax.cache.paged import Pool, chain_step, make_pools
from eagle3_jax.models.attention import paged_attention
from eagle3_jax.models.eagle3 import Eagle3, shared_weights
from eagle3_jax.models.layers import apply
from eagle3_jax.sharding import AnyMesh

Pick = Callable[[int, Array, Array | None], Array]
"""pick(j, logits [B, Vd], target_ids [Vd] or None) -> the j-th draft int32 [B] in the target's vocabulary."""


@struct.dataclass
class Verified:
    """Rows the target has verified and the drafter has not yet seen.

    Attributes:
        features: [B, T, F], the target's tapped hidden states of each row.
        next_ids: int32 [B, T], the token after each row.
        start: int32 [B], position of row 0.
        count: int32 [B], real rows; the rest is padding.
        table: int32 [B, M], the block table.
    """

    features: Array
    next_ids: Array
    start: Array
    count: Array
    table: Array


class Drafter(Protocol):
    """A proposer of tokens; hashable, so that it can be a static argument.

    `params` are (draft params, target params). Whatever it proposes, the emitted tokens stay the target's.
    """

    @property
    def taps(self) -> tuple[int, ...]:
        """Hidden states of the target that `Verified.features` joins."""
        ...

    def make_cache(self, slots: int, mesh: AnyMesh | None = None) -> Any:
        """The drafter's own state for a pool of `slots` slots; its arrays are pools [S, R, D], on a mesh if any."""
        ...

    def extend(self, params: tuple[Any, Any], cache: Any, rows: Verified, block_size: int) -> Any:
        """Take verified rows in (prefill); returns the cache."""
        ...

    def propose(
        self, params: tuple[Any, Any], cache: Any, rows: Verified, length: int, pick: Pick, block_size: int
    ) -> tuple[Array, Any]:
        """Take verified rows in and propose `length` tokens after the last: (int32 [B, length], cache)."""
        ...


@dataclasses.dataclass(frozen=True)
class NoDrafter:
    """Proposes nothing: plain decoding."""

    taps: tuple[int, ...] = ()

    def make_cache(self, slots: int, mesh: AnyMesh | None = None) -> tuple:
        """No state."""
        return ()

    def extend(self, params: tuple[Any, Any], cache: tuple, rows: Verified, block_size: int) -> tuple:
        """Nothing to learn."""
        return cache

    def propose(
        self, params: tuple[Any, Any], cache: tuple, rows: Verified, length: int, pick: Pick, block_size: int
    ) -> tuple[Array, tuple]:
        """No tokens: int32 [B, 0]."""
        return jnp.zeros((rows.start.shape[0], 0), jnp.int32), cache


@dataclasses.dataclass(frozen=True)
class Oracle:
    """Proposes a continuation given as the draft params: int32 [B, L], the whole rows from their first token.

    The best any drafter can do; tests count its rounds. Ids past the given rows are 0.
    """

    taps: tuple[int, ...] = ()

    def make_cache(self, slots: int, mesh: AnyMesh | None = None) -> tuple:
        """No state."""
        return ()

    def extend(self, params: tuple[Any, Any], cache: tuple, rows: Verified, block_size: int) -> tuple:
        """Nothing to learn."""
        return cache

    def propose(
        self, params: tuple[Any, Any], cache: tuple, rows: Verified, length: int, pick: Pick, block_size: int
    ) -> tuple[Array, tuple]:
        """The known tokens after the last verified one."""
        known = params[0]
        index = (rows.start + rows.count)[:, None] + 1 + jnp.arange(length, dtype=jnp.int32)
        return jnp.take_along_axis(known, index, axis=1, mode="fill", fill_value=0), cache


@dataclasses.dataclass(frozen=True)
class Eagle3Drafter:
    """EAGLE-3 (arXiv 2503.01840): extend over the verified rows with true features, then draft on its own.

    Attributes:
        model: the draft.
        page_size: tokens its attention gathers as one unit; None is a block.
        cache_format, cache_scales: of its cache, see `eagle3_jax.cache.paged.make_pools`.
    """

    model: Eagle3
    page_size: int | None = None
    cache_format: str | None = None
    cache_scales: tuple[float, ...] = ()

    @property
    def taps(self) -> tuple[int, ...]:
        """The draft's taps."""
        return self.model.config.taps

    def make_cache(self, slots: int, mesh: AnyMesh | None = None) -> tuple[Pool, ...]:
        """One pool [S, R, D] of cache rows for each layer of the draft."""
        c = self.model.config
        return make_pools(c.num_layers, slots, *c.cache_row, c.dtype, self.cache_format, self.cache_scales, mesh)

    def extend(self, params: tuple[Any, Any], cache: tuple, rows: Verified, block_size: int) -> tuple:
        """Write the verified rows' keys and values from true features."""
        return self._extend(params, cache, rows, block_size)[1]

    def _extend(self, params: tuple[Any, Any], cache: tuple, rows: Verified, block_size: int) -> tuple[Array, tuple]:
        shared = shared_weights(params[1])
        g = apply(self.model, params[0], rows.features, shared, method="fuse")
        length, slots = rows.next_ids.shape[1], cache[0].shape[0]
        step = chain_step(rows.table, rows.start, rows.count, length, block_size, slots, self.page_size)
        return apply(self.model, params[0], g, rows.next_ids, step.positions, paged_attention(step), cache, shared)

    def propose(
        self, params: tuple[Any, Any], cache: tuple, rows: Verified, length: int, pick: Pick, block_size: int
    ) -> tuple[Array, tuple]:
        """Extend, then draft a chain.

        The extend pass overwrites, with true features, the keys and values that the last round's drafting
        wrote from the draft's own features, and writes those of the last draft after a full acceptance.
        """
        shared, target_ids = shared_weights(params[1]), params[0].get("target_ids")
        y, cache = self._extend(params, cache, rows, block_size)
        last = jnp.maximum(rows.count - 1, 0)[:, None, None]
        y = jnp.take_along_axis(y, last, axis=1)
        end = rows.start + rows.count
        drafts: list[Array] = []
        for j in range(length):
            if j > 0:
                y, cache = self.step(params, cache, y, drafts[-1], end + j - 1, rows.table, block_size)
            logits = apply(self.model, params[0], y[:, 0], shared, method="logits")
            drafts.append(pick(j, logits, target_ids))
        return jnp.stack(drafts, axis=1), cache

    def step(
        self,
        params: tuple[Any, Any],
        cache: tuple,
        y: Array,
        ids: Array,
        position: Array,
        table: Array,
        block_size: int,
    ) -> tuple[Array, tuple]:
        """One token on from the draft's own output.

        Args:
            params, cache, block_size: as in `propose`.
            y: [B, 1, H], output for the row before. ids: int32 [B], the token drafted from it.
            position: int32 [B], of the new row. table: int32 [B, M].

        Returns:
            y [B, 1, H] of the new row, and the cache.
        """
        g = apply(self.model, params[0], y, method="feedback")
        step = chain_step(table, position, jnp.ones_like(position), 1, block_size, cache[0].shape[0], self.page_size)
        attend, shared = paged_attention(step), shared_weights(params[1])
        return apply(self.model, params[0], g, ids[:, None], step.positions, attend, cache, shared)
