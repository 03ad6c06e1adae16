"""How good a draft is: agreement with the target over given text, and acceptance by decoding.

Dimension letters: J training-time test steps, P padded prompt length, B rows, V vocabulary, Vd draft vocabulary.
"""

import dataclasses
import os
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from eagle3_jax.checkpoint.drafts import Draft
from eagle3_jax.decoding.batches import answers, pad_rows
from eagle3_jax.decoding.loop import speculative_generate
from eagle3_jax.decoding.request import Chain, GenerationConfig
from eagle3_jax.decoding.sampling import Sampling, row_keys
from eagle3_jax.decoding.stats import Stats, acceptance
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.models.eagle3 import Eagle3, SharedWeights, shared_weights
from eagle3_jax.models.layers import apply
from eagle3_jax.training.data import Chat, pack
from eagle3_jax.training.features import FeatureCache, RestrictedHead, Rows, make_batch, restrict_head
from eagle3_jax.training.loss import LossConfig, Metrics, counted_rows, shift_left, ttt_loss, ttt_outputs

_generate = jax.jit(speculative_generate, static_argnames=("target_model", "draft_model", "config"))


def evaluate(
    draft: Draft,
    prompts: Sequence[Sequence[int]],
    chain: int = 4,
    max_new_tokens: int = 96,
    temperatures: Sequence[float] = (0.0,),
    contexts: Sequence[int] = (),
    seed: int = 0,
    steps: int = 3,
    batch_size: int = 8,
    config: GenerationConfig = GenerationConfig(),
) -> dict[str, Any]:
    """Decode prompts at several temperatures and context lengths, and look closely at what was decoded.

    Args:
        draft: the draft. prompts: token ids of each prompt. chain: drafts of a round.
        max_new_tokens, temperatures, seed: of the generations.
        contexts: lengths to which prompts are brought in further runs, see `with_context`.
        steps: J, depth of the training-time test over the decoded text.
        batch_size: prompts of one batch.
        config: formats and pages of the caches; its other fields are set here.

    Returns:
        `decoding`: for each temperature, as `evaluate_decoding` returns it, first the prompts alone (`context` is
        None), then each of `contexts`. `text`: for each temperature, as `evaluate_text` returns it, over the
        answers of the prompts alone.

    Raises:
        Eagle3Error: whatever those functions refuse.

    Example:
        >>> evaluate(draft, prompts, temperatures=(0.0, 1.0), contexts=(1024,))  # doctest: +SKIP
    """
    decoding, text = [], []
    for temperature in temperatures:
        settings = (chain, max_new_tokens, temperature, seed, batch_size, config)
        alone = decode(draft, prompts, *settings)
        outputs = alone.outputs
        decoding.append({"context": None, **alone.report})
        for context in contexts:
            longer = decode(draft, with_context(prompts, outputs, context), *settings)
            decoding.append({"context": context, **longer.report})
        chats = [
            Chat(
                np.asarray([*prompt, *output], np.int32),
                np.arange(len(prompt) + len(output)) >= len(prompt),
                temperature,
            )
            for prompt, output in zip(prompts, outputs, strict=True)
        ]
        with tempfile.TemporaryDirectory() as scratch:
            row_length = max(512, *(len(chat.tokens) for chat in chats))
            text.append(evaluate_text(draft, chats, scratch, row_length, steps, temperature or 1.0))
    return {"decoding": decoding, "text": text}


def with_context(prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]], length: int) -> list[list[int]]:
    """Bring prompts to `length` tokens by other prompts and their answers before them.

    Prompts that are longer are left out.

    Args:
        prompts: token ids. outputs: the target's answer to each. length: tokens wanted of each.

    Raises:
        Eagle3Error: no prompt is that short, or all the others together are not that long.
    """
    texts = [[*prompt, *output] for prompt, output in zip(prompts, outputs, strict=True)]
    found = []
    for i, prompt in enumerate(prompts):
        if len(prompt) > length:
            continue
        before = [token for text in (*texts[i + 1 :], *texts[:i]) for token in text]
        if len(before) + len(prompt) < length:
            raise Eagle3Error(
                f"a context of {length} tokens: the set's prompts and answers hold {len(before) + len(prompt)}; "
                "give more prompts"
            )
        found.append([*before[len(before) + len(prompt) - length :], *prompt])
    if not found:
        raise Eagle3Error(f"a context of {length} tokens: every prompt is longer; give a longer context")
    return found


