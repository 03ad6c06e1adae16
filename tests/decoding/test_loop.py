"""The loop's parts: streaming, the draft's cache, statistics, errors, keys."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax import Array

from eagle3_jax.decoding.drafters import Eagle3Drafter, Oracle, Pick, Verified
from eagle3_jax.decoding.loop import (
    ERROR,
    RUNNING,
    Setup,
    decode_round,
    generate,
    jitted_prefill,
    prefill,
    run_rounds,
    speculative_generate,
    stream,
)
from eagle3_jax.decoding.request import Chain, GenerationConfig
from eagle3_jax.decoding.sampling import Sampling, row_keys
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.models.eagle3 import Eagle3

NEW = 20

plain_run = jax.jit(generate, static_argnames=("model", "config"))
drafted_run = jax.jit(speculative_generate, static_argnames=("target_model", "draft_model", "config"))


def inputs(batch: int, **wishes: Any) -> tuple[Array, Array, Array, Sampling]:
    ids, lengths = tiny.prompts(batch, width=12, seed=batch)
    return ids, lengths, row_keys(batch, batch), Sampling.make(batch, **wishes)


def plain_tokens(given: tuple, config: GenerationConfig) -> np.ndarray:
    model, params = tiny.target()
    return np.asarray(plain_run(params, *given, model=model, config=config).tokens)


def test_streaming_gives_the_fused_result_step_by_step_and_leaves_its_arguments_alone() -> None:
    model, params = tiny.target()
    draft_model, draft_params = tiny.draft()
    given = inputs(4, temperature=[0.0, 0.7, 1.3, 0.0], max_tokens=[NEW, 3, NEW, 1], stop_ids=[7])
    config = GenerationConfig(max_new_tokens=NEW, speculation=Chain(3), return_logprobs=True)
    models = {"target_model": model, "draft_model": draft_model, "config": config}
    fused = drafted_run(params, draft_params, *given, **models)
    steps = list(stream(params, draft_params, *given, **models, rounds_per_call=2))
    assert steps[0].lengths.tolist() == [1, 1, 1, 1]
    for earlier, later in itertools.pairwise(steps):
        for b, n in enumerate(earlier.lengths):
            assert np.array_equal(earlier.tokens[b, :n], later.tokens[b, :n])
    last = steps[-1]
    same = jax.tree.map(lambda a, b: np.allclose(a, b, atol=1e-5), last, fused)
    assert all(jax.tree.leaves(same)), same
    jax.block_until_ready((params, draft_params, given))
    again = list(stream(params, draft_params, *given, **models, rounds_per_call=5))[-1]
    assert np.array_equal(again.tokens, last.tokens)


def test_streaming_without_a_draft_is_plain_decoding() -> None:
    model, params = tiny.target()
    given = inputs(4, temperature=0.7)
    config = GenerationConfig(max_new_tokens=NEW)
    last = list(stream(params, None, *given, target_model=model, draft_model=None, config=config))[-1]
    assert np.array_equal(last.tokens, plain_tokens(given, config))
    assert last.stats.drafted.tolist() == [0] * 4 and last.stats.rounds.tolist() == [NEW - 1] * 4


def proposals_are_those_of_a_fresh_computation(drafter: type[tiny.Steered], **changes: Any) -> bool:
    """Whether in every round, whatever was accepted before, the draft proposes what it would from scratch.

    The acceptance is steered by a half-right oracle; the reference recomputes the whole sequence without a cache.
    """
    draft_config = dataclasses.replace(tiny.DRAFT, **changes)
    drafted = tiny.draft(draft_config)
    (model, params), length, batch = tiny.target(), 3, 3
    ids, lengths, keys, sampling = inputs(batch)
    lengths = jnp.asarray([12, 1, 9], jnp.int32)
    config = GenerationConfig(max_new_tokens=NEW, speculation=Chain(length), prefill_chunk=7, block_size=4)
    expected = plain_tokens((ids, lengths, keys, sampling), config)
    rows = tiny.whole_rows(ids, lengths, expected)
    steered = drafter(drafted[0])
    setup = Setup(model, steered, config)
    both = (params, (drafted[1], jnp.asarray(tiny.corrupted(rows, 0.25, seed=4))))

    @jax.jit
    def own(state: Any) -> Array:
        target_ids = drafted[1]["target_ids"]
        pick = lambda j, logits, _: target_ids[jnp.argmax(logits, axis=-1)]  # noqa: E731
        draft_params = (both[1], both[0])
        return steered.own(draft_params, state.draft_cache, state.pending, length, pick, config.block_size)[0]

    one_round = jax.jit(lambda state: run_rounds(setup, both, sampling, state, 1))
    state = jitted_prefill(setup, both, ids, lengths, keys, sampling)
    accepted = set()
    while np.any(np.asarray(state.finish) == RUNNING):
        proposed, before = np.asarray(own(state)), np.asarray(state.stats.accepted)
        for b in np.flatnonzero(np.asarray(state.finish) == RUNNING):
            if proposed[b].tolist() != tiny.naive_chain(drafted, rows[b], int(state.length[b]), length):
                return False
        state = one_round(state)
        accepted |= set((np.asarray(state.stats.accepted) - before).tolist())
    assert accepted == {0, 1, 2, 3}, "all acceptance lengths must occur"
    return True


@pytest.mark.parametrize("changes", [{}, {"norm_output": True, "fc_norm": True}], ids=["3", "3.1"])
def test_the_draft_cache_holds_true_features_after_any_acceptance(changes: dict) -> None:
    assert proposals_are_those_of_a_fresh_computation(tiny.Steered, **changes)


class PadsWithNaN(tiny.Steered):
    """Finds NaN in the padding after the verified rows, as a stale buffer may hold."""

    def own(self, params: Any, cache: Array, rows: Verified, length: int, pick: Pick, block_size: int) -> Any:
        real = jnp.arange(rows.next_ids.shape[1])[:, None] < rows.count[:, None, None]
        rows = dataclasses.replace(rows, features=jnp.where(real, rows.features, jnp.nan))
        return super().own(params, cache, rows, length, pick, block_size)


def test_what_lies_in_the_padding_is_never_seen() -> None:
    assert proposals_are_those_of_a_fresh_computation(PadsWithNaN)


class NormalisesTwice(tiny.Steered):
    """Feeds back norm(norm(y)) where EAGLE-3.1 feeds back norm(y)."""

    def own(self, params: Any, cache: Array, rows: Verified, length: int, pick: Pick, block_size: int) -> Any:
        class Twice(type(self.model)):
            def feedback(self, y: Array) -> Array:
                return self.final_norm(self.final_norm(y))

        return tiny.Steered(Twice(self.model.config)).own(params, cache, rows, length, pick, block_size)


def test_a_feedback_normalised_twice_is_seen() -> None:
    assert not proposals_are_those_of_a_fresh_computation(NormalisesTwice, norm_output=True)


class ForgetsToOverwrite(tiny.Steered):
    """Extends with the newest row only: older rows keep keys made from the draft's own features."""

    def own(self, params: Any, cache: Array, rows: Verified, length: int, pick: Pick, block_size: int) -> Any:
        newest = jnp.maximum(rows.count - 1, 0)[:, None]
        rows = dataclasses.replace(
            rows,
            features=jnp.take_along_axis(rows.features, newest[..., None], axis=1),
            next_ids=jnp.take_along_axis(rows.next_ids, newest, axis=1),
            start=rows.start + newest[:, 0],
            count=jnp.minimum(rows.count, 1),
        )
        return Eagle3Drafter.propose(self, (params[0][0], params[1]), cache, rows, length, pick, block_size)


