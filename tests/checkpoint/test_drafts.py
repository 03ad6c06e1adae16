"""Loading and saving drafts: taps, maps, sharing, round trips, refusals."""

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from loading import (
    DRAFTS,
    TARGET_OF,
    TARGETS,
    Edit,
    change,
    draft,
    drop,
    edited,
    expected,
    poison,
    put,
    target,
    tensors_of,
)

from eagle3_jax.api import score_draft
from eagle3_jax.checkpoint import draft_writer, drafts
from eagle3_jax.checkpoint.dialects import DraftTensors, find_layers
from eagle3_jax.checkpoint.drafts import load_draft, save_draft
from eagle3_jax.checkpoint.taps import resolve_taps, tap_fields
from eagle3_jax.checkpoint.targets import load_target
from eagle3_jax.checkpoint.tensors import SafetensorsSource
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.quant.weight import named_weights

A, B, C, D, E, F = (DRAFTS / name for name in TARGET_OF)
each_draft = pytest.mark.parametrize("name", TARGET_OF)
IDS = "eagle_aux_hidden_state_layer_ids"
Q = "midlayer.self_attn.q_proj.weight"


def refused(folder: Path | str, match: str, on: str = "llama_tied", overrides: Any = None) -> None:
    with pytest.raises(Eagle3Error, match=match) as caught:
        load_draft(folder, target(on), overrides)
    assert "\n" not in str(caught.value)


# What arrives


@each_draft
def test_every_tensor_arrives(name: str) -> None:
    files, params = tensors_of(DRAFTS / name), draft(name).params
    ids = files.pop("d2t", None)
    files.pop("t2d", None)
    if ids is None:
        assert "target_ids" not in params
    else:
        assert params["target_ids"].dtype == np.int32
        np.testing.assert_array_equal(np.asarray(params["target_ids"]), ids + np.arange(len(ids)))
    loaded = named_weights(params)
    assert len(loaded) == len(files)
    names = find_layers(DraftTensors(SafetensorsSource(DRAFTS / name / "model.safetensors"))).key_map()
    for path, weight in loaded.items():
        stored = files[names.file_name(path)]
        value = stored.T if weight.layout == "kn" else stored
        np.testing.assert_array_equal(np.asarray(weight.value), value, err_msg=path)


@each_draft
def test_settings(name: str) -> None:
    c, fixture = draft(name).model.config, json.loads((DRAFTS / name / "fixture.json").read_text())
    assert list(c.taps) == fixture["taps_hs_index"]
    assert c.rope.theta == fixture["rope_theta"]
    assert c.norm_output == c.fc_norm == fixture["norm_output"]
    assert c.qk_norm == c.norm_before_fc == (name == "f_speculators_qwen3")
    assert c.norm_before_residual == fixture["norm_before_residual"]
    assert c.shares_embedding == (fixture["embed"] == "target")
    sizes = (c.hidden_size, c.target_hidden_size, c.vocab_size, c.draft_vocab_size)
    names = ("hidden_size", "target_hidden_size", "vocab_size", "draft_vocab_size")
    assert sizes == tuple(fixture[n] for n in names)
    assert not c.shares_head


def test_a_width_of_heads_that_config_lacks_or_misstates_comes_from_the_weights(tmp_path: Path) -> None:
    assert draft("e_width").model.config.head_dim == 12
    assert draft("d_fullvocab").model.config.head_dim == 12  # not hidden_size / heads = 8
    loaded = load_draft(edited(D, tmp_path, config=put("head_dim", 8)), target("llama_tied"))
    assert loaded.model.config.head_dim == 12
    assert "head_dim 8" in loaded.warnings[0]


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16])
def test_narrow_files_are_cast_and_keep_their_map(stored: type, tmp_path: Path) -> None:
    def cast(tensors: dict) -> None:
        floats = {name: x for name, x in tensors.items() if x.dtype == np.float32}
        tensors.update({name: x.astype(stored) for name, x in floats.items()})

    loaded = load_draft(edited(A, tmp_path, tensors=cast), target("llama_tied"))
    q = np.asarray(loaded.params["attention"]["q"]["weight"].value)
    np.testing.assert_array_equal(q, tensors_of(A)[Q].astype(stored).T.astype(np.float32))
    np.testing.assert_array_equal(loaded.params["target_ids"], draft("a_safeailab").params["target_ids"])


