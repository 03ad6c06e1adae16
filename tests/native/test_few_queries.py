"""Attention by the native kernel: right, the same alone and among others, and only for what it can."""

from typing import Any

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel import arrays, kernel  # noqa: F401 - a fixture

from eagle3_jax.cache.paged import chain_step, make_pools
from eagle3_jax.models import few_queries
from eagle3_jax.models.attention import paged_attention

pytestmark = pytest.mark.usefixtures("kernel")

BLOCK, BLOCKS = 8, 20
CASES = [
    # tokens, query heads, key-value heads, width, starts, window
    (1, 9, 3, 64, (136,), None),
    (3, 9, 3, 64, (5,), None),
    (5, 4, 2, 24, (0, 77), None),
    (4, 2, 1, 7, (3, 40, 9), 6),
    (16, 8, 8, 16, (144,), 100),
    (1, 3, 3, 32, (0, 1), 1),
]


def given(case: tuple) -> tuple[Any, ...]:
    """Queries, keys, values, pool, table and starts."""
    length, heads, kv_heads, width, starts, _ = case
    batch = len(starts)
    q, k, v, pool = arrays(
        (batch, length, heads, width),
        (batch, length, kv_heads, width),
        (batch, length, kv_heads, width),
        (batch * BLOCKS * BLOCK, kv_heads, 2 * width),
    )
    table = np.random.default_rng(1).permutation(batch * BLOCKS).reshape(batch, BLOCKS).astype(np.int32)
    return q, k, v, pool, table, np.asarray(starts, np.int32)


def attend(window: int | None, q: Any, k: Any, v: Any, pool: Any, table: Any, start: Any) -> tuple[Any, Any]:
    def run(q: Any, k: Any, v: Any, pool: Any, table: Any, start: Any) -> tuple[Any, Any]:
        length = q.shape[1]
        step = chain_step(table, start, jnp.full_like(start, length), length, BLOCK, pool.shape[0])
        return paged_attention(step)(q, k, v, pool, window=window)

    program = jax.jit(run)
    if not isinstance(q, np.ndarray):
        return program(q, k, v, pool, table, start)
    assert few_queries.TARGET in program.lower(q, k, v, pool, table, start).as_text()
    return program(q, k, v, pool, table, start)


@pytest.mark.parametrize("case", CASES)
def test_it_mixes_what_each_query_sees(case: tuple) -> None:
    length, heads, _, width, _, window = case
    q, k, v, pool, table, start = given(case)
    ours = np.asarray(attend(window, q, k, v, pool, table, start)[0])
    for b, before in enumerate(start):
        slots = [table[b, p // BLOCK] * BLOCK + p % BLOCK for p in range(before)]
        keys = np.concatenate([pool[slots, :, :width], k[b]]).astype(np.float64)
        values = np.concatenate([pool[slots, :, width:], v[b]]).astype(np.float64)
        back = before + np.arange(length)[:, None] - np.arange(before + length)
        mask = (back >= 0) & (back < (window or len(keys)))
        expected = dense.attend(q[b].astype(np.float64), keys, values, mask)
        np.testing.assert_allclose(ours[b], expected.reshape(length, heads * width), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_a_query_has_the_bits_it_has_alone(case: tuple) -> None:
    q, k, v, pool, table, start = given(case)
    together, _ = attend(case[-1], q, k, v, pool, table, start)
    for t in range(q.shape[1]):
        one = slice(t, t + 1)
        alone, pool = attend(case[-1], q[:, one], k[:, one], v[:, one], pool, table, start + np.int32(t))
        np.testing.assert_array_equal(together[:, one], alone)


def test_a_row_past_its_table_is_one_that_fills_it() -> None:
    q, k, v, pool, table, _ = given(CASES[3])
    full = BLOCK * BLOCKS
    wanted, _ = attend(None, q, k, v, pool, table, np.asarray((full, 40, full), np.int32))
    ours, _ = attend(None, q, k, v, pool, table, np.asarray((full + 1, 40, 50 * full), np.int32))
    np.testing.assert_array_equal(ours, wanted)


def test_scores_of_minus_infinity_alone_give_no_number() -> None:
    q, k, v, pool, table, start = given(CASES[1])
    ours, _ = attend(None, np.full_like(q, 1e30), np.full_like(k, -1e30), v, pool, table, start * 0)
    assert not np.any(np.isfinite(ours))


def test_it_maps() -> None:
    q, k, v, pool, table, start = given(CASES[1])
    several = np.stack([q, 2 * q])
    ours = jax.vmap(lambda q: attend(None, q, k, v, pool, table, start)[0])(several)
    for one, got in zip(several, ours, strict=True):
        np.testing.assert_array_equal(got, attend(None, one, k, v, pool, table, start)[0])


def test_what_is_not_finite_spoils_only_the_queries_that_see_it() -> None:
    q, k, v, pool, table, start = given(CASES[1])
    clean, _ = attend(None, q, k, v, pool, table, start)
    for spoilt in (np.nan, np.inf):
        values = v.copy()
        values[0, 2] = spoilt
        stale = pool.copy()
        stale[table[0, 1] * BLOCK :][:BLOCK] = spoilt
        ours, _ = attend(None, q, k, values, stale, table, start)
        np.testing.assert_array_equal(ours[:, :2], clean[:, :2])
        assert not np.any(np.isfinite(ours[:, 2]))


def test_it_is_for_few_queries_in_float32() -> None:
    q, v = jnp.ones((2, 8, 4, 16)), jnp.ones((2, 8, 2, 16))
    pool = make_pools(1, 8, 2, 32, "float32")[0]
    assert isinstance(pool, jax.Array) and few_queries.fits(q, v, pool)
    assert not few_queries.fits(jnp.ones((1, 17, 4, 16)), v, pool) and not few_queries.fits(q, v[..., :8], pool)
    half = [x.astype(jnp.bfloat16) for x in (q, v, pool)]
    assert not any(few_queries.fits(*x) for x in ((half[0], v, pool), (q, half[1], pool), (q, v, half[2])))


def test_other_kinds_of_attention_go_without_it() -> None:
    q, k, v, _, table, start = map(jnp.asarray, given(CASES[1]))
    step = chain_step(table, start, jnp.full_like(start, 3), 3, BLOCK, BLOCKS * BLOCK)

    def program(format: str | None, sinks: bool, latent: bool) -> str:
        pool = make_pools(1, BLOCKS * BLOCK, 3, 128 // (1 + latent), "float32", format)[0]
        values = (lambda kept: (kept, kept)) if latent else v
        mixed = jax.jit(lambda q: paged_attention(step)(q, k, values, pool, sinks=jnp.ones(9) if sinks else None)[0])
        return mixed.lower(q).as_text()

    assert few_queries.TARGET in program(None, False, False)
    for other in (("fp8", False, False), (None, True, False), (None, False, True)):
        assert few_queries.TARGET not in program(*other), other
