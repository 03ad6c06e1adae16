"""Drafts that this library writes, in the hands of speculators' own model class, and under SpecForge's names."""

from pathlib import Path

import numpy as np
import pytest
from loading import DRAFTS, TARGET_OF, TARGETS, draft, expected, tensors_of

from eagle3_jax.checkpoint.convert import convert_draft
from eagle3_jax.checkpoint.drafts import save_draft

torch = pytest.importorskip("torch")
eagle3 = pytest.importorskip("speculators.models.eagle3")

# e_width is left out: speculators' class takes no target of another width.
PEERS = [name for name in TARGET_OF if name != "e_width"]

SPECFORGE = """fc.weight lm_head.weight norm.weight d2t t2d
    midlayer.hidden_norm.weight midlayer.input_layernorm.weight midlayer.post_attention_layernorm.weight
    midlayer.self_attn.q_proj.weight midlayer.self_attn.k_proj.weight midlayer.self_attn.v_proj.weight
    midlayer.self_attn.o_proj.weight midlayer.mlp.gate_proj.weight midlayer.mlp.up_proj.weight
    midlayer.mlp.down_proj.weight""".split()
"""Tensors that SpecForge needs of a draft with a reduced vocabulary."""


def peer_logits(folder: Path, features: np.ndarray, next_ids: np.ndarray) -> np.ndarray:
    """[T, Vd] of one row by the class that speculators loads the folder with."""
    config = eagle3.Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = eagle3.Eagle3DraftModel.from_pretrained(folder, config=config).float().eval()
    found = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: found.append(output.detach().numpy()))
    rows = torch.from_numpy(features)[None], torch.from_numpy(next_ids.astype(np.int64))[None]
    with torch.no_grad():
        model(*rows, document_ids=torch.zeros((1, len(next_ids)), dtype=torch.long), ttt_steps=1)
    return found[0][0]


@pytest.mark.parametrize("name", PEERS)
def test_its_class_computes_the_same(name: str, tmp_path: Path) -> None:
    x = expected(DRAFTS / name)
    save_draft(draft(name), tmp_path / "saved", "float32", "speculators")
    convert_draft(DRAFTS / name, tmp_path / "converted", "speculators", TARGETS / TARGET_OF[name])
    for folder in (tmp_path / "saved", tmp_path / "converted"):
        found = peer_logits(folder, x["features"][0], x["next_ids"][0])
        np.testing.assert_allclose(found, x["logits"][0], atol=2e-4)


@pytest.mark.parametrize("name", ["a_safeailab", "b_speculators", "c_eagle31", "e_width"])
def test_specforge_finds_what_it_needs(name: str, tmp_path: Path) -> None:
    convert_draft(DRAFTS / name, tmp_path / "draft", "safeailab", TARGETS / TARGET_OF[name])
    missing = set(SPECFORGE) - tensors_of(tmp_path / "draft").keys()
    assert not missing


def test_a_file_of_torch_save_itself(tmp_path: Path) -> None:
    """pytorch_model.bin as torch writes it: views, half precision, parameters."""
    from eagle3_jax.checkpoint.pickles import PickleSource

    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    state = {
        "whole": base,
        "view": base[1:3, ::2],
        "transposed": base.T,
        "half": base.half(),
        "brain": base.bfloat16(),
        "parameter": torch.nn.Parameter(base),
        "d2t": torch.arange(5),
        "t2d": torch.tensor([True, False]),
        "scalar": torch.tensor(3.0),
    }
    torch.save(state, tmp_path / "pytorch_model.bin")
    source = PickleSource(tmp_path / "pytorch_model.bin")
    assert source.names() == list(state)
    for name, tensor in state.items():
        found = source.read(name)
        assert source.shape(name) == tuple(tensor.shape)
        np.testing.assert_array_equal(found.astype(np.float64), tensor.detach().double().numpy(), err_msg=name)
