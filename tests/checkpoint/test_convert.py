"""Conversions: drafts between dialects bit for bit, targets into Hugging Face folders, and what is refused."""

import dataclasses
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from loading import DRAFTS, TARGET_OF, TARGETS, draft, edited, put, target, tensors_of

from eagle3_jax.checkpoint.convert import convert_draft
from eagle3_jax.checkpoint.drafts import load_draft, save_draft
from eagle3_jax.checkpoint.target_files import read_target_config, save_target_folder
from eagle3_jax.checkpoint.targets import load_target, save_target_orbax
from eagle3_jax.cli import main
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.quant.weight import named_weights

ROUNDS = [
    ("a_safeailab", "speculators"),
    ("a_safeailab", "vllm"),
    ("b_speculators", "safeailab"),
    ("c_eagle31", "speculators"),
    ("d_fullvocab", "speculators"),
    ("e_width", "speculators"),
    ("f_speculators_qwen3", "vllm"),
]


def target_of(name: str) -> Path:
    return TARGETS / TARGET_OF[name]


@pytest.mark.parametrize(("name", "dialect"), ROUNDS)
def test_a_round_trip_keeps_every_bit(name: str, dialect: str, tmp_path: Path) -> None:
    there = convert_draft(DRAFTS / name, tmp_path / "there", dialect, target_of(name))
    original = draft(name)
    assert there.config.taps == original.model.config.taps
    loaded = load_draft(tmp_path / "there", target(TARGET_OF[name]))
    filled = dialect == "speculators" and original.model.config.shares_embedding
    config = dataclasses.replace(
        original.model.config, shares_embedding=not filled and original.model.config.shares_embedding
    )
    assert dataclasses.replace(loaded.model.config, weights=config.weights) == config and loaded.dialect == dialect
    if filled:
        theirs = tensors_of(target_of(name))["model.embed_tokens.weight"]
        assert tensors_of(tmp_path / "there")["embed_tokens.weight"].tobytes() == theirs.tobytes()
    convert_draft(tmp_path / "there", tmp_path / "back", original.dialect, target_of(name))
    back, files = tensors_of(tmp_path / "back"), tensors_of(DRAFTS / name)
    assert back.keys() == files.keys()
    for key, tensor in files.items():
        assert back[key].dtype == tensor.dtype and back[key].tobytes() == tensor.tobytes(), key
    again = load_draft(tmp_path / "back", target(TARGET_OF[name]))
    assert (again.dialect, again.model) == (original.dialect, original.model)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_narrow_tensors_stay_as_they_are(dtype: type, tmp_path: Path) -> None:
    def cast(tensors: dict) -> None:
        tensors.update({k: x.astype(dtype) for k, x in tensors.items() if x.dtype == np.float32})

    convert_draft(
        edited(DRAFTS / "c_eagle31", tmp_path / "c", cast), tmp_path / "out", "speculators", target_of("c_eagle31")
    )
    found, files = tensors_of(tmp_path / "out"), tensors_of(tmp_path / "c")
    assert found["layers.0.mlp.up_proj.weight"].tobytes() == files["midlayer.mlp.up_proj.weight"].tobytes()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == np.dtype(dtype).name


def test_what_other_engines_read_of_a_converted_draft(tmp_path: Path) -> None:
    """The fields of the written config, as the engines' own sources name them."""
    convert_draft(DRAFTS / "c_eagle31", tmp_path / "s", "speculators", target_of("c_eagle31"))
    config = json.loads((tmp_path / "s" / "config.json").read_text())
    assert (config["speculators_model_type"], config["architectures"]) == ("eagle3", ["Eagle3DraftModel"])
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 3, 4]
    assert (config["fc_norm"], config["norm_output"], config["norm_before_residual"]) == (True, True, False)
    inner = config["transformer_layer_config"]
    assert (inner["model_type"], inner["rope_parameters"]["rope_theta"]) == ("llama", 10000.0)
    assert (inner["head_dim"], inner["vocab_size"], config["draft_vocab_size"]) == (10, 112, 44)
    convert_draft(DRAFTS / "b_speculators", tmp_path / "m", "safeailab")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert config["norm_before_residual"] is True and config["target_hidden_size"] == 40


