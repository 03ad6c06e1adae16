"""DeepSeek-V3's and Kimi's checkpoints: spellings of the config, prefixes, what is passed over, stop ids, sizes."""

import dataclasses
import json
import logging
import math
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from loading import TARGETS, drop, edited, put, target, tensors_of

from eagle3_jax.checkpoint.names import abstract_params
from eagle3_jax.checkpoint.orbax import is_orbax_folder
from eagle3_jax.checkpoint.registry import entries
from eagle3_jax.checkpoint.targets import load_target, save_target_orbax
from eagle3_jax.config import DeepseekConfig, parse_deepseek_v3
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.models.deepseek import Deepseek
from eagle3_jax.quant.weight import named_weights

GROUPED, KIMI = TARGETS / "deepseek_v3_grouped", TARGETS / "deepseek_v3_kimi"


def fields(folder: Path, file: str = "config.json") -> dict[str, Any]:
    return json.loads((folder / file).read_text())


def kimi_k25() -> dict[str, Any]:
    """Kimi-K2.5's spelling: the text model within, with the defaults that old transformers writes there."""
    text = {**fields(KIMI, "config.public.json"), "pruned_heads": {}, "repetition_penalty": 1.0}
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "media_placeholder_token_id": 117,
        "use_unified_vision_chunk": True,
        "video_placeholder": "<|video|>",
        "eos_token_id": 119,
        "tie_word_embeddings": False,
        "vision_config": {"hidden_size": 12, "patch_size": 14},
        "text_config": text,
    }


@pytest.mark.parametrize("folder", [GROUPED, KIMI], ids=lambda folder: folder.name)
def test_both_spellings_read_alike(folder: Path) -> None:
    public = fields(folder, "config.public.json")
    parsed = parse_deepseek_v3(fields(folder), "config.json")
    assert parse_deepseek_v3(public, "config.public.json") == parsed
    assert (parsed.family, parsed.tied, parsed.mtp_layers, parsed.interleaved) == ("deepseek_v3", False, 0, True)
    assert parsed.num_kv_heads == parsed.num_heads and parsed.head_dim == public["v_head_dim"]


def test_the_text_model_of_kimi_k25_reads_as_itself() -> None:
    assert parse_deepseek_v3(kimi_k25(), "config.json") == parse_deepseek_v3(fields(KIMI), "config.json")


def test_what_the_grouped_config_says() -> None:
    parsed = parse_deepseek_v3(fields(GROUPED), "config.json")
    moe, rope = parsed.moe, parsed.rope
    assert (moe.num_experts, moe.top_k, moe.groups, moe.top_groups, moe.scaling) == (8, 2, 2, 1, 1.8)
    assert (moe.scoring, moe.normalize, moe.correction_bias, moe.intermediate_size) == ("sigmoid", True, True, 16)
    assert (parsed.q_rank, parsed.kv_rank, parsed.nope_dim, parsed.rope_dim) == (20, 24, 10, 12)
    assert (parsed.dense_layers, parsed.shared_size, parsed.cache_row) == (1, 32, (1, 36))
    assert (rope.kind, rope.factor, rope.beta_fast, rope.mscale, rope.mscale_all_dim) == ("yarn", 20.0, 16.0, 1.0, 0.8)
    assert parsed.latent_norm_eps == 1e-6


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("architectures", ["DeepseekV2ForCausalLM"], "architectures"),
        ("model_type", "deepseek_v2", "model_type"),
        ("scoring_func", "softmax", "scoring_func"),
        ("topk_method", "group_limited_greedy", "topk_method"),
        ("moe_layer_freq", 2, "moe_layer_freq"),
        ("attention_bias", True, "attention_bias"),
        ("num_key_value_heads", 2, "num_key_value_heads"),
        ("qk_head_dim", 23, "qk_head_dim"),
        ("head_dim", 24, "head_dim"),
        ("qk_rope_head_dim", 15, "qk_head_dim|odd"),
        ("hidden_act", "gelu", "hidden_act"),
        ("num_nextn_predict_layers", 10**6, "64 at most"),
        ("index_n_heads", 4, "index_n_heads may change the result"),
        ("rope_parameters", {"rope_type": "yarn", "factor": 8.0}, "rope_theta"),
        ("kv_lora_rank", None, "kv_lora_rank is missing"),
        ("routed_scaling_factor", None, "routed_scaling_factor"),
        ("rms_norm_eps", None, "rms_norm_eps"),
        ("topk_group", 2, "groups"),
    ],
)
def test_other_maths_is_refused(name: str, value: object, match: str) -> None:
    with pytest.raises(Eagle3Error, match=match) as caught:
        parse_deepseek_v3({**fields(KIMI), name: value}, "config.json")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (put("text_config", None), "text_config is None; an object"),
        (put("tie_word_embeddings", True), "outside of text_config"),
        (put("logit_scale", 2.0), "logit_scale may change the result"),
        (put("model_type", "kimi_k3"), "model_type"),
        (lambda config: config["text_config"].update(norm_offset=1.0), "text_config: field.* norm_offset"),
    ],
)
def test_other_wrappers_are_refused(edit: Any, match: str) -> None:
    config = kimi_k25()
    edit(config)
    with pytest.raises(Eagle3Error, match=match):
        parse_deepseek_v3(config, "config.json")