def test_a_full_vocabulary_draft_may_use_the_targets_head(tmp_path: Path) -> None:
    folder = edited(D, tmp_path, tensors=drop("lm_head.weight"))
    loaded = load_draft(folder, target("llama_tied"))
    assert loaded.model.config.shares_head and "head" not in loaded.params
    x, own = expected(D), draft("d_fullvocab")
    logits = score_draft(loaded, x["features"], x["next_ids"])
    swapped = {**own.params, "head": {"weight": target("llama_tied").params["embed"]["weight"]}}
    own = drafts.Draft(own.name, own.model, swapped, "", "", (), own.target)
    np.testing.assert_allclose(logits, score_draft(own, x["features"], x["next_ids"]), atol=2e-4)


def test_an_identity_map_of_the_full_vocabulary_is_accepted(tmp_path: Path) -> None:
    def add(tensors: dict) -> None:
        tensors.update(d2t=np.zeros(96, np.int64), t2d=np.ones(96, bool))

    assert "target_ids" not in load_draft(edited(D, tmp_path, tensors=add), target("llama_tied")).params


def test_an_embedding_unlike_the_targets_is_used_with_a_warning(tmp_path: Path) -> None:
    random = np.random.default_rng(0).normal(size=(96, 32)).astype(np.float32)
    loaded = load_draft(edited(D, tmp_path, tensors=put("embed_tokens.weight", random)), target("llama_tied"))
    assert "unlike the target's" in loaded.warnings[0]
    np.testing.assert_array_equal(np.asarray(loaded.params["embed"]["weight"].value), random)
    assert draft("d_fullvocab").warnings == ()


# Taps


@pytest.mark.parametrize(
    ("ids", "layers", "taps", "convention"),
    [
        (None, 32, (2, 16, 29), "default"),
        ([], 61, (2, 30, 58), "default"),
        ([1, 29, 57], 61, (2, 30, 58), "output"),  # lightseekorg/kimi-k2.5-eagle3
        ([1, 46, 90], 94, (2, 47, 91), "output"),  # lmsys/Qwen3-235B-A22B-EAGLE3
        ([1, 17, 33], 36, (2, 18, 34), "output"),  # SpecForge gpt-oss-120B
        ([2, 30, 58], 61, (2, 30, 58), "hs"),  # AQ-MedAI/Kimi-K25-eagle3
        ([2, 18, 33], 36, (2, 18, 33), "hs"),  # RedHatAI/Qwen3-8B-speculator
        ([4, 20, 45], 45, (4, 20, 45), "hs"),
        ([4, 20, 40], 45, (4, 20, 40), "hs"),  # zjxia/step-3.5-flash-eagle3
        ([33, 2, 18], 36, (2, 18, 33), "hs"),
    ],
)
@pytest.mark.parametrize("nested", [True, False])
def test_layer_ids(ids: Any, layers: int, taps: tuple[int, ...], convention: str, nested: bool) -> None:
    config = {"eagle_config": {IDS: ids}} if nested else {IDS: ids}
    found = resolve_taps(config, layers, "config.json")
    assert (found.indices, found.convention) == (taps, convention)
    assert found.ambiguous == (ids == [4, 20, 40])


def test_saved_ids_are_right_for_every_reader() -> None:
    for taps in ((2, 30, 58), (3, 20, 40), (4, 20, 61), (1, 5, 9)):
        fields = tap_fields(taps)
        assert fields[IDS] == list(taps)  # vLLM, speculators: hs indices at the top level
        nested = fields["eagle_config"][IDS]
        assert [i + 1 for i in nested] == list(taps)  # SGLang, SpecForge: outputs of layers
        assert resolve_taps(fields, 61, "config.json").indices == taps
    assert resolve_taps(tap_fields((0, 5, 9)), 61, "config.json").indices == (0, 5, 9)


def test_tap_overrides() -> None:
    on = target("llama_gqa_rope3")
    assert load_draft(C, on, {"tap_convention": "hs"}).model.config.taps == (1, 2, 3)
    loaded = load_draft(C, on, {"taps": [0, 3, 6]})
    assert (loaded.model.config.taps, loaded.tap_convention) == ((0, 3, 6), "given")
    with pytest.raises(Eagle3Error, match="no eagle_aux_hidden_state_layer_ids"):
        load_draft(A, target("llama_tied"), {"tap_convention": "hs"})