def evaluate_text(
    draft: Draft,
    chats: Sequence[Chat],
    features: str | os.PathLike[str],
    row_length: int = 512,
    steps: int = 3,
    temperature: float = 1.0,
) -> dict[str, Any]:
    """Agreement with the target over the answers of given chats.

    Args:
        draft: the draft. chats: text of the target that the draft has not learnt from.
        features: folder of the feature cache. row_length: tokens of a packed row.
        steps: J, depth of the training-time test. temperature: of the two distributions that are compared.

    Returns:
        See `summary`; and `temperature` with `expected_acceptance` [J], the mean over the answers' tokens of
        sum(min(p, q)), p the target's and q the draft's probabilities at that temperature: the rate at which
        rejection sampling (arXiv 2211.17192) accepts a draft of step j whose predecessors are the text's.

    Raises:
        Eagle3Error: no chat, chats of another tokenizer, a temperature that is no positive number, or logits
            that are not finite.

    Example:
        >>> evaluate_text(draft, split(read_chats("chats"))[1], "run/features")  # doctest: +SKIP
    """
    if not 0 < temperature < float("inf"):
        raise Eagle3Error(f"temperature {temperature}: distributions are compared at a positive, finite one")
    cache = FeatureCache(features, draft.target, pack(chats, row_length), draft.model.config.taps)
    ids = draft.params.get("target_ids")
    ids = np.arange(draft.model.config.vocab_size) if ids is None else np.asarray(ids)
    head = restrict_head(draft.target, ids)
    agreement = teacher_forced(draft, cache, range(len(cache)), LossConfig(steps), *head)
    overlap = _expected_acceptance(draft, cache, steps, temperature, *head)
    return {**agreement, "temperature": temperature, "expected_acceptance": _rounded(overlap)}


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
    if not np.all(np.isfinite(total.loss)):
        raise Eagle3Error(f"{draft.name}: the loss is not finite; the draft's or the target's weights are at fault")
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


def _expected_acceptance(
    draft: Draft,
    cache: FeatureCache,
    steps: int,
    temperature: float,
    restricted: RestrictedHead,
    head_params: Any,
    batch_size: int = 4,
) -> np.ndarray:
    """Mean of sum(min(p, q)) at each step: float [J]."""
    total, target = np.zeros((2, steps)), draft.target
    for begin in range(0, len(cache), batch_size):
        rows = cache.get(range(begin, min(begin + batch_size, len(cache))))
        models = (draft.model, target.model, restricted, steps)
        total += np.asarray(
            _row_overlap(*models, draft.params, target.params, head_params, rows, jnp.float32(temperature))
        )
    return total[0] / np.maximum(total[1], 1)