def test_every_tensor_arrives() -> None:
    loaded, files = target("deepseek_v3_grouped"), tensors_of(GROUPED)
    weights = named_weights(loaded.params)
    # Two weights are made of each of the five kv_b; the experts of the four sparse layers are stacked.
    assert len(weights) == len(files) + 5 - 4 * 3 * 7
    kv_b = files["model.layers.2.self_attn.kv_b_proj.weight"].reshape(2, 10 + 14, 24)
    attention = loaded.params["layers_2"]["attention"]
    np.testing.assert_array_equal(attention["k_b"]["weight"].value, kv_b[:, :10].reshape(20, 24))
    np.testing.assert_array_equal(attention["v_b"]["weight"].value, kv_b[:, 10:].reshape(28, 24))
    np.testing.assert_array_equal(
        weights["layers_3/shared/down/weight"].value, files["model.layers.3.mlp.shared_experts.down_proj.weight"].T
    )
    np.testing.assert_array_equal(
        weights["layers_3/mlp/router/correction"].value, files["model.layers.3.mlp.gate.e_score_correction_bias"]
    )
    up = files["model.layers.3.mlp.experts.5.up_proj.weight"]
    np.testing.assert_array_equal(weights["layers_3/mlp/experts/up/weight"].expert(5).value, up.T)


def renamed(body: str, head: str) -> Any:
    """An edit to another prefix of the decoder's tensors, beside those of a vision tower."""

    def edit(tensors: dict[str, np.ndarray]) -> None:
        for name in list(tensors):
            new = f"{head}{name}" if name.startswith("lm_head") else body + name.removeprefix("model.")
            tensors[new] = tensors.pop(name)
        root = "model." if body == "model.language_model." else ""
        tensors[f"{root}vision_tower.encoder.blocks.0.wqkv.weight"] = np.full((2, 2), np.nan, np.float32)
        tensors[f"{root}mm_projector.proj.0.weight"] = np.ones((2, 2), np.float32)

    return edit


@pytest.mark.parametrize(
    ("body", "head"), [("language_model.model.", "language_model."), ("model.language_model.", ""), ("model.", "")]
)
def test_prefixes_and_vision(body: str, head: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = edited(KIMI, tmp_path, tensors=renamed(body, head))
    (folder / "config.json").write_text(json.dumps(kimi_k25()))
    with caplog.at_level(logging.INFO, "eagle3_jax"):
        loaded = load_target(folder)
    assert loaded.model == target("deepseek_v3_kimi").model
    jax.tree.map(np.testing.assert_array_equal, loaded.params, target("deepseek_v3_kimi").params)
    told = [record.message for record in caplog.records if "not read" in record.message]
    assert len(told) == 1 and "mm_projector.proj.0.weight is not needed" in told[0] and "1 more" in told[0]


def test_prediction_layers_are_passed_over_only_where_the_config_has_them(tmp_path: Path) -> None:
    def more(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.layers.4.eh_proj.weight"] = np.ones((2, 2), np.float32)

    load_target(edited(KIMI, tmp_path / "a", tensors=more, config=put("num_nextn_predict_layers", 1)))
    with pytest.raises(Eagle3Error, match=r"model\.layers\.4\.eh_proj\.weight is not part of the model"):
        load_target(edited(KIMI, tmp_path / "b", tensors=more))
    # Announced and absent, as some publish them: nothing of them is needed.
    load_target(edited(KIMI, tmp_path / "c", config=put("num_nextn_predict_layers", 1)))


def test_a_missing_tensor_is_refused(tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    with pytest.raises(Eagle3Error, match=f"tensor {name} is missing"):
        load_target(edited(KIMI, tmp_path, tensors=drop(name)))


def test_both_end_tokens_stop(tmp_path: Path) -> None:
    folder = edited(KIMI, tmp_path)
    (folder / "config.json").write_text(json.dumps(kimi_k25()))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 118}))
    assert load_target(folder).eos_ids == (118, 119)


