"""Loading targets: what arrives where, in which dtype, and what is refused."""

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from loading import TARGETS, Edit, change, drop, edited, poison, put, target, tensors_of

from eagle3_jax.checkpoint.dialects import LayerNames
from eagle3_jax.checkpoint.families import FAMILIES
from eagle3_jax.checkpoint.names import abstract_params
from eagle3_jax.checkpoint.targets import _llama3_scaling, default_dtype, load_target
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.quant.weight import named_weights

TIED, UNTIED = TARGETS / "llama_tied", TARGETS / "llama_gqa_rope3"
Q = "model.layers.3.self_attn.q_proj.weight"
NORM = "model.layers.2.post_attention_layernorm.weight"


def refused(path: Path | str, match: str, dtype: str | None = None) -> None:
    with pytest.raises(Eagle3Error, match=match) as caught:
        load_target(path, dtype)
    assert "\n" not in str(caught.value)


def test_file_names_of_tree_paths() -> None:
    assert FAMILIES["llama"].names.file_name("layers_12/attention/q/bias") == "model.layers.12.self_attn.q_proj.bias"
    assert FAMILIES["llama"].names.file_name("embed/weight") == "model.embed_tokens.weight"
    names = LayerNames().key_map()
    assert names.file_name("fc_norms_2/weight") == "fc_norm.2.weight"
    assert names.file_name("mlp/gate/weight") == "midlayer.mlp.gate_proj.weight"


@pytest.mark.parametrize("folder", [TIED, UNTIED], ids=lambda folder: folder.name)
def test_every_tensor_arrives_transposed_or_as_it_is(folder: Path) -> None:
    files, loaded = tensors_of(folder), named_weights(target(folder.name).params)
    assert len(loaded) == len(files)
    for path, weight in loaded.items():
        stored = files[FAMILIES["llama"].names.file_name(path)]
        assert weight.shape == stored.shape[::-1]
        value = stored.T if weight.layout == "kn" else stored
        np.testing.assert_array_equal(np.asarray(weight.value), value, err_msg=path)


def test_layouts() -> None:
    assert target("llama_tied").params["embed"]["weight"].layout == "kn"
    untied = target("llama_gqa_rope3").params
    assert untied["embed"]["weight"].layout == "nk"
    assert untied["head"]["weight"].layout == "kn"


def test_off_cpu_matrices_lie_as_in_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for folder in (TIED, UNTIED):
        files, loaded = tensors_of(folder), named_weights(load_target(folder, "float32").params)
        assert {weight.layout for weight in loaded.values()} == {"n", "nk"}
        for path, weight in loaded.items():
            stored = files[FAMILIES["llama"].names.file_name(path)]
            np.testing.assert_array_equal(np.asarray(weight.value), stored, err_msg=path)


def test_loaded_tree_is_the_declared_one() -> None:
    loaded = target("llama_gqa_rope3")
    declared = named_weights(abstract_params(loaded.model))
    for path, weight in named_weights(loaded.params).items():
        same = (weight.format, weight.layout, weight.axes, weight.value.dtype, weight.value.shape)
        other = declared[path]
        assert same == (other.format, other.layout, other.axes, other.value.dtype, other.value.shape)


def test_a_model_without_tokenizer_says_so() -> None:
    loaded = target("llama_tied")
    assert (loaded.name, loaded.tokenizer, loaded.eos_ids) == ("llama_tied", None, (95,))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_matrices_are_cast_and_norms_stay_float32(dtype: str) -> None:
    loaded = load_target(TIED, dtype)
    q = loaded.params["layers_3"]["attention"]["q"]["weight"].value
    np.testing.assert_array_equal(np.asarray(q), tensors_of(TIED)[Q].T.astype(jnp.dtype(dtype)))
    assert loaded.params["layers_3"]["mlp_norm"]["weight"].value.dtype == jnp.float32
    assert loaded.model.config.dtype == dtype


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_narrow_and_wide_files_are_accepted(stored: type, tmp_path: Path) -> None:
    def cast(tensors: dict) -> None:
        tensors.update({name: x.astype(stored) for name, x in tensors.items()})

    q = load_target(edited(TIED, tmp_path, tensors=cast)).params["layers_3"]["attention"]["q"]["weight"].value
    np.testing.assert_array_equal(np.asarray(q), tensors_of(TIED)[Q].astype(stored).T.astype(np.float32))


