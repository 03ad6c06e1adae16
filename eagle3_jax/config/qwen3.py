"""Reading of Qwen3's and Qwen3-MoE's config.json: a norm over each head of queries and keys; experts by softmax."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from eagle3_jax.config.fields import Fields
from eagle3_jax.config.llama import LlamaConfig, checked, required_fields
from eagle3_jax.config.moe import parse_moe
from eagle3_jax.errors import Eagle3Error


def parse_qwen3(config: Mapping[str, Any], where: str) -> LlamaConfig:
    """Read the config.json of a dense Qwen3 target.

    Raises:
        Eagle3Error: another architecture, a missing or malformed field, or an unread field that may change
            the result.
    """
    fields = Fields(config, where)
    return checked(_qwen3(fields, "qwen3", "Qwen3ForCausalLM"), fields)


def parse_qwen3_moe(config: Mapping[str, Any], where: str) -> LlamaConfig:
    """Read the config.json of a Qwen3-MoE target.

    Raises:
        Eagle3Error: as `parse_qwen3`.
    """
    fields = Fields(config, where)
    parsed = _qwen3(fields, "qwen3_moe", "Qwen3MoeForCausalLM")
    fields.get("router_aux_loss_coef")  # of training
    fields.get("output_router_logits")
    step = fields.size("decoder_sparse_step", 1)
    dense = fields.get("mlp_only_layers", [])
    layers = range(parsed.num_layers)
    if not isinstance(dense, list) or not all(type(i) is int and i in layers for i in dense):
        raise Eagle3Error(f"{where}: field mlp_only_layers is {dense!r:.80}; a list of layer numbers is needed")
    moe = parse_moe(
        fields,
        "num_experts",
        "num_local_experts",
        intermediate_size=fields.size("moe_intermediate_size"),
        normalize=fields.flag("norm_topk_prob"),
    )
    dense_layers = tuple(i for i in layers if i in dense or (i + 1) % step)
    return checked(dataclasses.replace(parsed, moe=moe, dense_layers=dense_layers), fields)


def _qwen3(fields: Fields, family: str, architecture: str) -> LlamaConfig:
    fields.expect("use_sliding_window", [False])
    fields.get("sliding_window")  # means something with use_sliding_window only, as does the next
    fields.get("max_window_layers")
    kinds = fields.get("layer_types", [])
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise Eagle3Error(f"{fields.where}: field layer_types is {kinds!r:.80}; only full_attention is supported")
    bias = fields.flag("attention_bias")
    return LlamaConfig(
        **required_fields(fields, family, architecture), qk_norm="head", attention_bias=bias, output_bias=bias
    )