@pytest.mark.parametrize(
    ("ids", "match"),
    [
        ([1, 4, 9], r"taps \[2, 5, 10\].*not all in the target's hs\[0\] .. hs\[6\]"),
        ([2, 3], "2 taps .* but fc takes 3 hidden states of 40"),
        ([1, 3, 3], "coincide"),
        ([1, "3", 4], "list of layer ids"),
        ([-1, 3, 4], "list of layer ids"),
        ("1,2,3", "list of layer ids"),
    ],
)
def test_impossible_layer_ids_are_refused(ids: Any, match: str, tmp_path: Path) -> None:
    folder = edited(C, tmp_path, config=put("eagle_config", {IDS: ids}))
    refused(folder, match, on="llama_gqa_rope3")


def test_contradicting_layer_ids_are_refused(tmp_path: Path) -> None:
    refused(edited(C, tmp_path, config=put(IDS, [2, 4, 5])), "equal ids, or", on="llama_gqa_rope3")


def test_default_taps_of_a_shallow_target_coincide(tmp_path: Path) -> None:
    refused(edited(C, tmp_path, config=drop("eagle_config")), r"\[2, 3, 3\].*coincide", on="llama_gqa_rope3")


# Overrides


def test_overrides_win() -> None:
    on = target("llama_tied")
    assert load_draft(D, on, {"rope_theta": 5e5}).model.config.rope.theta == 5e5
    assert load_draft(D, on, {"norm_output": True}).model.config.norm_output
    shared = load_draft(D, on, {"embedding": "target"})
    assert shared.model.config.shares_embedding and "embed" not in shared.params
    narrow = load_draft(D, on, {"dtype": "bfloat16"})
    assert narrow.params["fc"]["weight"].value.dtype == ml_dtypes.bfloat16
    assert narrow.model.config.dtype == "bfloat16"
    assert not load_draft(C, target("llama_gqa_rope3"), {"norm_output": False}).model.config.norm_output


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        ({"tap": [1, 2, 3]}, "override 'tap' is not known; the overrides are tap_convention, taps"),
        ({"taps": "1,2"}, "taps is '1,2'"),
        ({"taps": [0, 3, 9]}, r"not all in the target's hs\[0\] .. hs\[7\]"),
        ({"taps": [3, 2, 4]}, "descend"),
        ({"taps": [2, 3]}, "2 taps"),
        ({"taps": [2, 3, 4], "tap_convention": "hs"}, "exclude each other"),
        ({"tap_convention": "auto"}, "'hs' or 'output'"),
        ({"norm_output": 1}, "true or false"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"embedding": "own"}, "has no embed_tokens.weight"),
        ({"embedding": "mine"}, "'own' or 'target'"),
        ({"dtype": "int8"}, "dtype 'int8'"),
    ],
)
def test_bad_overrides_are_refused(overrides: dict[str, Any], match: str) -> None:
    refused(A, match, overrides=overrides)


def test_a_draft_of_another_width_cannot_read_the_targets_embedding() -> None:
    refused(E, "width 48 cannot read .* width 32", overrides={"embedding": "target"})


# Refusals