def test_default_dtype_on_cpu() -> None:
    assert default_dtype() == "float32" == target("llama_tied").model.config.dtype


def test_loaded_weights_do_not_follow_the_file(tmp_path: Path) -> None:
    folder = edited(UNTIED, tmp_path)
    loaded = load_target(folder)
    before = np.asarray(loaded.params["embed"]["weight"].value).copy()
    with open(folder / "model.safetensors", "r+b") as file:
        file.seek(-4000, 2)
        file.write(bytes(4000))
    np.testing.assert_array_equal(np.asarray(loaded.params["embed"]["weight"].value), before)


@pytest.mark.parametrize(
    ("generation", "config", "eos"),
    [([7, 3, 7], 95, (7, 3)), (4, 95, (4,)), (None, [1, 2], (1, 2)), (None, None, ())],
)
def test_stop_ids(generation: object, config: object, eos: tuple[int, ...], tmp_path: Path) -> None:
    folder = edited(TIED, tmp_path, config=put("eos_token_id", config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert load_target(folder).eos_ids == eos


def test_tensors_that_may_be_there(tmp_path: Path) -> None:
    def add(tensors: dict) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)

    load_target(edited(TIED, tmp_path, tensors=add))


TENSOR_FAULTS: dict[str, tuple[Edit, str]] = {
    "missing": (drop(Q), rf"tensor {Q} is missing;"),
    "extra": (
        put("model.layers.3.self_attn.q_norm.weight", np.ones(8, np.float32)),
        "q_norm.weight is not part",
    ),
    "a layer too many": (
        put("model.layers.7.mlp.up_proj.weight", np.ones((80, 32), np.float32)),
        "layers.7.*not part",
    ),
    "untied head": (put("lm_head.weight", np.ones((96, 32), np.float32)), "lm_head.weight differs"),
    "transposed": (
        change("model.layers.1.mlp.up_proj.weight", np.transpose),
        r"up_proj.weight has shape \(32, 80\).*\(80, 32\).*transposed",
    ),
    "short": (change(Q, lambda x: x[:-1]), r"q_proj.weight has shape \(63, 32\)"),
    "flat": (change(NORM, lambda x: x[None]), r"layernorm.weight has shape \(1, 32\).*\(32,\)"),
    "NaN": (change(Q, poison(math.nan)), f"{Q} holds NaN"),
    "NaN in a norm": (change(NORM, poison(math.nan)), f"{NORM} holds NaN"),
    "infinity": (
        change("model.embed_tokens.weight", poison(-math.inf)),
        "embed_tokens.weight holds NaN or infinity",
    ),
    "integers": (change(Q, lambda x: x.astype(np.int8)), "q_proj.weight is stored as I8"),
}


@pytest.mark.parametrize("fault", TENSOR_FAULTS)
def test_faulty_tensors_are_refused(fault: str, tmp_path: Path) -> None:
    edit, match = TENSOR_FAULTS[fault]
    refused(edited(TIED, tmp_path, tensors=edit), match)


def test_a_float16_overflow_is_refused(tmp_path: Path) -> None:
    folder = edited(TIED, tmp_path, tensors=change(Q, poison(1e6)))
    load_target(folder)
    refused(folder, "converted to float16, holds NaN or infinity", dtype="float16")


CONFIG_FAULTS: dict[str, tuple[Edit, str]] = {
    "unknown norm field": (put("use_qk_norm", True), "use_qk_norm"),
    "quantised": (put("quantization_config", {"quant_method": "fp8"}), "quantization_config"),
    "architecture": (put("architectures", ["MambaForCausalLM"]), "MambaForCausalLM"),
    "architecture text": (put("architectures", True), "architectures is True; a list of names"),
    "wrong width": (put("hidden_size", 64), "has shape .* needs"),
    "a layer too few": (put("num_hidden_layers", 6), "layers.6.*not part"),
    "untied": (put("tie_word_embeddings", False), "lm_head.weight is missing"),
    "biases": (put("attention_bias", True), "bias is missing"),
    "stop id": (put("eos_token_id", 96), "eos_token_id is .*96.* 0 to 95"),
    "stop text": (put("eos_token_id", "</s>"), "eos_token_id"),
    "a draft": (put("draft_vocab_size", 40), "holds a draft, not a target; load it with load_draft"),
}


@pytest.mark.parametrize("fault", CONFIG_FAULTS)
def test_faulty_configs_are_refused(fault: str, tmp_path: Path) -> None:
    edit, match = CONFIG_FAULTS[fault]
    refused(edited(TIED, tmp_path, config=edit), match)


def test_a_draft_without_telling_config_is_refused(tmp_path: Path) -> None:
    draft = TARGETS.parent / "drafts" / "a_safeailab"
    refused(edited(draft, tmp_path, config=drop("draft_vocab_size")), "load it with load_draft")


@pytest.mark.parametrize("text", ["{", "[]", '{"a": 1, "a": 2}', "\xff"])
def test_bad_json_is_refused(text: str, tmp_path: Path) -> None:
    folder = edited(TIED, tmp_path)
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    refused(folder, "config.json: ")
    folder = edited(TIED, tmp_path)
    (folder / "generation_config.json").write_bytes(text.encode("latin-1"))
    refused(folder, "generation_config.json: ")


def test_paths_that_hold_no_model_are_refused(tmp_path: Path) -> None:
    refused(tmp_path, "no config.json in this folder; give a Hugging Face checkpoint folder")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    refused(tmp_path, "give the .gguf file itself")
    refused(tmp_path / "absent", "no file or folder here and no known target; known targets: .*smollm2-135m")
    refused("", "no known target")
    refused(TIED / "model.safetensors", "not a GGUF file")
    (tmp_path / "empty.gguf").touch()
    refused(tmp_path / "empty.gguf", "empty.gguf: ")
    (tmp_path / "config.json").write_bytes((TIED / "config.json").read_bytes())
    refused(tmp_path, "neither model.safetensors nor")
    refused(TIED, "dtype 'int8' is not supported; use float32", dtype="int8")


@pytest.mark.parametrize("path", [None, 5, b"model", ["model"]])
def test_what_is_no_path_is_refused(path: object) -> None:
    with pytest.raises(Eagle3Error, match="no name or path of a target"):
        load_target(path)  # type: ignore[arg-type]


@pytest.mark.parametrize("layers", [66, 2**31 - 1])
def test_more_layers_than_tensors_are_refused_at_once(layers: int, tmp_path: Path) -> None:
    folder = edited(TARGETS / "llama_tied", tmp_path, config=put("num_hidden_layers", layers))
    with pytest.raises(Eagle3Error, match=f"cannot be the {layers} layers"):
        load_target(folder)


def test_gguf_frequency_divisors_become_llama3_settings() -> None:
    # The rule as Llama 3.1 published it: low frequencies by the factor, high ones not, a ramp between.
    config = {"rope_theta": 500000.0, "head_dim": 64}
    divisors = []
    for i in range(0, 64, 2):
        wavelength = 2 * math.pi * 500000.0 ** (i / 64)
        smooth = (8192 / wavelength - 1) / 3
        divisors.append(1 / ((1 - smooth) / 32 + smooth) if 0 < smooth < 1 else (1.0 if smooth >= 1 else 32.0))
    assert _llama3_scaling(divisors, config, "x.gguf")["factor"] == 32.0
    divisors[10] *= 1.1
    with pytest.raises(Eagle3Error, match="Llama 3's rule"):
        _llama3_scaling(divisors, config, "x.gguf")


@pytest.mark.model
def test_smollm2_loads_from_its_package() -> None:
    loaded = load_target("smollm2-135m", "bfloat16")
    assert loaded.name == "smollm2-135m"
    assert loaded.eos_ids == (2,)
    assert loaded.tokenizer is not None and loaded.tokenizer.vocab_size == 49152
    assert loaded.params["embed"]["weight"].shape == (576, 49152)
