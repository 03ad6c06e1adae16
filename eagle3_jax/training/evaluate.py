"""How good a draft is: agreement with the target over given text, and acceptance by decoding.

Dimension letters: J training-time test steps, P padded prompt length.
"""

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax.checkpoint.drafts import Draft
from eagle3_jax.decoding.loop import ERROR, speculative_generate
from eagle3_jax.decoding.request import Chain, GenerationConfig
from eagle3_jax.decoding.sampling import Sampling, row_keys
from eagle3_jax.decoding.stats import acceptance
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.models.eagle3 import Eagle3, SharedWeights, shared_weights
from eagle3_jax.training.data import Chat, pack
from eagle3_jax.training.features import FeatureCache, RestrictedHead, Rows, make_batch, restrict_head
from eagle3_jax.training.loss import LossConfig, Metrics, ttt_loss

_generate = jax.jit(speculative_generate, static_argnames=("target_model", "draft_model", "config"))


def evaluate_text(
    draft: Draft,
    chats: Sequence[Chat],
    features: str | os.PathLike[str],
    row_length: int = 512,
    steps: int = 3,
) -> dict[str, Any]:
    """Agreement with the target's argmax over the answers of given chats.

    Args:
        draft: the draft. chats: text of the target that the draft has not learnt from.
        features: folder of the feature cache. row_length: tokens of a packed row.
        steps: J, depth of the training-time test.

    Returns:
        See `summary`.

    Raises:
        Eagle3Error: no chat, or chats of another tokenizer.

    Example:
        >>> evaluate_text(draft, split(read_chats("chats"))[1], "run/features")  # doctest: +SKIP
    """
    cache = FeatureCache(features, draft.target, pack(chats, row_length), draft.model.config.taps)
    ids = draft.params.get("target_ids")
    ids = np.arange(draft.model.config.vocab_size) if ids is None else np.asarray(ids)
    return teacher_forced(draft, cache, range(len(cache)), LossConfig(steps), *restrict_head(draft.target, ids))


def teacher_forced(
    draft: Draft,
    cache: FeatureCache,
    indices: Sequence[int],
    config: LossConfig,
    restricted: RestrictedHead,
    head_params: Any,
    batch_size: int = 4,
) -> dict[str, Any]:
    """Agreement with the target's argmax at each training-time test step, over the true text.

    Args:
        draft: the draft. cache: features of the rows. indices: which rows. batch_size: rows of one pass.
        config: how deep. restricted, head_params: the target's head at the draft vocabulary.

    Returns:
        See `summary`.
    """
    shared = shared_weights(draft.target.params)
    total: Metrics | None = None
    for begin in range(0, len(indices), batch_size):
        rows = cache.get(indices[begin : begin + batch_size])
        metrics = _row_metrics(draft.model, restricted, config, draft.params, shared, head_params, rows)
        part = jax.device_get(metrics)
        total = part if total is None else jax.tree.map(np.add, total, part)
    if total is None:
        raise Eagle3Error("no rows to evaluate on")
    return summary(total)


@partial(jax.jit, static_argnames=("model", "restricted", "config"))
def _row_metrics(
    model: Eagle3,
    restricted: RestrictedHead,
    config: LossConfig,
    params: Any,
    shared: SharedWeights,
    head_params: Any,
    rows: Rows,
) -> Metrics:
    batch = make_batch(rows, restricted, head_params, model.config.dtype)
    return ttt_loss(model, params, shared, batch, config)[1]


def summary(metrics: Metrics) -> dict[str, Any]:
    """Means of summed metrics, ready for JSON.

    Returns:
        `loss` [J]; `accuracy` [J]; `chain_accuracy` [J], right at this and every earlier step;
        `expected_length`, 1 + the sum of the latter: what a chain of J greedy drafts would reach;
        `predictions`, how many tokens of step 0 this is over.
    """
    count = np.maximum(np.asarray(metrics.count), 1)
    chain = np.asarray(metrics.chain_correct) / count
    return {
        "loss": _rounded(np.asarray(metrics.loss) / np.maximum(np.asarray(metrics.weight), 1)),
        "accuracy": _rounded(np.asarray(metrics.correct) / count),
        "chain_accuracy": _rounded(chain),
        "expected_length": round(1 + float(chain.sum()), 4),
        "predictions": int(metrics.count[0]),
    }


def _rounded(values: np.ndarray) -> list[float]:
    return [round(float(value), 4) for value in values]


def evaluate_decoding(
    draft: Draft,
    prompts: Sequence[Sequence[int]],
    chain: int = 4,
    max_new_tokens: int = 96,
    temperature: float = 0.0,
    seed: int = 0,
) -> dict[str, Any]:
    """Acceptance by decoding prompts, as vLLM counts it.

    Args:
        draft: the draft. prompts: token ids of each prompt. chain: drafts of a round.
        max_new_tokens, temperature, seed: of the generation.

    Returns:
        `acceptance` of all rounds, with what was asked for, `prompts` and `new_tokens`.

    Raises:
        Eagle3Error: no prompts, prompts that do not fit the target, or logits without a finite maximum.

    Example:
        >>> evaluate_decoding(draft, prompts)["mean_acceptance_length"]  # doctest: +SKIP
        1.71
    """
    if not prompts:
        raise Eagle3Error("no prompts to decode")
    target, count = draft.target, len(prompts)
    ids = np.zeros((count, max(map(len, prompts))), np.int32)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    out = _generate(
        target.params,
        draft.params,
        jnp.asarray(ids),
        jnp.asarray([len(prompt) for prompt in prompts], jnp.int32),
        row_keys(seed, count),
        Sampling.make(count, temperature=temperature, eos_ids=target.eos_ids),
        target_model=target.model,
        draft_model=draft.model,
        # No longer than the context: the result is as wide as what is asked for.
        config=GenerationConfig(min(max_new_tokens, target.model.config.max_position), Chain(chain), transforms=()),
    )
    if np.any(np.asarray(out.finish_reason) == ERROR):
        raise Eagle3Error(f"{target.name}: the logits have no finite maximum; the weights or their dtype are at fault")
    asked = {"chain": chain, "temperature": temperature, "seed": seed, "max_new_tokens": max_new_tokens}
    done = {"prompts": count, "new_tokens": int(np.sum(np.asarray(out.lengths)))}
    return {**asked, **done, **acceptance(jax.device_get(out.stats))}
