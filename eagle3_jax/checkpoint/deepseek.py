"""What DeepSeek-V3's, Kimi-K2's and Kimi-K2.5's checkpoints call their tensors, and what they hold besides."""

from collections.abc import Container
from typing import Any

from eagle3_jax.checkpoint.names import HeadRows, KeyMap, Place
from eagle3_jax.config import DeepseekConfig, Eagle3LatentConfig

_PREFIXES = (("model.", ""), ("language_model.model.", "language_model."), ("model.language_model.", ""))
"""Of the decoder's tensors and of the head's: the text model alone, Kimi-K2.5 as published, and as transformers
saves it."""

_ATTENTION = {
    "q": "q_proj",
    "q_a": "q_a_proj",
    "q_a_norm": "q_a_layernorm",
    "q_b": "q_b_proj",
    "kv_a": "kv_a_proj_with_mqa",
    "kv_a_norm": "kv_a_layernorm",
    "o": "o_proj",
}

VISION = r"(model\.)?(vision_tower|mm_projector|multi_modal_projector)\..*"


def latent_names(path: str, name: str, nope_dim: int, value_dim: int) -> dict[str, Place]:
    """Latent attention in `KeyMap.modules`.

    Args:
        path: of the layer in the parameter tree. name: of the layer in the file.
        nope_dim, value_dim: columns of a head's unturned keys and of its values.
    """
    parts: dict[str, Place] = {f"{path}attention/{ours}": f"{name}self_attn.{x}" for ours, x in _ATTENTION.items()}
    kv_b, period = f"{name}self_attn.kv_b_proj.weight", nope_dim + value_dim
    parts[f"{path}attention/k_b/weight"] = HeadRows(kv_b, 0, nope_dim, period)
    parts[f"{path}attention/v_b/weight"] = HeadRows(kv_b, nope_dim, value_dim, period)
    return parts


def deepseek_names(config: DeepseekConfig, tensors: Container[str]) -> KeyMap:
    """The names of one checkpoint.

    Args:
        config: the model. tensors: the names in the file, which show the prefix.
    """
    maps = [_names(config, *prefix) for prefix in _PREFIXES]
    return next((names for names in maps if names.file_name("embed/weight") in tensors), maps[0])


def _names(config: DeepseekConfig, body: str, head: str) -> KeyMap:
    layer = f"{body}layers.{{i}}."
    parts: dict[str, Place] = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    parts |= {"mlp/router": "mlp.gate", "mlp/router/correction": "mlp.gate.e_score_correction_bias"}
    for name in ("gate", "up", "down"):
        parts[f"mlp/{name}"] = f"mlp.{name}_proj"
        parts[f"shared/{name}"] = f"mlp.shared_experts.{name}_proj"
        parts[f"mlp/experts/{name}"] = f"mlp.experts.{{e}}.{name}_proj"
    modules: dict[str, Place] = {f"layers_{{i}}/{ours}": f"{layer}{theirs}" for ours, theirs in parts.items()}
    modules |= latent_names("layers_{i}/", layer, config.nope_dim, config.head_dim)
    modules |= {"embed": f"{body}embed_tokens", "final_norm": f"{body}norm", "head": f"{head}lm_head"}
    body = body.replace(".", r"\.")
    mtp = [rf"{body}layers\.{config.num_layers + i}\..*" for i in range(config.mtp_layers)]
    return KeyMap(modules, ignored=(r"(.*\.)?rotary_emb\.inv_freq", VISION, *mtp))


def latent_fields(config: DeepseekConfig | Eagle3LatentConfig) -> dict[str, Any]:
    """The fields of config.json about latent attention; `parse_latent` reads them as this config's."""
    return {
        "num_key_value_heads": config.num_heads,
        "q_lora_rank": config.q_rank,
        "kv_lora_rank": config.kv_rank,
        "qk_nope_head_dim": config.nope_dim,
        "qk_rope_head_dim": config.rope_dim,
        "v_head_dim": config.head_dim,
        "rope_interleave": config.interleaved,
    }


def deepseek_fields(config: DeepseekConfig) -> dict[str, Any]:
    """The fields of config.json that are DeepSeek's own; `parse_deepseek_v3` reads them as this config."""
    moe = config.moe
    return {
        **latent_fields(config),
        "first_k_dense_replace": config.dense_layers,
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.intermediate_size,
        "n_shared_experts": config.shared_size // moe.intermediate_size,
        "scoring_func": moe.scoring,
        "topk_method": "noaux_tc",
        "norm_topk_prob": moe.normalize,
        "routed_scaling_factor": moe.scaling,
        "n_group": moe.groups,
        "topk_group": moe.top_groups,
    }
