"""Drafts side by side: the same target, prompts and keys.

Dimension letters: N prompts, K drafts of a round, R resamples.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from eagle3_jax.checkpoint.drafts import Draft
from eagle3_jax.decoding.request import GenerationConfig
from eagle3_jax.decoding.stats import Stats
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.training.evaluate import Decoded, decode, with_context

RESAMPLES = 10_000
CONFIDENCE = 0.95


def compare(
    drafts: Sequence[Draft],
    prompts: Sequence[Sequence[int]],
    chain: int = 4,
    max_new_tokens: int = 96,
    temperatures: Sequence[float] = (0.0,),
    contexts: Sequence[int] = (),
    seed: int = 0,
    batch_size: int = 8,
    config: GenerationConfig = GenerationConfig(),
) -> list[dict[str, Any]]:
    """Decode the same prompts with the same keys under several drafts.

    Args:
        drafts: of one target; the first is what the others are compared with.
        prompts: token ids of each. chain, max_new_tokens, temperatures, contexts, seed, batch_size, config: as in
            `eagle3_jax.training.evaluate.evaluate`.

    Returns:
        For each temperature, first the prompts alone and then each context: `temperature`, `context`, and `drafts`:
        for each draft what `evaluate_decoding` returns, with `tokens_per_second` (of one run; `bench` measures
        with more care) and, from the second on, `difference`, see `paired_difference`.

    Raises:
        Eagle3Error: fewer than two drafts or prompts, drafts of several targets, or whatever decoding refuses.

    Example:
        >>> compare([bf16, fp8], prompts)[0]["drafts"][1]["difference"]["mean_acceptance_length"]  # doctest: +SKIP
        {'value': -0.004, 'low': -0.013, 'high': 0.005}
    """
    if len(drafts) < 2 or len(prompts) < 2:
        raise Eagle3Error(f"{len(drafts)} drafts on {len(prompts)} prompts: a comparison needs two of each")
    if any(draft.target is not drafts[0].target for draft in drafts):
        raise Eagle3Error("drafts of different targets cannot be compared; load them for one target")
    cells = []
    for temperature in temperatures:
        settings = (chain, max_new_tokens, temperature, seed, batch_size, config)
        alone = [decode(draft, prompts, *settings, timed=True) for draft in drafts]
        cells.append(_cell(temperature, None, alone))
        for context in contexts:
            longer = with_context(prompts, alone[0].outputs, context)
            cells.append(
                _cell(temperature, context, [decode(draft, longer, *settings, timed=True) for draft in drafts])
            )
    return cells


def _cell(temperature: float, context: int | None, decoded: list[Decoded]) -> dict[str, Any]:
    first, *others = decoded
    found = [{**other.report, "difference": paired_difference(first.stats, other.stats)} for other in others]
    return {"temperature": temperature, "context": context, "drafts": [first.report, *found]}


def paired_difference(first: Stats, other: Stats, seed: int = 0) -> dict[str, Any]:
    """How much more another draft has accepted, with a confidence interval.

    The interval is the percentile bootstrap's (Efron 1979) over prompts: each resample draws the same prompts for
    both drafts, so that what a prompt does to both cancels out.

    Args:
        first, other: counts of each prompt [N] under either draft. seed: of the resamples.

    Returns:
        `mean_acceptance_length`, and `acceptance_per_position` up to the last position that both have drafted:
        `value`, other minus first; `low` and `high`, the ends of its 95 % interval. None where nothing was drafted.

    Raises:
        Eagle3Error: a single prompt, which has no spread.
    """
    count = len(first.rounds)
    if count < 2:
        raise Eagle3Error(f"{count} prompts: a confidence interval needs two or more")
    drawn = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), RESAMPLES)
    # The first row is the prompts as they are.
    times = np.concatenate([np.ones((1, count)), drawn])
    change = _acceptance(other, times) - _acceptance(first, times)
    found = [_interval(column) for column in change.T]
    return {
        "mean_acceptance_length": found[0],
        "acceptance_per_position": [position for position in found[1:] if position is not None],
    }


def _acceptance(stats: Stats, times: np.ndarray) -> np.ndarray:
    """Accepted drafts a round, and the accepted share of each position: [R, 1 + K]; NaN where there is none.

    Args:
        stats: counts [N]. times: how often each prompt counts, [R, N].
    """
    accepted = np.column_stack([stats.accepted, stats.accepted_per_position])
    tried = np.column_stack([stats.rounds, stats.drafted_per_position])
    kept, all_tried = times @ accepted, times @ tried
    return np.divide(kept, all_tried, out=np.full_like(kept, np.nan), where=all_tried > 0)


def _interval(change: np.ndarray) -> dict[str, float] | None:
    """The observed change, the first of [1 + R], within the resampled ones."""
    if np.isnan(change[0]):
        return None
    tail = (1 - CONFIDENCE) / 2
    low, high = np.nanquantile(change[1:], [tail, 1 - tail])
    return {"value": float(change[0]), "low": float(low), "high": float(high)}
