"""An EAGLE-3 draft restated plainly: NumPy, float64, whole sequences, tensors as they lie in the file.

Written from the architecture's description; it shares no code with the package. Names are those of the
`layers.{i}.*` dialect.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np


def norm(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + epsilon) * weight


def rotated(x: np.ndarray, theta: float) -> np.ndarray:
    """x [T, N, D] turned by its positions 0 .. T-1; dimension i is paired with i + D/2."""
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None, None] * theta ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1)


def attention(w: Mapping[str, np.ndarray], at: str, x: np.ndarray, c: Mapping[str, Any]) -> np.ndarray:
    """Causal attention of x [T, K] with the projections at prefix `at`."""
    if f"{at}kv_a_proj_with_mqa.weight" in w:
        return latent_attention(w, at, x, c)
    heads, kv_heads, length = c["num_attention_heads"], c["num_key_value_heads"], len(x)
    q, k, v = (x @ w[f"{at}{name}_proj.weight"].T for name in "qkv")
    q, k, v = (y.reshape(length, n, -1) for y, n in ((q, heads), (k, kv_heads), (v, kv_heads)))
    if f"{at}q_norm.weight" in w:
        q = norm(q, w[f"{at}q_norm.weight"], c["rms_norm_eps"])
        k = norm(k, w[f"{at}k_norm.weight"], c["rms_norm_eps"])
    q, k = rotated(q, c["rope_theta"]), rotated(k, c["rope_theta"])
    mixed = np.zeros_like(q)
    for head in range(heads):
        group = head * kv_heads // heads
        for t in range(length):
            scores = k[: t + 1, group] @ q[t, head] / np.sqrt(q.shape[-1])
            weights = np.exp(scores - scores.max())
            mixed[t, head] = weights / weights.sum() @ v[: t + 1, group]
    return mixed.reshape(length, -1) @ w[f"{at}o_proj.weight"].T


def latent_attention(w: Mapping[str, np.ndarray], at: str, x: np.ndarray, c: Mapping[str, Any]) -> np.ndarray:
    """Multi-head latent attention of x [T, K], with every head's keys and values written out."""
    heads, length, eps = c["num_attention_heads"], len(x), c["rms_norm_eps"]
    nope, rank, rope = c["qk_nope_head_dim"], c["kv_lora_rank"], c.get("rope_scaling")
    if c.get("q_lora_rank"):
        latent = norm(x @ w[f"{at}q_a_proj.weight"].T, w[f"{at}q_a_layernorm.weight"], eps)
        q = latent @ w[f"{at}q_b_proj.weight"].T
    else:
        q = x @ w[f"{at}q_proj.weight"].T
    q = q.reshape(length, heads, -1)
    down = x @ w[f"{at}kv_a_proj_with_mqa.weight"].T
    kv = norm(down[:, :rank], w[f"{at}kv_a_layernorm.weight"], eps) @ w[f"{at}kv_b_proj.weight"].T
    kv = kv.reshape(length, heads, -1)
    width, scale = down.shape[1] - rank, q.shape[-1] ** -0.5
    inverse, size = c["rope_theta"] ** (-np.arange(0, width, 2) / width), 1.0
    if rope is not None:  # YaRN, with DeepSeek's temperatures
        low, high = (
            width
            * np.log(rope["original_max_position_embeddings"] / (2 * np.pi * rope[beta]))
            / (2 * np.log(c["rope_theta"]))
            for beta in ("beta_fast", "beta_slow")
        )
        low, high = max(np.floor(low), 0), min(np.ceil(high), width - 1)
        slow = np.clip((np.arange(width // 2) - low) / (high - low), 0, 1)
        inverse = inverse * (1 - slow) + inverse / rope["factor"] * slow
        warm, all_warm = (0.1 * rope[name] * np.log(rope["factor"]) + 1 for name in ("mscale", "mscale_all_dim"))
        size, scale = warm / all_warm, scale * all_warm**2
    angles = np.arange(length)[:, None, None] * inverse

    def turned(y: np.ndarray) -> np.ndarray:
        """Neighbouring columns are the pairs."""
        a, b, out = y[..., 0::2], y[..., 1::2], np.empty_like(y)
        out[..., 0::2] = size * (a * np.cos(angles) - b * np.sin(angles))
        out[..., 1::2] = size * (b * np.cos(angles) + a * np.sin(angles))
        return out

    q = np.concatenate([q[..., :nope], turned(q[..., nope:])], axis=-1)
    key = np.repeat(turned(down[:, None, rank:]), heads, axis=1)
    k, v = np.concatenate([kv[..., :nope], key], axis=-1), kv[..., nope:]
    mixed = np.zeros_like(v)
    for head in range(heads):
        for t in range(length):
            scores = k[: t + 1, head] @ q[t, head] * scale
            weights = np.exp(scores - scores.max())
            mixed[t, head] = weights / weights.sum() @ v[: t + 1, head]
    return mixed.reshape(length, -1) @ w[f"{at}o_proj.weight"].T


def mlp(w: Mapping[str, np.ndarray], at: str, x: np.ndarray) -> np.ndarray:
    gate = x @ w[f"{at}gate_proj.weight"].T
    return (gate / (1 + np.exp(-gate)) * (x @ w[f"{at}up_proj.weight"].T)) @ w[f"{at}down_proj.weight"].T


def fused(tensors: Mapping[str, np.ndarray], config: Mapping[str, Any], features: np.ndarray) -> np.ndarray:
    """The feature g [T, H] that `fc` makes of the tapped hidden states [T, F] of one row."""
    g = features.astype(np.float64)
    if "input_norm.weight" in tensors:
        g = norm(g, tensors["input_norm.weight"].astype(np.float64), config["rms_norm_eps"])
    return g @ tensors["fc.weight"].astype(np.float64).T


def hidden(
    tensors: Mapping[str, np.ndarray], config: Mapping[str, Any], g: np.ndarray, next_ids: np.ndarray, embedding: Any
) -> np.ndarray:
    """The last layer's output [T, H] for g [T, H] and next_ids int [T]; embedding is [V, H]."""
    w, eps = {name: x.astype(np.float64) for name, x in tensors.items()}, config["rms_norm_eps"]
    normed = norm(g, w["layers.0.hidden_norm.weight"], eps)
    embedded = norm(embedding[next_ids].astype(np.float64), w["layers.0.input_layernorm.weight"], eps)
    x = normed if config.get("norm_before_residual") else g
    x = x + attention(w, "layers.0.self_attn.", np.concatenate([embedded, normed], axis=-1), config)
    x = x + mlp(w, "layers.0.mlp.", norm(x, w["layers.0.post_attention_layernorm.weight"], eps))
    i = 1
    while f"layers.{i}.mlp.up_proj.weight" in w:
        before = w.get(f"layers.{i}.input_layernorm.weight", w.get(f"layers.{i}.hidden_norm.weight"))
        assert before is not None
        x = x + attention(w, f"layers.{i}.self_attn.", norm(x, before, eps), config)
        x = x + mlp(w, f"layers.{i}.mlp.", norm(x, w[f"layers.{i}.post_attention_layernorm.weight"], eps))
        i += 1
    return x


def logits(tensors: Mapping[str, np.ndarray], config: Mapping[str, Any], x: np.ndarray) -> np.ndarray:
    """Logits [..., Vd] of the last layer's output [..., H]."""
    normed = norm(x, tensors["norm.weight"].astype(np.float64), config["rms_norm_eps"])
    return normed @ tensors["lm_head.weight"].astype(np.float64).T
