"""Attention over a paged prefix and over plain sequences, against a float64 softmax in numpy."""

from functools import partial
from typing import Any

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from eagle3_jax.cache.paged import chain_step, read_chunk
from eagle3_jax.models.attention import causal_attention, paged_attention
from eagle3_jax.training.loss import ttt_attention

LENGTHS = np.array([0, 1, 127, 128, 129, 300], np.int32)
BLOCK, BLOCKS_PER_ROW, KV_HEADS, WIDTH = 16, 20, 2, 8
TOLERANCE = 1e-5


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


class Ragged:
    """Six rows of the lengths above in scattered blocks, and the new tokens that follow them."""

    def __init__(self, group: int, new: int) -> None:
        rng = np.random.default_rng(group * 10 + new)
        rows = len(LENGTHS)
        self.q = normal(rng, rows, new, KV_HEADS * group, WIDTH)
        self.k, self.v = normal(rng, rows, new, KV_HEADS, WIDTH), normal(rng, rows, new, KV_HEADS, WIDTH)
        self.prefix = [normal(rng, n, KV_HEADS, 2 * WIDTH) for n in LENGTHS]
        self.table = rng.permutation(rows * BLOCKS_PER_ROW + 8)[: rows * BLOCKS_PER_ROW].reshape(rows, -1)
        self.pool = 100 * normal(rng, (rows * BLOCKS_PER_ROW + 8) * BLOCK, KV_HEADS, 2 * WIDTH)
        for row, tokens in enumerate(self.prefix):
            position = np.arange(len(tokens))
            self.pool[self.table[row, position // BLOCK] * BLOCK + position % BLOCK] = tokens

    def run(self, visible: np.ndarray, chunk_size: int = 128, **options: Any) -> np.ndarray:
        arrays = (self.pool, self.table.astype(np.int32), LENGTHS, self.q, self.k, self.v, visible)
        return np.asarray(attend(*map(jnp.asarray, arrays), chunk_size=chunk_size, **options))

    def expected(self, visible: np.ndarray, window: int | None = None, **options: Any) -> np.ndarray:
        rows = []
        for q, k, v, prefix in zip(self.q, self.k, self.v, self.prefix, strict=True):
            keys = np.concatenate([prefix[..., :WIDTH], k])
            values = np.concatenate([prefix[..., WIDTH:], v])
            seen = dense.in_window(dense.after_prefix(len(prefix), visible), window)
            rows.append(dense.attend(q, keys, values, seen, **options))
        return np.stack(rows)


def attend_eagerly(
    pool: Array,
    table: Array,
    start: Array,
    q: Array,
    k: Array,
    v: Array,
    visible: Array,
    chunk_size: int,
    scale: float | None = None,
    window: int | None = None,
    sinks: Array | None = None,
) -> Array:
    count = jnp.full_like(start, q.shape[1])
    step = chain_step(table, start, count, q.shape[1], BLOCK, pool.shape[0]).replace(visible=visible)
    return paged_attention(step, chunk_size)(q, k, v, pool, scale=scale, window=window, sinks=sinks)[0]


attend = jax.jit(attend_eagerly, static_argnames=("chunk_size", "scale", "window"))


@pytest.fixture(params=["row by row", "all rows together"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a test as CPU computes attention, and as other platforms do."""
    if request.param == "all rows together":
        monkeypatch.setattr("eagle3_jax.models.attention.each_row_on_cpu", lambda function, rows: function(rows))
        # The compiled one has been traced already.
        monkeypatch.setitem(globals(), "attend", attend_eagerly)


def chain(length: int) -> np.ndarray:
    return np.tril(np.ones((length, length), bool))


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("new", [1, 5])
@pytest.mark.parametrize("group", [1, 3])
def test_attention_over_the_pool_is_a_softmax_over_the_whole_sequence(group: int, new: int) -> None:
    case = Ragged(group, new)
    got = case.run(chain(new))
    assert got.shape == (len(LENGTHS), new, KV_HEADS * group * WIDTH)
    assert np.abs(got - case.expected(chain(new))).max() < TOLERANCE


def test_new_tokens_see_each_other_only_as_the_step_says_and_the_prefix_always() -> None:
    """Two branches of a tree: 0 - 1 - 2 and 0 - 3 - 4."""
    case = Ragged(group=3, new=5)
    tree = chain(5)
    tree[3:, 1:3] = False
    got = case.run(tree)
    assert np.abs(got - case.expected(tree)).max() < TOLERANCE
    assert np.abs(got - case.run(chain(5))).max() > 0.1


@pytest.mark.parametrize("chunk_size", [1, 48, 512])
def test_the_chunk_size_changes_nothing(chunk_size: int) -> None:
    """Below a block, no divisor of the lengths, and longer than a row's whole table."""
    case = Ragged(group=3, new=5)
    got = case.run(chain(5), chunk_size)
    assert np.abs(got - case.expected(chain(5))).max() < TOLERANCE
    assert np.abs(got - case.run(chain(5))).max() < TOLERANCE


def test_scores_far_beyond_the_exponential_keep_their_softmax() -> None:
    """Scores of some thousands over all chunks: without the running maximum this is inf / inf."""
    case = Ragged(group=3, new=5)
    case.q = 3000 * case.q
    got = case.run(chain(5))
    assert np.all(np.isfinite(got))
    scores_apart = np.abs(got - case.expected(chain(5))).max(axis=-1) < 1e-2
    assert scores_apart.mean() > 0.95  # near ties of the two largest scores, some thousands, may round apart


@pytest.mark.parametrize("group", [1, 3])
def test_plain_causal_attention_is_a_softmax_over_the_past(group: int) -> None:
    rng = np.random.default_rng(group)
    q, k = normal(rng, 2, 11, KV_HEADS * group, WIDTH), normal(rng, 2, 11, KV_HEADS, WIDTH)
    v = normal(rng, 2, 11, KV_HEADS, WIDTH)
    mixed, cache = jax.jit(causal_attention)(*map(jnp.asarray, (q, k, v)), None)
    expected = np.stack([dense.attend(q[b], k[b], v[b], chain(11)) for b in range(2)])
    assert cache is None and np.abs(np.asarray(mixed) - expected).max() < TOLERANCE


def test_scores_of_bfloat16_activations_are_float32() -> None:
    """Scores 64 and 64.125, which bfloat16 cannot tell apart; the second key's value is 1, the first's 0."""
    q = jnp.asarray([[[[8.0, 0.25, 0.0, 0.0]]] * 2], jnp.bfloat16)
    k = jnp.asarray([[[[16.0, 0.0, 0.0, 0.0]], [[16.0, 1.0, 0.0, 0.0]]]], jnp.bfloat16)
    v = jnp.asarray([[[[0.0] * 4], [[1.0] * 4]]], jnp.bfloat16)
    mixed, _ = causal_attention(q, k, v, None)
    assert mixed.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(mixed[0, 1], np.float32), 1 / (1 + np.exp(-0.125)), rtol=2**-8)


SINKS = np.array([-1.0, 0.5, 2.0, 6.0, 0.0, 1.5], np.float32)


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("window", [1, 3, 20, 150, 1000])
def test_a_window_hides_what_lies_before_it(window: int) -> None:
    """Below the new tokens, across a chunk's edge, longer than most rows, and longer than all of them."""
    case = Ragged(group=3, new=5)
    got = case.run(chain(5), chunk_size=48, window=window)
    assert np.abs(got - case.expected(chain(5), window)).max() < TOLERANCE
    assert (np.abs(got - case.run(chain(5))).max() > 0.1) == (window < 300)


def test_chunks_that_no_window_reaches_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []

    def counted(pool: Array, step: Any, chunk: Array, chunk_size: int) -> Array:
        jax.debug.callback(lambda i: read.append(int(i)), chunk)
        return read_chunk(pool, step, chunk, chunk_size)

    monkeypatch.setattr("eagle3_jax.models.attention.read_chunk", counted)
    case = Ragged(group=1, new=1)
    start = jnp.full((len(LENGTHS),), 300, jnp.int32)
    step = chain_step(jnp.asarray(case.table, jnp.int32), start, start, 1, BLOCK, case.pool.shape[0])
    paged_attention(step, 16)(*map(jnp.asarray, (case.q, case.k, case.v, case.pool)), window=20)
    jax.effects_barrier()
    assert read == [17, 18] * len(LENGTHS)  # tokens 281 .. 299, and 300 itself is new; on CPU row by row


def test_sinks_and_scale_join_the_softmax() -> None:
    case = Ragged(group=3, new=5)
    got = case.run(chain(5), scale=0.7, sinks=jnp.asarray(SINKS))
    assert np.abs(got - case.expected(chain(5), scale=0.7, sinks=SINKS)).max() < TOLERANCE
    assert np.abs(got - case.expected(chain(5), scale=0.7)).max() > 0.1
    assert np.abs(got - case.expected(chain(5), sinks=SINKS)).max() > 0.1


@pytest.mark.parametrize("packed", [False, True], ids=["causal", "packed rows"])
def test_whole_sequences_have_window_sinks_and_scale(packed: bool) -> None:
    """Without a cache, as scoring and the training data see a target; values narrower than keys."""
    rng = np.random.default_rng(0)
    q, k = normal(rng, 2, 11, 3 * KV_HEADS, WIDTH), normal(rng, 2, 11, KV_HEADS, WIDTH)
    v = normal(rng, 2, 11, KV_HEADS, 5)
    segments = np.array([[0] * 4 + [1] * 7, [0] * 11]) * packed
    run: Any = (
        partial(ttt_attention(jnp.asarray(segments)), cache=()) if packed else partial(causal_attention, cache=None)
    )
    mixed = run(*map(jnp.asarray, (q, k, v)), scale=0.7, window=3, sinks=jnp.asarray(SINKS))[0]
    seen = dense.in_window(chain(11), 3) & (segments[:, :, None] == segments[:, None])
    expected = [dense.attend(q[b], k[b], v[b], seen[b], 0.7, SINKS) for b in range(2)]
    assert np.abs(np.asarray(mixed) - np.stack(expected)).max() < TOLERANCE


@pytest.mark.parametrize("packed", [False, True], ids=["causal", "packed rows"])
def test_whole_sequences_of_what_a_cache_would_keep(packed: bool) -> None:
    rng = np.random.default_rng(0)
    q, kept = normal(rng, 2, 11, 4, WIDTH), normal(rng, 2, 11, 1, WIDTH)
    attend: Any = ttt_attention(jnp.zeros((2, 11), jnp.int32)) if packed else causal_attention
    cache = () if packed else None
    mixed = attend(jnp.asarray(q), jnp.asarray(kept), lambda rows: (rows, rows[..., :6]), cache)[0]
    expected = [dense.attend(q[b], kept[b], kept[b, ..., :6], chain(11)) for b in range(2)]
    assert np.abs(np.asarray(mixed) - np.stack(expected)).max() < TOLERANCE


def test_the_cache_may_keep_something_else_than_keys_and_values() -> None:
    """One row a token for all heads, whose first columns are the value; a NaN nobody owns stays outside."""
    case = Ragged(group=1, new=5)
    rng = np.random.default_rng(0)
    q, kept = normal(rng, len(LENGTHS), 5, 4, WIDTH), normal(rng, len(LENGTHS), 5, 1, WIDTH)
    prefix = [normal(rng, n, 1, WIDTH) for n in LENGTHS]
    pool = np.full((case.pool.shape[0], 1, WIDTH), np.nan, np.float32)
    for row, tokens in enumerate(prefix):
        position = np.arange(len(tokens))
        pool[case.table[row, position // BLOCK] * BLOCK + position % BLOCK] = tokens
    step = chain_step(*map(jnp.asarray, (case.table.astype(np.int32), LENGTHS, LENGTHS)), 5, BLOCK, pool.shape[0])

    @jax.jit
    def run(q: Array, kept: Array, pool: Array) -> tuple[Array, Array]:
        return paged_attention(step)(q, kept, lambda rows: (rows, rows[..., :6]), pool)

    mixed, pool = run(*map(jnp.asarray, (q, kept, pool)))
    for row, tokens in enumerate(prefix):
        keys = np.concatenate([tokens, kept[row]])
        seen = dense.after_prefix(len(tokens), chain(5))
        assert np.abs(mixed[row] - dense.attend(q[row], keys, keys[..., :6], seen)).max() < TOLERANCE
    written = pool[case.table[5, 300 // BLOCK] * BLOCK + 300 % BLOCK]
    np.testing.assert_array_equal(written, kept[5, 0])
