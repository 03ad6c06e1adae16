"""Decoders with grouped-query attention: Llama, Qwen3, MiniMax-M2, gpt-oss and what is built like them."""

from typing import Any

import flax.linen as nn
from jax import Array

from eagle3_jax.config import LlamaConfig
from eagle3_jax.models.attention import Attend
from eagle3_jax.models.decoder import Decoder
from eagle3_jax.models.layers import Attention, RMSNorm, SwiGLU
from eagle3_jax.models.moe import MoE


class DecoderLayer(nn.Module):
    """One pre-norm decoder layer."""

    config: LlamaConfig
    index: int

    @nn.compact
    def __call__(self, x: Array, angles: tuple[Array, Array], attend: Attend, cache: Any) -> tuple[Array, Any]:
        """[B, T, H] -> ([B, T, H], new cache)."""
        c = self.config
        normed = RMSNorm(c.rms_norm_eps, c.weights, name="attention_norm")(x)
        attention = Attention(
            c.hidden_size,
            c.num_heads,
            c.num_kv_heads,
            c.head_dim,
            c.weights,
            c.attention_bias,
            c.output_bias,
            qk_norm_eps=c.rms_norm_eps if c.qk_norm else None,
            joint_qk_norm=c.qk_norm == "joint",
            window=c.windows[self.index] if c.windows else None,
            use_sinks=c.sinks,
            name="attention",
        )
        mixed, cache = attention(normed, angles, attend, cache)
        x = x + mixed
        normed = RMSNorm(c.rms_norm_eps, c.weights, name="mlp_norm")(x)
        if c.moe is None or self.index in c.dense_layers:
            mlp = SwiGLU(c.hidden_size, c.intermediate_size, c.weights, c.mlp_bias, name="mlp")
        else:
            mlp = MoE(c.moe, c.weights, name="mlp")
        return x + mlp(normed), cache


class Llama(Decoder):
    """A target with grouped-query attention."""

    config: LlamaConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def layer(self, index: int) -> nn.Module:
        """The layer at `index`."""
        return DecoderLayer(self.config, index)
