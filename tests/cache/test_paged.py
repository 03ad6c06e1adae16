"""The paged cache against plain Python: allocator, slots, writes and reads, and what attention sees through it."""

import math
from functools import partial

import dense
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from jax import Array

from eagle3_jax.cache.paged import (
    Step,
    allocate,
    blocks_for,
    chain_step,
    empty_table,
    make_allocator,
    make_pools,
    read_chunk,
    release,
    slot_of,
    write,
)
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.models.attention import paged_attention

INT32_MAX = 2**31 - 1
BLOCKS, ROWS, WIDTH = 7, 3, 4

allocate_jit, release_jit = jax.jit(allocate), jax.jit(release)


class Books:
    """The allocator as sets and lists: what is free, and which blocks each row holds, in order."""

    def __init__(self) -> None:
        self.free, self.rows = set(range(BLOCKS)), [[] for _ in range(ROWS)]
        self.allocator, self.table = make_allocator(BLOCKS), empty_table(ROWS, WIDTH, BLOCKS)

    def allocate(self, needed: list[int]) -> None:
        blocked, expected = False, []
        self.allocator, self.table, served = allocate_jit(self.allocator, self.table, jnp.asarray(needed, jnp.int32))
        room = len(self.free)
        for row, wanted in enumerate(needed):
            more = max(wanted - len(self.rows[row]), 0)
            blocked = blocked or more > room
            if more and not blocked:
                room -= more
                new = np.asarray(self.table)[row, len(self.rows[row]) : wanted].tolist()
                assert len(set(new)) == more and set(new) <= self.free
                self.free -= set(new)
                self.rows[row] += new
            if more:
                expected.append((row, not blocked))
        assert [(row, bool(served[row])) for row, _ in expected] == expected

    def release(self, done: list[bool]) -> None:
        self.allocator, self.table = release_jit(self.allocator, self.table, jnp.asarray(done))
        for row in np.flatnonzero(done):
            self.free |= set(self.rows[row])
            self.rows[row] = []

    def check(self) -> None:
        available = int(self.allocator.available)
        listed = np.asarray(self.allocator.free)[:available].tolist()
        assert sorted(listed) == sorted(self.free)
        held = [block for row in self.rows for block in row]
        assert sorted(listed + held) == list(range(BLOCKS))
        padded = [row + [BLOCKS] * (WIDTH - len(row)) for row in self.rows]
        assert np.asarray(self.table).tolist() == padded


requests = st.lists(st.integers(0, WIDTH), min_size=ROWS, max_size=ROWS).map(lambda needed: ("allocate", needed))
ends = st.lists(st.booleans(), min_size=ROWS, max_size=ROWS).map(lambda done: ("release", done))


@given(st.lists(requests | ends, min_size=1, max_size=12))
def test_the_allocator_keeps_the_books_of_a_set_of_free_blocks(operations: list) -> None:
    books = Books()
    for name, values in operations:
        getattr(books, name)(values)
        books.check()


def test_releasing_every_row_returns_every_block_however_often() -> None:
    books = Books()
    for i in range(40):
        books.allocate([(i % 4) + 1, 4 - (i % 3), 1])
        assert len(books.free) < BLOCKS
        books.release([True] * ROWS)
        books.check()
        assert len(books.free) == BLOCKS
    books.release([True] * ROWS)
    books.check()


def test_a_row_that_does_not_fit_gets_nothing_and_none_overtakes_it() -> None:
    allocator, table, served = allocate_jit(
        make_allocator(BLOCKS), empty_table(ROWS, WIDTH, BLOCKS), jnp.asarray([4, 4, 1], jnp.int32)
    )
    assert np.asarray(served).tolist() == [True, False, False]
    assert np.asarray(table)[1:].tolist() == [[BLOCKS] * WIDTH] * 2 and int(allocator.available) == 3


def test_a_row_that_lacks_nothing_is_served_whatever_became_of_the_rows_before_it() -> None:
    allocator, table, _ = allocate_jit(
        make_allocator(BLOCKS), empty_table(ROWS, WIDTH, BLOCKS), jnp.asarray([2, 1, 4], jnp.int32)
    )
    _, after, served = allocate_jit(allocator, table, jnp.asarray([4, 1, 4], jnp.int32))
    assert np.asarray(after).tolist() == np.asarray(table).tolist()
    assert np.asarray(served).tolist() == [False, True, True]


