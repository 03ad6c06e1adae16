"""Targets over a mesh of devices compute what one device computes."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
from loading import DRAFTS, TARGETS, draft, expected, target

from eagle3_jax.api import propose, score
from eagle3_jax.checkpoint.drafts import load_draft
from eagle3_jax.checkpoint.targets import load_target, save_target_orbax
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.quant.weight import named_weights
from eagle3_jax.sharding import make_mesh, mesh_of, shard_weights, weight_shardings

FAMILIES = ("llama_tied", "qwen3", "qwen3_moe", "minimax_m2", "gpt_oss", "deepseek_v3_kimi")


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_do_not_depend_on_the_mesh(name: str) -> None:
    """Norms over all heads, experts, sinks and biases, each split over the devices."""
    loaded, x = target(name), expected(TARGETS / name)
    # gpt-oss' four sinks can be split over four devices.
    params = shard_weights(loaded.params, make_mesh(1, 4 if name == "gpt_oss" else 8))
    split = {path for path, weight in named_weights(params).items() if not weight.value.sharding.is_fully_replicated}
    own = {"minimax_m2": "attention/q_norm", "gpt_oss": "attention/sinks", "deepseek_v3_kimi": "attention/v_b"}
    parts = ["attention/o/weight", own.get(name, "")]
    if loaded.model.config.moe is not None:
        parts.append("mlp/experts/up/weight")
    for part in parts:
        assert any(part in path for path in split), part
    got = score(dataclasses.replace(loaded, params=params), x["input_ids"])
    np.testing.assert_allclose(got.logits, x["logits"], atol=2e-4, rtol=0)
    np.testing.assert_allclose(got.hidden_states, x["hs"], atol=2e-4, rtol=0)


def laid_out(params: object, mesh: jax.sharding.Mesh) -> bool:
    """Whether every array lies where `weight_shardings` says."""
    found = jax.tree.map(lambda x, place: x.sharding == place, params, weight_shardings(params, mesh))
    return all(jax.tree.leaves(found))


def test_targets_and_their_drafts_are_loaded_onto_the_mesh(tmp_path: Path) -> None:
    # As JAX makes it by default; its axes are of another kind.
    given = jax.make_mesh((2, 4), ("data", "model"))
    loaded, mesh = load_target(TARGETS / "llama_tied", mesh=given), make_mesh(2, 4)
    assert mesh_of(loaded.params) == mesh and laid_out(loaded.params, mesh)
    jax.tree.map(np.testing.assert_array_equal, loaded.params, target("llama_tied").params)
    save_target_orbax(loaded, tmp_path / "orbax")
    restored = load_target(tmp_path / "orbax", mesh=given)
    assert laid_out(restored.params, mesh)
    jax.tree.map(np.testing.assert_array_equal, restored.params, loaded.params)
    ours, alone = load_draft(DRAFTS / "a_safeailab", loaded), draft("a_safeailab")
    assert laid_out(ours.params, mesh)
    jax.tree.map(np.testing.assert_array_equal, ours.params, alone.params)
    x = expected(DRAFTS / "a_safeailab")
    for got, wanted in zip(*(propose(d, x["features"], x["next_ids"], 2) for d in (ours, alone)), strict=True):
        np.testing.assert_allclose(got, wanted, atol=2e-4, rtol=0)
    with pytest.raises(Eagle3Error, match="axes x; it may have data and model"):
        load_target(TARGETS / "llama_tied", mesh=jax.make_mesh((2,), ("x",)))
