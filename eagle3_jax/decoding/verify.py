"""Check that speculation changes nothing: the same rows with and without a draft, token by token.

Rows computed together and alone differ by rounding, so two runs may part where the target's decision is a near
tie. `verify_lossless` measures how near, and excuses a difference only there.
"""

import dataclasses
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from eagle3_jax.cache.paged import chain_step, make_pools
from eagle3_jax.config import DecoderConfig
from eagle3_jax.decoding.loop import Generation, generate, speculative_generate
from eagle3_jax.decoding.request import GenerationConfig
from eagle3_jax.decoding.sampling import (
    History,
    Sampling,
    adjust,
    check_keys,
    draw,
    gumbel_noise,
    temper,
    truncate,
)
from eagle3_jax.models.attention import paged_attention
from eagle3_jax.models.decoder import Decoder
from eagle3_jax.models.layers import apply

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.05}
"""Decision margins (in logits after temperature) below which rounding may decide, by activation dtype."""
CACHE_TOLERANCE, ACTIVATION_TOLERANCE = 0.75, 2.0
"""The same where the target's cache, or its activations, are FP8 or FP4: a value at the edge between two numbers
becomes the one or the other, and the codes after it follow. Twice what margins were seen to move between passes of one
token and of four over 30 layers (SmolLM2-135M: by up to 0.37 and 1.09)."""


class Model(Protocol):
    """A loaded target or draft: its module and its weights."""

    model: Any
    params: Any


@dataclasses.dataclass(frozen=True)
class RowReport:
    """How one row compares.

    Attributes:
        row: its index. equal: whether every token is the same.
        first_difference: output index of the first different token; None when equal.
        expected, got: token ids there, by the target alone and with the draft; -1 past a row's end.
        margin: by how much the target's decision there was won, in logits; None when equal.
        excused: the margin is below the tolerance.
    """

    row: int
    equal: bool
    first_difference: int | None = None
    expected: int | None = None
    got: int | None = None
    margin: float | None = None
    excused: bool = False


@dataclasses.dataclass(frozen=True)
class LosslessReport:
    """The comparison of all rows.

    Attributes:
        rows: one report a row. tolerance: the margin below which a difference is excused.
    """

    rows: list[RowReport]
    tolerance: float

    @property
    def equal(self) -> bool:
        """Whether every row is equal."""
        return all(row.equal for row in self.rows)

    @property
    def ok(self) -> bool:
        """Whether every row is equal up to an excused near tie."""
        return all(row.equal or row.excused for row in self.rows)


_generate = jax.jit(generate, static_argnames=("model", "config"))
_speculate = jax.jit(speculative_generate, static_argnames=("target_model", "draft_model", "config"))


def verify_lossless(
    target: Model,
    draft: Model,
    token_ids: Array,
    lengths: Array,
    keys: Array,
    sampling: Sampling,
    config: GenerationConfig,
    tolerance: float | None = None,
) -> LosslessReport:
    """Generate with and without the draft and compare.

    Both read a cache of the same format, so an FP8 cache of the target changes what is compared with, not the rule.

    Args:
        target, draft: loaded models. token_ids: int32 [B, P]. lengths: int32 [B].
        keys: [B] threefry keys. sampling, config: as for `speculative_generate`.
        tolerance: decision margin that excuses a difference; None takes `tolerance_of` the target's config.

    Raises:
        Eagle3Error: prompts that do not fit.

    Example:
        >>> report = verify_lossless(target, draft, ids, lengths, row_keys(0, 1), sampling, config)
        >>> assert report.ok, report.rows
    """
    plain = _generate(target.params, token_ids, lengths, keys, sampling, model=target.model, config=config)
    speculative = _speculate(
        target.params,
        draft.params,
        token_ids,
        lengths,
        keys,
        sampling,
        target_model=target.model,
        draft_model=draft.model,
        config=config,
    )
    tolerance = tolerance_of(target.model.config, config) if tolerance is None else tolerance
    margin = partial(decision_margin, target.model, target.params, config, tolerance)
    keys = check_keys(keys, token_ids.shape[0])
    return compare(plain, speculative, margin, token_ids, lengths, keys, sampling, tolerance)


def tolerance_of(target: DecoderConfig, config: GenerationConfig) -> float:
    """The decision margin below which rounding may decide: the largest of `TOLERANCE` and what is rounded.

    Example:
        >>> tolerance_of(target.model.config, GenerationConfig())  # doctest: +SKIP
        0.001
    """
    cache = CACHE_TOLERANCE if config.cache_format is not None else 0.0
    activations = ACTIVATION_TOLERANCE if target.weights.activations else 0.0
    return max(TOLERANCE[target.dtype], cache, activations)


