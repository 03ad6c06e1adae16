"""The families' checkpoints: what their configs may say, how experts are stacked, and public models' sizes."""

import json
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from loading import TARGETS, Edit, change, drop, edited, poison, put, target, tensors_of

from eagle3_jax.checkpoint.families import FAMILIES, family_of
from eagle3_jax.checkpoint.names import abstract_params
from eagle3_jax.checkpoint.registry import entries
from eagle3_jax.checkpoint.targets import load_target, save_target_orbax
from eagle3_jax.config import DecoderConfig
from eagle3_jax.errors import Eagle3Error

NAMES = ("qwen3", "qwen3_moe", "minimax_m2", "gpt_oss")


def parse(name: str, file: str = "config.json", **changes: Any) -> DecoderConfig:
    """A fixture's config with changes; a value of `...` removes the field."""
    fields = {**json.loads((TARGETS / name / file).read_text()), **changes}
    return FAMILIES[name].parse({key: value for key, value in fields.items() if value is not ...}, "config.json")


@pytest.mark.parametrize("name", NAMES)
def test_a_family_is_known_by_its_architecture_or_its_type(name: str) -> None:
    family = FAMILIES[name]
    assert family_of({"architectures": [family.architecture], "model_type": name}, "x") is family
    assert family_of({"model_type": name}, "x") is family
    # A mere fine-tune may call its type as it likes.
    assert family_of({"architectures": ["LlamaForCausalLM"], "model_type": "mistral"}, "x") is FAMILIES["llama"]
    assert family_of({}, "x") is FAMILIES["llama"]


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["GPT2LMHeadModel"]},
        {"architectures": ["Qwen3ForCausalLM", "X"]},
        {"architectures": []},
        {"model_type": "gpt2"},
    ],
    ids=str,
)
def test_other_families_are_refused_by_name(config: dict[str, Any]) -> None:
    with pytest.raises(Eagle3Error, match=r"is not supported; supported are .*Qwen3MoeForCausalLM"):
        family_of(config, "config.json")


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *[(name, {"rms_norm_eps": ...}, "rms_norm_eps") for name in NAMES],
    *[(name, {"head_dim": ...}, "head_dim is missing") for name in NAMES],
    *[(name, {"num_key_value_heads": ...}, "num_key_value_heads is missing") for name in NAMES],
    *[(name, {"rope_parameters": {"rope_type": "default"}}, "rope_theta") for name in NAMES],
    *[(name, {"num_key_value_heads": 5}, "cannot share 5") for name in NAMES],
    *[(name, {"hidden_act": "gelu"}, "hidden_act") for name in NAMES],
    *[(name, {"model_type": "llama"}, "model_type") for name in NAMES],
    *[(name, {"attention_window": 3, "qk_scale": 2.0}, "attention_window, qk_scale may change") for name in NAMES],
    *[(name, {"num_hidden_layers": 2**31 - 1}, "2147483647 layers are more than any model") for name in NAMES],
    *[(name, {"num_local_experts": 2**31 - 1}, "2147483647 experts are more") for name in NAMES[1:]],
    ("qwen3", {"use_sliding_window": True, "sliding_window": 4}, "use_sliding_window"),
    ("qwen3", {"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, "layer_types"),
    ("qwen3", {"num_experts": 8, "router_norm": True}, "router_norm"),
    ("qwen3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("qwen3", {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ("qwen3_moe", {"mlp_only_layers": [5]}, "mlp_only_layers"),
    ("qwen3_moe", {"mlp_only_layers": 1}, "mlp_only_layers"),
    ("qwen3_moe", {"num_local_experts": ...}, "num_experts is missing"),
    ("qwen3_moe", {"num_experts": 16}, "disagree"),
    ("qwen3_moe", {"num_experts_per_tok": 9}, "9 experts cannot be chosen from 8"),
    ("qwen3_moe", {"moe_intermediate_size": ...}, "moe_intermediate_size is missing"),
    ("minimax_m2", {"rope_parameters": {"rope_theta": 1e6}}, "rotary_dim is missing"),
    ("minimax_m2", {"rotary_dim": 6}, "disagree"),
    ("minimax_m2", {"rope_parameters": {"rope_theta": 1e6}, "rotary_dim": 14}, "more than the head's 12"),
    ("minimax_m2", {"rope_parameters": {"rope_theta": 1e6}, "rotary_dim": 3}, "rotary_dim 3 is odd"),
    ("minimax_m2", {"use_qk_norm": False}, "use_qk_norm"),
    ("minimax_m2", {"qk_norm_type": "per_head"}, "qk_norm_type"),
    ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func"),
    ("minimax_m2", {"use_routing_bias": False}, "use_routing_bias"),
    ("minimax_m2", {"shared_intermediate_size": 20}, "shared_intermediate_size"),
    ("minimax_m2", {"attn_type_list": [1, 1, 0, 1, 1]}, "attn_type_list"),
    ("gpt_oss", {"layer_types": ["sliding_attention"] * 3}, "each of 4 layers"),
    ("gpt_oss", {"layer_types": ...}, "layer_types"),
    ("gpt_oss", {"layer_types": ["chunked_attention"] * 4}, "layer_types"),
    ("gpt_oss", {"sliding_window": None}, "sliding_window is missing"),
    ("gpt_oss", {"swiglu_limit": ...}, "swiglu_limit"),
    ("gpt_oss", {"experts_per_token": 2}, "disagree"),
    ("gpt_oss", {"initial_context_length": 4096}, "initial_context_length"),
]


@pytest.mark.parametrize(("name", "changes", "match"), REFUSED, ids=str)
def test_other_maths_and_missing_fields_are_refused(name: str, changes: dict[str, Any], match: str) -> None:
    with pytest.raises(Eagle3Error, match=match) as caught:
        parse(name, **changes)
    assert str(caught.value).startswith("config.json: ") and "\n" not in str(caught.value)


def test_which_layers_of_qwen3_moe_are_dense() -> None:
    assert parse("qwen3_moe").dense_layers == (1,)  # type: ignore[attr-defined]
    every_other = parse("qwen3_moe", decoder_sparse_step=2, mlp_only_layers=[3])
    assert every_other.dense_layers == (0, 2, 3, 4)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", NAMES)
def test_orbax_folders_hold_every_family(name: str, tmp_path: Path) -> None:
    loaded = target(name)
    save_target_orbax(loaded, tmp_path / "saved")
    again = load_target(tmp_path / "saved")
    assert again.model == loaded.model and again.eos_ids == loaded.eos_ids
    jax.tree.map(np.testing.assert_array_equal, again.params, loaded.params)


def test_one_tensor_an_expert_becomes_one_stack() -> None:
    files, experts = tensors_of(TARGETS / "minimax_m2"), target("minimax_m2").params["layers_3"]["mlp"]["experts"]
    for ours, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
        stack = experts[ours]["weight"]
        assert stack.axes[0] == "experts" and stack.shape[0] == 8
        for e in range(8):
            stored = files[f"model.layers.3.block_sparse_moe.experts.{e}.{theirs}.weight"]
            np.testing.assert_array_equal(np.asarray(stack.value)[e], stored.T if stack.layout == "kn" else stored)


def test_gate_and_up_of_gpt_oss_come_apart() -> None:
    files, experts = tensors_of(TARGETS / "gpt_oss"), target("gpt_oss").params["layers_2"]["mlp"]["experts"]
    prefix = "model.layers.2.mlp.experts."
    for i, ours in enumerate(("gate", "up")):
        np.testing.assert_array_equal(experts[ours]["weight"].value, files[f"{prefix}gate_up_proj"][:, :, i::2])
        np.testing.assert_array_equal(experts[ours]["bias"].value, files[f"{prefix}gate_up_proj_bias"][:, i::2])
    np.testing.assert_array_equal(experts["down"]["weight"].value, files[f"{prefix}down_proj"])
    np.testing.assert_array_equal(experts["down"]["bias"].value, files[f"{prefix}down_proj_bias"])


EXPERT = "model.layers.2.mlp.experts.5.up_proj.weight"
FUSED = "model.layers.1.mlp.experts.gate_up_proj"
FAULTS: dict[str, tuple[str, Edit, str]] = {
    "no expert": ("qwen3_moe", drop(EXPERT), rf"tensor {EXPERT} is missing"),
    "an expert too many": (
        "qwen3_moe",
        put("model.layers.2.mlp.experts.8.up_proj.weight", np.ones((20, 32), np.float32)),
        r"experts\.8\.up_proj\.weight is not part",
    ),
    "transposed expert": ("qwen3_moe", change(EXPERT, np.transpose), r"up_proj.weight has shape \(32, 20\).*transp"),
    "NaN in an expert": ("qwen3_moe", change(EXPERT, poison(math.nan)), rf"{EXPERT} holds NaN"),
    "experts in a dense layer": (
        "qwen3_moe",
        put("model.layers.1.mlp.gate.weight", np.ones((8, 32), np.float32)),
        r"layers\.1\.mlp\.gate\.weight is not part",
    ),
    "no bias of the choice": (
        "minimax_m2",
        drop("model.layers.0.block_sparse_moe.e_score_correction_bias"),
        "e_score_correction_bias is missing",
    ),
    "norm of one head": (
        "minimax_m2",
        change("model.layers.0.self_attn.q_norm.weight", lambda x: x[:12]),
        r"q_norm.weight has shape \(12,\).*\(48,\)",
    ),
    "no sinks": ("gpt_oss", drop("model.layers.3.self_attn.sinks"), "sinks is missing"),
    "fused the other way round": ("gpt_oss", change(FUSED, lambda x: x[:, :, :-1]), r"gate_up_proj has shape"),
    "infinity in a stack": ("gpt_oss", change(FUSED, poison(math.inf)), f"{FUSED} holds NaN or infinity"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_in_stacks_are_refused_by_name(fault: str, tmp_path: Path) -> None:
    name, edit, match = FAULTS[fault]
    with pytest.raises(Eagle3Error, match=match) as caught:
        load_target(edited(TARGETS / name, tmp_path, tensors=edit))
    assert "\n" not in str(caught.value)


def test_announced_prediction_layers_without_tensors_are_no_fault(tmp_path: Path) -> None:
    """MiniMax-M2's config announces three; its checkpoint has none of their tensors."""
    public = json.loads((TARGETS / "minimax_m2" / "config.public.json").read_text())
    assert public["use_mtp"] and public["num_mtp_modules"] == 3
    assert parse("minimax_m2", "config.public.json") == parse("minimax_m2")


SIZES = {
    "llama-3.1-8b": 8_030_261_248,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "gpt-oss-20b": 20_914_757_184,
}
"""What the published weights add up to."""


def declared(name: str) -> Any:
    """The weights of a known target, from its packaged config.json alone."""
    config = entries("target")[name].config()
    family = family_of(config, name)
    return abstract_params(family.model(family.parse(config, name)))


def count(tree: Any) -> int:
    return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))


@pytest.mark.parametrize("name", SIZES)
def test_sizes_of_known_targets(name: str) -> None:
    assert count(declared(name)) == SIZES[name]


def test_size_of_minimax_m25() -> None:
    """229 billion weights, of which a token uses 10; a layer, added up by hand from its tensors' published shapes."""
    params = declared("minimax-m2.5")
    expert = 3 * 3072 * 1536
    attention = 2 * 6144 * 3072 + 2 * 1024 * 3072 + 6144 + 1024
    layer = attention + 2 * 3072 + 256 * expert + 256 * 3072 + 256
    assert [count(params[f"layers_{i}"]) for i in (0, 61)] == [layer, layer]
    total = count(params)
    assert total == 62 * layer + 2 * 200064 * 3072 + 3072
    assert total == pytest.approx(229e9, rel=2e-3)
    assert total - 62 * 248 * expert == pytest.approx(10e9, rel=0.15)


@pytest.mark.parametrize(
    ("name", "repository"),
    [
        ("llama-3.1-8b", "meta-llama/Llama-3.1-8B-Instruct"),
        ("qwen3-8b", "Qwen/Qwen3-8B"),
        ("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B"),
        ("gpt-oss-20b", "openai/gpt-oss-20b"),
        ("minimax-m2.5", "MiniMaxAI/MiniMax-M2.5"),
    ],
)
def test_a_known_target_without_weights_says_what_to_fetch(
    name: str, repository: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = repository.split("/")[1]
    with pytest.raises(
        Eagle3Error, match=rf"in the folder {folder}; run: hf download {repository} --local-dir {folder}"
    ):
        load_target(name)
