"""Pages are views of blocks: a target and a draft with any two page sizes share one block table.

A latent target (one row a token) and a draft with keys and values, in blocks of 64 tokens, against the models
without a cache.
"""

import dataclasses
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import latent
import numpy as np
import pytest
import tiny
from jax import Array

from eagle3_jax.cache.paged import Step, chain_step, make_pools, read_chunk
from eagle3_jax.decoding.drafters import Eagle3Drafter, Oracle
from eagle3_jax.decoding.loop import generate, speculative_generate
from eagle3_jax.decoding.request import Chain, GenerationConfig
from eagle3_jax.decoding.sampling import Sampling, row_keys
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.models import attention
from eagle3_jax.models.attention import causal_attention, paged_attention
from eagle3_jax.models.eagle3 import shared_weights
from eagle3_jax.models.layers import apply

PAGES = (1, 16, 32, 64)
BLOCK, BLOCKS = 64, 12
LENGTH, NEW = 150, 5
STARTS = (145, 70)
"""Tokens of each row before the last NEW; both end inside a block, and inside a page of any size but 1."""
DRAFT = dataclasses.replace(tiny.DRAFT, taps=(0, 1, 2))
IDS = np.random.default_rng(1).integers(0, tiny.VOCAB, (2, LENGTH + 1)).astype(np.int32)
CONTIGUOUS = ((0, 1, 2), (3, 4, 5))
SCATTERED = ((7, 0, 10), (5, 11, 2))


@pytest.fixture(scope="module", autouse=True)
def made() -> None:
    """Make both models, which are kept, before anything is traced."""
    latent.target(), tiny.draft(DRAFT)


def gathered(x: Array, index: Array) -> Array:
    """Places [B, T] of x [B, L, ...]."""
    return jnp.take_along_axis(x, index.reshape(*index.shape, *[1] * (x.ndim - 2)), axis=1)


def two_passes(table: Array, page_size: int) -> list[tuple[Array, Step]]:
    """Places and steps of the tokens before the last NEW, and of these."""
    start, slots = jnp.asarray(STARTS, jnp.int32), BLOCKS * BLOCK
    passes = []
    for begin, count, length in ((jnp.zeros_like(start), start, max(STARTS)), (start, jnp.full_like(start, NEW), NEW)):
        step = chain_step(table, begin, count, length, BLOCK, slots, page_size)
        passes.append((step.positions, step))
    return passes


@partial(jax.jit, static_argnums=0)
def target_passes(page_size: int, params: Any, pools: tuple, table: Array) -> tuple[list[Array], Array]:
    """The target's features in both passes, and its logits in the second."""
    features, out, model = [], None, latent.target()[0]
    for index, step in two_passes(table, page_size):
        ids = gathered(jnp.asarray(IDS), index)
        out = apply(model, params, ids, index, paged_attention(step), pools, DRAFT.taps)
        features.append(out.features)
        pools = out.caches
    return features, apply(model, params, out.hidden, method="logits")


@partial(jax.jit, static_argnums=0)
def draft_passes(page_size: int, params: Any, pools: tuple, table: Array, features: list[Array]) -> Array:
    """The draft's logits in the second pass over the target's features."""
    (model, weights), shared, y = tiny.draft(DRAFT), shared_weights(params), None
    for (index, step), rows in zip(two_passes(table, page_size), features, strict=True):
        g = apply(model, weights, rows, shared, method="fuse")
        ids = gathered(jnp.asarray(IDS), index + 1)
        y, pools = apply(model, weights, g, ids, index, paged_attention(step), pools, shared)
    return apply(model, weights, y, shared, method="logits")


def pools_of(config: Any, layers: int, background: float) -> tuple:
    return tuple(
        jnp.full_like(pool, background) for pool in make_pools(layers, BLOCKS * BLOCK, *config.cache_row, "float32")
    )