class TakesTheLastFeature(tiny.Steered):
    """Drafts from the last verified row instead of the last accepted one."""

    def own(self, params: Any, cache: Array, rows: Verified, length: int, pick: Pick, block_size: int) -> Any:
        newest = jnp.maximum(rows.count - 1, 0)[:, None, None]
        stale = rows.features.at[jnp.arange(rows.count.shape[0])[:, None], newest[:, 0]].set(rows.features[:, -1:])
        rows = dataclasses.replace(rows, features=stale)
        return super().own(params, cache, rows, length, pick, block_size)


class SwapsTheTaps(tiny.Steered):
    """Joins the features high to low."""

    def own(self, params: Any, cache: Array, rows: Verified, length: int, pick: Pick, block_size: int) -> Any:
        parts = jnp.split(rows.features, 3, axis=-1)
        rows = dataclasses.replace(rows, features=jnp.concatenate(parts[::-1], axis=-1))
        return super().own(params, cache, rows, length, pick, block_size)


class ShiftsTheTokens(tiny.Steered):
    """Feeds token x_t beside the feature of x_t instead of x_{t+1}."""

    def own(self, params: Any, cache: Array, rows: Verified, length: int, pick: Pick, block_size: int) -> Any:
        rows = dataclasses.replace(rows, next_ids=jnp.roll(rows.next_ids, 1, axis=1))
        return super().own(params, cache, rows, length, pick, block_size)


