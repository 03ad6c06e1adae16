"""Quantised checkpoints: what arrives, what it computes, what it costs to load, and what is refused."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from loading import FIXTURES, TARGETS, expected, put, target, tensors_of

from eagle3_jax import api
from eagle3_jax.checkpoint.dialects import LayerNames
from eagle3_jax.checkpoint.drafts import Draft, load_draft
from eagle3_jax.checkpoint.targets import load_target, save_target_orbax
from eagle3_jax.checkpoint.tensors import SafetensorsSource, write_safetensors
from eagle3_jax.cli import main
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.quant.formats import NARROW_FORMATS
from eagle3_jax.quant.quantize import dequantize_tree
from eagle3_jax.quant.weight import named_weights, weight_bytes

ATOL = 2e-4  # of the fixtures' README
QUANT = FIXTURES / "quant"
QUARK = {"ptpc_fp8": "fp8_channel", "mxfp4": "mxfp4"}
NAMES = LayerNames().key_map()
each_scheme = pytest.mark.parametrize("scheme", QUARK)


def quark(scheme: str, **options: Any) -> Draft:
    return load_draft(QUANT / f"quark_{scheme}_draft_a", target("llama_tied"), **options)


# Quark's own exports


@each_scheme
@pytest.mark.parametrize("widen", [True, False])
def test_quarks_weights_arrive_bit_for_bit(scheme: str, widen: bool) -> None:
    draft, x = quark(scheme, widen=widen), expected(QUANT / f"quark_{scheme}_draft_a")
    weights = named_weights(draft.params)
    formats = {NAMES.file_name(path): weight.format for path, weight in weights.items()}
    narrow = {name for name, format in formats.items() if format == QUARK[scheme]}
    assert len(narrow) == (0 if widen else 7) and not narrow & {"fc.weight", "lm_head.weight"}
    wide = named_weights(dequantize_tree(draft.params))
    assert len(wide) == sum(name.startswith("dequant/") for name in x)
    for path, weight in wide.items():
        value = np.asarray(weight.value).T if weight.layout == "kn" else np.asarray(weight.value)
        np.testing.assert_array_equal(value, x[f"dequant/{NAMES.file_name(path)}"], err_msg=path)


@each_scheme
def test_quarks_drafts_give_the_stored_logits_and_chains(scheme: str) -> None:
    draft, x = quark(scheme), expected(QUANT / f"quark_{scheme}_draft_a")
    ids, chain = api.propose(draft, x["features"], x["next_ids"], 4)
    np.testing.assert_array_equal(ids, x["chain_tokens"])
    np.testing.assert_allclose(chain, x["chain_logits"], atol=ATOL, rtol=0)
    np.testing.assert_allclose(logits(draft, x), x["logits"], atol=ATOL, rtol=0)


def test_weights_kept_narrow_give_the_stored_logits() -> None:
    draft, x = quark("mxfp4", widen=False), expected(QUANT / "quark_mxfp4_draft_a")
    np.testing.assert_allclose(logits(draft, x), x["logits"], atol=ATOL, rtol=0)


@each_scheme
def test_rounded_activations_on_cpu_are_those_of_the_narrow_products(scheme: str) -> None:
    x = expected(QUANT / f"quark_{scheme}_draft_a")
    fake = logits(quark(scheme, widen=True, activations="fake_quant"), x)
    np.testing.assert_allclose(
        fake, logits(quark(scheme, widen=False, activations="fake_quant"), x), atol=ATOL, rtol=0
    )
    assert np.abs(fake - x["logits"]).max() > 0.01


def logits(draft: Draft, x: dict[str, np.ndarray]) -> np.ndarray:
    return np.asarray(api.score_draft(draft, x["features"], x["next_ids"]))


def modes(draft: Draft) -> set[str]:
    return set(dict(draft.model.config.weights.activations).values())


def test_the_modes_of_a_draft_are_its_own() -> None:
    on_card = quark("ptpc_fp8", widen=False)
    assert modes(on_card) == {"fp8_token"} and not on_card.target.model.config.weights.activations
    assert modes(quark("ptpc_fp8")) == set()
    assert modes(quark("mxfp4", widen=False, activations="mxfp8")) == {"mxfp8"}


def exclude(entry: str) -> Callable[[dict], object]:
    return lambda config: config["quantization_config"]["exclude"].append(entry)


def name_fp4(config: dict) -> None:
    config["quantization_config"]["global_quant_config"]["weight"]["dtype"] = "fp4"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (exclude("midlayer.mlp.up_proj"), r"excludes.*up_proj.*is stored as fp8"),
        (exclude("re:.*self_attn.*"), r"excludes 're:\.\*self_attn"),
        (name_fp4, "names mxfp4 weights"),
        (put("quantization_config", 3), "quant_method is needed"),
    ],
)
def test_a_config_that_contradicts_the_tensors_is_refused(
    change: Callable[[dict], object], match: str, tmp_path: Path
) -> None:
    folder = copied("ptpc_fp8", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(Eagle3Error, match=match):
        load_draft(folder, target("llama_tied"))


def test_a_config_of_quantised_weights_that_are_all_wide_is_refused(tmp_path: Path) -> None:
    folder = copied("ptpc_fp8", tmp_path)
    shutil.copyfile(FIXTURES / "drafts/a_safeailab/model.safetensors", folder / "model.safetensors")
    with pytest.raises(Eagle3Error, match="names fp8 weights, but all are stored wide"):
        load_draft(folder, target("llama_tied"))


def test_no_config_at_all_is_enough(tmp_path: Path) -> None:
    folder = copied("mxfp4", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    jax.tree.map(np.testing.assert_array_equal, load_draft(folder, target("llama_tied")).params, quark("mxfp4").params)


def test_unknown_activations_are_refused() -> None:
    with pytest.raises(Eagle3Error, match="activations 'fp8' are not known; use 'wide'"):
        quark("mxfp4", activations="fp8")
    with pytest.raises(Eagle3Error, match="activations 'x' are not known"):
        load_target(TARGETS / "llama_tied", activations="x")


def copied(scheme: str, place: Path) -> Path:
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(QUANT / f"quark_{scheme}_draft_a" / name, place / name)
    return place


# Targets in every format


def is_linear(name: str, x: np.ndarray, format: str) -> bool:
    return name.endswith("_proj.weight") and x.ndim == 2 and NARROW_FORMATS[format].fits(x.shape)


def narrow_tensors(name: str, x: np.ndarray, format: str) -> dict[str, np.ndarray]:
    """A matrix as public checkpoints of each format have it."""
    codes, scale = NARROW_FORMATS[format].encode(x.astype(np.float32))
    if format.endswith("_block"):
        return {name: codes, f"{name}_scale_inv": scale}
    if format.endswith("_tensor"):
        module = name.removesuffix(".weight")
        return {name: codes, f"{name}_scale": scale.reshape(()), f"{module}.input_scale": np.array(0.02, np.float32)}
    if format.endswith("_channel"):
        return {name: codes, f"{name}_scale": scale[:, 0]}
    if format == "mxfp4":
        return {name: codes, f"{name}_scale": scale.view(np.uint8)}
    return {f"{name}_packed": codes, f"{name}_scale": scale, f"{name}_shape": np.array(x.shape, np.int32)}


def both(name: str, format: str, place: Path) -> tuple[Path, Path]:
    """A fixture target with its matrices in a format, and with the same matrices decoded."""
    narrow, wide = place / "narrow", place / "wide"
    tensors: dict[Path, dict[str, np.ndarray]] = {narrow: {}, wide: {}}
    for tensor, x in tensors_of(TARGETS / name).items():
        if is_linear(tensor, x, format):
            fmt = NARROW_FORMATS[format]
            tensors[narrow] |= narrow_tensors(tensor, x, format)
            tensors[wide][tensor] = fmt.decode(*fmt.encode(x.astype(np.float32)))
        else:
            tensors[narrow][tensor] = tensors[wide][tensor] = x
    assert len(tensors[narrow]) > len(tensors[wide])
    for folder, content in tensors.items():
        folder.mkdir()
        shutil.copyfile(TARGETS / name / "config.json", folder / "config.json")
        write_safetensors(folder / "model.safetensors", content)
    return narrow, wide


CASES = [
    *(("llama_tied", format) for format in NARROW_FORMATS),
    ("qwen3_moe", "fp8_channel"),
    ("qwen3_moe", "mxfp4"),
    ("deepseek_v3_kimi", "fp8_block"),
    ("deepseek_v3_kimi", "int4"),
]


@pytest.mark.parametrize(("name", "format"), CASES)
def test_targets_arrive_as_their_dequantised_weights(name: str, format: str, tmp_path: Path) -> None:
    narrow, wide = both(name, format, tmp_path)
    want = load_target(wide)
    widened, kept = load_target(narrow), load_target(narrow, widen=False)
    assert widened.model == want.model
    jax.tree.map(np.testing.assert_array_equal, widened.params, want.params)
    formats = [weight.format for weight in named_weights(kept.params).values()]
    assert formats.count(format) > len(formats) / 4
    assert weight_bytes(kept.params) < 0.8 * weight_bytes(want.params)
    again = named_weights(dequantize_tree(kept.params))
    for path, weight in named_weights(want.params).items():
        np.testing.assert_array_equal(again[path].value, weight.value, err_msg=path)


def test_narrow_experts_compute_what_their_dequantised_weights_do(tmp_path: Path) -> None:
    narrow, wide = both("qwen3_moe", "mxfp4", tmp_path)
    ids = expected(TARGETS / "qwen3_moe")["input_ids"]
    want, got = (api.score(load_target(folder, widen=False), ids).logits for folder in (wide, narrow))
    np.testing.assert_allclose(got, want, atol=ATOL, rtol=0)


def test_calibrated_activations_keep_their_scale(tmp_path: Path) -> None:
    narrow, _ = both("llama_tied", "fp8_tensor", tmp_path)
    for widen in (True, False):
        loaded = load_target(narrow, widen=widen, activations="fake_quant")
        modes = dict(loaded.model.config.weights.activations)
        assert set(modes.values()) == {"fp8_static"}
        for path in modes:
            scale = named_weights(loaded.params)[path].input_scale
            assert scale is not None and scale.tolist() == [np.float32(0.02)]


def test_gpt_oss_blocks_arrive_as_the_fused_matrices(tmp_path: Path) -> None:
    config = json.loads((TARGETS / "gpt_oss/config.json").read_text())
    config |= {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2}
    config["layer_types"] = config["layer_types"][:2]
    rng, tensors, narrow = np.random.default_rng(0), dict[str, np.ndarray](), dict[str, np.ndarray]()
    for name, x in tensors_of(TARGETS / "gpt_oss").items():
        if "layers.2." not in name and "layers.3." not in name:
            # The fixture's widths 40 and 20 are no multiples of 32.
            shape = [{40: 64, 20: 32}.get(size, size) for size in x.shape]
            tensors[name] = rng.standard_normal(shape).astype(np.float32)
    for name in list(tensors):
        narrow[name] = tensors[name]
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            codes, scale = NARROW_FORMATS["mxfp4"].encode(narrow.pop(name).swapaxes(1, 2))
            tensors[name] = np.ascontiguousarray(NARROW_FORMATS["mxfp4"].decode(codes, scale).swapaxes(1, 2))
            narrow[f"{name}_blocks"] = codes.reshape(*codes.shape[:-1], -1, 16)
            narrow[f"{name}_scales"] = scale.view(np.uint8)
    method = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    for folder, content in (("wide", tensors), ("narrow", narrow)):
        (tmp_path / folder).mkdir()
        write_safetensors(tmp_path / folder / "model.safetensors", content)
        fields = {**config, "quantization_config": method} if folder == "narrow" else config
        (tmp_path / folder / "config.json").write_text(json.dumps(fields))
    want, widened = load_target(tmp_path / "wide"), load_target(tmp_path / "narrow")
    jax.tree.map(np.testing.assert_array_equal, widened.params, want.params)
    kept = load_target(tmp_path / "narrow", widen=False)
    assert named_weights(kept.params)["layers_1/mlp/experts/up/weight"].format == "mxfp4"
    for path, weight in named_weights(dequantize_tree(kept.params)).items():
        np.testing.assert_array_equal(weight.value, named_weights(want.params)[path].value, err_msg=path)


def test_experts_of_several_formats_are_widened_or_refused(tmp_path: Path) -> None:
    narrow, _ = both("qwen3_moe", "fp8_channel", tmp_path)
    source = SafetensorsSource(narrow / "model.safetensors")
    tensors = {name: source.read(name).copy() for name in source}
    name = next(name for name in tensors if name.endswith("experts.3.up_proj.weight"))
    tensors[name] = tensors[name].astype(np.float32) * tensors.pop(f"{name}_scale")[:, None]
    write_safetensors(narrow / "model.safetensors", tensors)
    jax.tree.map(np.testing.assert_array_equal, load_target(narrow).params, load_target(tmp_path / "wide").params)
    with pytest.raises(Eagle3Error, match="several formats; load them with widen=True"):
        load_target(narrow, widen=False)


@pytest.mark.parametrize("format", ["fp8_tensor", "mxfp4"])
def test_orbax_keeps_narrow_weights_bit_for_bit(format: str, tmp_path: Path) -> None:
    narrow, wide = both("llama_tied", format, tmp_path)
    kept = load_target(narrow, widen=False, activations="fake_quant")
    save_target_orbax(kept, tmp_path / "orbax")
    assert main(["convert", str(narrow), str(tmp_path / "converted"), "--to", "orbax"]) == 0
    same_bits(
        *(load_target(tmp_path / name, widen=False, activations="wide").params for name in ("converted", "orbax"))
    )
    again = load_target(tmp_path / "orbax", widen=False)
    assert again.model == kept.model
    same_bits(again.params, kept.params)
    assert load_target(tmp_path / "orbax", activations="fake_quant").model.config.weights.activations
    widened = load_target(tmp_path / "orbax")
    assert widened.model == load_target(wide).model
    jax.tree.map(np.testing.assert_array_equal, widened.params, load_target(wide).params)


def same_bits(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(np.asarray(ours).view(np.uint8), np.asarray(theirs).view(np.uint8))


LOAD = """
import sys, threading, time
from eagle3_jax.checkpoint.targets import load_target
from eagle3_jax.quant.weight import weight_bytes