TENSOR_FAULTS: dict[str, tuple[Edit, str]] = {
    "missing": (drop("midlayer.mlp.down_proj.weight"), "midlayer.mlp.down_proj.weight is missing"),
    "missing fc": (drop("fc.weight"), "fc.weight is missing"),
    "missing head": (drop("lm_head.weight"), "lm_head.weight is missing; only"),
    "extra": (put("midlayer.self_attn.q_norm.weight", np.ones(16, np.float32)), "k_norm.weight is missing"),
    "transposed": (change("midlayer.mlp.up_proj.weight", np.transpose), r"up_proj.*\(32, 64\).*transposed"),
    "transposed q": (change(Q, np.transpose), "q_proj and k_proj have 64 and 16 rows"),
    "transposed fc": (change("fc.weight", np.transpose), "fc"),
    "NaN": (change(Q, poison(math.nan)), f"{Q} holds NaN"),
    "infinity": (change("norm.weight", poison(math.inf)), "norm.weight holds NaN or infinity"),
    "quantised": (change(Q, lambda x: x.astype(ml_dtypes.float8_e4m3fn)), "stored as F8_E4M3"),
    "head of another width": (change("lm_head.weight", lambda x: x[:, :30]), "lm_head.weight has shape"),
    "short head": (change("lm_head.weight", lambda x: x[:39]), "draft_vocab_size is 40.*39"),
    "d2t missing": (drop("d2t"), "d2t is missing; a draft of 40 of the target's 96 ids"),
    "d2t short": (change("d2t", lambda x: x[:-1]), r"d2t has shape \(39,\); \(40,\)"),
    "d2t past the end": (
        change("d2t", lambda x: x + 60),
        "d2t maps draft id .* outside of the target's 96 ids",
    ),
    "d2t negative": (change("d2t", lambda x: x - 50), "outside of the target's 96 ids"),
    "d2t huge": (change("d2t", lambda x: x + 2**62), "outside of the target's 96 ids"),
    "d2t absolute": (change("d2t", lambda x: (x + np.arange(40)) // 2), "t2d marks|the map must increase"),
    "d2t repeats": (change("d2t", lambda x: -np.arange(40)), "the map must increase"),
    "d2t zeros": (change("d2t", np.zeros_like), "40 ids that t2d marks"),
    "d2t floats": (change("d2t", lambda x: x.astype(np.float32)), "d2t is stored as F32"),
    "t2d wrong": (change("t2d", np.logical_not), "56 ids that t2d marks are not the 40"),
    "t2d long": (change("t2d", lambda x: np.append(x, False)), r"t2d has shape \(97,\)"),
    "both dialects": (put("layers.0.mlp.down_proj.weight", np.ones((32, 64), np.float32)), "named both"),
    "no layer": (lambda t: [t.pop(k) for k in list(t) if "midlayer" in k], "no EAGLE-3 draft"),
    "second layer alone": (put("layers.1.mlp.up_proj.bias", np.ones(64, np.float32)), "layers after the first need"),
    "third layer": (put("layers.2.hidden_norm.weight", np.ones(32, np.float32)), "not numbered 0 .. 1"),
    "P-EAGLE": (put("mask_hidden", np.ones((1, 96), np.float32)), "P-EAGLE"),
    "MLA": (put("layers.0.self_attn.kv_a_proj_with_mqa.weight", np.ones((4, 64), np.float32)), "an MLA draft"),
    "twice": (put("model.fc.weight", np.ones((32, 96), np.float32)), "are both fc.weight"),
}


@pytest.mark.parametrize("fault", TENSOR_FAULTS)
def test_faulty_tensors_are_refused(fault: str, tmp_path: Path) -> None:
    edit, match = TENSOR_FAULTS[fault]
    refused(edited(A, tmp_path, tensors=edit), match)


CONFIG_FAULTS: dict[str, tuple[Edit, str]] = {
    "unknown norm field": (put("norm_after_fc", True), "norm_after_fc may change the result"),
    "norm_before_fc": (put("norm_before_fc", True), "input_norm.weight is missing"),
    "nested norm_before_fc": (
        put("eagle_config", {"norm_before_fc": True}),
        "input_norm.weight is missing",
    ),
    "last hidden state": (put("eagle_config", {"use_aux_hidden_state": False}), "has fc.weight; one is wrong"),
    "nested unknown": (put("eagle_config", {"layer_ids": [1, 2, 3]}), "layer_ids"),
    "eagle_config list": (put("eagle_config", [1]), "eagle_config"),
    "legacy norms": (put("use_aux_norm", True), r"fc_norm\.0\.weight is missing"),
    "two names of one norm": (lambda c: c.update(use_aux_norm=True, fc_norm=False), "use_aux_norm is True"),
    "both norms": (lambda c: c.update(norm_before_fc=True, fc_norm=True), "exclude each other"),
    "fc_norm without tensors": (put("fc_norm", True), r"fc_norm\.0\.weight is missing"),
    "biases without tensors": (put("attention_bias", True), "bias is missing"),
    "two layers": (put("num_hidden_layers", 2), "num_hidden_layers is 2, but the layers in the file: 1"),
    "MLA": (put("kv_lora_rank", 512), "kv_lora_rank means an MLA draft"),
    "speculators": (put("speculators_model_type", "eagle3"), "architecture .'LlamaForCausalLM'. is not supported"),
    "architecture": (put("architectures", ["Eagle3Speculator"]), "Eagle3Speculator"),
    "MLA architecture": (put("architectures", ["Eagle3DeepseekV2ForCausalLM"]), "an MLA draft"),
    "P-EAGLE": (put("pard_token", 5), "P-EAGLE"),
    "Qwen3 without its norms": (
        lambda c: c.update(architectures=["Eagle3Qwen3ForCausalLM"], model_type="qwen3"),
        "says Qwen3, but midlayer.self_attn.q_norm.weight is missing",
    ),
    "two bases": (
        lambda c: c.update(rope_parameters={"rope_type": "yarn", "factor": 2.0}, rope_scaling={"type": "linear"}),
        "contradict each other",
    ),
    "windows": (put("layer_types", ["sliding_attention"]), "layer_types"),
    "architecture text": (put("architectures", "LlamaForCausalLM"), "architecture"),
    "logit scale": (put("logit_scale", 0.5), "logit_scale"),
    "window": (put("sliding_window", 512), "sliding_window"),
    "quantised": (put("quantization_config", {}), "quantization_config"),
    "activation": (put("hidden_act", "gelu"), "hidden_act"),
    "heads": (put("num_attention_heads", 3), "q_proj and k_proj"),
    "heads missing": (drop("num_attention_heads"), "num_attention_heads is missing"),
    "kv heads": (put("num_key_value_heads", 3), "key-value heads"),
    "hidden size": (put("hidden_size", 64), "hidden_size is 64, but the rows of o_proj: 32"),
    "intermediate size": (put("intermediate_size", 65), "intermediate_size"),
    "draft vocabulary": (put("draft_vocab_size", 41), "draft_vocab_size is 41"),
    "vocabulary": (put("vocab_size", 128), "vocab_size is 128, but the target's vocabulary: 96"),
    "target width": (put("target_hidden_size", 64), "target_hidden_size is 64"),
    "taps": (put("num_aux_hidden_states", 4), "num_aux_hidden_states"),
    "norm_output twice": (
        lambda c: c.update(norm_output=False, eagle_config={"return_hidden_post_norm": True}),
        "return_hidden_post_norm",
    ),
    "norm_output text": (put("norm_output", "yes"), "true or false"),
    "rope": (put("rope_scaling", {"rope_type": "longrope", "factor": 2.0}), "longrope"),
}


@pytest.mark.parametrize("fault", CONFIG_FAULTS)
def test_faulty_configs_are_refused(fault: str, tmp_path: Path) -> None:
    edit, match = CONFIG_FAULTS[fault]
    refused(edited(A, tmp_path, config=edit), match)


def test_fields_that_change_nothing_are_accepted(tmp_path: Path) -> None:
    def add(config: dict) -> None:
        build = {"use_last_layernorm": True, "next_layer_regular": True, "parallel_draft_step": 1, IDS: []}
        config.update(eagle_config=build, use_sliding_window=False, sliding_window=4096, max_window_layers=28)
        config.update(num_aux_hidden_states=3, norm_before_fc=False, modality="text", tie_word_embeddings=True)
        config.update(max_position_embeddings=8)  # RoPE has no table that could end there

    loaded = load_draft(edited(A, tmp_path, config=add), target("llama_tied"))
    assert loaded.model == draft("a_safeailab").model
    assert any("ties the head" in warning for warning in loaded.warnings)


def test_tensorrts_name_of_norm_output(tmp_path: Path) -> None:
    folder = edited(A, tmp_path, config=put("eagle_config", {"return_hidden_post_norm": True}))
    assert load_draft(folder, target("llama_tied")).model.config.norm_output


def test_drafts_of_other_targets_are_refused(tmp_path: Path) -> None:
    refused(
        A,
        "takes 96 features, no multiple .* 40; this is the draft of another target",
        on="llama_gqa_rope3",
    )

    def cut(tensors: dict) -> None:
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:39]

    def shrink(config: dict) -> None:
        config.update(vocab_size=39, eos_token_id=None)

    small = load_target(edited(TARGETS / "llama_tied", tmp_path / "small", cut, shrink))
    for folder, match in (
        (A, "vocab_size is 96"),
        (edited(A, tmp_path / "a", config=drop("vocab_size")), "lm_head"),
    ):
        with pytest.raises(Eagle3Error, match=match):
            load_draft(folder, small)


def test_paths_that_hold_no_draft_are_refused(tmp_path: Path) -> None:
    refused(TARGETS / "llama_tied", "holds a target, not a draft; load it with load_target")
    refused(tmp_path, "no config.json")
    refused(A / "model.safetensors", "is a file; give the draft's folder")
    refused(tmp_path / "absent", "known drafts: smollm2-135m-eagle3")
    folder = edited(A, tmp_path / "bad")
    (folder / "config.json").write_text('{"hidden_size": 32,}')
    refused(folder, "not valid JSON")


# Saving


@each_draft
def test_a_saved_draft_holds_the_same_tensors(name: str, tmp_path: Path) -> None:
    save_draft(draft(name), tmp_path / "new", dtype="float32")
    saved, original = tensors_of(tmp_path / "new"), tensors_of(DRAFTS / name)
    assert saved.keys() == original.keys()
    for key, tensor in original.items():
        assert saved[key].dtype == tensor.dtype, key
        np.testing.assert_array_equal(saved[key], tensor, err_msg=key)


@each_draft
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_saving_and_loading_is_exact(name: str, dtype: str, tmp_path: Path) -> None:
    save_draft(draft(name), tmp_path / "one", dtype)
    first = load_draft(tmp_path / "one", target(TARGET_OF[name]))
    assert first.model == draft(name).model
    rounded = np.dtype(getattr(ml_dtypes, dtype, dtype))
    for path, weight in named_weights(draft(name).params).items():
        value = np.asarray(weight.value).astype(rounded).astype(np.float32)
        np.testing.assert_array_equal(np.asarray(named_weights(first.params)[path].value), value)
    save_draft(first, tmp_path / "two", dtype)
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_every_setting_survives_saving(tmp_path: Path) -> None:
    def turn(config: dict) -> None:
        config.update(norm_before_residual=True, norm_output=True, attention_bias=True, mlp_bias=True, bias=True)
        config.update(rope_theta=7e5, rms_norm_eps=3e-6, eagle_config={IDS: [2, 4, 6]})
        scaling = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048}
        config["rope_scaling"] = {**scaling, "mscale": 1.0, "truncate": False}

    def add(tensors: dict) -> None:
        for name in [key for key in tensors if key == "fc.weight" or "_proj" in key]:
            if "o_proj" not in name:
                bias = np.linspace(-1, 1, len(tensors[name]), dtype=np.float32)
                tensors[name.replace("weight", "bias")] = bias

    loaded = load_draft(edited(A, tmp_path / "a", add, turn), target("llama_tied"))
    c = loaded.model.config
    assert c.norm_before_residual and c.fc_bias and c.attention_bias and c.mlp_bias and c.taps == (2, 4, 6)
    save_draft(loaded, tmp_path / "b", "float32")
    again = load_draft(tmp_path / "b", target("llama_tied"))
    assert again.model == loaded.model and all("norm_output" in warning for warning in again.warnings)


