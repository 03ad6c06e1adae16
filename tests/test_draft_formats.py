"""Every format of a draft leaves the text the target's own."""

from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from loading import DRAFTS, TARGETS, edited, expected

from eagle3_jax import api
from eagle3_jax.checkpoint.drafts import load_draft
from eagle3_jax.checkpoint.quark import quantize_folder, quantized_modules
from eagle3_jax.checkpoint.targets import Target, load_target
from eagle3_jax.decoding.request import Chain, GenerationConfig
from eagle3_jax.decoding.sampling import Sampling, row_keys
from eagle3_jax.decoding.verify import verify_lossless
from eagle3_jax.quant.weight import named_weights

A, LAYERS = DRAFTS / "a_safeailab", 3
CONFIG = GenerationConfig(max_new_tokens=24, speculation=Chain(2), transforms=(), prefill_chunk=16)
ON_A_CARD = {"ptpc_fp8": {"fp8_token"}, "fp8": {"fp8_static"}, "mxfp4": {"mxfp4"}}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """The first layers of a fixture."""

    def shorten(tensors: dict[str, np.ndarray]) -> None:
        for name in [name for name in tensors if name.startswith("model.layers.")]:
            if int(name.split(".")[2]) >= LAYERS:
                del tensors[name]

    place = tmp_path_factory.mktemp("target")
    layers = {"num_hidden_layers": LAYERS}
    return load_target(edited(TARGETS / "llama_tied", place, shorten, lambda fields: fields.update(layers)))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """A draft in every format."""

    def in_bfloat16(tensors: dict[str, np.ndarray]) -> None:
        tensors |= {name: x.astype(ml_dtypes.bfloat16) for name, x in tensors.items() if x.dtype == np.float32}
        modules.update(
            dict.fromkeys(quantized_modules({name: x.shape for name, x in tensors.items()}, "fc|lm_head"), 4.0)
        )

    place, modules = tmp_path_factory.mktemp("drafts"), {}
    found = {"float32": A, "bfloat16": edited(A, place / "bfloat16", tensors=in_bfloat16)}
    for scheme in ON_A_CARD:
        quantize_folder(found["bfloat16"], place / scheme, scheme, maxima=modules)
        found[scheme] = place / scheme
    return found


@pytest.mark.parametrize(
    ("name", "activations"),
    [*((name, None) for name in ("float32", "bfloat16", *ON_A_CARD)), *((name, "fake_quant") for name in ON_A_CARD)],
)
def test_verify_passes(target: Target, folders: Mapping[str, Path], name: str, activations: str | None) -> None:
    draft = load_draft(folders[name], target, {"taps": [0, 1, 3]}, activations=activations)
    modes = {weight.activations for weight in named_weights(draft.params).values()} - {"wide"}
    assert modes == (ON_A_CARD[name] if activations else set())
    prompts = expected(TARGETS / "llama_tied")["greedy_prompt_ids"].tolist()
    ids, lengths = api.encode_ids(target, prompts)
    sampling = Sampling.make(len(prompts), temperature=[0.0, 0.9], ignore_eos=True)
    report = verify_lossless(target, draft, ids, lengths, row_keys(0, len(prompts)), sampling, CONFIG)
    # The draft's rounding is not the target's: the tolerance stays that of float32, and no row needs it.
    assert report.tolerance == 1e-3 and report.equal, report.rows
