"""Drafts in Quark's layout: what is written, read back by a reader that knows the published layout only."""

import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from loading import DRAFTS, FIXTURES, TARGETS, change, edited, poison, target

from eagle3_jax import api, cli
from eagle3_jax.checkpoint.drafts import load_draft
from eagle3_jax.checkpoint.quark import quantize_folder, quantized_layout, quantized_modules
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.quant.weight import named_weights
from eagle3_jax.training.calibrate import activation_maxima

QUANT, A = FIXTURES / "quant", DRAFTS / "a_safeailab"
BF16 = np.dtype(ml_dtypes.bfloat16)
E2M1 = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
LINEAR = [f"midlayer.{name}_proj" for name in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o")]
LINEAR += [f"midlayer.mlp.{name}_proj" for name in ("gate", "up", "down")]


def read(folder: Path) -> dict[str, np.ndarray]:
    """A safetensors file by its published layout: a length, a JSON header, the bytes."""
    data = (folder / "model.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    kinds = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "BF16": BF16, "F32": np.float32, "U8": np.uint8, "I64": np.int64}
    kinds["BOOL"] = np.bool_
    tensors = {}
    for name, entry in header.items():
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        tensors[name] = np.frombuffer(data[begin:end], kinds[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def decoded(tensors: dict[str, np.ndarray], module: str, scheme: str) -> np.ndarray:
    """A matrix as Quark's documentation of each scheme has it, element by element."""
    codes, scale = tensors[f"{module}.weight"], tensors[f"{module}.weight_scale"]
    if scheme == "mxfp4":
        out = np.zeros((codes.shape[0], 2 * codes.shape[1]), np.float32)
        out[:, 0::2], out[:, 1::2] = E2M1[codes & 15], E2M1[codes >> 4]
        return out * np.repeat(np.exp2(scale.astype(np.float64) - 127), 32, axis=1).astype(np.float32)
    wide = codes.astype(np.float32)
    return wide * (scale[:, None] if scheme == "ptpc_fp8" else scale)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Draft a in bfloat16, as Quark's exports were made of it."""

    def cast(tensors: dict[str, np.ndarray]) -> None:
        floats = {name: x.astype(BF16) for name, x in tensors.items() if x.dtype == np.float32}
        tensors.update(floats)

    return edited(A, tmp_path_factory.mktemp("bf16"), tensors=cast)


@pytest.mark.parametrize("scheme", ["ptpc_fp8", "mxfp4"])
def test_the_files_are_quarks(scheme: str, source: Path, tmp_path: Path) -> None:
    layers = quantize_folder(source, tmp_path / "out", scheme)
    ours, theirs = read(tmp_path / "out"), read(QUANT / f"quark_{scheme}_draft_a")
    assert {name: (x.dtype, x.shape) for name, x in ours.items()} == {n: (x.dtype, x.shape) for n, x in theirs.items()}
    for name, x in theirs.items():
        if scheme == "ptpc_fp8" and name.endswith("_proj.weight"):
            continue  # Quark divides in bfloat16 there, so a few codes are one off
        np.testing.assert_array_equal(ours[name].view(np.uint8), x.view(np.uint8), err_msg=name)
    assert [layer.module for layer in layers] == [m for m in (n.removesuffix(".weight") for n in ours) if m in LINEAR]
    config, reference = (
        json.loads((folder / "config.json").read_text())["quantization_config"]
        for folder in (tmp_path / "out", QUANT / f"quark_{scheme}_draft_a")
    )
    assert config.pop("exclude") == ["fc", "lm_head", r"re:(.*\.)?(fc|lm_head)$"]
    assert reference.pop("exclude") == ["fc", "lm_head"]
    assert config == reference


@pytest.mark.parametrize("scheme", ["ptpc_fp8", "mxfp4", "fp8"])
def test_another_reader_gets_the_weights_back(scheme: str, source: Path, tmp_path: Path) -> None:
    maxima = {module: 448.0 for module in LINEAR} if scheme == "fp8" else None
    layers = quantize_folder(source, tmp_path / "out", scheme, maxima=maxima)
    wide, written = read(source), read(tmp_path / "out")
    ours = load_draft(tmp_path / "out", target("llama_tied"))
    weights = {f"midlayer.{name}": weight for name, weight in zip_names(ours.params)}
    for layer in layers:
        exact = wide[f"{layer.module}.weight"].astype(np.float64)
        got = decoded(written, layer.module, scheme)
        error = np.linalg.norm(got - exact) / np.linalg.norm(exact)
        assert error == pytest.approx(layer.error, rel=1e-6)
        assert np.abs(got - exact).max() == pytest.approx(layer.largest_error, rel=1e-6)
        assert 0.005 < error < (0.2 if scheme == "mxfp4" else 0.05)
        size = sum(x.nbytes for name, x in written.items() if name.startswith(f"{layer.module}."))
        assert (layer.before, layer.after) == (exact.size * 2, size)
        np.testing.assert_array_equal(np.asarray(weights[layer.module]).T, got)
        if scheme == "fp8":
            assert written[f"{layer.module}.input_scale"] == np.float32(1)
    card = (tmp_path / "out/README.md").read_text()
    assert all(
        f"| {layer.module} | {layer.shape[0]} x {layer.shape[1]} | {layer.error:.3%}" in card for layer in layers
    )


def zip_names(params: Any) -> list[tuple[str, np.ndarray]]:
    parts = {"attention": "self_attn", "mlp": "mlp"}
    return [
        (f"{parts[kind]}.{name}_proj", np.asarray(weight.value))
        for path, weight in named_weights(params).items()
        if len(pieces := path.split("/")) == 3
        for kind, name, _ in [pieces]
    ]


def test_excluded_layers_stay_and_say_so(source: Path, tmp_path: Path) -> None:
    layers = quantize_folder(source, tmp_path / "out", "ptpc_fp8", exclude=r"fc|self_attn\..*")
    written, wide = read(tmp_path / "out"), read(source)
    names = {layer.module for layer in layers}
    assert names == {"lm_head", "midlayer.mlp.gate_proj", "midlayer.mlp.up_proj", "midlayer.mlp.down_proj"}
    for name in ("fc.weight", "midlayer.self_attn.q_proj.weight", "norm.weight"):
        np.testing.assert_array_equal(written[name].view(np.uint8), wide[name].view(np.uint8))
    exclude = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]["exclude"]
    assert exclude[:-1] == sorted({"fc", *LINEAR[:4]}) and exclude[-1] == r"re:(.*\.)?(fc|self_attn\..*)$"
    loaded = load_draft(tmp_path / "out", target("llama_tied"), widen=False)
    assert named_weights(loaded.params)["head/weight"].format == "fp8_channel"


def test_what_cannot_be_quantised_is_refused_and_nothing_written(source: Path, tmp_path: Path) -> None:
    def refused(match: str, folder: Path = source, **options: Any) -> None:
        with pytest.raises(Eagle3Error, match=match):
            quantize_folder(folder, tmp_path / "out", **{"scheme": "ptpc_fp8", **options})
        assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))

    with pytest.raises(Eagle3Error, match="is the draft's own folder"):
        quantize_folder(source, source.parent / "." / source.name, "mxfp4")
    refused("holds a target, not a draft", TARGETS / "llama_tied")
    refused("scheme 'int8' is not known", scheme="int8")
    refused("excludes every linear layer", exclude=".*")
    refused("no regular expression", exclude="(")
    refused("needs the largest activation of midlayer", scheme="fp8")
    refused("has a quantization_config already", QUANT / "quark_mxfp4_draft_a")
    q = f"{LINEAR[0]}.weight"
    poisoned = edited(source, tmp_path / "nan", tensors=change(q, poison(np.nan)))
    refused(r"q_proj.weight holds NaN or infinity", poisoned)
    narrow = edited(source, tmp_path / "width", tensors=change(q, lambda x: x[:, :40]))
    refused("40 inputs, no multiple of 32; exclude it", narrow, scheme="mxfp4")


# Names, dtypes and shapes of the draft that AMD published for Kimi-K2.5

KIMI = {
    "embed_tokens.weight": (163840, 7168),
    "fc.weight": (7168, 21504),
    "lm_head.weight": (163840, 7168),
    **{f"midlayer.{name}.weight": (7168,) for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
    "norm.weight": (7168,),
    **{f"midlayer.self_attn.{x}_proj.weight": (8192, 14336) for x in "qkv"},
    "midlayer.self_attn.o_proj.weight": (7168, 8192),
    "midlayer.mlp.gate_proj.weight": (12288, 7168),
    "midlayer.mlp.up_proj.weight": (12288, 7168),
    "midlayer.mlp.down_proj.weight": (7168, 12288),
}


def test_the_layout_of_the_published_kimi_draft() -> None:
    modules = quantized_modules(KIMI, "fc|lm_head")
    assert sorted(modules) == sorted(LINEAR)
    layout = {}
    for module in modules:
        layout |= quantized_layout(module, KIMI[f"{module}.weight"], "ptpc_fp8")
    fp8 = {name: shape for name, (dtype, shape) in layout.items() if dtype == ml_dtypes.float8_e4m3fn}
    scales = {name: shape for name, (dtype, shape) in layout.items() if dtype == np.float32}
    assert fp8 == {f"{module}.weight": KIMI[f"{module}.weight"] for module in LINEAR}
    assert scales == {f"{module}.weight_scale": KIMI[f"{module}.weight"][:1] for module in LINEAR}
    assert sum(np.prod(shape) for shape in fp8.values()) == 675_282_944


def test_excludes_are_for_whole_names_under_any_prefix() -> None:
    names = ["fc", "fc1", "midlayer.fc", "embed_tokens", "lm_head", "lm_head.more"]
    shapes = {f"{name}.weight": (32, 32) for name in names} | {"fc.bias": (32,), "norm.weight": (32,)}
    assert quantized_modules(shapes, "fc|lm_head") == ["fc1", "lm_head.more"]


# Calibration and the command


def test_maxima_are_those_of_the_matrices_inputs() -> None:
    draft = load_draft(A, target("llama_tied"))
    prompts = [list(range(3, 15)), list(range(60, 48, -1))]
    maxima = activation_maxima(draft, prompts)
    taps = draft.model.config.taps
    largest = 0.0
    for prompt in prompts:
        states = np.asarray(api.score(draft.target, np.array([prompt])).hidden_states)
        largest = max(largest, np.abs(states[list(taps), :, :-1]).max())
    assert maxima["fc/weight"] == pytest.approx(largest, rel=1e-5)
    parts = {"fc", "head", *(f"attention/{x}" for x in "qkvo"), *(f"mlp/{x}" for x in ("gate", "up", "down"))}
    assert set(maxima) == {f"{part}/weight" for part in parts}
    assert maxima["attention/q/weight"] == maxima["attention/k/weight"] != maxima["attention/o/weight"]
    with pytest.raises(Eagle3Error, match="prompts of 3 to"):
        activation_maxima(draft, [[1, 2]])


def test_the_command_calibrates_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompts.json").write_text(json.dumps([list(range(3, 15))]))
    flags = ["quantize", "--draft", str(A), "--out", str(tmp_path / "out"), "--json", "--no-compilation-cache"]
    calibration = ["--calibration", str(tmp_path / "prompts.json"), "--target", str(TARGETS / "llama_tied")]
    assert cli.main([*flags, "--scheme", "fp8", *calibration]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["scheme"] == "fp8" and {layer["module"] for layer in report["layers"]} == set(LINEAR)
    assert report["bytes_after"] < 0.3 * report["bytes_before"]  # of float32
    loaded = load_draft(tmp_path / "out", target("llama_tied"), activations="fake_quant")
    assert set(dict(loaded.model.config.weights.activations).values()) == {"fp8_static"}
    for wrong in (["--scheme", "fp8"], ["--scheme", "mxfp4", *calibration]):
        assert cli.main([*flags, *wrong]) == 2
        assert "--calibration belongs to --scheme fp8" in capsys.readouterr().err
    assert cli.main([*flags[:-2], "--no-compilation-cache", "--scheme", "ptpc_fp8"]) == 0
    assert "7 layers" in capsys.readouterr().out