def compare(
    plain: Generation,
    speculative: Generation,
    margin: Any,
    token_ids: Array,
    lengths: Array,
    keys: Array,
    sampling: Sampling,
    tolerance: float,
) -> LosslessReport:
    """Compare two results row by row; `margin(prompt, output, key, sampling row)` judges a first difference."""
    rows = []
    for b in range(token_ids.shape[0]):
        expected = np.asarray(plain.tokens[b])[: int(plain.lengths[b])]
        got = np.asarray(speculative.tokens[b])[: int(speculative.lengths[b])]
        if np.array_equal(expected, got) and plain.finish_reason[b] == speculative.finish_reason[b]:
            rows.append(RowReport(b, True))
            continue
        shared = min(len(expected), len(got))
        differs = np.flatnonzero(expected[:shared] != got[:shared])
        at = int(differs[0]) if len(differs) else shared
        prompt = np.asarray(token_ids[b])[: int(lengths[b])]
        one = jax.tree.map(lambda value, b=b: value[b : b + 1], sampling)
        won_by = margin(prompt, expected[:at], keys[b], one)
        rows.append(
            RowReport(
                row=b,
                equal=False,
                first_difference=at,
                expected=int(expected[at]) if at < len(expected) else -1,
                got=int(got[at]) if at < len(got) else -1,
                margin=won_by,
                excused=won_by < tolerance and len(differs) > 0,
            )
        )
    return LosslessReport(rows, tolerance)


def decision_margin(
    model: Decoder,
    params: Any,
    config: GenerationConfig,
    tolerance: float,
    prompt: np.ndarray,
    output: np.ndarray,
    key: Array,
    sampling: Sampling,
) -> float:
    """By how much the target's next token wins, teacher-forced on one row.

    Args:
        model, params, config: what generated. tolerance: the width in which a cut-off counts as touched.
        prompt, output: int [n], int [m], the row so far. key: the row's key. sampling: of one row.

    Returns:
        Best minus second best of logits plus noise; 0 if moving the min_p, top_k or top_p cut by the tolerance
        changes the winner.
    """
    row = np.concatenate([prompt, output]).astype(np.int32)
    padded = np.zeros((1, -(-len(row) // 64) * 64), np.int32)
    padded[0, : len(row)] = row
    cache = (config.cache_format, config.cache_scales)
    logits = _logits_at(model, cache, params, jnp.asarray(padded), jnp.int32(len(row) - 1))
    vocab = np.arange(model.config.vocab_size)
    counts = np.bincount(output.astype(np.int64), minlength=len(vocab))[None]
    history = History(jnp.asarray(np.isin(vocab, prompt)[None]), jnp.asarray(counts, jnp.int32))
    none, produced = jnp.zeros((1, 0), jnp.int32), jnp.asarray([len(output)], jnp.int32)
    z = temper(adjust(logits, sampling, config.transforms, history, none, produced), sampling)
    noise = gumbel_noise(key[None], jnp.asarray([[len(row)]], jnp.int32), len(vocab))

    def winner(slack: float) -> tuple[int, np.ndarray]:
        cut = truncate(z, sampling, config.transforms, slack)
        scores = np.asarray(jnp.where(sampling.temperature[0] > 0, cut + noise, cut))[0, 0]
        return int(draw(cut, noise, sampling)[0, 0]), scores

    best, scores = winner(0.0)
    if winner(tolerance)[0] != best or winner(-tolerance)[0] != best:
        return 0.0
    top = np.sort(scores)[-2:]
    return float(top[1] - top[0])


@partial(jax.jit, static_argnums=(0, 1))
def _logits_at(
    model: Decoder, cache: tuple[str | None, tuple[float, ...]], params: Any, token_ids: Array, index: Array
) -> Array:
    """Logits float32 [1, 1, V] of the row at `index` of token_ids [1, T], over a cache of that format and scales."""
    c, length = model.config, token_ids.shape[1]
    pools = make_pools(c.num_layers, length, *c.cache_row, c.dtype, *cache)
    start = jnp.zeros((1,), jnp.int32)
    # One pass into one block.
    step = chain_step(start[None], start, start + length, length, length, length)
    out = apply(model, params, token_ids, step.positions, paged_attention(step), pools)
    hidden = jax.lax.dynamic_slice_in_dim(out.hidden, index, 1, axis=1)
    return apply(model, params, hidden, method="logits")
