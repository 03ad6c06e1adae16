"""A static-shape paged key-value cache: pools, block table, slot map, allocator.

Storage is token-major: one pool [S, R, D] per layer with S = num_blocks * block_size slots. A row's token at
position `pos` lives in slot `table[row, pos // block_size] * block_size + pos % block_size`. A page of any
size that divides the block size is a reshape of the same storage, so target and draft pools with different
page sizes share one table and one allocator.

Dimension letters: B rows, T new tokens, M blocks of a row, S slots, R rows and D columns that a layer keeps
of a token (a config's `cache_row`), C tokens of a chunk.
"""

import math

import jax.numpy as jnp
from flax import struct
from jax import Array, lax

from eagle3_jax.errors import Eagle3Error
from eagle3_jax.quant.fp8 import saturating_cast
from eagle3_jax.sharding import MODEL, AnyMesh, axis_size, keep, mesh_of, pool_shardings

CACHE_FORMATS = ("fp8",)
"""Formats of pools that are narrower than the model."""


@struct.dataclass
class Fp8Pool:
    """A pool of FP8 numbers (e4m3fn) with one scale, kept as their bits.

    A pool of a narrow float would be widened by XLA's CPU back end, as a whole, in every pass.

    Attributes:
        bits: uint8 [S, R, D]. scale: what the numbers are multiplied by.
    """

    bits: Array
    scale: float = struct.field(pytree_node=False, default=1.0)

    @property
    def shape(self) -> tuple[int, ...]:
        """(S, R, D)."""
        return self.bits.shape

    def encode(self, values: Array) -> Array:
        """Bits uint8 [...] of values [...]: the nearest number, at most 448 scales; NaN stays NaN."""
        return lax.bitcast_convert_type(saturating_cast(values.astype(jnp.float32) / self.scale), jnp.uint8)

    def decode(self, bits: Array) -> Array:
        """Values float32 [...] of bits uint8 [...]."""
        return lax.bitcast_convert_type(bits, jnp.float8_e4m3fn).astype(jnp.float32) * self.scale


Pool = Array | Fp8Pool
"""What a layer keeps: an array [S, R, D], or its FP8 codes."""


@struct.dataclass
class BlockAllocator:
    """A stack of free block ids; pure, usable inside `jax.jit`.

    Attributes:
        free: int32 [num_blocks]; the first `available` entries are the free ids.
        available: int32 [], number of free blocks.
    """

    free: Array
    available: Array


def make_allocator(num_blocks: int) -> BlockAllocator:
    """An allocator that owns blocks 0 .. num_blocks-1, all free."""
    return BlockAllocator(jnp.arange(num_blocks, dtype=jnp.int32)[::-1], jnp.int32(num_blocks))


def empty_table(batch: int, blocks_per_row: int, num_blocks: int) -> Array:
    """A block table int32 [B, M] without blocks: every entry is `num_blocks`, whose slots lie past the pool.

    The marker is never negative: JAX wraps negative indices, so -1 would write the last slot.
    """
    return jnp.full((batch, blocks_per_row), num_blocks, jnp.int32)


