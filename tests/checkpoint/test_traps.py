"""Drafts in shapes that other engines stumbled over, against the plain restatement."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import plain_draft
import pytest
from loading import DRAFTS, TARGETS, draft, edited, expected, put, target, tensors_of
from safetensors.numpy import save_file

from eagle3_jax.api import score_draft
from eagle3_jax.checkpoint.drafts import load_draft
from eagle3_jax.errors import Eagle3Error

A, C, D = DRAFTS / "a_safeailab", DRAFTS / "c_eagle31", DRAFTS / "d_fullvocab"
IDS = "eagle_aux_hidden_state_layer_ids"


def random_draft(folder: Path, width: int, taps: list[int]) -> dict[str, np.ndarray]:
    """Write a draft of llama_tied (V 96, Ht 32, N 7) with layer ids given as hs indices; returns its tensors."""
    rng, heads, mlp = np.random.default_rng(width), 4, 40
    shapes = {
        "fc.weight": (width, len(taps) * 32),
        "embed_tokens.weight": (96, width),
        "norm.weight": (width,),
        "lm_head.weight": (96, width),
        **{f"layers.0.self_attn.{x}_proj.weight": (heads * 8, 2 * width) for x in "qkv"},
        "layers.0.self_attn.o_proj.weight": (width, heads * 8),
        **{f"layers.0.mlp.{x}_proj.weight": (mlp, width) for x in ("gate", "up")},
        "layers.0.mlp.down_proj.weight": (width, mlp),
        **{f"layers.0.{x}.weight": (width,) for x in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
    }
    tensors = {
        name: (0.3 * rng.normal(size=shape) if len(shape) == 2 else rng.uniform(0.5, 1.5, shape)).astype(np.float32)
        for name, shape in shapes.items()
    }
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    config = {
        "num_attention_heads": heads,
        "rms_norm_eps": 1e-5,
        IDS: taps,
        "eagle_config": {IDS: [k - 1 for k in taps]},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


def check_logits(folder: Path, tensors: dict[str, np.ndarray], taps: list[int]) -> None:
    hs, x = expected(TARGETS / "llama_tied")["hs"], expected(A)
    features = np.concatenate([hs[k] for k in taps], axis=-1)
    loaded = load_draft(folder, target("llama_tied"))
    assert loaded.model.config.taps == tuple(taps)
    config: dict[str, Any] = {**json.loads((folder / "config.json").read_text()), "rope_theta": 10000.0}
    config["num_key_value_heads"] = config["num_attention_heads"]
    g = plain_draft.fused(tensors, config, features[0])
    y = plain_draft.hidden(tensors, config, g, x["next_ids"][0], tensors["embed_tokens.weight"])
    plain = plain_draft.logits(tensors, config, y)
    np.testing.assert_allclose(np.asarray(score_draft(loaded, features, x["next_ids"]))[0], plain, atol=2e-4)


def test_fc_runs_though_its_input_is_as_wide_as_the_draft(tmp_path: Path) -> None:
    check_logits(tmp_path, random_draft(tmp_path, 96, [2, 3, 5]), [2, 3, 5])


@pytest.mark.parametrize("taps", [[4], [2, 5], [1, 2, 4, 6, 7]])
def test_any_number_of_taps(taps: list[int], tmp_path: Path) -> None:
    check_logits(tmp_path, random_draft(tmp_path, 32, taps), taps)


def test_the_drafts_own_context_limits_nothing(tmp_path: Path) -> None:
    """24 positions, of which the draft's config says that it has 8."""
    loaded = load_draft(edited(A, tmp_path, config=put("max_position_embeddings", 8)), target("llama_tied"))
    x = expected(A)
    np.testing.assert_allclose(score_draft(loaded, x["features"], x["next_ids"]), x["logits"], atol=2e-4)


def test_a_padded_embedding_is_refused(tmp_path: Path) -> None:
    def pad(tensors: dict) -> None:
        tensors["embed_tokens.weight"] = np.pad(tensors["embed_tokens.weight"], ((0, 32), (0, 0)))

    with pytest.raises(Eagle3Error, match=r"embed_tokens.weight has shape \(128, 32\); .* needs \(96, 32\)"):
        load_draft(edited(D, tmp_path, pad), target("llama_tied"))


def test_norm_output_without_fc_norm_is_warned_of(tmp_path: Path) -> None:
    loaded = load_draft(edited(D, tmp_path, config=put("norm_output", True)), target("llama_tied"))
    assert loaded.model.config.norm_output
    assert any("norm_output" in w and "overrides={'norm_output': False}" in w for w in loaded.warnings)
    assert not any("norm_output" in warning for warning in draft("c_eagle31").warnings)
    told = load_draft(tmp_path, target("llama_tied"), {"norm_output": False})
    assert told.model == draft("d_fullvocab").model and told.warnings == ()


def test_the_files_head_wins_over_a_tie(tmp_path: Path) -> None:
    loaded = load_draft(edited(D, tmp_path, config=put("tie_word_embeddings", True)), target("llama_tied"))
    head = np.asarray(loaded.params["head"]["weight"].value)
    stored = tensors_of(D)["lm_head.weight"]
    np.testing.assert_array_equal(head if head.shape == stored.shape else head.T, stored)
    assert any("ties the head" in warning for warning in loaded.warnings)