class SkipsThePrompt(tiny.Steered):
    """Never sees the prompt's features, as after a prefix hit without the draft's keys."""

    def extend(self, params: Any, cache: Array, rows: Verified, block_size: int) -> Array:
        return cache


@pytest.mark.parametrize(
    "fault", [ForgetsToOverwrite, TakesTheLastFeature, SwapsTheTaps, ShiftsTheTokens, SkipsThePrompt]
)
def test_a_fault_in_the_drafting_is_seen(fault: type[tiny.Steered]) -> None:
    assert not proposals_are_those_of_a_fresh_computation(fault)


def test_a_round_writes_through_the_table_of_now() -> None:
    """Between rounds blocks may change hands; a draft that took last round's would write into another row."""
    (model, params), seen = tiny.target(), []

    class Watched(Oracle):
        def propose(self, params: Any, cache: Any, rows: Verified, *rest: Any) -> Any:
            seen.append(rows.table)
            return super().propose(params, cache, rows, *rest)

    setup = Setup(model, Watched(), GenerationConfig(max_new_tokens=4, speculation=Chain(2), transforms=()))
    *given, sampling = inputs(2)

    def one(params: Any) -> Any:
        state = prefill(setup, params, *given, sampling)
        state = dataclasses.replace(state, table=state.table[::-1])
        round_ = decode_round(setup, params, sampling, state)
        assert seen[0] is state.table
        return round_

    jax.eval_shape(one, (params, jnp.zeros((2, 40), jnp.int32)))
    assert len(seen) == 1


def test_logits_without_a_maximum_end_their_row_as_an_error_and_no_other() -> None:
    model, params = tiny.target()
    draft_model, draft_params = tiny.draft()
    ids, lengths, keys, sampling = inputs(3, temperature=1.0)
    config = GenerationConfig(max_new_tokens=NEW, speculation=Chain(3))
    clean = plain_tokens((ids, lengths, keys, sampling), config)
    # Poison the embedding of one token: the row that draws it has NaN logits at the next index.
    elsewhere = np.concatenate([clean[1:].ravel(), np.asarray(ids).ravel(), clean[0, :2]])
    poison = int(np.setdiff1d(clean[0, :-1], elsewhere)[0])
    spoilt = params["embed"]["weight"].value.at[:, poison].set(jnp.nan)
    params = {**params, "embed": {"weight": dataclasses.replace(params["embed"]["weight"], value=spoilt)}}
    models = {"target_model": model, "draft_model": draft_model, "config": config}
    out = drafted_run(params, draft_params, ids, lengths, keys, sampling, **models)
    end = clean[0].tolist().index(poison) + 1
    assert out.finish_reason.tolist() == [ERROR, 2, 2] and int(out.lengths[0]) == end
    assert np.array_equal(out.tokens[0, :end], clean[0, :end]) and np.array_equal(out.tokens[1:], clean[1:])


