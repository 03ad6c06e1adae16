"""Drafts with latent attention (MLA drafts): loading, saving, what they compute, and training."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import plain_draft
import pytest
from loading import Edit, change, drop, edited, put, target, tensors_of
from safetensors.numpy import save_file

from eagle3_jax.api import score_draft
from eagle3_jax.checkpoint.convert import convert_draft
from eagle3_jax.checkpoint.drafts import Draft, load_draft, save_draft
from eagle3_jax.config import Eagle3LatentConfig
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.models.eagle3 import Eagle3, shared_weights
from eagle3_jax.training.initial import init_draft
from eagle3_jax.training.loss import Batch, LossConfig, ttt_loss, ttt_outputs

ON = "deepseek_v3_kimi"
VOCAB, DRAFT_VOCAB, WIDTH, INNER, HEADS = 120, 50, 32, 48, 3
NOPE, ROPE, VALUE, RANK, Q_RANK = 8, 4, 6, 10, 14
PUBLISHED = {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"],
    "model_type": "kimi_k2",
    "attention_bias": False,
    "aux_loss_alpha": 0.001,
    "bos_token_id": 118,
    "draft_vocab_size": DRAFT_VOCAB,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "use_aux_hidden_state": True},
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "kv_lora_rank": RANK,
    "max_position_embeddings": 2048,
    "moe_intermediate_size": 28,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": HEADS,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 1,
    "num_key_value_heads": HEADS,
    "num_nextn_predict_layers": 0,
    "pruned_heads": {},
    "q_lora_rank": Q_RANK,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "rms_norm_eps": 1e-3,
    "rope_scaling": {
        "type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
    "rope_theta": 100.0,
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "torch_dtype": "float32",
    "v_head_dim": VALUE,
    "vocab_size": VOCAB,
}
"""A config.json with the fields of those that ModelOpt and TorchSpec write for Kimi's drafts, in small."""


def tensors(layers: int, q_rank: int | None) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(layers)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (1.5 * rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    def vector(size: int) -> np.ndarray:
        return rng.uniform(0.5, 1.5, size).astype(np.float32)

    kept = np.sort(rng.permutation(VOCAB)[:DRAFT_VOCAB])
    made = {
        "fc.weight": matrix(WIDTH, 3 * WIDTH),
        "norm.weight": vector(WIDTH),
        "lm_head.weight": matrix(DRAFT_VOCAB, WIDTH),
        "d2t": kept - np.arange(DRAFT_VOCAB),
        "layers.0.hidden_norm.weight": vector(WIDTH),
    }
    for i in range(layers):
        at, inputs = f"layers.{i}.", 2 * WIDTH if i == 0 else WIDTH
        queries, attention = HEADS * (NOPE + ROPE), f"{at}self_attn."
        made |= {f"{at}{name}.weight": vector(WIDTH) for name in ("input_layernorm", "post_attention_layernorm")}
        if q_rank is None:
            made[f"{attention}q_proj.weight"] = matrix(queries, inputs)
        else:
            made[f"{attention}q_a_proj.weight"] = matrix(q_rank, inputs)
            made[f"{attention}q_a_layernorm.weight"] = vector(q_rank)
            made[f"{attention}q_b_proj.weight"] = matrix(queries, q_rank)
        made[f"{attention}kv_a_proj_with_mqa.weight"] = matrix(RANK + ROPE, inputs)
        made[f"{attention}kv_a_layernorm.weight"] = vector(RANK)
        made[f"{attention}kv_b_proj.weight"] = matrix(HEADS * (NOPE + VALUE), RANK)
        made[f"{attention}o_proj.weight"] = matrix(WIDTH, HEADS * VALUE)
        made |= {f"{at}mlp.{name}_proj.weight": matrix(INNER, WIDTH) for name in ("gate", "up")}
        made[f"{at}mlp.down_proj.weight"] = matrix(WIDTH, INNER)
    return made


def written(folder: Path, layers: int = 1, q_rank: int | None = Q_RANK, **fields: Any) -> Path:
    folder.mkdir()
    save_file(tensors(layers, q_rank), folder / "model.safetensors")
    config = PUBLISHED | {"num_hidden_layers": layers, "q_lora_rank": q_rank} | fields
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("mla") / "published")