def test_saved_sharing(tmp_path: Path) -> None:
    shared = edited(D, tmp_path / "d", tensors=lambda t: [t.pop(n) for n in ("lm_head.weight", "embed_tokens.weight")])
    loaded = load_draft(shared, target("llama_tied"))
    assert loaded.model.config.shares_head and loaded.model.config.shares_embedding
    save_draft(loaded, tmp_path / "new")
    assert load_draft(tmp_path / "new", target("llama_tied")).model == loaded.model
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert "draft_vocab_size" not in config and "target_hidden_size" not in config


def test_an_interrupted_save_leaves_the_old_draft_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_draft(draft("a_safeailab"), tmp_path / "d", "float32")
    (tmp_path / "d" / "README.md").write_text("the card")
    before = {file.name: file.read_bytes() for file in (tmp_path / "d").iterdir()}
    for fault in (OSError(28, "No space left on device"), KeyboardInterrupt()):

        def fail(*_: Any, fault: BaseException = fault) -> None:
            raise fault

        with monkeypatch.context() as patch:
            patch.setattr(draft_writer, "write_json_atomic", fail)
            with pytest.raises((Eagle3Error, KeyboardInterrupt)):
                save_draft(draft("a_safeailab"), tmp_path / "d")
        assert {file.name: file.read_bytes() for file in (tmp_path / "d").iterdir()} == before
        assert [entry.name for entry in tmp_path.iterdir()] == ["d"]
    save_draft(draft("a_safeailab"), tmp_path / "d")
    assert (tmp_path / "d" / "README.md").read_text() == "the card"
    assert (tmp_path / "d" / "model.safetensors").read_bytes() != before["model.safetensors"]


def test_saves_that_cannot_be(tmp_path: Path) -> None:
    loaded = draft("a_safeailab")
    with pytest.raises(Eagle3Error, match="dtype 'int8'"):
        save_draft(loaded, tmp_path / "d", "int8")
    (tmp_path / "file").touch()
    with pytest.raises(Eagle3Error, match="is a file"):
        save_draft(loaded, tmp_path / "file")
    with pytest.raises(Eagle3Error, match="cannot be written"):
        save_draft(loaded, tmp_path / "file" / "d")
    big = load_draft(edited(A, tmp_path / "big", tensors=change(Q, poison(1e6))), target("llama_tied"))
    with pytest.raises(Eagle3Error, match=r"attention/q/weight in float16 holds NaN or infinity"):
        save_draft(big, tmp_path / "d", "float16")
    assert not (tmp_path / "d").exists()