@partial(jax.jit, static_argnames=("model", "target_model", "restricted", "steps"))
def _row_overlap(
    model: Eagle3,
    target_model: Any,
    restricted: RestrictedHead,
    steps: int,
    params: Any,
    target_params: Any,
    head_params: Any,
    rows: Rows,
    temperature: Array,
) -> Array:
    """Sums over the learned tokens of sum(min(p, q)), and their number: float32 [2, J]."""
    batch, shared = make_batch(rows, restricted, head_params, model.config.dtype), shared_weights(target_params)

    def log_partition(hidden: Array) -> Array:
        logits = apply(target_model, target_params, hidden.astype(model.config.dtype), method="logits")
        return jax.nn.logsumexp(logits / temperature, axis=-1)

    # Over the whole vocabulary, row by row: the draft's is a part, the rest of p meets no q.
    whole = jax.lax.map(log_partition, jnp.asarray(rows.hidden[:, 1:]))
    p = jnp.exp(batch.target_logits / temperature - whole[..., None])
    sums = []
    for j, y in enumerate(ttt_outputs(model, params, shared, batch, steps)):
        q = jax.nn.softmax(apply(model, params, y, shared, method="logits") / temperature, axis=-1)
        counted = counted_rows(batch, batch.loss_mask, j).astype(jnp.float32)
        overlap = jnp.sum(jnp.minimum(shift_left(p, j), q), axis=-1)
        sums.append(jnp.stack([jnp.sum(overlap * counted), jnp.sum(counted)]))
    return jnp.stack(sums, axis=1)


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
    batch_size: int = 8,
) -> dict[str, Any]:
    """Acceptance by decoding prompts, as vLLM counts it.

    Args:
        draft: the draft. prompts: token ids of each prompt. chain: drafts of a round.
        max_new_tokens, temperature, seed: of the generation.
        batch_size: prompts of one batch; no result depends on it.

    Returns:
        `acceptance` of all rounds, with what was asked for, `prompts` and `new_tokens`.

    Raises:
        Eagle3Error: no prompts, prompts that do not fit the target, or logits without a finite maximum.

    Example:
        >>> evaluate_decoding(draft, prompts)["mean_acceptance_length"]  # doctest: +SKIP
        1.71
    """
    return decode(draft, prompts, chain, max_new_tokens, temperature, seed, batch_size).report


@dataclasses.dataclass(frozen=True)
class Decoded:
    """Decoded prompts.

    Attributes:
        outputs: the answer to each prompt. stats: counts of each prompt. report: as `evaluate_decoding` returns it.
    """

    outputs: list[list[int]]
    stats: Stats
    report: dict[str, Any]


def decode(
    draft: Draft,
    prompts: Sequence[Sequence[int]],
    chain: int,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    batch_size: int,
    config: GenerationConfig = GenerationConfig(),
    timed: bool = False,
) -> Decoded:
    """Decode prompts; the arguments and errors of `evaluate_decoding`.

    `config` gives formats and pages of the caches; its other fields are set here.
    With `timed` the report has `tokens_per_second`, prefill included and compilation left out: the first batch is
    decoded once more before the clock starts.
    """
    if not prompts:
        raise Eagle3Error("no prompts to decode")
    target, count = draft.target, len(prompts)
    size = min(batch_size, count)
    ids, lengths = pad_rows(prompts)
    keys = row_keys(seed, count)
    sampling = Sampling.make(size, temperature=temperature, eos_ids=target.eos_ids)
    # No longer than the context: the result is as wide as what is asked for.
    capacity = min(max_new_tokens, target.model.config.max_position)
    config = dataclasses.replace(config, max_new_tokens=capacity, speculation=Chain(chain), transforms=())

    def run(begin: int) -> Any:
        # Always a full batch, so that one program serves; the repeated rows are not counted.
        pick = np.arange(begin, begin + size) % count
        return jax.device_get(
            _generate(
                target.params,
                draft.params,
                jnp.asarray(ids[pick]),
                jnp.asarray(lengths[pick]),
                keys[pick],
                sampling,
                target_model=target.model,
                draft_model=draft.model,
                config=config,
            )
        )

    outputs: list[list[int]] = []
    stats: list[Stats] = []
    if timed:
        run(0)
    seconds, made = 0.0, 0
    for begin in range(0, count, size):
        started = time.perf_counter()
        out = run(begin)
        seconds, made = seconds + time.perf_counter() - started, made + int(out.lengths.sum())
        out = jax.tree.map(lambda x: x[: count - begin], out)  # noqa: B023 - called at once
        outputs += answers(out, target.name)
        stats.append(out.stats)
    asked = {"chain": chain, "temperature": temperature, "seed": seed, "max_new_tokens": max_new_tokens}
    asked |= {name: getattr(config, name) for name in ("cache_format", "draft_cache_format")}
    done = {"prompts": count, "new_tokens": sum(map(len, outputs))}
    every = jax.tree.map(lambda *parts: np.concatenate(parts), *stats)
    speed = {"tokens_per_second": made / seconds} if timed else {}
    return Decoded(outputs, every, {**asked, **done, **acceptance(every), **speed})