def blocks_for(tokens: Array | int, block_size: int) -> Array | int:
    """Number of blocks that hold `tokens` tokens."""
    return -(-tokens // block_size)


def allocate(allocator: BlockAllocator, table: Array, needed: Array) -> tuple[BlockAllocator, Array, Array]:
    """Give rows blocks until each holds `needed` of them.

    Args:
        allocator: the free blocks.
        table: int32 [B, M].
        needed: int32 [B], wanted blocks of each row, at most M; rows that hold as many already get none.

    Returns:
        The allocator, the table, and bool [B]: whether the row holds what it needs. Rows are served in order: one
        that does not fit gets nothing, nor do those after it that want more.
    """
    num_blocks = allocator.free.shape[0]
    held = jnp.sum(table < num_blocks, axis=1, dtype=jnp.int32)
    fits = needed <= table.shape[1]
    want = jnp.where(fits, jnp.maximum(needed - held, 0), 0)
    served = fits & ((jnp.cumsum(want, dtype=jnp.int32) <= allocator.available) | (want == 0))
    want = jnp.where(served, want, 0)
    before = jnp.cumsum(want, dtype=jnp.int32) - want
    column = jnp.arange(table.shape[1], dtype=jnp.int32) - held[:, None]
    new = (column >= 0) & (column < want[:, None])
    taken = allocator.available - 1 - (before[:, None] + column)
    table = jnp.where(new, allocator.free[jnp.clip(taken, 0, num_blocks - 1)], table)
    return BlockAllocator(allocator.free, allocator.available - jnp.sum(want, dtype=jnp.int32)), table, served


def release(allocator: BlockAllocator, table: Array, done: Array) -> tuple[BlockAllocator, Array]:
    """Return all blocks of the rows where `done` (bool [B]) to the allocator and empty their table rows."""
    num_blocks = allocator.free.shape[0]
    freed = (done[:, None] & (table < num_blocks)).reshape(-1)
    rank = jnp.cumsum(freed, dtype=jnp.int32) - 1
    place = jnp.where(freed, allocator.available + rank, num_blocks)
    free = allocator.free.at[place].set(table.reshape(-1), mode="drop")
    table = jnp.where(done[:, None], num_blocks, table)
    return BlockAllocator(free, allocator.available + jnp.sum(freed, dtype=jnp.int32)), table


def check_page_size(name: str, page_size: object, block_size: int) -> None:
    """Refuse pages that do not fill a block.

    Raises:
        Eagle3Error: with `name` as its subject.
    """
    if type(page_size) is not int or not 0 < page_size <= block_size or block_size % page_size:
        raise Eagle3Error(f"{name} is {page_size!r:.80}; a divisor of the block size {block_size} is needed")


def check_cache_format(name: str, format: object, scales: object) -> None:
    """Refuse a format of pools that is not known, and scales that are none.

    Raises:
        Eagle3Error: with `name` as its subject.
    """
    if format is not None and format not in CACHE_FORMATS:
        raise Eagle3Error(f"{name} is {format!r:.80}; None or {', '.join(CACHE_FORMATS)} is needed")
    sound = isinstance(scales, tuple) and all(type(x) is float and x > 0 and math.isfinite(x) for x in scales)
    if not sound or (scales and format is None):
        raise Eagle3Error(f"{name} is {format!r:.80} with scales {scales!r:.80}; fp8 takes a tuple of positive floats")


def make_pools(
    num_layers: int,
    slots: int,
    rows: int,
    width: int,
    dtype: str,
    format: str | None = None,
    scales: tuple[float, ...] = (),
    mesh: AnyMesh | None = None,
) -> tuple[Pool, ...]:
    """Zeroed pools, one [S, R, D] per layer.

    Args:
        num_layers, slots, rows, width: the pools and their shape. dtype: of what they keep.
        format: None, or "fp8": codes with a scale for each pool. scales: of the pools; () is 1 for each.
        mesh: where the pools lie, as `eagle3_jax.sharding.pool_shardings` says; None is one device.

    Raises:
        Eagle3Error: a device's part of a pool would pass 2**31 elements, the reach of a 32-bit offset; or another
            number of scales.
    """
    parts = axis_size(mesh, MODEL)
    held = rows if rows % parts else rows // parts
    if slots * held * width >= 2**31:
        raise Eagle3Error(
            f"a cache pool of {slots} x {held} x {width} elements passes 2**31; use fewer rows or a shorter context"
        )
    if scales and len(scales) != num_layers:
        raise Eagle3Error(f"there are {len(scales)} cache scales; one for each of {num_layers} layers is needed")

    def empty(dtype: str) -> Array:
        pool = jnp.zeros((slots, rows, width), dtype)
        return pool if mesh is None else keep(pool, pool_shardings(pool, mesh))

    if format is None:
        return tuple(empty(dtype) for _ in range(num_layers))
    return tuple(Fp8Pool(empty("uint8"), scale) for scale in scales or (1.0,) * num_layers)


@struct.dataclass
class Step:
    """Where the new tokens of one forward pass stand.

    Attributes:
        positions: int32 [B, T], positions of the new tokens (RoPE).
        start: int32 [B], tokens before them in the cache; all of these are visible.
        slots: int32 [B, T], where their keys and values go; slots past the pool are not written.
        visible: bool [T, T], which new token (column) each new token (row) attends to.
        table: int32 [B, M] block table.
        block_size: tokens of a block. page_size: tokens gathered as one unit; divides the block size.
    """

    positions: Array
    start: Array
    slots: Array
    visible: Array
    table: Array
    block_size: int = struct.field(pytree_node=False)
    page_size: int = struct.field(pytree_node=False)


def chain_step(
    table: Array,
    start: Array,
    count: Array,
    length: int,
    block_size: int,
    num_slots: int,
    page_size: int | None = None,
) -> Step:
    """The step of `length` consecutive tokens after `start`, of which the first `count` are real.

    Args:
        table: int32 [B, M]. start: int32 [B]. count: int32 [B], at most `length`.
        length: T, static. block_size: tokens of a block. num_slots: S, slots of a pool.
        page_size: tokens gathered as one unit; None is a block.

    Tokens past `count` get slots past the pool, so nothing of them is kept.

    Raises:
        Eagle3Error: pages that do not fill a block.
    """
    page_size = block_size if page_size is None else page_size
    check_page_size("page_size", page_size, block_size)
    offset = jnp.arange(length, dtype=jnp.int32)
    positions = start[:, None] + offset
    slots = slot_of(table, positions, block_size)
    slots = jnp.where(offset < count[:, None], slots, num_slots)
    visible = offset[:, None] >= offset
    return Step(positions, start, slots, visible, table, block_size, page_size)


def slot_of(table: Array, positions: Array, block_size: int) -> Array:
    """Slots int32 [B, T] of positions int32 [B, T]; past the pool where the row has no such block."""
    block = positions // block_size
    ids = jnp.take_along_axis(table, jnp.minimum(block, table.shape[1] - 1), axis=1)
    slots = ids * block_size + positions % block_size
    return jnp.where(block < table.shape[1], slots, jnp.iinfo(jnp.int32).max)


def as_kept(pool: Pool, values: Array) -> Array:
    """What reading values [...] back from a pool will give, in their dtype."""
    return pool.decode(pool.encode(values)).astype(values.dtype) if isinstance(pool, Fp8Pool) else values


def write(pool: Pool, slots: Array, values: Array) -> Pool:
    """Store values [B, T, R, D] at slots [B, T] of a pool [S, R, D]; slots past the pool are dropped."""
    if isinstance(pool, Fp8Pool):
        return Fp8Pool(_stored(pool.bits, slots, pool.encode(values)), pool.scale)
    return _stored(pool, slots, values)


def _stored(pool: Array, slots: Array, values: Array) -> Array:
    flat = values.reshape(-1, *values.shape[2:]).astype(pool.dtype)
    if (mesh := mesh_of(pool)) is not None:
        # Where the values lie otherwise, XLA would let the pool follow them.
        flat = keep(flat, pool_shardings(flat, mesh))
    return pool.at[slots.reshape(-1)].set(flat, mode="drop")


def read_chunk(pool: Pool, step: Step, chunk: Array | int, chunk_size: int) -> Array:
    """Gather tokens chunk * C .. chunk * C + C - 1 of every row: [B, C, R, D].

    Whole pages are gathered; tokens a row does not have come back as some other slot's content and must be
    masked by the caller.
    """
    if isinstance(pool, Fp8Pool):
        return pool.decode(_gathered(pool.bits, step, chunk, chunk_size))
    return _gathered(pool, step, chunk, chunk_size)


def _gathered(pool: Array, step: Step, chunk: Array | int, chunk_size: int) -> Array:
    page, per_block = step.page_size, step.block_size // step.page_size
    first = chunk * (chunk_size // page) + jnp.arange(chunk_size // page, dtype=jnp.int32)
    block = jnp.minimum(first // per_block, step.table.shape[1] - 1)
    pages = step.table[:, block] * per_block + first % per_block
    paged = pool.reshape(-1, page, *pool.shape[1:])
    gathered = jnp.take(paged, pages, axis=0, mode="clip")
    return gathered.reshape(step.table.shape[0], chunk_size, *pool.shape[1:])