def test_a_row_that_wants_more_than_its_table_holds_gets_nothing() -> None:
    allocator, table, served = allocate_jit(
        make_allocator(BLOCKS), empty_table(ROWS, WIDTH, BLOCKS), jnp.asarray([1, 1, WIDTH + 1], jnp.int32)
    )
    assert np.asarray(served).tolist() == [True, True, False]
    assert np.asarray(table)[2].tolist() == [BLOCKS] * WIDTH and int(allocator.available) == BLOCKS - 2


@pytest.mark.parametrize("block_size", [1, 3, 8])
def test_blocks_for_rounds_up(block_size: int) -> None:
    tokens = np.arange(0, 30)
    expected = [math.ceil(int(n) / block_size) for n in tokens]
    assert [blocks_for(int(n), block_size) for n in tokens] == expected
    assert np.asarray(blocks_for(jnp.asarray(tokens, jnp.int32), block_size)).tolist() == expected


def test_the_slot_of_a_position_is_its_block_times_the_block_size_plus_the_rest() -> None:
    table = [[5, 0, 9, 2], [7, 1, 10, 10], [10, 10, 10, 10]]  # 10 blocks in all: 10 marks none
    positions = np.stack([np.arange(45), np.arange(45)[::-1], np.arange(45)])
    slots = np.asarray(slot_of(jnp.asarray(table, jnp.int32), jnp.asarray(positions, jnp.int32), 8))
    for row in range(3):
        for t, position in enumerate(positions[row].tolist()):
            if position < 32 and table[row][position // 8] < 10:
                assert slots[row, t] == table[row][position // 8] * 8 + position % 8
            else:
                assert slots[row, t] >= 10 * 8


def test_a_chain_step_places_the_real_tokens_and_drops_the_others() -> None:
    table = [[3, 1], [0, 2], [4, 4]]
    start, count = [0, 5, 2], [3, 2, 0]
    step = chain_step(
        *(jnp.asarray(x, jnp.int32) for x in (table, start, count)), length=3, block_size=4, num_slots=16
    )
    assert np.asarray(step.positions).tolist() == [[0, 1, 2], [5, 6, 7], [2, 3, 4]]
    slots = np.asarray(step.slots)
    assert slots[0].tolist() == [12, 13, 14] and slots[1, :2].tolist() == [9, 10]
    assert np.all(slots[1, 2:] >= 16) and np.all(slots[2] >= 16)
    assert np.asarray(step.visible).tolist() == [[True, False, False], [True, True, False], [True, True, True]]
    assert np.asarray(step.start).tolist() == start


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_write_changes_its_slots_and_no_other(dtype: str) -> None:
    rng = np.random.default_rng(0)
    pool = rng.standard_normal((16, 2, 3)).astype(dtype)
    values = rng.standard_normal((2, 4, 2, 3)).astype(np.float32)
    # Past the pool in every way: the next slot, further on, the largest integer, and a row without a block.
    nowhere = int(slot_of(jnp.full((1, 2), 4, jnp.int32), jnp.zeros((1, 1), jnp.int32), 4)[0, 0])
    slots = np.array([[15, 16, 0, INT32_MAX], [nowhere, 7, 300, 8]], np.int32)
    expected = pool.copy()
    for b, t in ((0, 0), (0, 2), (1, 1), (1, 3)):
        expected[slots[b, t]] = values[b, t].astype(dtype)
    got = np.asarray(write(jnp.asarray(pool), jnp.asarray(slots), jnp.asarray(values)))
    assert got.dtype == expected.dtype and got.tobytes() == expected.tobytes()


def test_a_write_past_every_block_of_a_row_is_dropped() -> None:
    table = jnp.asarray([[1, 0]], jnp.int32)
    slots = slot_of(table, jnp.asarray([[8, 9, 2**30]], jnp.int32), 4)
    pool = np.arange(8, dtype=np.float32).reshape(8, 1, 1)
    assert np.array_equal(write(jnp.asarray(pool), slots, jnp.full((1, 3, 1, 1), np.nan)), pool)


@pytest.mark.parametrize("page_size", [1, 2, 4, 8])
def test_reading_by_pages_of_any_size_is_a_plain_gather(page_size: int) -> None:
    rng = np.random.default_rng(page_size)
    blocks, rows, block_size = 4, 3, 8
    pool = rng.standard_normal((16 * block_size, 2, 3)).astype(np.float32)
    table = rng.permutation(16)[: rows * blocks].reshape(rows, blocks)
    table[1, 3] = table[2, 1:] = 16  # rows with fewer blocks
    held = [4, 3, 1]
    start = jnp.zeros(rows, jnp.int32)
    slots, visible = jnp.zeros((rows, 1), jnp.int32), jnp.ones((1, 1), bool)
    step = Step(slots, start, slots, visible, jnp.asarray(table, jnp.int32), block_size, page_size)
    compared = 0
    for chunk_size in sorted({page_size, 8, 16, 24}):
        read = jax.jit(partial(read_chunk, chunk_size=chunk_size))
        for chunk in range(-(-blocks * block_size // chunk_size)):
            got = np.asarray(read(jnp.asarray(pool), step, jnp.int32(chunk)))
            assert got.shape == (rows, chunk_size, 2, 3)
            for row in range(rows):
                for c in range(chunk_size):
                    block, rest = divmod(chunk * chunk_size + c, block_size)
                    if block < held[row]:
                        assert np.array_equal(got[row, c], pool[table[row, block] * block_size + rest])
                        compared += 1
    assert compared >= 8 * block_size * 3


def test_pools_are_zero_and_stay_within_32_bit_offsets() -> None:
    pools = make_pools(3, 8, 4, 5, "bfloat16")
    assert len(pools) == 3 and all(p.shape == (8, 4, 5) and p.dtype == jnp.bfloat16 for p in pools)
    assert not any(np.asarray(p).any() for p in pools)
    assert jax.eval_shape(lambda: make_pools(1, 2**31 - 1, 1, 1, "float32"))[0].shape == (2**31 - 1, 1, 1)
    with pytest.raises(Eagle3Error, match=r"2\*\*31"):
        make_pools(1, 2**20, 2**6, 2**5, "float32")


# What attention sees through the table. Two key-value heads, four query heads, width 4, blocks of 8 tokens.

KV_HEADS, HEADS, HEAD_DIM, BLOCK = 2, 4, 4, 8
K1 = 5
"""Tokens of a verify pass, K + 1."""
CHAIN = np.tril(np.ones((K1, K1), bool))


@jax.jit
def attend(pool: Array, table: Array, start: Array, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    count = jnp.full_like(start, q.shape[1])
    step = chain_step(table, start, count, q.shape[1], BLOCK, pool.shape[0])
    return paged_attention(step, chunk_size=16)(q, k, v, pool)


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def window(rng: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries, keys and values of K + 1 new tokens."""
    shape = (rows, K1, KV_HEADS, HEAD_DIM)
    return normal(rng, rows, K1, HEADS, HEAD_DIM), normal(rng, *shape), normal(rng, *shape)


def fill(pool: np.ndarray, table: np.ndarray, prefix: np.ndarray, start: np.ndarray) -> np.ndarray:
    """A copy of the pool that holds the first `start` tokens of prefix [B, L, R, D], slot by slot."""
    pool = pool.copy()
    for row, length in enumerate(start):
        for position in range(length):
            pool[table[row, position // BLOCK] * BLOCK + position % BLOCK] = prefix[row, position]
    return pool


class Scene:
    """Four rows of ragged lengths over a pool with four blocks to spare."""

    def __init__(self) -> None:
        rng = np.random.default_rng(5)
        self.start = np.array([0, 7, 8, 26], np.int32)
        self.prefix = normal(rng, 4, 32, KV_HEADS, 2 * HEAD_DIM)
        self.q, self.k, self.v = window(rng, 4)
        self.garbage = normal(rng, 20 * BLOCK, KV_HEADS, 2 * HEAD_DIM)
        self.scattered = rng.permutation(20)[:16].reshape(4, 4)
        self.contiguous = np.arange(16).reshape(4, 4)

    def run(self, table: np.ndarray, background: np.ndarray) -> np.ndarray:
        pool = fill(background, table, self.prefix, self.start)
        arrays = (pool, table.astype(np.int32), self.start, self.q, self.k, self.v)
        return np.asarray(attend(*map(jnp.asarray, arrays))[0])


@pytest.fixture(scope="module")
def scene() -> Scene:
    return Scene()


def test_a_scattered_table_gives_the_bits_of_a_contiguous_one(scene: Scene) -> None:
    one = scene.run(scene.contiguous, scene.garbage)
    other = scene.run(scene.scattered, scene.garbage[::-1])
    assert np.all(np.isfinite(one)) and np.ptp(one) > 0.1
    assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_lies_in_slots_without_a_token_changes_nothing(scene: Scene, poison: float) -> None:
    clean = scene.run(scene.scattered, np.zeros_like(scene.garbage))
    poisoned = scene.run(scene.scattered, np.full_like(scene.garbage, poison))
    assert np.all(np.isfinite(clean)) and clean.tobytes() == poisoned.tobytes()


def test_a_window_across_a_block_edge_is_kept_and_read_back_at_every_offset() -> None:
    rows = 2 * BLOCK + 1
    rng = np.random.default_rng(11)
    start = np.arange(rows, dtype=np.int32)
    table = rng.permutation(rows * 4).reshape(rows, 4)
    text = normal(rng, rows, 4 * BLOCK, KV_HEADS, 2 * HEAD_DIM)
    blank = np.full((rows * 4 * BLOCK, KV_HEADS, 2 * HEAD_DIM), -7.0, np.float32)
    pool = jnp.asarray(fill(blank, table, text, start))
    for kept in (None, start % K1 + 1):
        if kept is not None:  # a later window begins inside the first one: what was rejected is written over
            start = start + kept.astype(np.int32)
        q, k, v = window(rng, rows)
        arrays = (table.astype(np.int32), start, q, k, v)
        mixed, pool = attend(pool, *map(jnp.asarray, arrays))
        for row, n in enumerate(start):
            text[row, n : n + K1] = np.concatenate([k[row], v[row]], axis=-1)
            seen = text[row, : n + K1]
            expected = dense.attend(q[row], seen[..., :HEAD_DIM], seen[..., HEAD_DIM:], dense.after_prefix(n, CHAIN))
            assert np.abs(np.asarray(mixed)[row] - expected).max() < 2e-6
    # Everything is where it belongs, and nothing anywhere else.
    for row, n in enumerate(start):
        for position in range(4 * BLOCK):
            slot = table[row, position // BLOCK] * BLOCK + position % BLOCK
            if position < n + K1:
                assert np.array_equal(pool[slot], text[row, position])
            else:
                assert np.all(np.asarray(pool[slot]) == -7.0)


def test_block_ids_past_65535_are_like_any_other() -> None:
    rng = np.random.default_rng(3)
    start = np.array([19, 3], np.int32)
    prefix = normal(rng, 2, 24, KV_HEADS, 2 * HEAD_DIM)
    q, k, v = window(rng, 2)
    outputs = []
    for blocks, table in (
        (6, [[0, 1, 2], [3, 4, 5]]),
        (70_000, [[65_535, 65_536, 69_999], [65_537, 131, 0]]),
    ):
        ids = np.asarray(table)
        pool = fill(np.zeros((blocks * BLOCK, KV_HEADS, 2 * HEAD_DIM), np.float32), ids, prefix, start)
        arrays = (pool, ids.astype(np.int32), start, q, k, v)
        mixed, pool = attend(*map(jnp.asarray, arrays))
        assert np.array_equal(pool[ids[0, 2] * BLOCK + 19 % BLOCK], np.concatenate([k[0, 0], v[0, 0]], axis=-1))
        outputs.append(np.asarray(mixed))
    assert outputs[0].tobytes() == outputs[1].tobytes() and np.ptp(outputs[0]) > 0.1