@cache
def target_logits(page_size: int, table: tuple = SCATTERED, background: float = 0.0) -> tuple[Any, np.ndarray]:
    pools = pools_of(latent.TARGET, latent.TARGET.num_layers, background)
    features, logits = target_passes(page_size, latent.target()[1], pools, jnp.asarray(table, jnp.int32))
    return features, np.asarray(logits)


@cache
def pair_logits(
    pages: tuple[int, int], table: tuple = SCATTERED, background: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Logits [2, NEW, V] of the target and [2, NEW, Vd] of the draft with these page sizes under one table."""
    features, logits = target_logits(pages[0], table, background)
    pools = pools_of(DRAFT, 1, background)
    return logits, np.asarray(
        draft_passes(pages[1], latent.target()[1], pools, jnp.asarray(table, jnp.int32), features)
    )


@pytest.fixture(scope="module")
def whole() -> tuple[np.ndarray, np.ndarray]:
    """The same logits without a cache."""

    @jax.jit
    def run(params: Any) -> tuple[Array, Array]:
        model, (drafter, weights), shared = latent.target()[0], tiny.draft(DRAFT), shared_weights(params)
        ids = jnp.asarray(IDS)
        positions = jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32), (2, LENGTH))
        out = apply(model, params, ids[:, :-1], positions, causal_attention, (None, None), DRAFT.taps)
        g = apply(drafter, weights, out.features, shared, method="fuse")
        y, _ = apply(drafter, weights, g, ids[:, 1:], positions, causal_attention, (None,), shared)
        index = jnp.asarray(STARTS, jnp.int32)[:, None] + jnp.arange(NEW, dtype=jnp.int32)
        logits = apply(model, params, gathered(out.hidden, index), method="logits")
        return logits, apply(drafter, weights, gathered(y, index), shared, method="logits")

    target, drafted = run(latent.target()[1])
    return np.asarray(target), np.asarray(drafted)


def off(got: tuple[np.ndarray, np.ndarray], expected: tuple[np.ndarray, np.ndarray]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("draft_page", PAGES)
@pytest.mark.parametrize("target_page", PAGES)
def test_any_two_page_sizes_under_one_table_give_what_no_cache_gives(
    whole: tuple, target_page: int, draft_page: int
) -> None:
    got = pair_logits((target_page, draft_page))
    assert off(got, whole) < 1e-4 < min(np.ptp(x) for x in whole) / 1e3
    # Gathering by other units moves the same numbers: not a bit may differ from contiguous whole blocks.
    for a, b in zip(got, pair_logits((BLOCK, BLOCK), CONTIGUOUS), strict=True):
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("pages", [(1, 64), (16, 1)])
def test_what_lies_in_slots_without_a_token_changes_nothing(pages: tuple) -> None:
    for a, b in zip(pair_logits(pages, background=np.nan), pair_logits(pages), strict=True):
        assert np.all(np.isfinite(b)) and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("faulty", ["target", "draft"])
def test_page_ids_of_the_wrong_granularity_are_seen(
    whole: tuple, faulty: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Block ids taken for page ids, as an engine does that hands one kernel's table to another."""

    def misread(pool: Array, step: Step, chunk: Array | int, chunk_size: int) -> Array:
        return read_chunk(pool, step.replace(block_size=step.page_size), chunk, chunk_size)

    (features, logits), params, table = target_logits(1), latent.target()[1], jnp.asarray(SCATTERED, jnp.int32)
    assert off((logits,), whole[:1]) < 1e-4
    monkeypatch.setattr(attention, "read_chunk", misread)
    # Traced anew: the module's own programs have the right reader in them.
    if faulty == "target":
        pools = pools_of(latent.TARGET, latent.TARGET.num_layers, 0.0)
        got = jax.jit(lambda *given: target_passes.__wrapped__(16, *given)[1])(params, pools, table)
        assert off((got,), whole[:1]) > 0.1
    else:
        got = jax.jit(lambda *given: draft_passes.__wrapped__(16, *given))(
            params, pools_of(DRAFT, 1, 0.0), table, features
        )
        assert off((got,), whole[1:]) > 0.1


def test_pages_of_blocks_past_65535_are_like_any_other() -> None:
    """Latent rows by pages of 1, keys and values by pages of 4; page ids reach past 2**18."""
    rng = np.random.default_rng(3)
    size, start = 4, jnp.asarray([9, 2], jnp.int32)
    q, kept = (jnp.asarray(rng.standard_normal((2, 3, n, 6)), jnp.float32) for n in (2, 1))
    prefix = rng.standard_normal((2, 12, 1, 6)).astype(np.float32)

    @partial(jax.jit, static_argnums=0)
    def attend(page: int, table: Array, pool: Array) -> Array:
        step = chain_step(table, start, jnp.full_like(start, 3), 3, size, pool.shape[0], page)
        return paged_attention(step, size)(q, kept, lambda rows: (rows, rows[..., :4]), pool)[0]

    outputs = []
    for blocks, ids in ((6, [[0, 1, 2], [3, 4, 5]]), (70_000, [[65_535, 65_536, 69_999], [65_537, 131, 0]])):
        pool = np.zeros((blocks * size, 1, 6), np.float32)
        for row, n in enumerate(start.tolist()):
            for position in range(n):
                pool[ids[row][position // size] * size + position % size] = prefix[row, position]
        outputs += [np.asarray(attend(page, jnp.asarray(ids, jnp.int32), jnp.asarray(pool))) for page in (1, 4)]
    assert np.ptp(outputs[0]) > 0.1 and all(x.tobytes() == outputs[0].tobytes() for x in outputs)


def test_a_run_gathers_both_caches_by_their_own_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """That such runs give the tokens of plain decoding is tested with the other runs of each family."""
    read = set()

    def recorded(pool: Array, step: Step, chunk: Array | int, chunk_size: int) -> Array:
        read.add((pool.shape[1:], step.page_size, step.block_size))
        return read_chunk(pool, step, chunk, chunk_size)

    monkeypatch.setattr(attention, "read_chunk", recorded)
    config = GenerationConfig(max_new_tokens=9, speculation=Chain(2), block_size=64, page_size=1, draft_page_size=16)
    models = {"target_model": latent.target()[0], "draft_model": tiny.draft(DRAFT)[0], "config": config}
    given = (*tiny.prompts(2), row_keys(0, 2), Sampling.make(2))
    jax.eval_shape(partial(speculative_generate, **models), latent.target()[1], tiny.draft(DRAFT)[1], *given)
    assert read == {(latent.TARGET.cache_row, 1, 64), (DRAFT.cache_row, 16, 64)}


@pytest.mark.parametrize("name", ["page_size", "draft_page_size"])
@pytest.mark.parametrize("value", [0, -1, 3, 64, 16.0, True, "16"])
def test_pages_that_do_not_fill_a_block_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(Eagle3Error, match=rf"{name} is .* a divisor of the block size 32"):
        GenerationConfig(**{name: value})


def test_page_sizes_of_drafters_that_bring_their_own_cache() -> None:
    given = (*tiny.prompts(2), row_keys(0, 2), Sampling.make(2))
    model, params = latent.target()
    config = GenerationConfig(max_new_tokens=2, draft_page_size=16)
    with pytest.raises(Eagle3Error, match="draft_page_size is for an Eagle3 module"):
        run = partial(speculative_generate, target_model=model, draft_model=Oracle(), config=config)
        jax.eval_shape(run, params, given[0], *given)
    with pytest.raises(Eagle3Error, match="page_size is 12; a divisor of the block size 32"):
        own = Eagle3Drafter(tiny.draft(DRAFT)[0], page_size=12)
        run = partial(speculative_generate, target_model=model, draft_model=own, config=GenerationConfig(2))
        jax.eval_shape(run, params, tiny.draft(DRAFT)[1], *given)
    # One config serves the run with a draft and the one without.
    plain = jax.eval_shape(partial(generate, model=model, config=config), params, *given)
    assert plain.tokens.shape == (2, 2)
