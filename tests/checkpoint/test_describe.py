"""What `inspect` says of checkpoints, without reading weights."""

import json
from pathlib import Path

import numpy as np
import pytest
from loading import DRAFTS, TARGET_OF, TARGETS, edited, put, target, tensors_of

from eagle3_jax.checkpoint import tensors
from eagle3_jax.checkpoint.describe import describe
from eagle3_jax.checkpoint.targets import save_target_orbax
from eagle3_jax.cli import main
from eagle3_jax.errors import Eagle3Error

DIALECT = {"b_speculators": "speculators", "f_speculators_qwen3": "speculators"}
EXPLICIT = [name for name in TARGET_OF if name not in ("a_safeailab", "e_width")]


@pytest.mark.parametrize("name", TARGET_OF)
def test_drafts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = tensors.SafetensorsSource.read

    def only_maps(source: tensors.SafetensorsSource, name: str) -> np.ndarray:
        assert name in ("d2t", "t2d"), f"{name} was read"
        return read(source, name)

    monkeypatch.setattr(tensors.SafetensorsSource, "read", only_maps)
    found = describe(DRAFTS / name, TARGETS / TARGET_OF[name])
    fixture = json.loads((DRAFTS / name / "fixture.json").read_text())
    config = json.loads((DRAFTS / name / "config.json").read_text())
    assert (found.kind, found.architecture, found.refusal) == ("draft", config["architectures"][0], None)
    assert found.dialect == DIALECT.get(name, "safeailab")
    assert found.taps == fixture["taps_hs_index"] and found.tap_reason
    assert found.config is not None and found.config["draft_vocab_size"] == fixture["draft_vocab_size"]
    files = tensors_of(DRAFTS / name)
    shapes = {key: tuple(about["shape"]) for key, about in found.tensors.items()}
    assert shapes == {key: tensor.shape for key, tensor in files.items()}
    assert found.tensors["fc.weight"]["format"] == "F32" and found.tensors["lm_head.weight"]["format"] == "F32"


@pytest.mark.parametrize("name", EXPLICIT)
def test_taps_that_the_files_themselves_tell(name: str) -> None:
    fixture = json.loads((DRAFTS / name / "fixture.json").read_text())
    assert describe(DRAFTS / name).taps == fixture["taps_hs_index"]


def test_taps_that_only_the_target_tells() -> None:
    found = describe(DRAFTS / "a_safeailab")
    assert (found.taps, found.tap_convention, found.refusal) == (None, "default", None)
    assert found.tap_reason is not None and "name it with --target" in found.tap_reason


def test_the_draft_that_ships() -> None:
    found = describe("smollm2-135m-eagle3")
    assert (found.taps, found.tap_convention, found.dialect) == ([2, 15, 27], "hs", "safeailab")


def test_targets(tmp_path: Path) -> None:
    found = describe(TARGETS / "llama_tied")
    assert (found.kind, found.architecture, found.dialect) == ("target", "LlamaForCausalLM", "huggingface")
    assert found.taps is None and found.config is not None and found.config["num_layers"] == 7
    assert found.tensors["model.norm.weight"] == {"shape": [32], "format": "F32"}
    save_target_orbax(target("llama_tied"), tmp_path / "orbax")
    found = describe(tmp_path / "orbax")
    assert (found.kind, found.dialect) == ("target", "orbax")
    assert found.tensors["layers_6/mlp/down/weight"]["format"] == "float32"


def test_what_is_whole_but_does_not_load_is_described(tmp_path: Path) -> None:
    mla = edited(DRAFTS / "c_eagle31", tmp_path / "mla", config=put("architectures", ["Eagle3DeepseekV2ForCausalLM"]))
    found = describe(mla)
    assert found.kind == "draft" and found.refusal is not None and "an MLA draft" in found.refusal
    assert len(found.tensors) == len(tensors_of(mla))
    odd = edited(DRAFTS / "c_eagle31", tmp_path / "odd", config=put("modality", "text"))
    assert any("modality" in warning for warning in describe(odd).warnings)
    other = edited(TARGETS / "llama_tied", tmp_path / "mamba", config=put("architectures", ["MambaForCausalLM"]))
    assert "MambaForCausalLM" in str(describe(other).refusal)


def test_what_is_damaged_is_refused(tmp_path: Path) -> None:
    for path, match in ((tmp_path, "no config.json"), (tmp_path / "absent", "no file or folder")):
        with pytest.raises(Eagle3Error, match=match):
            describe(path)
    with pytest.raises(Eagle3Error, match="run: hf download AQ-MedAI/Kimi-K25-eagle3"):
        describe("AQ-MedAI/Kimi-K25-eagle3")
    broken = edited(DRAFTS / "c_eagle31", tmp_path / "c")
    data = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(data[:-1])
    with pytest.raises(Eagle3Error, match="truncated"):
        describe(broken)


def test_the_verb(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(DRAFTS / "c_eagle31")
    assert main(["inspect", path, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    wanted = {"architecture", "dialect", "taps", "tap_convention", "tap_reason", "tensors", "warnings"}
    assert wanted <= found.keys() and found["taps"] == [2, 3, 4]
    assert main(["inspect", path, "--draft-set", "tap_convention=hs"]) == 0
    text = capsys.readouterr().out
    assert "taps: hs[1, 2, 3], convention hs" in text and "midlayer.mlp.up_proj.weight" in text
    assert main(["inspect", path + "x"]) == 2


@pytest.mark.parametrize("folder", [TARGETS / "qwen3", DRAFTS / "c_eagle31"])
def test_a_quantization_config_that_does_not_load_is_said(folder: Path, tmp_path: Path) -> None:
    odd = edited(folder, tmp_path / "odd", config=lambda config: config.update(quantization_config={"bits": 4}))
    assert "an object with quant_method is needed" in str(describe(odd).refusal)
