"""Products of activations with narrow weights, without a wide copy of the weight.

Weights lie as [N, K] codes with scales (see `eagle3_jax.quant.formats`).

Dimension letters: M rows of activations, K contracting width, N output width.
"""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from eagle3_jax.errors import Eagle3Error
from eagle3_jax.quant import fp8, mxfp4
from eagle3_jax.quant.activations import fake_quantize, quantize_activations
from eagle3_jax.quant.formats import NARROW_FORMATS, NarrowFormat

TILE = 2**22
"""Weights that are wide at a time where activations stay wide."""
PARTS = 8
"""Equal parts of a matrix of which a loop takes a slice each: devices that share the matrix share every step."""
FEW = 4
"""Rows up to which a card needs no matrix instructions: reading the matrix takes longer."""
_SEVERAL = fp8.BLOCK // 4
"""Rows up to which the products of all blocks take no more memory than the codes."""
_SUMS = 2**29
"""Most products of blocks at a time."""


def narrow_product(x: Array, codes: Array, scale: Array, format: str, mode: str, static: Array | None = None) -> Array:
    """Multiply: [..., K] -> float32 [..., N], accumulated in float32.

    FP8 activations meet FP8 weights in one `dot_general` of narrow operands, scaled afterwards; MX ones in
    `jax.lax.scaled_dot`; wide ones meet a few rows of the weight at a time, unpacked.

    Args:
        x: activations.
        codes, scale: the weight.
        format: its key in `NARROW_FORMATS`.
        mode: how the activations are rounded, one that fits the format (see `modes_of`).
        static: the scale of mode "fp8_static".
    """
    fmt = NARROW_FORMATS[format]

    def whole(rows: Array, codes: Array, scale: Array) -> Array:
        if mode == "wide":
            return _unpacked(rows, codes, scale, fmt)
        if mode in ("mxfp4", "mxfp8"):
            return _scaled_dot(rows, codes, scale, mode)
        quantized, token_scale = quantize_activations(rows, mode, static, fmt.dtype)
        if mode == "fp8_group":
            return _block_product(quantized, token_scale, codes, scale)
        return _dot(quantized, codes) * token_scale * scale[:, 0]

    def by_row(rows: Array, codes: Array, scale: Array) -> Array:
        matrix = fmt.decode(codes, scale).astype(rows.dtype if mode == "wide" else jnp.float32)
        return _by_row(fake_quantize(rows.astype(jnp.float32), mode, static), matrix)

    return _chosen(whole, by_row, x, codes, scale)


def modes_of(format: str) -> tuple[str, ...]:
    """Activation modes that a weight of a format can be multiplied in; the first is a card's own."""
    if format.endswith("_block"):
        return "fp8_group", "wide"
    if NARROW_FORMATS[format].dtype in (fp8.E4M3FN, fp8.E4M3FNUZ):
        return "fp8_token", "fp8_static", "wide"
    return ("mxfp4", "mxfp8", "wide") if format == "mxfp4" else ("wide",)


WISHES = (None, "wide", "fake_quant", "mxfp8")
"""What a caller may ask of the activations of narrow weights, see `chosen_mode`."""


def chosen_mode(format: str, wish: str | None, narrow: bool, static: bool = False) -> str:
    """The activation mode of a weight.

    Args:
        format: key of the narrow format that the weight has or was widened from.
        wish: None: a card's own mode for FP8 weights kept narrow, else wide. "wide": always wide. "fake_quant": a
            card's own mode, also where the weight was widened. "mxfp8": the same, with MXFP8 for MXFP4 weights.
        narrow: whether the weight stays narrow. static: whether it came with a calibrated scale.

    Raises:
        Eagle3Error: another wish.
    """
    if wish not in WISHES:
        raise Eagle3Error(f"activations {wish!r} are not known; use None, 'wide', 'fake_quant' or 'mxfp8'")
    own, *others = modes_of(format)
    if static and "fp8_static" in others:
        own = "fp8_static"
    if wish == "wide" or (wish is None and not (narrow and own.startswith("fp8"))):
        return "wide"
    return wish if wish in others else own


def product(x: Array, matrix: Array) -> Array:
    """[..., K] times [N, K] -> float32 [..., N]."""
    return _chosen(_dot, _by_row, x, matrix)


def _chosen(whole: Callable[..., Array], by_row: Callable[..., Array], x: Array, *matrix: Array) -> Array:
    """A product of the rows [M, K] of x [..., K], for a few of them the one that suits the platform."""
    rows = x.reshape(-1, x.shape[-1])
    y = whole(rows, *matrix) if len(rows) > FEW else lax.platform_dependent(rows, *matrix, cpu=whole, default=by_row)
    return y.reshape(*x.shape[:-1], y.shape[-1])