def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))

small, folder, widen = sys.argv[1], sys.argv[2], sys.argv[3] == "True"
kept = load_target(small, dtype="float32", widen=widen)
before = highest = anonymous()

def watch():
    global highest
    while True:
        highest = max(highest, anonymous())
        time.sleep(0.0005)

threading.Thread(target=watch, daemon=True).start()
params = load_target(folder, dtype="float32", widen=widen).params
print(highest - before, weight_bytes(params))
"""
LAYERS, HIDDEN, INNER = 6, 512, 2048


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux to look at its memory")
@pytest.mark.parametrize("widen", [True, False])
def test_loading_takes_the_weights_and_less_than_a_layer(widen: bool, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    config = json.loads((TARGETS / "llama_tied/config.json").read_text())
    sizes = {"q": (HIDDEN, HIDDEN), "k": (HIDDEN, HIDDEN), "v": (HIDDEN, HIDDEN), "o": (HIDDEN, HIDDEN)}
    inner = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
    for folder, layers in (("small", 1), ("large", LAYERS)):
        tensors = {"model.embed_tokens.weight": np.zeros((96, HIDDEN), np.float32)}
        tensors["model.norm.weight"] = np.ones(HIDDEN, np.float32)
        for i in range(layers):
            for norm in ("input_layernorm", "post_attention_layernorm"):
                tensors[f"model.layers.{i}.{norm}.weight"] = np.ones(HIDDEN, np.float32)
            for part, shapes in (("self_attn", sizes), ("mlp", inner)):
                for name, shape in shapes.items():
                    weight = f"model.layers.{i}.{part}.{name}_proj.weight"
                    tensors[weight] = rng.integers(0, 0x70, shape, np.uint8).view(ml_dtypes.float8_e4m3fn)
                    tensors[f"{weight}_scale"] = np.full(shape[:1], 1e-3, np.float32)
        fields = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": layers, "head_dim": 64}
        fields |= {"num_attention_heads": 8, "num_key_value_heads": 8}
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps({**config, **fields, "layer_types": None}))
        write_safetensors(tmp_path / folder / "model.safetensors", tensors)
    command = [sys.executable, "-c", LOAD, str(tmp_path / "small"), str(tmp_path / "large"), str(widen)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    peak, weights = map(int, ran.stdout.split())
    layer = (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER) * (4 if widen else 1)
    assert weights > LAYERS * layer
    assert weights * 0.9 < peak < weights + layer, f"{peak / layer:.2f} layers for {weights / layer:.2f} of weights"