def test_conversions_that_would_be_misread_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, dialect, match in (
        ("f_speculators_qwen3", "safeailab", "dialect safeailab has no qk_norm"),
        ("a_safeailab", "speculators", "name the target"),
        ("a_safeailab", "gguf", "dialect 'gguf' is not known"),
    ):
        on = None if "name" in match else target_of(name)
        with pytest.raises(Eagle3Error, match=match):
            convert_draft(DRAFTS / name, tmp_path / "out", dialect, on)
    open_ids = edited(DRAFTS / "c_eagle31", tmp_path / "c", config=put("eagle_config", {IDS: [3, 4, 5]}))
    with pytest.raises(Eagle3Error, match=r"fit both readings.*say which is right"):
        convert_draft(open_ids, tmp_path / "out", "speculators")
    with pytest.raises(Eagle3Error, match="needs the target's embedding in the file; name the target"):
        convert_draft(open_ids, tmp_path / "out", "speculators", None, {"tap_convention": "output"})
    found = convert_draft(open_ids, tmp_path / "out", "vllm", None, {"tap_convention": "output"})
    assert found.taps.indices == (4, 5, 6)
    with pytest.raises(Eagle3Error, match=r"taps \[1, 3, 5\] start at 1"):
        convert_draft(open_ids, tmp_path / "x", "speculators", target_of("c_eagle31"), {"taps": [1, 3, 5]})
    assert not (tmp_path / "x").exists()
    convert_draft(DRAFTS / "b_speculators", tmp_path / "b", "safeailab")
    assert "SGLang and SafeAILab ignore norm_before_residual" in caplog.text


IDS = "eagle_aux_hidden_state_layer_ids"


def test_saving_in_another_dialect(tmp_path: Path) -> None:
    for dialect in ("safeailab", "vllm", "speculators"):
        save_draft(draft("d_fullvocab"), tmp_path / dialect, "float32", dialect)
        loaded = load_draft(tmp_path / dialect, target("llama_tied"))
        assert (loaded.model, loaded.dialect) == (draft("d_fullvocab").model, dialect)


# Targets


@pytest.mark.parametrize(
    "name", ["llama_tied", "llama_gqa_rope3", "qwen3", "qwen3_moe", "minimax_m2", "gpt_oss", "deepseek_v3_grouped"]
)
def test_a_target_becomes_the_folder_it_came_from(name: str, tmp_path: Path) -> None:
    """Every tensor as the reference library wrote it, through the model's own form of it."""
    loaded = load_target(TARGETS / name)
    save_target_folder(loaded, tmp_path / "hf")
    found, files = tensors_of(tmp_path / "hf"), tensors_of(TARGETS / name)
    assert found.keys() == files.keys()
    for key, tensor in files.items():
        np.testing.assert_array_equal(found[key], tensor, err_msg=key)
    assert read_target_config(tmp_path / "hf") == read_target_config(TARGETS / name)


def test_an_orbax_folder_becomes_a_hugging_face_folder(tmp_path: Path) -> None:
    save_target_orbax(target("llama_tied"), tmp_path / "orbax")
    assert main(["convert", str(tmp_path / "orbax"), str(tmp_path / "hf"), "--to", "huggingface"]) == 0
    assert load_target(tmp_path / "hf").model == target("llama_tied").model
    for key, tensor in tensors_of(TARGETS / "llama_tied").items():
        np.testing.assert_array_equal(tensors_of(tmp_path / "hf")[key], tensor, err_msg=key)
    save_target_folder(target("llama_tied"), tmp_path / "half", "float16")
    assert json.loads((tmp_path / "half" / "config.json").read_text())["torch_dtype"] == "float16"
    rounded = named_weights(load_target(tmp_path / "half").params)["layers_0/mlp/up/weight"].value
    original = np.asarray(named_weights(target("llama_tied").params)["layers_0/mlp/up/weight"].value)
    np.testing.assert_array_equal(np.asarray(rounded), original.astype(np.float16).astype(np.float32))


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, on = str(DRAFTS / "a_safeailab"), str(TARGETS / "llama_tied")
    assert main(["convert", source, str(tmp_path / "out"), "--to", "speculators", "--target", on]) == 0
    assert "taps hs[2, 3, 4]" in capsys.readouterr().out
    assert main(["convert", source, str(tmp_path / "out"), "--to", "huggingface", "--target", on]) == 2
    assert main(["convert", source, str(tmp_path / "out"), "--to", "vllm", "--dtype", "float16"]) == 2
