"""Reading of MiniMax-M2's config.json: joint norms of queries and keys, partial RoPE, sigmoid routing."""

from collections.abc import Mapping
from typing import Any

from eagle3_jax.config.fields import Fields
from eagle3_jax.config.llama import LlamaConfig, checked, required_fields
from eagle3_jax.config.moe import parse_moe
from eagle3_jax.config.rope import parse_rotary_dim
from eagle3_jax.errors import Eagle3Error


def parse_minimax_m2(config: Mapping[str, Any], where: str) -> LlamaConfig:
    """Read the config.json of a MiniMax-M2 target (M2, M2.5, M2.7).

    Raises:
        Eagle3Error: another architecture, a missing or malformed field, or an unread field that may change
            the result.
    """
    fields = Fields(config, where)
    for name, only in (
        ("use_qk_norm", True),
        ("qk_norm_type", "per_layer"),
        ("use_routing_bias", True),
        ("scoring_func", "sigmoid"),
        ("shared_intermediate_size", 0),
        ("sliding_window", None),
    ):
        fields.expect(name, [only])
    kinds = fields.get("attn_type_list", [])
    if not isinstance(kinds, list) or any(kind != 1 for kind in kinds):
        raise Eagle3Error(f"{where}: field attn_type_list is {kinds!r:.80}; only full attention, 1, is supported")
    # Training's; and multi-token prediction, which public checkpoints announce without its tensors.
    for name in "router_aux_loss_coef router_jitter_noise output_router_logits use_mtp num_mtp_modules".split():
        fields.get(name)
    fields.get("mtp_transformer_layers")
    common = required_fields(fields, "minimax_m2", "MiniMaxM2ForCausalLM", partial=True)
    moe = parse_moe(
        fields,
        "num_local_experts",
        "num_experts",
        intermediate_size=common["intermediate_size"],
        scoring="sigmoid",
        correction_bias=True,
    )
    rotated = parse_rotary_dim(fields, common["head_dim"])
    return checked(LlamaConfig(**common, rotated=rotated, qk_norm="joint", moe=moe), fields)
