"""Quark-format drafts that this library writes, in the hands of compressed-tensors' own decoders.

It reads no Quark config, so its scheme is given here. Of the tensors it takes FP8 with one scale a matrix as they are;
a scale an output wants a second dimension, and MXFP4 codes another name.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loading import DRAFTS, target
from safetensors import safe_open

from eagle3_jax.checkpoint.drafts import load_draft
from eagle3_jax.checkpoint.quark import quantize_folder
from eagle3_jax.quant.weight import named_weights

torch = pytest.importorskip("torch")
compressors = pytest.importorskip("compressed_tensors.compressors")
quantization = pytest.importorskip("compressed_tensors.quantization")

SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8": ("float-quantized", {"num_bits": 8, "strategy": "tensor"}),
    "ptpc_fp8": ("float-quantized", {"num_bits": 8, "strategy": "channel"}),
    "mxfp4": ("mxfp4-pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
}
OURS = {f"midlayer.mlp.{name}_proj": f"mlp/{name}/weight" for name in ("gate", "up", "down")}
OURS |= {f"midlayer.self_attn.{name}_proj": f"attention/{name}/weight" for name in "qkvo"}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_its_decoders_give_the_weights_that_we_load(scheme: str, tmp_path: Path) -> None:
    quantize_folder(DRAFTS / "a_safeailab", tmp_path / "out", scheme, maxima=dict.fromkeys(OURS, 4.0))
    loaded = named_weights(load_draft(tmp_path / "out", target("llama_tied"), widen=True).params)
    format, fields = SCHEMES[scheme]
    decoder = compressors.BaseCompressor.get_value_from_registry(format)
    weights = quantization.QuantizationArgs(type="float", symmetric=True, **fields)
    described = quantization.QuantizationScheme(targets=["Linear"], weights=weights)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        for module, path in OURS.items():
            codes, scale = (file.get_tensor(f"{module}.{name}") for name in ("weight", "weight_scale"))
            given = {"weight": codes, "weight_scale": scale[:, None] if scheme == "ptpc_fp8" else scale}
            if scheme == "mxfp4":
                given = {"weight_packed": codes, "weight_scale": scale}
            wide = decoder.decompress(given, described)["weight"].float().numpy()
            weight = loaded[path]
            ours = np.asarray(weight.value, np.float32)
            np.testing.assert_array_equal(wide, ours.T if weight.layout == "kn" else ours, err_msg=module)
