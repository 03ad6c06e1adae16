"""The training-time test restated slowly: NumPy, float64, checkpoint files as they lie, explicit masks.

Written from the paper and from what public checkpoints hold; it shares no code with the package.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import dense
import numpy as np
from safetensors.numpy import load_file


@dataclasses.dataclass(frozen=True)
class SlowDraft:
    """A draft folder's tensors by their last names, and the numbers of its config."""

    tensors: dict[str, np.ndarray]
    config: dict[str, Any]
    embedding: np.ndarray
    head: np.ndarray

    @property
    def target_ids(self) -> np.ndarray:
        """int [Vd]."""
        offsets = self.tensors.get("d2t", np.zeros(len(self.head), int))
        return np.arange(len(offsets)) + offsets


def read(draft: Path, target: Path) -> SlowDraft:
    config = json.loads((draft / "config.json").read_text())
    config = {**config, **config.get("transformer_layer_config", {})}
    raw = {
        name: x.astype(np.float64 if x.dtype.kind == "f" else int)
        for name, x in load_file(draft / "model.safetensors").items()
    }
    tensors = {
        name.removeprefix("midlayer.").removeprefix("layers.0.").removesuffix(".weight"): x for name, x in raw.items()
    }
    theirs = load_file(target / "model.safetensors")["model.embed_tokens.weight"].astype(np.float64)
    return SlowDraft(tensors, config, tensors.get("embed_tokens", theirs), tensors["lm_head"])


def norm(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + epsilon) * weight


def rotated(x: np.ndarray, positions: np.ndarray, theta: float) -> np.ndarray:
    """Rotate the two halves of x [T, N, D] against each other."""
    half = x.shape[-1] // 2
    angles = positions[:, None] / theta ** (np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def softmax(x: np.ndarray) -> np.ndarray:
    x = np.exp(x - x.max(axis=-1, keepdims=True))
    return x / x.sum(axis=-1, keepdims=True)


def visible(length: int, steps: int, segments: np.ndarray) -> np.ndarray:
    """Which of the (j+1) * T keys a query of the last of `steps` steps sees: bool [T, steps * T]."""
    mask = np.zeros((length, steps * length), bool)
    for query in range(length):
        for key in range(query + 1):
            mask[query, key] = segments[query] == segments[key]
        for step in range(1, steps):
            mask[query, step * length + query] = True
    return mask


def logits_of_steps(
    draft: SlowDraft, features: np.ndarray, next_ids: np.ndarray, steps: int, segments: np.ndarray | None = None
) -> np.ndarray:
    """features [T, F], next_ids int [T] -> logits [J, T, Vd] of one row."""
    w, c = draft.tensors, draft.config
    eps, theta, length = c["rms_norm_eps"], rope_theta(c), len(next_ids)
    heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
    segments = np.zeros(length, int) if segments is None else segments
    features = features.astype(np.float64)
    if "fc_norm.0" in w:
        parts = np.split(features, sum(name.startswith("fc_norm.") for name in w), axis=-1)
        features = np.concatenate([norm(part, w[f"fc_norm.{i}"], eps) for i, part in enumerate(parts)], axis=-1)
    if "input_norm" in w:
        features = norm(features, w["input_norm"], eps)
    g = features @ w["fc"].T
    all_keys, all_values, found = [], [], []
    for j in range(steps):
        ids = np.concatenate([next_ids[j:], np.zeros(j, int)])
        normed = norm(g, w["hidden_norm"], eps)
        x = np.concatenate([norm(draft.embedding[ids], w["input_layernorm"], eps), normed], axis=-1)
        q, k, v = (
            (x @ w[f"self_attn.{name}_proj"].T).reshape(length, count, -1)
            for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        if "self_attn.q_norm" in w:
            q, k = norm(q, w["self_attn.q_norm"], eps), norm(k, w["self_attn.k_norm"], eps)
        positions = np.arange(length) + j
        all_keys.append(rotated(k, positions, theta))
        all_values.append(v)
        keys, values = np.concatenate(all_keys), np.concatenate(all_values)
        mixed = dense.attend(rotated(q, positions, theta), keys, values, visible(length, j + 1, segments))
        mixed = mixed @ w["self_attn.o_proj"].T
        h = (normed if c.get("norm_before_residual") else g) + mixed
        n = norm(h, w["post_attention_layernorm"], eps)
        gate = n @ w["mlp.gate_proj"].T
        y = h + (gate / (1 + np.exp(-gate)) * (n @ w["mlp.up_proj"].T)) @ w["mlp.down_proj"].T
        z = norm(y, w["norm"], eps)
        found.append(z @ draft.head.T)
        g = z if c.get("norm_output") else y
    return np.stack(found)


def rope_theta(config: dict[str, Any]) -> float:
    return config.get("rope_parameters", config).get("rope_theta", 10000.0)


@dataclasses.dataclass
class SlowSums:
    """What `Metrics` holds, for one row; `overlap` is the sum of sum(min(p, q)) at temperature 1.

    `lk` is the loss of the objective of that name.
    """

    loss: np.ndarray
    weight: np.ndarray
    correct: np.ndarray
    chain_correct: np.ndarray
    count: np.ndarray
    overlap: np.ndarray
    lk: np.ndarray


def sums_of_steps(
    draft: SlowDraft, logits: np.ndarray, target_logits: np.ndarray, mask: np.ndarray, segments: np.ndarray
) -> SlowSums:
    """Cross-entropy and agreement, position by position.

    Args:
        draft: the draft. logits: its [J, T, Vd]. target_logits: [T, V], for the token that row t predicts.
        mask: bool [T], tokens to learn. segments: int [T].
    """
    ids = draft.target_ids
    sums = {field.name: np.zeros(len(logits)) for field in dataclasses.fields(SlowSums)}
    for t in range(logits.shape[1]):
        right_so_far = True
        for j in range(len(logits)):
            if t + j >= len(mask):
                break
            there = target_logits[t + j].astype(np.float64)
            q = softmax(logits[j, t])
            right_so_far &= bool(ids[np.argmax(q)] == np.argmax(there))
            if not mask[t + j] or segments[t] != segments[t + j]:
                continue
            sums["count"][j] += 1
            sums["correct"][j] += ids[np.argmax(q)] == np.argmax(there)
            sums["chain_correct"][j] += right_so_far
            sums["overlap"][j] += np.minimum(softmax(there)[ids], q).sum()
            if np.argmax(there) in ids:
                sums["weight"][j] += 1
                p = softmax(there[ids])
                sums["loss"][j] -= np.sum(p * np.log(q))
                accepted = np.minimum(p, q).sum()
                share = np.exp(-3 * accepted)
                sums["lk"][j] += share * np.sum(p * np.log(p / q)) + (1 - share) * (1 - accepted)
    return SlowSums(**sums)
