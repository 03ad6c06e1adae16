"""Decoders with grouped-query attention, and the reading of Llama's config.json."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from eagle3_jax.config.decoder import MOST_LAYERS, DecoderConfig
from eagle3_jax.config.fields import Fields, check_unknown_fields
from eagle3_jax.config.moe import MoEConfig
from eagle3_jax.config.rope import parse_rope
from eagle3_jax.errors import Eagle3Error


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """A decoder with grouped-query attention: Llama by default, others by their settings.

    Attributes:
        rotated: dimensions of a head that RoPE turns; None is all (MiniMax-M2 has half).
        qk_norm: RMSNorm on queries and keys: None, "head" (over each head, Qwen3) or "joint" (over all heads
            together, MiniMax-M2).
        windows: of each layer, the tokens that a query sees, None for all; () is all in every layer (gpt-oss has
            a window in every other layer).
        sinks: a score of each head takes weight and has no value (gpt-oss).
        attention_bias: biases on q, k and v; `output_bias` on o; `mlp_bias` on the dense MLP's three matrices.
        moe: the experts of every layer but the `dense_layers`; None is a dense MLP everywhere.
    """

    family: str = "llama"
    rotated: int | None = None
    qk_norm: str | None = None
    windows: tuple[int | None, ...] = ()
    sinks: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    moe: MoEConfig | None = None
    dense_layers: tuple[int, ...] = ()

    @property
    def cache_row(self) -> tuple[int, int]:
        """What the cache keeps of a token in a layer: a row a head, its key and then its value, and their width."""
        return self.num_kv_heads, 2 * self.head_dim

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that the rotary embedding turns."""
        return self.head_dim if self.rotated is None else self.rotated


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
    fields.expect("sliding_window", [])
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    max_position = fields.size("max_position_embeddings", 2048)
    return checked(
        LlamaConfig(
            vocab_size=fields.size("vocab_size"),
            hidden_size=hidden,
            intermediate_size=fields.size("intermediate_size"),
            num_layers=fields.size("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=fields.size("num_key_value_heads", heads),
            head_dim=fields.size("head_dim", hidden // heads),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope=parse_rope(fields, max_position),
            max_position=max_position,
            tied=fields.flag("tie_word_embeddings"),
            attention_bias=fields.flag("attention_bias"),
            output_bias=fields.flag("attention_bias"),
            mlp_bias=fields.flag("mlp_bias"),
        ),
        fields,
    )


def required_fields(fields: Fields, family: str, architecture: str, partial: bool = False) -> dict[str, Any]:
    """The arguments of `LlamaConfig` that Qwen3, MiniMax-M2 and gpt-oss spell alike.

    Nothing that differs between models of a family has a default: the base of RoPE, the head's width and the
    epsilon of one revision are wrong for the next.

    Args:
        fields: the file. family, architecture: what it has to call itself. partial: as in `parse_rope`.

    Raises:
        Eagle3Error: another architecture, a missing or malformed field.
    """
    fields.expect("architectures", [[architecture]])
    fields.expect("model_type", [family])
    max_position = fields.size("max_position_embeddings")
    if (layers := fields.size("num_hidden_layers")) > MOST_LAYERS:
        raise Eagle3Error(f"{fields.where}: {layers} layers are more than any model has")
    return {
        "family": family,
        "vocab_size": fields.size("vocab_size"),
        "hidden_size": fields.size("hidden_size"),
        "intermediate_size": fields.size("intermediate_size"),
        "num_layers": layers,
        "num_heads": fields.size("num_attention_heads"),
        "num_kv_heads": fields.size("num_key_value_heads"),
        "head_dim": fields.size("head_dim"),
        "rms_norm_eps": fields.number("rms_norm_eps"),
        "rope": parse_rope(fields, max_position, None, partial),
        "max_position": max_position,
        "tied": fields.flag("tie_word_embeddings"),
    }


def checked(config: LlamaConfig, fields: Fields) -> LlamaConfig:
    """The config, once its sizes fit each other and nothing in the file was left unread.

    Raises:
        Eagle3Error: they do not, or a field was.
    """
    fields.expect("hidden_act", ["silu", "swish"])
    if config.num_heads % config.num_kv_heads:
        raise Eagle3Error(
            f"{fields.where}: {config.num_heads} heads cannot share {config.num_kv_heads} key-value heads evenly"
        )
    for name, width in (("head_dim", config.head_dim), ("rotary_dim", config.rotary_dim)):
        if width % 2 or width > config.head_dim:
            fault = "odd" if width % 2 else f"more than the head's {config.head_dim}"
            raise Eagle3Error(f"{fields.where}: {name} {width} is {fault}; RoPE rotates pairs of a head's dimensions")
    check_unknown_fields(fields.config, fields.read, fields.where)
    return config
