"""Speculation changes nothing: every row equals plain decoding, up to near ties of the target's decision."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from xla import SHIPPED

from eagle3_jax.decoding.drafters import Drafter, Oracle
from eagle3_jax.decoding.loop import LENGTH, STOP, Generation, generate, speculative_generate
from eagle3_jax.decoding.request import Chain, GenerationConfig
from eagle3_jax.decoding.sampling import Sampling, row_keys
from eagle3_jax.decoding.verify import LosslessReport, compare, decision_margin
from eagle3_jax.models.eagle3 import Eagle3

BATCH, NEW = 512, 20
PLAIN = GenerationConfig(max_new_tokens=NEW, prefill_chunk=16, block_size=8)

plain_run = jax.jit(generate, static_argnames=("model", "config"), compiler_options=SHIPPED)
draft_run = jax.jit(
    speculative_generate, static_argnames=("target_model", "draft_model", "config"), compiler_options=SHIPPED
)


def every_kind_of_row(batch: int = BATCH) -> Sampling:
    """Rows of all temperatures and transforms, mixed within one batch."""
    rng = np.random.default_rng(7)

    def some(values: list) -> list:
        return [values[i] for i in rng.integers(0, len(values), batch)]

    return Sampling.make(
        batch,
        temperature=some([0.0, 0.7, 1.3]),
        top_k=some([0, 0, 1, 5, 20]),
        top_p=some([1.0, 1.0, 0.9, 0.5]),
        min_p=some([0.0, 0.0, 0.05, 0.3]),
        repetition_penalty=some([1.0, 1.0, 1.3]),
        presence_penalty=some([0.0, 0.0, 0.6]),
        frequency_penalty=some([0.0, 0.0, -0.4, 0.4]),
        min_tokens=some([0, 0, 6]),
        max_tokens=some([NEW, NEW, NEW, 1, 2, 7]),
        stop_ids=some([[], [3], [4, 9]]),
        eos_ids=(5,),
        ignore_eos=some([False, True]),
        logit_bias=some([{}, {}, {3: 4.0, 7: -100.0}]),
    )


def plain(seed: int, sampling: Sampling, config: GenerationConfig = PLAIN) -> Generation:
    model, params = tiny.target()
    ids, lengths = tiny.prompts(sampling.top_k.shape[0], seed=seed)
    keys = row_keys(seed, ids.shape[0])
    return plain_run(params, ids, lengths, keys, sampling, model=model, config=config)


def drafted(
    seed: int, sampling: Sampling, drafter: Eagle3 | Drafter, draft_params: object, config: GenerationConfig
) -> Generation:
    model, params = tiny.target()
    ids, lengths = tiny.prompts(sampling.top_k.shape[0], seed=seed)
    keys = row_keys(seed, ids.shape[0])
    models = {"target_model": model, "draft_model": drafter}
    return draft_run(params, draft_params, ids, lengths, keys, sampling, config=config, **models)


def report(seed: int, sampling: Sampling, expected: Generation, got: Generation) -> LosslessReport:
    model, params = tiny.target()
    ids, lengths = tiny.prompts(sampling.top_k.shape[0], seed=seed)
    margin = partial(decision_margin, model, params, PLAIN, 1e-3)
    return compare(expected, got, margin, ids, lengths, row_keys(seed, ids.shape[0]), sampling, 1e-3)


def assert_lossless(seed: int, sampling: Sampling, expected: Generation, got: Generation) -> None:
    found = report(seed, sampling, expected, got)
    assert found.ok, [row for row in found.rows if not row.equal and not row.excused]
    # The excuse is for rounding: it may not carry the test.
    assert sum(not row.equal for row in found.rows) <= max(2, len(found.rows) // 100)


@pytest.mark.parametrize("length", [1, 2, 3, 5, 8])
def test_any_row_with_a_garbage_draft_and_a_half_right_oracle_equals_plain_decoding(length: int) -> None:
    """2 x 2 x 512 rows for each K: 10,240 in all."""
    sampling = every_kind_of_row()
    draft_model, draft_params = tiny.draft()
    pages, draft_pages = {2: (1, 16), 5: (8, 1)}.get(length, (None, None))
    sizes = {"prefill_chunk": 24, "block_size": 16, "page_size": pages}
    config = GenerationConfig(max_new_tokens=NEW, speculation=Chain(length), **sizes)
    drafter = tiny.Steered(draft_model, draft_pages)
    for seed in (2 * length, 2 * length + 1):
        expected = plain(seed, sampling)
        rows = tiny.whole_rows(*tiny.prompts(BATCH, seed=seed), expected.tokens)
        # One program for both: the draft's own proposals, and given ones.
        got = drafted(seed, sampling, drafter, (draft_params, jnp.full(rows.shape, -1, jnp.int32)), config)
        assert_lossless(seed, sampling, expected, got)
        assert np.sum(got.stats.accepted) > 0
        half_right = jnp.asarray(tiny.corrupted(rows, 0.3, seed), jnp.int32)
        got = drafted(seed, sampling, drafter, (draft_params, half_right), config)
        assert_lossless(seed, sampling, expected, got)
        accepted = np.asarray(got.stats.accepted_per_position).sum(axis=0)
        assert np.all(accepted > 0), "every acceptance length must occur for this test to mean anything"


def test_rows_do_not_depend_on_their_order_or_their_neighbours() -> None:
    sampling = every_kind_of_row()
    config = GenerationConfig(max_new_tokens=NEW, speculation=Chain(3), prefill_chunk=24, block_size=16)
    model, params = tiny.target()
    draft_model, draft_params = tiny.draft()
    ids, lengths = tiny.prompts(BATCH, seed=3)
    keys = row_keys(3, BATCH)
    models = {"target_model": model, "draft_model": draft_model, "config": config}
    first = draft_run(params, draft_params, ids, lengths, keys, sampling, **models)
    order = np.random.default_rng(0).permutation(BATCH)
    others, other_lengths = tiny.prompts(BATCH, seed=99)
    stays = jnp.asarray(np.random.default_rng(1).random(BATCH) < 0.5)
    mixed_ids = jnp.where(stays[:, None], ids, others)[order]
    mixed_lengths = jnp.where(stays, lengths, other_lengths)[order]
    moved = jax.tree.map(lambda x: x[order], sampling)
    second = draft_run(params, draft_params, mixed_ids, mixed_lengths, keys[order], moved, **models)
    kept = np.asarray(stays)[order]
    expected = np.asarray(first.tokens)[order][kept]
    same = np.all(np.asarray(second.tokens)[kept] == expected, axis=1)
    assert same.mean() > 0.99 and kept.sum() > 200


def test_an_oracle_needs_exactly_the_fewest_rounds() -> None:
    sampling = Sampling.make(32, temperature=[0.0, 0.7, 1.3, 0.7] * 8, max_tokens=list(range(1, 17)) * 2)
    expected = plain(5, sampling, GenerationConfig(max_new_tokens=NEW, prefill_chunk=16, block_size=8))
    rows = jnp.asarray(tiny.whole_rows(*tiny.prompts(32, seed=5), expected.tokens))
    n = np.asarray(expected.lengths)
    assert n.tolist() == list(range(1, 17)) * 2
    for length in (1, 4):
        config = GenerationConfig(max_new_tokens=NEW, speculation=Chain(length))
        got = drafted(5, sampling, Oracle(), rows, config)
        assert np.array_equal(got.tokens, expected.tokens)
        assert np.array_equal(got.stats.rounds, -(-(n - 1) // (length + 1)))
        # The last round drafts no further than the row's limit, and an oracle's drafts are all accepted.
        assert np.array_equal(got.stats.accepted, got.stats.drafted)


@pytest.mark.parametrize("kind", ["garbage", "oracle"])
def test_a_stop_at_any_place_of_a_run_cuts_there(kind: str) -> None:
    free = plain(6, Sampling.make(NEW, temperature=0.7))
    stops = [[int(free.tokens[i, i])] for i in range(NEW)]
    sampling = Sampling.make(NEW, temperature=0.7, stop_ids=stops)
    draft_model, draft_params = tiny.draft()
    if kind == "oracle":
        draft_model, draft_params = (
            Oracle(),
            jnp.asarray(tiny.whole_rows(*tiny.prompts(NEW, seed=6), free.tokens)),
        )
    got = drafted(6, sampling, draft_model, draft_params, GenerationConfig(max_new_tokens=NEW, pad_id=39))
    for i in range(NEW):
        text = np.asarray(free.tokens[i]).tolist()
        end = text.index(stops[i][0]) + 1
        assert int(got.lengths[i]) == end
        assert np.asarray(got.tokens[i]).tolist() == text[:end] + [39] * (NEW - end)
        assert int(got.finish_reason[i]) == STOP
        if kind == "oracle":
            # Whole rounds emit four drafts and one more token; the last is cut inside its drafts.
            assert int(got.stats.accepted[i]) == end - 1 - (end - 1) // 5
            assert int(got.stats.rounds[i]) == -(-(end - 1) // 5)


def test_a_row_ends_at_its_own_limit_and_at_the_context_end() -> None:
    sampling = Sampling.make(8, temperature=0.7, max_tokens=[1, 2, 3, 4, 5, 20, 20, 20])
    ids, _ = tiny.prompts(8, width=40, seed=8)
    ids = jnp.concatenate([ids, ids[:, :7]], axis=1)
    lengths = jnp.asarray([5, 9, 13, 2, 47, 40, 38, 27], jnp.int32)
    keys = row_keys(8, 8)
    draft_model, draft_params = tiny.draft()
    wide, params = tiny.target()
    narrow, _ = tiny.target(max_position=48)
    free = plain_run(params, ids, lengths, keys, sampling, model=wide, config=PLAIN)
    assert free.lengths.tolist() == [1, 2, 3, 4, 5, 20, 20, 20]
    for length in (1, 5):
        config = GenerationConfig(max_new_tokens=NEW, speculation=Chain(length), block_size=16)
        models = {"target_model": narrow, "draft_model": draft_model, "config": config}
        got = draft_run(params, draft_params, ids, lengths, keys, sampling, **models)
        assert got.lengths.tolist() == [1, 2, 3, 4, 1, 8, 10, 20]
        assert np.all(np.asarray(got.finish_reason) == LENGTH)
        for b, n in enumerate(got.lengths.tolist()):
            assert np.array_equal(got.tokens[b, :n], free.tokens[b, :n])


def test_another_seed_gives_another_text_and_the_same_seed_the_same() -> None:
    sampling = Sampling.make(BATCH, temperature=1.0)
    first, again = plain(1, sampling), plain(1, sampling)
    assert np.array_equal(first.tokens, again.tokens)
    model, params = tiny.target()
    ids, lengths = tiny.prompts(BATCH, seed=1)
    other = plain_run(params, ids, lengths, row_keys(2, BATCH), sampling, model=model, config=PLAIN)
    assert np.mean(np.all(np.asarray(first.tokens) == np.asarray(other.tokens), axis=1)) < 0.01
