"""Llama-style decoders."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from eagle3_jax.config.fields import Fields, check_unknown_fields
from eagle3_jax.config.rope import RopeConfig, parse_rope
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.quant.weight import WeightFormats


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """A Llama-style decoder: grouped-query attention, SwiGLU, RMSNorm.

    Attributes:
        vocab_size, hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim: sizes.
        rms_norm_eps: epsilon inside the norms' square root.
        rope: rotary embedding.
        max_position: context length in tokens; a longer prompt is refused.
        tied: the head reads the embedding's weight.
        attention_bias: biases on q, k and v; `output_bias` on o; `mlp_bias` on the MLP's three matrices.
        dtype: dtype of activations ("float32", "bfloat16").
        weights: format and layout of every weight.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = RopeConfig()
    max_position: int = 2048
    tied: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    dtype: str = "float32"
    weights: WeightFormats = WeightFormats()

    @property
    def cache_row(self) -> tuple[int, int]:
        """What the cache keeps of a token in a layer: rows (keys, then values) and their width."""
        return 2 * self.num_kv_heads, self.head_dim


def parse_llama(config: Mapping[str, Any], where: str) -> LlamaConfig:
    """Read the config.json of a Llama-architecture target.

    Args:
        config: the parsed file.
        where: its name for messages.

    Raises:
        Eagle3Error: another architecture, a missing or malformed field, or an unread field that may change
            the result.
    """
    fields = Fields(config, where)
    fields.expect("architectures", [["LlamaForCausalLM"]])
    fields.expect("hidden_act", ["silu", "swish"])
    fields.expect("sliding_window", [])
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    kv_heads = fields.size("num_key_value_heads", heads)
    max_position = fields.size("max_position_embeddings", 2048)
    parsed = LlamaConfig(
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.size("intermediate_size"),
        num_layers=fields.size("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=fields.size("head_dim", hidden // heads),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=parse_rope(fields, max_position),
        max_position=max_position,
        tied=fields.flag("tie_word_embeddings"),
        attention_bias=fields.flag("attention_bias"),
        output_bias=fields.flag("attention_bias"),
        mlp_bias=fields.flag("mlp_bias"),
    )
    if heads % kv_heads:
        raise Eagle3Error(f"{where}: {heads} heads cannot share {kv_heads} key-value heads evenly")
    if parsed.head_dim % 2:
        raise Eagle3Error(f"{where}: head_dim {parsed.head_dim} is odd; RoPE rotates pairs")
    check_unknown_fields(config, fields.read, where)
    return parsed
