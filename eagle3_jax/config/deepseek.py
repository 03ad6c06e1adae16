"""DeepSeek-V3 decoders, among them Kimi-K2's and Kimi-K2.5's, and the reading of their config.json."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from eagle3_jax.config.decoder import DecoderConfig
from eagle3_jax.config.fields import Fields, check_unknown_fields
from eagle3_jax.config.moe import MoEConfig, parse_moe
from eagle3_jax.config.rope import parse_rope
from eagle3_jax.errors import Eagle3Error

WRAPPERS = ("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration")
"""Architectures that add vision to the decoder, whose own settings are in `text_config`."""

_OF_TRAINING = "aux_loss_alpha seq_aux ep_size output_router_logits router_aux_loss_coef"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepseekConfig(DecoderConfig):
    """A DeepSeek-V3 decoder (arXiv 2412.19437, section 2.1): latent attention, and experts after the first layers.

    Attributes:
        q_rank: width of the latent that queries are made of; None makes them of the hidden state.
        kv_rank: width of the latent that keys and values are made of, and that the cache keeps.
        nope_dim, rope_dim: columns of a head's queries and keys that RoPE leaves alone, and that it turns; `head_dim`
            are those of its values.
        interleaved: RoPE turns neighbours (2i, 2i + 1), not (i, i + rope_dim / 2).
        latent_norm_eps: epsilon of the norms of both latents. DeepSeek's and Kimi's own code builds them with
            1e-6 whatever `rms_norm_eps` is; some engines take that instead.
        moe: the experts of every layer but the first `dense_layers`.
        shared_size: width of the experts that every token uses, together; 0 is none.
        mtp_layers: multi-token prediction layers that a checkpoint has behind the others; they are not loaded.
        expand_from: new tokens of a pass from which on keys and values are expanded; None is where that takes
            fewer multiplications (see `eagle3_jax.models.deepseek`).
    """

    family: str = "deepseek_v3"
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    moe: MoEConfig
    dense_layers: int = 0
    shared_size: int = 0
    mtp_layers: int = 0
    interleaved: bool = True
    latent_norm_eps: float = 1e-6
    expand_from: int | None = None

    @property
    def cache_row(self) -> tuple[int, int]:
        """What the cache keeps of a token in a layer: one row, the latent and the turned key that all heads share."""
        return 1, self.kv_rank + self.rope_dim

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that the rotary embedding turns."""
        return self.rope_dim


def parse_deepseek_v3(config: Mapping[str, Any], where: str) -> DeepseekConfig:
    """Read the config.json of a DeepSeek-V3, Kimi-K2 or Kimi-K2.5 target; of the last, the text model's part.

    Args:
        config: the parsed file.
        where: its name for messages.

    Raises:
        Eagle3Error: another architecture, a missing or malformed field, or an unread field that may change
            the result.
    """
    tied = None
    if config.get("architectures") in [[name] for name in WRAPPERS]:
        config, where, tied = _text_config(config, where)
    fields = Fields(config, where)
    for name, allowed in (
        ("architectures", [["DeepseekV3ForCausalLM"]]),
        ("model_type", ["deepseek_v3", "kimi_k2"]),
        ("hidden_act", ["silu", "swish"]),
        ("scoring_func", ["sigmoid"]),
        ("topk_method", ["noaux_tc"]),
        ("moe_layer_freq", [1]),
        ("sliding_window", []),
        ("pruned_heads", [{}]),  # old transformers writes its defaults into a nested config
    ):
        fields.expect(name, allowed)
    for name in _OF_TRAINING.split():
        fields.get(name)
    latent, max_position = parse_latent(fields), fields.size("max_position_embeddings")
    fields.expect("head_dim", [latent["rope_dim"]])
    moe = parse_moe(
        fields,
        "n_routed_experts",
        intermediate_size=fields.size("moe_intermediate_size"),
        scoring="sigmoid",
        correction_bias=True,
        normalize=fields.flag("norm_topk_prob", True),
        scaling=fields.number("routed_scaling_factor"),
        groups=fields.size("n_group", 1),
        top_groups=fields.size("topk_group", 1),
    )
    parsed = DeepseekConfig(
        vocab_size=fields.size("vocab_size"),
        hidden_size=fields.size("hidden_size"),
        intermediate_size=fields.size("intermediate_size"),
        num_layers=fields.size("num_hidden_layers"),
        **latent,
        rms_norm_eps=fields.number("rms_norm_eps"),
        rope=parse_rope(fields, max_position, None),
        max_position=max_position,
        tied=fields.flag("tie_word_embeddings", bool(tied)),
        moe=moe,
        dense_layers=_count(fields, "first_k_dense_replace"),
        shared_size=_count(fields, "n_shared_experts") * moe.intermediate_size,
        mtp_layers=_count(fields, "num_nextn_predict_layers", most=64),
    )
    if tied is not None and tied != parsed.tied:
        raise Eagle3Error(f"{where}: tie_word_embeddings is {parsed.tied}, but {tied} outside of text_config")
    check_unknown_fields(config, fields.read, where)
    return parsed


def parse_latent(fields: Fields) -> dict[str, Any]:
    """The sizes of latent attention, by their names in `DeepseekConfig`.

    Raises:
        Eagle3Error: a missing or malformed size, sizes that contradict each other, biases, or attention without RoPE.
    """
    heads = fields.size("num_attention_heads")
    nope_dim, rope_dim = fields.size("qk_nope_head_dim"), fields.size("qk_rope_head_dim")
    fields.expect("num_key_value_heads", [heads])
    fields.expect("qk_head_dim", [nope_dim + rope_dim])
    fields.expect("attention_bias", [False])
    fields.expect("mla_use_nope", [False])  # Kimi-K3: no RoPE at all
    if rope_dim % 2:
        raise Eagle3Error(f"{fields.where}: qk_rope_head_dim {rope_dim} is odd; RoPE rotates pairs")
    return {
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": fields.size("v_head_dim"),
        "q_rank": None if fields.get("q_lora_rank") is None else fields.size("q_lora_rank"),
        "kv_rank": fields.size("kv_lora_rank"),
        "nope_dim": nope_dim,
        "rope_dim": rope_dim,
        "interleaved": fields.flag("rope_interleave", True),
    }


def _text_config(config: Mapping[str, Any], where: str) -> tuple[Mapping[str, Any], str, bool | None]:
    """The part of a model with vision that is about its decoder, its name, and the outer word on tying."""
    fields = Fields(config, where)
    fields.expect("model_type", ["kimi_k25"])
    for name in "vision_config media_placeholder_token_id use_unified_vision_chunk video_placeholder".split():
        fields.get(name)
    text = fields.get("text_config")
    if not isinstance(text, Mapping):
        raise Eagle3Error(
            f"{where}: field text_config is {text!r:.80}; an object with the decoder's settings is needed"
        )
    tied = fields.flag("tie_word_embeddings") if fields.get("tie_word_embeddings") is not None else None
    check_unknown_fields(config, fields.read, where)
    return text, f"{where}: text_config", tied


def _count(fields: Fields, name: str, most: int = 2**31) -> int:
    """A number of things that may be none; absent is 0."""
    number = 0 if fields.get(name) in (None, 0) else fields.size(name)
    if number > most:
        raise Eagle3Error(f"{fields.where}: field {name} is {number}; {most} at most are needed")
    return number
