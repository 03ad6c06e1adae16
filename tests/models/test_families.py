"""Qwen3, Qwen3-MoE, MiniMax-M2 and gpt-oss against reference outputs, alone and with speculation."""

import dataclasses
import json
import re
import shutil
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from loading import TARGETS, expected, target
from xla import SHIPPED

from eagle3_jax.api import score
from eagle3_jax.checkpoint.families import FAMILIES, config_fields
from eagle3_jax.checkpoint.names import abstract_params
from eagle3_jax.checkpoint.targets import load_target
from eagle3_jax.config import Eagle3Config
from eagle3_jax.decoding.loop import Generation, generate, speculative_generate
from eagle3_jax.decoding.request import Chain, GenerationConfig
from eagle3_jax.decoding.sampling import Sampling, row_keys
from eagle3_jax.decoding.verify import compare, decision_margin
from eagle3_jax.models.eagle3 import Eagle3

NAMES = ("qwen3", "qwen3_moe", "minimax_m2", "gpt_oss")
each_family = pytest.mark.parametrize("name", NAMES)


@each_family
def test_logits_and_hidden_states_match_the_reference(name: str) -> None:
    x = expected(TARGETS / name)
    got = score(target(name), x["input_ids"])
    np.testing.assert_allclose(got.logits, x["logits"], atol=2e-4, rtol=0)
    np.testing.assert_allclose(got.hidden_states, x["hs"], atol=2e-4, rtol=0)


@each_family
def test_the_public_spelling_is_the_same_model(name: str, tmp_path: Path) -> None:
    shutil.copyfile(TARGETS / name / "model.safetensors", tmp_path / "model.safetensors")
    shutil.copyfile(TARGETS / name / "config.public.json", tmp_path / "config.json")
    public, ours = load_target(tmp_path), target(name)
    assert public.model == ours.model and public.eos_ids == ours.eos_ids
    jax.tree.map(np.testing.assert_array_equal, public.params, ours.params)


@each_family
def test_a_written_config_reads_as_the_same(name: str) -> None:
    config = target(name).model.config
    fields = json.loads(json.dumps(config_fields(config)))
    parsed = FAMILIES[name].parse(fields, "x")
    assert dataclasses.replace(parsed, weights=config.weights) == config


NEW, BATCH = 24, 8
CONFIG = GenerationConfig(max_new_tokens=NEW, transforms=(), prefill_chunk=5, block_size=8)
plain_run = jax.jit(generate, static_argnames=("model", "config"))
drafted_run = jax.jit(speculative_generate, static_argnames=("target_model", "draft_model", "config"))


def prompts(name: str) -> tuple[jax.Array, jax.Array, Sampling, jax.Array]:
    """The reference's two prompts, greedy, and six others of all lengths, of which every other is drawn."""
    x, rng = expected(TARGETS / name), np.random.default_rng(0)
    ids = rng.integers(0, 100, (BATCH, 12))
    ids[:2, :9] = x["greedy_prompt_ids"]
    lengths = jnp.asarray([9, 9, 1, 3, 5, 7, 10, 12], jnp.int32)
    sampling = Sampling.make(BATCH, temperature=[0.0, 0.0, 0.0, 0.7, 0.0, 0.7, 0.0, 0.7])
    return jnp.asarray(ids, jnp.int32), lengths, sampling, row_keys(0, BATCH)


@pytest.fixture(scope="module", params=NAMES)
def plain(request: pytest.FixtureRequest) -> tuple[str, Generation]:
    """What each family generates on its own."""
    loaded = target(request.param)
    ids, lengths, sampling, keys = prompts(request.param)
    return request.param, plain_run(loaded.params, ids, lengths, keys, sampling, model=loaded.model, config=CONFIG)


def test_greedy_ids_match_the_reference(plain: tuple[str, Generation]) -> None:
    name, got = plain
    np.testing.assert_array_equal(got.tokens[:2], expected(TARGETS / name)["greedy_ids"])


@pytest.mark.parametrize("drafts", [1, 3])
def test_speculation_changes_nothing(plain: tuple[str, Generation], drafts: int) -> None:
    """The draft's own cache and features run along, but half-right proposals make every length of run occur."""
    name, alone = plain
    loaded, (ids, lengths, sampling, keys) = target(name), prompts(name)
    drafter, draft_params = steered(name)
    rows = tiny.whole_rows(ids, lengths, np.asarray(alone.tokens))
    wrong = np.random.default_rng(drafts).random(rows.shape) < 0.3
    proposals = jnp.asarray(np.where(wrong, (rows + 1) % 100, rows), jnp.int32)
    config = dataclasses.replace(CONFIG, speculation=Chain(drafts))
    got = drafted_run(
        loaded.params,
        (draft_params, proposals),
        ids,
        lengths,
        keys,
        sampling,
        target_model=loaded.model,
        draft_model=drafter,
        config=config,
    )
    margin = partial(decision_margin, loaded.model, loaded.params, CONFIG, 1e-3)
    report = compare(alone, got, margin, ids, lengths, keys, sampling, 1e-3)
    assert report.ok and sum(not row.equal for row in report.rows) <= 1, report.rows
    assert np.all(np.sum(got.stats.accepted_per_position, axis=0) > 0)
    assert np.sum(got.stats.accepted) < np.sum(got.stats.drafted)


def test_no_loop_copies_or_converts_a_stack_of_experts(plain: tuple[str, Generation]) -> None:
    """Neither the loop over rounds nor that over tiles: it would read all experts for a single row."""
    name, _ = plain
    loaded, (ids, lengths, sampling, keys) = target(name), prompts(name)
    if loaded.model.config.moe is None:  # type: ignore[attr-defined]
        return
    arguments = (loaded.params, ids, lengths, keys, sampling)
    hlo = plain_run.lower(*arguments, model=loaded.model, config=CONFIG).compile(compiler_options=SHIPPED).as_text()
    experts = loaded.params["layers_0"]["mlp"]["experts"]
    shapes = {",".join(map(str, experts[part]["weight"].value.shape)) for part in ("gate", "down")}
    made = set(re.findall(rf"= f32\[(?:{'|'.join(shapes)})\]\S* ([a-z-]+)\(", hlo))
    assert "parameter" in made and made <= {"parameter", "get-tuple-element", "bitcast"}


@cache
def steered(name: str) -> tuple[tiny.Steered, Any]:
    """An EAGLE-3 draft of random weights that taps the first, a middle and the last hidden state."""
    loaded = target(name)
    c = loaded.model.config
    config = Eagle3Config(
        vocab_size=c.vocab_size,
        draft_vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        target_hidden_size=c.hidden_size,
        intermediate_size=16,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        taps=(0, 2, c.num_layers),
    )
    model, rng = Eagle3(config), np.random.default_rng(1)
    return tiny.Steered(model), jax.tree.map(
        lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape) * 0.3, leaf.dtype), abstract_params(model)
    )