def test_a_rejected_draft_that_spoils_its_own_row_spoils_no_token_before_it() -> None:
    model, params = tiny.target()
    ids, lengths, keys, sampling = inputs(3, temperature=1.0)
    config = GenerationConfig(max_new_tokens=NEW, speculation=Chain(3))
    clean = plain_tokens((ids, lengths, keys, sampling), config)
    unused = int(np.setdiff1d(np.arange(tiny.VOCAB), np.concatenate([clean.ravel(), np.asarray(ids).ravel()]))[0])
    spoilt = params["embed"]["weight"].value.at[:, unused].set(jnp.nan)
    params = {**params, "embed": {"weight": dataclasses.replace(params["embed"]["weight"], value=spoilt)}}
    rows = tiny.whole_rows(ids, lengths, clean)
    rows = np.where(np.random.default_rng(0).random(rows.shape) < 0.3, unused, rows)
    models = {"target_model": model, "draft_model": Oracle(), "config": config}
    out = drafted_run(params, jnp.asarray(rows), ids, lengths, keys, sampling, **models)
    assert np.array_equal(out.tokens, clean) and out.finish_reason.tolist() == [2, 2, 2]
    assert np.all(np.asarray(out.stats.accepted) > 0)


def test_log_probabilities_are_those_of_the_untransformed_logits() -> None:
    model, params = tiny.target()
    draft_model, draft_params = tiny.draft()
    ids, lengths, keys, sampling = inputs(3, temperature=1.3, top_k=5, repetition_penalty=1.5)
    config = GenerationConfig(max_new_tokens=NEW, speculation=Chain(3), return_logprobs=True)
    models = {"target_model": model, "draft_model": draft_model, "config": config}
    out = drafted_run(params, draft_params, ids, lengths, keys, sampling, **models)
    for b, n in enumerate(np.asarray(lengths)):
        row = tiny.whole_rows(ids, lengths, out.tokens)[b, : n + NEW]
        logits = tiny.causal_logits(row).astype(np.float64)
        shifted = logits - logits.max(axis=-1, keepdims=True)
        reference = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
        expected = reference[np.arange(n - 1, n + NEW - 1), row[n:]]
        assert np.allclose(out.logprobs[b], expected, atol=1e-4)


def test_keys_of_another_kind_are_refused_and_a_scalar_key_is_split() -> None:
    model, params = tiny.target()
    ids, lengths, _, sampling = inputs(2, temperature=1.0)
    config = GenerationConfig(max_new_tokens=4)
    for keys in (jax.random.PRNGKey(0), jax.random.key(0, impl="rbg"), row_keys(0, 3)):
        with pytest.raises(Eagle3Error, match="key"):
            generate(params, ids, lengths, keys, sampling, model=model, config=config)
    key = jax.random.key(3, impl="threefry2x32")
    given = (ids, lengths, key, sampling)
    assert np.array_equal(
        plain_tokens(given, config), plain_tokens((ids, lengths, jax.random.split(key, 2), sampling), config)
    )


def test_double_precision_mode_changes_nothing() -> None:
    model, params = tiny.target()
    draft_model, draft_params = tiny.draft()
    config = GenerationConfig(max_new_tokens=NEW, speculation=Chain(3))
    models = {"target_model": model, "draft_model": draft_model, "config": config}
    wishes = {"temperature": [0.0, 0.7], "top_p": 0.9, "top_k": 9, "repetition_penalty": 1.2, "logit_bias": {3: 1.0}}
    given = inputs(2, **wishes)
    expected = drafted_run(params, draft_params, *given, **models)
    with jax.enable_x64(True):
        given = inputs(2, **wishes)
        wide = drafted_run(params, draft_params, *given, **models)
    assert np.array_equal(wide.tokens, expected.tokens)
    assert jax.tree.map(lambda x: x.dtype, wide) == jax.tree.map(lambda x: x.dtype, expected)


def test_a_draft_of_another_target_is_refused_even_while_tracing() -> None:
    model, params = tiny.target()
    config = GenerationConfig(max_new_tokens=NEW, speculation=Chain(3))
    given = inputs(2)
    for change, match in (
        ({"target_hidden_size": 25}, "width 25"),
        ({"vocab_size": 41}, "41 ids"),
        ({"taps": (0, 1, 4)}, "taps"),
    ):
        draft_model = Eagle3(dataclasses.replace(tiny.DRAFT, **change))
        with pytest.raises(Eagle3Error, match=match):
            drafted_run(params, tiny.draft()[1], *given, target_model=model, draft_model=draft_model, config=config)
    with pytest.raises(Eagle3Error, match="rounds_per_call"):
        next(stream(params, None, *given, target_model=model, draft_model=None, config=config, rounds_per_call=0))
