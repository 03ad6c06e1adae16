"""Reading of gpt-oss' config.json: sinks, a window in every other layer, biases everywhere, clamped experts."""

from collections.abc import Mapping
from typing import Any

from eagle3_jax.config.fields import Fields
from eagle3_jax.config.llama import LlamaConfig, checked, required_fields
from eagle3_jax.config.moe import parse_moe
from eagle3_jax.errors import Eagle3Error


def parse_gpt_oss(config: Mapping[str, Any], where: str) -> LlamaConfig:
    """Read the config.json of a gpt-oss target.

    Raises:
        Eagle3Error: another architecture, a missing or malformed field, or an unread field that may change
            the result.
    """
    fields = Fields(config, where)
    common = required_fields(fields, "gpt_oss", "GptOssForCausalLM")
    fields.get("router_aux_loss_coef")  # of training
    fields.get("output_router_logits")
    original = common["rope"].original_max_position
    fields.expect("initial_context_length", [original] if common["rope"].kind == "yarn" else [])
    bias = fields.flag("attention_bias", True)
    # A softmax over the chosen experts' logits is that over all of them, divided by the chosen ones' sum.
    moe = parse_moe(
        fields,
        "num_local_experts",
        "num_experts",
        intermediate_size=common["intermediate_size"],
        router_bias=True,
        expert_bias=True,
        gate_limit=fields.number("swiglu_limit"),
        gate_slope=fields.number("swiglu_alpha", 1.702),
    )
    windows = _windows(fields, common["num_layers"])
    return checked(
        LlamaConfig(**common, windows=windows, sinks=True, attention_bias=bias, output_bias=bias, moe=moe), fields
    )


def _windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    window, kinds = fields.size("sliding_window"), fields.get("layer_types")
    sees = {"sliding_attention": window, "full_attention": None}
    if not isinstance(kinds, list) or len(kinds) != num_layers or not all(kind in sees for kind in kinds):
        raise Eagle3Error(
            f"{fields.where}: field layer_types is {kinds!r:.80}; one of {' and '.join(sees)} for each of "
            f"{num_layers} layers is needed"
        )
    return tuple(sees[kind] for kind in kinds)