@pytest.fixture(scope="module")
def draft(folder: Path) -> Draft:
    return load_draft(folder, target(ON))


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def test_settings_come_from_the_config_and_fields_of_experts_say_nothing(draft: Draft) -> None:
    c = draft.model.config
    assert isinstance(c, Eagle3LatentConfig) and c.taps == (2, 3, 4)
    assert (c.q_rank, c.kv_rank, c.nope_dim, c.rope_dim, c.head_dim) == (Q_RANK, RANK, NOPE, ROPE, VALUE)
    assert (c.num_heads, c.num_kv_heads, c.cache_row, c.rotary_dim) == (HEADS, HEADS, (1, RANK + ROPE), ROPE)
    assert c.interleaved and c.latent_norm_eps == c.rms_norm_eps == 1e-3
    assert (c.rope.kind, c.rope.theta, c.rope.mscale, c.rope.mscale_all_dim) == ("yarn", 100.0, 1.0, 0.7)
    assert not any("unknown" in warning for warning in draft.warnings)


LENGTH = 14
RNG = np.random.default_rng(5)
FEATURES = RNG.standard_normal((1, LENGTH, 3 * WIDTH)).astype(np.float32)
NEXT_IDS = RNG.integers(0, VOCAB, (1, LENGTH + 2)).astype(np.int32)


def embedding() -> np.ndarray:
    return np.asarray(target(ON).params["embed"]["weight"].outputs(jnp.arange(VOCAB)))


def hidden(folder: Path, g: np.ndarray, next_ids: np.ndarray) -> np.ndarray:
    return plain_draft.hidden(tensors_of(folder), config_of(folder), g, next_ids, embedding())


@pytest.mark.parametrize("expand_from", [10_000, 1], ids=["absorbed", "direct"])
@pytest.mark.parametrize("kind", ["published", "two layers, plain RoPE, no latent of queries"])
def test_logits_are_those_of_a_plain_restatement(kind: str, expand_from: int, folder: Path, tmp_path: Path) -> None:
    if kind != "published":
        folder = written(tmp_path / "other", 2, None, rope_scaling=None, norm_before_residual=True)
    loaded = load_draft(folder, target(ON))
    loaded = dataclasses.replace(
        loaded, model=Eagle3(dataclasses.replace(loaded.model.config, expand_from=expand_from))
    )
    got = score_draft(loaded, FEATURES, NEXT_IDS[:, :LENGTH])[0]
    files, config = tensors_of(folder), config_of(folder)
    g = plain_draft.fused(files, config, FEATURES[0])
    expected = plain_draft.logits(files, config, hidden(folder, g, NEXT_IDS[0, :LENGTH]))
    assert np.abs(got - expected).max() < 2e-4 < np.ptp(expected) / 1e3


def test_what_is_saved_is_what_was_loaded(draft: Draft, folder: Path, tmp_path: Path) -> None:
    save_draft(draft, tmp_path / "saved", dtype="float32")
    convert_draft(folder, tmp_path / "converted", "vllm")
    files = tensors_of(folder)
    for name in ("saved", "converted"):
        again = tensors_of(tmp_path / name)
        assert again.pop("t2d").sum() == DRAFT_VOCAB and again.keys() == files.keys()
        for tensor, value in files.items():
            np.testing.assert_array_equal(again[tensor], value, err_msg=tensor)
        assert config_of(tmp_path / name)["architectures"] == PUBLISHED["architectures"]
        loaded = load_draft(tmp_path / name, target(ON))
        assert loaded.model.config == draft.model.config
    for dialect in ("safeailab", "speculators"):
        with pytest.raises(Eagle3Error, match=f"dialect {dialect} has no latent attention"):
            save_draft(draft, tmp_path / "refused", dialect=dialect)
    assert not (tmp_path / "refused").exists()


