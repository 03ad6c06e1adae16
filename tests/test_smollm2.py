"""The real model: SmolLM2-135M-Instruct with the shipped draft, against text another implementation wrote."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from xla import SHIPPED

import eagle3_jax as e3
from eagle3_jax.decoding.verify import compare, decision_margin
from eagle3_jax.quant.weight import named_weights

pytestmark = pytest.mark.model

NEW = 96
CONFIG = e3.GenerationConfig(max_new_tokens=NEW, speculation=e3.Chain(4))


@pytest.fixture(scope="module")
def written(fixtures_dir: Path) -> list[dict[str, Any]]:
    return json.loads((fixtures_dir / "real" / "smollm2_135m_dev.json").read_text(encoding="utf-8"))["prompts"]


@pytest.fixture(scope="module")
def target() -> Any:
    return e3.load_target("smollm2-135m")


@pytest.fixture(scope="module")
def draft(target: Any) -> Any:
    return e3.load_draft("smollm2-135m-eagle3", target)


@pytest.fixture(scope="module")
def fp8_draft(target: Any) -> Any:
    return e3.load_draft("smollm2-135m-eagle3-fp8", target)


@pytest.fixture(scope="module")
def both_ways(target: Any, draft: Any) -> Any:
    """Generates without and with drafts: (prompts, sampling) -> (plain, speculative, ...)."""
    plain = jax.jit(e3.generate, static_argnames=("model", "config"), compiler_options=SHIPPED)
    speculate = jax.jit(
        e3.speculative_generate,
        static_argnames=("target_model", "draft_model", "config"),
        compiler_options=SHIPPED,
    )

    def drafted(draft: Any, *given: Any) -> Any:
        models = {"target_model": target.model, "draft_model": draft.model, "config": CONFIG}
        return speculate(target.params, draft.params, *given, **models)

    def run(
        ids: Any, lengths: Any, keys: Any, sampling: e3.Sampling, drafts: Sequence[Any] = (draft,)
    ) -> tuple[Any, ...]:
        given = (ids, lengths, keys, sampling)
        expected = plain(target.params, *given, model=target.model, config=CONFIG)
        return expected, *(drafted(draft, *given) for draft in drafts)

    return run


def test_greedy_text_is_that_of_transformers_with_and_without_drafts(
    written: list[dict[str, Any]], target: Any, draft: Any, fp8_draft: Any, both_ways: Any
) -> None:
    ids, lengths = e3.encode_ids(target, [prompt["prompt_ids"] for prompt in written])
    sampling = e3.Sampling.make(len(written), eos_ids=target.eos_ids)
    plain, *drafted = both_ways(ids, lengths, e3.row_keys(0, len(written)), sampling, (draft, fp8_draft))
    for out in (plain, *drafted):
        for b, prompt in enumerate(written):
            n = int(out.lengths[b])
            assert np.asarray(out.tokens[b, :n]).tolist() == prompt["output_ids"], prompt["name"]
            assert int(out.finish_reason[b]) == {"stop": 1, "length": 2}[prompt["finish_reason"]]
    accepted = [int(out.stats.accepted.sum()) for out in drafted]
    assert min(accepted) > 0.8 * max(accepted) > 0, "a draft that never helps would pass the rest unseen"


def test_the_fp8_draft_widens_to_the_other_ones_program(target: Any, draft: Any, fp8_draft: Any) -> None:
    narrow = e3.load_draft("smollm2-135m-eagle3-fp8", target, widen=False)
    formats = [weight.format for weight in named_weights(narrow.params).values()]
    assert formats.count("fp8_channel") == 7 and narrow.model.config.weights.activations
    assert fp8_draft.model == draft.model
    wide, rounded = (named_weights(loaded.params) for loaded in (draft, fp8_draft))
    same = {path for path in wide if np.array_equal(wide[path].value, rounded[path].value)}
    assert same == {path for path in wide if path.partition("/")[0] not in ("attention", "mlp")}


def test_sampled_text_is_the_same_with_and_without_the_draft(
    written: list[dict[str, Any]], target: Any, both_ways: Any
) -> None:
    ids, lengths = e3.encode_ids(target, [prompt["prompt_ids"] for prompt in written])
    sampling = e3.Sampling.make(
        len(written),
        temperature=[0.7, 1.3, 0.7, 0.0, 1.0, 0.7],
        top_k=[0, 50, 0, 0, 0, 20],
        top_p=[1.0, 1.0, 0.9, 1.0, 0.8, 1.0],
        min_p=[0.0, 0.0, 0.0, 0.0, 0.05, 0.0],
        repetition_penalty=[1.0, 1.0, 1.2, 1.1, 1.0, 1.0],
        logit_bias=[{}, {}, {}, {28: 2.0}, {}, {}],
        eos_ids=target.eos_ids,
    )
    for seed in range(2):
        keys = e3.row_keys(seed, len(written))
        plain, speculative = both_ways(ids, lengths, keys, sampling)

        def margin(*row: Any) -> float:
            return decision_margin(target.model, target.params, CONFIG, 1e-3, *row)

        report = compare(plain, speculative, margin, ids, lengths, keys, sampling, 1e-3)
        assert report.ok, [row for row in report.rows if not row.equal]
        assert sum(not row.equal for row in report.rows) <= 1
        assert np.asarray(speculative.stats.accepted).sum() > 0