def _dot(x: Array, matrix: Array) -> Array:
    """[M, K] times [N, K] -> float32 [M, N]."""
    return lax.dot_general(x, matrix, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _by_row(x: Array, matrix: Array) -> Array:
    """The same as a sum for each row.

    XLA's GPU back end takes all these sums in one pass over what the matrix is made of, a slice of a stack of experts
    or codes. For a product of several rows at once it writes the matrix to memory first.
    """
    x, matrix = x.astype(jnp.float32), matrix.astype(jnp.float32)
    return jnp.stack([jnp.sum(row * matrix, axis=1) for row in x])


def _scaled_dot(x: Array, codes: Array, scale: Array, mode: str) -> Array:
    quantized, token_scale = quantize_activations(x, mode)
    elements = mxfp4.elements(codes).astype(mxfp4.E2M1)
    return lax.scaled_dot(
        quantized,
        elements,
        lhs_scale=token_scale,
        rhs_scale=scale,
        dimension_numbers=(((1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32,
    )


def _block_product(x: Array, token_scale: Array, codes: Array, scale: Array) -> Array:
    """Sum over blocks of the contracting dimension, each scaled by its token's and its block's scale."""
    (rows, width), outputs = x.shape, codes.shape[0]
    blocks, rest = divmod(width, fp8.BLOCK)
    inner, y = blocks * fp8.BLOCK, jnp.zeros((rows, outputs), jnp.float32)
    if blocks:
        at_once = math.gcd(blocks, PARTS) if PARTS * rows * outputs <= _SUMS else 1
        at_once = blocks if rows <= _SEVERAL else at_once
        y = _block_sums(at_once, x[:, :inner], token_scale[:, :blocks], codes[:, :inner], scale[:, :blocks])
    if rest:
        column = scale[:, blocks].repeat(fp8.BLOCK)[:outputs]
        y += _dot(x[:, inner:], codes[:, inner:]) * token_scale[:, blocks:] * column
    return y


def _block_sums(at_once: int, x: Array, token_scale: Array, codes: Array, scale: Array) -> Array:
    """`_block_product` of whole blocks, so many at once, from as many parts of the width."""
    outputs, steps = codes.shape[0], token_scale.shape[1] // at_once
    x, codes = (array.reshape(array.shape[0], at_once, steps, fp8.BLOCK) for array in (x, codes))
    token_scale, scale = (
        array.reshape(array.shape[0], at_once, steps).swapaxes(0, 1) for array in (token_scale, scale)
    )

    def part(step: Any) -> Array:
        ours, theirs, token, column = (
            lax.dynamic_index_in_dim(array, step, axis=2, keepdims=False) for array in (x, codes, token_scale, scale)
        )
        products = lax.dot_general(ours, theirs, (((2,), (2,)), ((1,), (1,))), preferred_element_type=jnp.float32)
        column = column.repeat(fp8.BLOCK, axis=1)[:, None, :outputs]
        return jnp.sum(products * token[:, :, None] * column, axis=0)

    if steps == 1:
        return part(0)
    return lax.fori_loop(0, steps, lambda step, y: y + part(step), jnp.zeros((x.shape[0], outputs), jnp.float32))


def _unpacked(x: Array, codes: Array, scale: Array, fmt: NarrowFormat) -> Array:
    """The weight unpacked tile by tile: at most `TILE` weights are wide at a time."""
    outputs, unit = codes.shape[0], fmt.rows or 1
    parts = math.gcd(outputs // unit, PARTS) if outputs % unit == 0 else 1
    height, grain = outputs // parts, math.lcm(unit, 16)
    step = max(TILE // (x.shape[1] * parts) // grain, 1) * grain

    def part(start: Any, size: int) -> Array:
        """[M, parts, size]."""
        ours, scales = _rows_of_parts(codes, parts, start, size), scale
        if fmt.rows is not None:
            scales = _rows_of_parts(scale, parts, start // unit, -(-size // unit))
        return _dot(x, fmt.decode(ours, scales).astype(x.dtype)).reshape(x.shape[0], parts, size)

    whole, rest = divmod(height, step)
    y = []
    if whole:
        tiles = lax.map(lambda tile: part(tile * step, step), jnp.arange(whole, dtype=jnp.int32))
        y.append(jnp.moveaxis(tiles, 0, 2).reshape(x.shape[0], parts, whole * step))
    if rest:
        y.append(part(whole * step, rest))
    return jnp.concatenate(y, axis=2).reshape(x.shape[0], outputs)


def _rows_of_parts(matrix: Array, parts: int, start: Any, size: int) -> Array:
    """The same rows of each of a matrix' equal parts, [parts * size, ...]."""
    cut = lax.dynamic_slice_in_dim(matrix.reshape(parts, -1, matrix.shape[1]), start, size, axis=1)
    return cut.reshape(parts * size, -1)


def take_rows(codes: Array, scale: Array, format: str, ids: Array) -> Array:
    """Single rows of the [N, K] matrix, wide: int [...] in [0, N) -> float32 [..., K]."""
    fmt = NARROW_FORMATS[format]
    rows = jnp.take(codes, ids, axis=0, mode="clip")
    scales = scale[0] if fmt.rows is None else jnp.take(scale, ids // fmt.rows, axis=0, mode="clip")
    # As matrices of one row each.
    return fmt.decode(rows[..., None, :], jnp.broadcast_to(scales, (*ids.shape, scale.shape[-1]))[..., None, :])[
        ..., 0, :
    ]
