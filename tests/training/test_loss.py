"""The training-time test against speculators' own forward, and against a restatement with explicit masks."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from eagle3_jax.config import Eagle3Config, Fields, parse_rope
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.models.eagle3 import Eagle3, SharedWeights
from eagle3_jax.quant.weight import Weight
from eagle3_jax.training.loss import Batch, LossConfig, shift_left, ttt_loss, ttt_outputs

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
DRAFTS = {"a_safeailab": "llama_tied", "c_eagle31": "llama_gqa_rope3", "d_fullvocab": "llama_tied"}


def _weight(value: np.ndarray) -> dict[str, Weight]:
    array = jnp.asarray(value.T if value.ndim == 2 else value)
    return {"weight": Weight(array, None, "f32", "kn" if value.ndim == 2 else "n")}


def _load(name: str) -> tuple[Eagle3, dict[str, Any], SharedWeights, dict[str, np.ndarray], dict[str, Weight]]:
    """Draft, params, the target's shared weights, expected arrays, the target's final norm."""
    folder = FIXTURES / "drafts" / name
    raw, fixture = (json.loads((folder / f).read_text()) for f in ("config.json", "fixture.json"))
    tensors = load_file(folder / "model.safetensors")
    target = load_file(FIXTURES / "targets" / DRAFTS[name] / "model.safetensors")
    layer = "midlayer" if "midlayer.hidden_norm.weight" in tensors else "layers.0"
    heads = raw["num_attention_heads"]
    config = Eagle3Config(
        vocab_size=raw["vocab_size"],
        draft_vocab_size=raw["draft_vocab_size"],
        hidden_size=raw["hidden_size"],
        target_hidden_size=fixture["target_hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_heads=heads,
        num_kv_heads=raw["num_key_value_heads"],
        head_dim=raw.get("head_dim", raw["hidden_size"] // heads),
        taps=tuple(fixture["taps_hs_index"]),
        rms_norm_eps=raw["rms_norm_eps"],
        rope=parse_rope(Fields(raw, name), 2048),
        norm_before_residual=fixture["norm_before_residual"],
        norm_output=fixture["norm_output"],
        fc_norm="fc_norm.0.weight" in tensors,
        shares_embedding="embed_tokens.weight" not in tensors,
    )
    names = {
        "embed_norm": f"{layer}.input_layernorm",
        "hidden_norm": f"{layer}.hidden_norm",
        "mlp_norm": f"{layer}.post_attention_layernorm",
        "final_norm": "norm",
        "fc": "fc",
        "head": "lm_head",
    }
    params: dict[str, Any] = {ours: _weight(tensors[f"{theirs}.weight"]) for ours, theirs in names.items()}
    params["attention"] = {n: _weight(tensors[f"{layer}.self_attn.{n}_proj.weight"]) for n in "qkvo"}
    params["mlp"] = {n: _weight(tensors[f"{layer}.mlp.{n}_proj.weight"]) for n in ("gate", "up", "down")}
    if config.fc_norm:
        params |= {f"fc_norms_{i}": _weight(tensors[f"fc_norm.{i}.weight"]) for i in range(len(config.taps))}
    if not config.shares_embedding:
        params["embed"] = _weight(tensors["embed_tokens.weight"])
    if "d2t" in tensors:
        ids = tensors["d2t"] + np.arange(len(tensors["d2t"]))
        params["target_ids"] = jnp.asarray(ids, jnp.int32)
    embedding = _weight(target["model.embed_tokens.weight"])["weight"]
    head = _weight(target["lm_head.weight"])["weight"] if "lm_head.weight" in target else embedding
    with np.load(folder / "expected.npz") as file:
        expected = dict(file)
    return Eagle3(config), params, SharedWeights(embedding, head), expected, _weight(target["model.norm.weight"])


def _batch(
    params: dict[str, Any], shared: SharedWeights, expected: dict[str, np.ndarray], norm: dict[str, Weight]
) -> Batch:
    hidden = np.asarray(expected["ttt_verifier_last_hidden"], np.float64)
    normed = hidden / np.sqrt(np.mean(hidden**2, -1, keepdims=True) + 1e-5) * np.asarray(norm["weight"].value)
    logits = np.asarray(normed @ np.asarray(shared.head.value, np.float64), np.float32)
    ids = np.asarray(params["target_ids"]) if "target_ids" in params else np.arange(logits.shape[-1])
    return Batch(
        features=jnp.asarray(expected["ttt_features"]),
        token_ids=jnp.asarray(expected["ttt_input_ids"], jnp.int32),
        target_logits=jnp.asarray(logits[..., ids]),
        target_argmax=jnp.asarray(logits.argmax(-1), jnp.int32),
        loss_mask=jnp.asarray(expected["ttt_loss_mask"]),
        segment_ids=jnp.zeros(logits.shape[:2], jnp.int32),
    )


each_draft = pytest.mark.parametrize("name", DRAFTS)


@each_draft
def test_logits_of_every_step_match_speculators(name: str) -> None:
    model, params, shared, expected, norm = _load(name)
    outputs = ttt_outputs(model, params, shared, _batch(params, shared, expected, norm), 3)
    for j, y in enumerate(outputs):
        logits = model.apply({"params": params}, y, shared, method="logits")
        valid = expected["ttt_valid"][j]
        np.testing.assert_allclose(logits[:, valid], expected["ttt_logits"][j][:, valid], rtol=0, atol=2e-5)


@each_draft
def test_loss_and_accuracy_match_speculators(name: str) -> None:
    model, params, shared, expected, norm = _load(name)
    batch = _batch(params, shared, expected, norm)
    config = LossConfig(steps=3, decay=1.0, objective="kl", drop_uncovered=False)
    for row in range(2):
        one = jax.tree.map(lambda x, row=row: x[row : row + 1], batch)
        total, metrics = ttt_loss(model, params, shared, one, config)
        print(name, metrics.loss, metrics.weight, metrics.loss/metrics.weight, expected["ttt_loss_kl_per_step"][row], total, expected["ttt_loss_kl_total"][row])
        print(metrics.correct, metrics.count, metrics.chain_correct, expected["ttt_full_acc"][row], expected["ttt_cond_acc"][row], expected["ttt_loss_mask"][row].sum())