FAULTS: dict[str, tuple[Edit, Edit, str]] = {
    "no RoPE": (dict, put("mla_use_nope", True), "mla_use_nope is True"),
    "biases": (dict, put("attention_bias", True), "attention_bias is True"),
    "fewer key-value heads": (dict, put("num_key_value_heads", 1), "num_key_value_heads is 1"),
    "odd RoPE": (dict, put("qk_rope_head_dim", 5), "qk_rope_head_dim 5 is odd"),
    "no rank": (dict, drop("kv_lora_rank"), "means an MLA draft, but .* has no kv_lora_rank"),
    "other rank": (dict, put("kv_lora_rank", 8), r"shape \(14, 64\)"),
    "Llama": (dict, put("architectures", ["LlamaForCausalLMEagle3"]), "is not supported of an MLA draft"),
    "heads": (dict, put("num_attention_heads", 2), "num_key_value_heads is 3"),
    "speculators": (dict, put("speculators_model_type", "eagle3"), "is not supported of an MLA draft"),
    "pruned": (dict, put("pruned_heads", {"0": [1]}), "pruned_heads"),
    "a training checkpoint": (
        lambda t: t.update(
            {"layers.0.self_attn.kv_a_proj.weight": t.pop("layers.0.self_attn.kv_a_proj_with_mqa.weight")}
        ),
        dict,
        "means an MLA draft, but .* has no tensor kv_a_proj_with_mqa",
    ),
    "kv_b short": (
        change("layers.0.self_attn.kv_b_proj.weight", lambda x: x[:-1]),
        dict,
        "kv_b_proj.weight has shape",
    ),
    "kv_b missing": (drop("layers.0.self_attn.kv_b_proj.weight"), dict, "kv_b_proj"),
    "experts": (put("layers.0.mlp.experts.0.up_proj.weight", np.ones((4, 4), np.float32)), dict, r"experts\.0"),
    "norms of heads": (put("layers.0.self_attn.q_norm.weight", np.ones(4, np.float32)), dict, "q_norm"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_contradicts_itself_is_refused(fault: str, folder: Path, tmp_path: Path) -> None:
    tensor_edit, config_edit, match = FAULTS[fault]
    with pytest.raises(Eagle3Error, match=match) as caught:
        load_draft(edited(folder, tmp_path / "faulty", tensor_edit, config_edit), target(ON))
    assert "\n" not in str(caught.value)


def batch() -> Batch:
    logits = RNG.standard_normal((1, LENGTH, DRAFT_VOCAB)).astype(np.float32)
    ones = np.ones((1, LENGTH), np.int32)
    return Batch(
        features=jnp.asarray(FEATURES),
        token_ids=jnp.asarray(NEXT_IDS[:, :LENGTH]),
        target_logits=jnp.asarray(logits),
        target_argmax=jnp.asarray(NEXT_IDS[:, 1 : LENGTH + 1]),
        loss_mask=jnp.asarray(ones, bool),
        segment_ids=jnp.asarray(ones * 0),
    )


def test_training_unrolls_the_chain_and_reaches_every_weight(draft: Draft, folder: Path) -> None:
    """Step 1 sees the latents of step 0 up to its own row, and its own: what the cache of a chain would hold."""
    shared, rows = shared_weights(target(ON).params), batch()
    files, config = tensors_of(folder), config_of(folder)
    g = plain_draft.fused(files, config, FEATURES[0])
    ids = NEXT_IDS[0]
    first = hidden(folder, g, ids[:LENGTH])

    @jax.jit
    def run(params: Any) -> tuple[Any, Any]:
        trained = {name: value for name, value in params.items() if name != "target_ids"}
        loss = lambda trained: ttt_loss(  # noqa: E731
            draft.model, trained | {"target_ids": params["target_ids"]}, shared, rows, LossConfig(steps=2)
        )[0]
        return ttt_outputs(draft.model, params, shared, rows, 2), jax.grad(loss)(trained)

    (y0, y1), gradients = run(draft.params)
    assert np.abs(y0[0] - first).max() < 2e-4
    for t in (0, 5, LENGTH - 3):
        chained = hidden(folder, np.concatenate([g[: t + 1], first[t : t + 1]]), ids[: t + 2])[-1]
        assert np.abs(y1[0, t] - chained).max() < 5e-4
    assert all(np.abs(np.asarray(x)).max() > 0 for x in jax.tree.leaves(gradients))


def test_a_fresh_draft_takes_what_fits_from_its_target(draft: Draft) -> None:
    """Its attention reads twice the width and stays random; the widths of the MLPs differ here."""
    on = target(ON)
    params = init_draft(draft.model, jax.random.key(0), on.params, np.arange(DRAFT_VOCAB, dtype=np.int32), True)
    last = on.params["layers_3"]
    for ours, theirs in (("hidden_norm", "attention_norm"), ("mlp_norm", "mlp_norm")):
        np.testing.assert_array_equal(params[ours]["weight"].value, last[theirs]["weight"].value)
    assert jax.tree.map(jnp.shape, params["attention"]) == jax.tree.map(jnp.shape, draft.params["attention"])