def test_orbax_round_trip(tmp_path: Path) -> None:
    loaded = target("deepseek_v3_grouped")
    save_target_orbax(loaded, tmp_path / "saved")
    assert is_orbax_folder(tmp_path / "saved")
    again = load_target(tmp_path / "saved")
    assert again.model == loaded.model and again.eos_ids == loaded.eos_ids
    jax.tree.map(np.testing.assert_array_equal, again.params, loaded.params)


def test_queries_without_a_latent_of_their_own(tmp_path: Path) -> None:
    def direct(tensors: dict[str, np.ndarray]) -> None:
        for i in range(4):
            a, b = (tensors.pop(f"model.layers.{i}.self_attn.q_{x}_proj.weight") for x in "ab")
            tensors.pop(f"model.layers.{i}.self_attn.q_a_layernorm.weight")
            tensors[f"model.layers.{i}.self_attn.q_proj.weight"] = b @ a

    loaded = load_target(edited(KIMI, tmp_path, tensors=direct, config=put("q_lora_rank", None)))
    attention = loaded.params["layers_0"]["attention"]
    assert attention["q"]["weight"].shape == (32, 4 * 24) and "q_a" not in attention


def test_sizes_of_kimi_k25() -> None:
    """Its 1.026e12 weights, added up by hand; of which a token uses 31.7e9, without the embedding."""
    model = Deepseek(
        dataclasses.replace(parse_deepseek_v3(entries()["kimi-k2.5"].config(), "config"), dtype="bfloat16")
    )
    params = abstract_params(model)

    def count(tree: Any) -> int:
        return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))

    hidden, embedding = 7168, 163840 * 7168
    attention = hidden * (1536 + 576 + 64 * 128) + 1536 * 64 * 192 + 512 * 64 * 256 + 1536 + 512
    expert, norms = 3 * hidden * 2048, 2 * hidden
    dense = attention + norms + 3 * hidden * 18432
    sparse = attention + norms + 385 * expert + 384 * hidden + 384
    assert [count(params[f"layers_{i}"]) for i in (0, 1, 60)] == [dense, sparse, sparse]
    total = count(params)
    assert total == 2 * embedding + hidden + dense + 60 * sparse
    assert total == pytest.approx(1.026e12, rel=5e-4)
    active = total - embedding - 60 * (384 - 8) * expert
    assert active == pytest.approx(31.7e9, rel=2e-3)
    assert model.config.cache_row == (1, 576)
    with pytest.raises(Eagle3Error, match=r"hf download moonshotai/Kimi-K2\.5"):
        load_target("kimi-k2.5")


def test_narrow_halves_of_kv_b_are_refused() -> None:
    config: DeepseekConfig = target("deepseek_v3_kimi").model.config  # pyright: ignore[reportAssignmentType]
    weights = dataclasses.replace(config.weights, exceptions=(("layers_1/attention/k_b/weight", "fp8_channel", "nk"),))
    with pytest.raises(Eagle3Error, match="layers_1/attention/k_b/weight is fp8_channel; use f32, bf16, f16"):
        abstract_params(Deepseek(dataclasses.replace(config, weights=weights)))


def test_public_folders_load_as_they_are(tmp_path: Path) -> None:
    shutil.copytree(KIMI, tmp_path / "kimi")
    shutil.copyfile(KIMI / "config.public.json", tmp_path / "kimi" / "config.json")
    assert load_target(tmp_path / "kimi").model == target("deepseek_v3_kimi").model
