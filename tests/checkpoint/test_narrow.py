"""Which format a checkpoint's tensors mean, and what its quantization_config may say of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from loading import FIXTURES

from eagle3_jax.checkpoint.files import read_json
from eagle3_jax.checkpoint.narrow import find_matrix
from eagle3_jax.checkpoint.quant_config import QuantConfig, parse_quant_config
from eagle3_jax.checkpoint.tensors import SafetensorsSource, write_safetensors
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.quant.fp8 import E4M3FN, E4M3FNUZ

QUANT = FIXTURES / "quant"
BF16 = np.dtype(ml_dtypes.bfloat16)
Tensors = dict[str, np.ndarray]
Write = Callable[[Tensors], SafetensorsSource]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(tensors: Tensors) -> SafetensorsSource:
        write_safetensors(tmp_path / "model.safetensors", tensors)
        return SafetensorsSource(tmp_path / "model.safetensors")

    return write


def fp8(shape: tuple[int, ...] = (256, 384), dtype: np.dtype = E4M3FN) -> np.ndarray:
    return np.ones(shape, dtype)


def scale(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


@pytest.mark.parametrize(
    ("tensors", "format"),
    [
        ({"m.weight": scale(256, 384)}, None),
        ({"m.weight": scale(256, 384, dtype=BF16)}, None),
        ({"m.weight": fp8(), "m.weight_scale": scale()}, "fp8_tensor"),
        ({"m.weight": fp8(), "m.weight_scale": scale(1), "m.input_scale": scale()}, "fp8_tensor"),
        ({"m.weight": fp8(), "m.weight_scale": scale(256)}, "fp8_channel"),
        ({"m.weight": fp8(), "m.weight_scale": scale(256, 1, dtype=BF16)}, "fp8_channel"),
        ({"m.weight": fp8(), "m.weight_scale_inv": scale(2, 3)}, "fp8_block"),
        ({"m.weight": fp8(), "m.weight_scale": scale(2, 3)}, "fp8_block"),
        ({"m.weight": fp8((130, 257)), "m.weight_scale_inv": scale(2, 3)}, "fp8_block"),
        ({"m.weight": fp8(dtype=E4M3FNUZ), "m.weight_scale": scale(256)}, "fnuz_channel"),
        ({"m.weight": np.zeros((8, 32), np.uint8), "m.weight_scale": np.ones((8, 2), np.uint8)}, "mxfp4"),
        (
            {"m.weight_blocks": np.zeros((2, 8, 2, 16), np.uint8), "m.weight_scales": np.ones((2, 8, 2), np.uint8)},
            "mxfp4",
        ),
        (
            {
                "m.weight_packed": np.zeros((8, 8), np.int32),
                "m.weight_scale": scale(8, 2, dtype=BF16),
                "m.weight_shape": np.array([8, 64], np.int64),
            },
            "int4",
        ),
    ],
)
def test_formats_are_read_from_dtypes_and_shapes(tensors: Tensors, format: str | None, write: Write) -> None:
    found = find_matrix(write(tensors), "m.weight")
    assert found is not None and (found.format, set(found.tensors)) == (format, set(tensors))
    sizes = {"int4": (8, 64), "mxfp4": (2, 8, 64) if "m.weight_blocks" in tensors else (8, 64)}
    assert found.shape == sizes.get(format or "", next(x for x in tensors.values()).shape)
    if format is not None:
        codes, scales = found.read()
        decoded = found.narrow.decode(codes, scales)
        assert decoded.shape == found.shape
        assert (found.read_input_scale() is None) == ("m.input_scale" not in tensors)


def test_no_tensor_is_no_matrix(write: Write) -> None:
    assert find_matrix(write({"other.weight": scale(2, 2)}), "m.weight") is None


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        ({"m.weight": fp8()}, "F8_E4M3 with no m.weight_scale; one scale"),
        ({"m.weight": np.zeros((8, 32), np.uint8)}, "U8 with no m.weight_scale"),
        (
            {"m.weight": fp8(), "m.weight_scale": scale(256), "m.weight_scale_inv": scale(2, 3)},
            "scales m.weight_scale and",
        ),
        ({"m.weight": scale(4, 4), "m.weight_scale": scale(4)}, "m.weight is stored as F32, which has none"),
        ({"m.weight": scale(4, 4, dtype=BF16), "m.weight_scale_inv": scale(1, 1)}, "stored as BF16, which has none"),
        ({"m.weight": fp8(), "m.weight_scale": scale(384)}, r"scales of shape \[\], \[256\], \[256, 1\] or \[2, 3\]"),
        ({"m.weight": fp8(), "m.weight_scale_inv": scale(256)}, "scales of shape"),
        ({"m.weight": fp8(), "m.weight_scale": np.ones(256, np.uint8)}, "floating scales"),
        ({"m.weight": fp8((2, 8, 64)), "m.weight_scale": scale(2)}, "a matrix"),
        (
            {"m.weight": np.zeros((8, 32), np.uint8), "m.weight_scale": np.ones((8, 4), np.uint8)},
            r"U8 scales \[out, in/32\]",
        ),
        ({"m.weight": np.zeros((8, 32), np.uint8), "m.weight_scale": scale(8, 2)}, "U8 scales"),
        ({"m.weight": fp8(), "m.weight_scale": scale(), "m.input_scale": scale(3)}, "m.input_scale has shape"),
        (
            {"m.weight": fp8(), "m.weight_packed": np.zeros((8, 8), np.int32)},
            "m.weight is there beside m.weight_packed",
        ),
        ({"m.weight_packed": np.zeros((8, 8), np.int32), "m.weight_scale": scale(8, 2)}, "m.weight_shape is missing"),
        (
            {
                "m.weight_packed": np.zeros((8, 8), np.int32),
                "m.weight_scale": scale(8, 2),
                "m.weight_shape": np.array([8, 60]),
            },
            r"says \(8, 60\), the codes are \(8, 64\)",
        ),
        ({"m.weight_packed": np.zeros((8, 8), np.int32), "m.weight_scale": scale(8, 4)}, "I32 codes"),
    ],
)
def test_tensors_that_fit_no_format_are_refused(tensors: Tensors, match: str, write: Write) -> None:
    with pytest.raises(Eagle3Error, match=match):
        find_matrix(write(tensors), "m.weight")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
def test_bad_scales_and_codes_are_refused(bad: float, write: Write) -> None:
    scales = scale(256)
    scales[3] = bad
    found = find_matrix(write({"m.weight": fp8(), "m.weight_scale": scales}), "m.weight")
    assert found is not None
    with pytest.raises(Eagle3Error, match="scales that are NaN, infinite or negative"):
        found.read()


@pytest.mark.parametrize(("dtype", "code"), [(E4M3FN, 0x7F), (E4M3FN, 0xFF), (E4M3FNUZ, 0x80)])
def test_codes_that_are_nan_are_refused(dtype: np.dtype, code: int, write: Write) -> None:
    codes = fp8(dtype=dtype).view(np.uint8).copy()
    codes[7, 9] = code
    found = find_matrix(write({"m.weight": codes.view(dtype), "m.weight_scale": scale(256)}), "m.weight")
    assert found is not None
    with pytest.raises(Eagle3Error, match=r"m.weight holds NaN"):
        found.read()


def test_a_nan_scale_of_mxfp4_is_refused() -> None:
    found = find_matrix(SafetensorsSource(QUANT / "mxfp4.safetensors"), "corner.weight")
    assert found is not None
    with pytest.raises(Eagle3Error, match=r"corner.weight_scale holds scales that are NaN"):
        found.read()


# quantization_config


def config_of(fields: Any) -> QuantConfig:
    parsed = parse_quant_config({"quantization_config": fields}, "config.json")
    assert parsed is not None
    return parsed


def test_quarks_and_compressed_tensors_own_files_are_understood() -> None:
    quark = {
        name: parse_quant_config(read_json(QUANT / f"quark_{name}_draft_a/config.json"), "c")
        for name in ("ptpc_fp8", "mxfp4")
    }
    assert all(found and found.method == "quark" and found.exclude == ("fc", "lm_head") for found in quark.values())
    assert [found and set(found.kinds) for found in quark.values()] == [{"fp8"}, {"mxfp4"}]
    packed = config_of(read_json(QUANT / "int4_group32.quantization_config.json"))
    assert (packed.method, set(packed.kinds)) == ("compressed-tensors", {"int4"})
    assert packed.excludes("model.layers.3.self_attn.o_proj") and packed.excludes("model.layers.0.mlp.gate_proj")
    assert packed.excludes("model.layers.3.mlp.experts.7.gate_proj") is None


def test_older_and_newer_files_of_quark_are_read_leniently() -> None:
    old = {
        "quant_method": "quark",
        "global_quant_config": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_channel", "observer_cls": "Old"}},
        "exclude": [],
    }
    new = {
        **old,
        "layer_quant_config": {"*attn*": {"weight": [{"dtype": "fp4", "novel": 1}]}},
        "something": {"else": 2},
    }
    assert set(config_of(old).kinds) == {"fp8"} and set(config_of(new).kinds) == {"fp8", "mxfp4"}
    deepseek = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["gate", "lm_head"]}
    assert (set(config_of(deepseek).kinds), config_of(deepseek).exclude) == ({"fp8"}, ("gate", "lm_head"))


@pytest.mark.parametrize(
    ("entry", "module", "matches"),
    [
        ("fc", "fc", True),
        ("fc", "model.fc", True),
        ("fc", "midlayer.mlp.fc1", False),
        ("gate", "model.layers.0.block_sparse_moe.gate", True),
        ("gate", "model.layers.0.mlp.gate_proj", False),
        ("*self_attn*", "model.layers.0.self_attn.q_proj", True),
        ("*mlp.gate", "model.layers.0.mlp.gate_proj", False),
        ("re:.*lm_head$", "model.lm_head", True),
        ("re:.*lm_head$", "model.lm_head.extra", False),
        ("model.layers.1.self_attn.q_proj", "language_model.model.layers.1.self_attn.q_proj", True),
        ("model.layers.1.self_attn.q_proj", "model.layers.11.self_attn.q_proj", False),
    ],
)
def test_excludes_match_names_parts_globs_and_patterns(entry: str, module: str, matches: bool) -> None:
    found = config_of({"quant_method": "quark", "exclude": [entry]})
    assert (found.excludes(module) == entry) == matches


def test_contradictions_are_refused_by_name() -> None:
    config = parse_quant_config(read_json(QUANT / "quark_ptpc_fp8_draft_a/config.json"), "config.json")
    assert config is not None
    config.check("midlayer.mlp.up_proj", "fp8")
    with pytest.raises(Eagle3Error, match=r"excludes 'fc', but model.fc is stored as fp8"):
        config.check("model.fc", "fp8")
    with pytest.raises(Eagle3Error, match=r"names fp8 weights, but midlayer.mlp.up_proj is stored as mxfp4"):
        config.check("midlayer.mlp.up_proj", "mxfp4")


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ("fp8", "an object with quant_method is needed"),
        ({"exclude": []}, "quant_method is needed"),
        ({"quant_method": "quark", "exclude": "fc"}, "exclude is 'fc'; a list"),
        ({"quant_method": "quark", "exclude": [1]}, "a list of module names"),
        ({"quant_method": "quark", "exclude": ["re:("]}, "no regular expression"),
    ],
)
def test_malformed_configs_are_refused(fields: Any, match: str) -> None:
    with pytest.raises(Eagle3Error, match=match):
        config_of(fields)


def test_no_config_is_no_opinion() -> None:
    assert parse_quant_config({"hidden_size": 3, "quantization_config": None}, "config.json") is None
