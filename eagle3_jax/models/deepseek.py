"""The DeepSeek-V3 decoder, which is also Kimi-K2's and Kimi-K2.5's: multi-head latent attention and experts.

Source: DeepSeek-V3 (arXiv 2412.19437), section 2.1; DeepSeek-V2 (arXiv 2405.04434), section 2.1, for the two forms
of the attention. The cache keeps one row a token for all heads: the normed latent c and the turned key r.

- Absorbed form: a query is carried into the latent space, (k_b q) . c = q . (k_b c), the latents are mixed, and the
  mixture is carried out by v_b. Keys and values of the prefix are never made.
- Direct form: k_b and v_b make keys and values of every latent, a chunk of the prefix at a time, and heads attend
  as usual.

A pass of T new tokens over a prefix of P takes, a head and prefix token, T (2 L + R) multiplications in the absorbed
form, and L (D + V) + T (D + R + V) in the direct one; the rest of a pass costs both the same, or less directly. So
the direct form is the cheaper one from T = L (D + V) / (2 L - D - V) on (171 tokens for Kimi-K2.5): chunks of a
prompt are above it, rounds of decoding far below. T is static, so a pass is compiled in one form.

Dimension letters: B rows, T new tokens, N heads, L width of the latent, D unturned and R turned columns of queries
and keys, V columns of values, C tokens of a chunk, H width.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from eagle3_jax.config import DeepseekConfig, Eagle3LatentConfig
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.models.attention import Attend
from eagle3_jax.models.decoder import Decoder
from eagle3_jax.models.layers import Linear, RMSNorm, SwiGLU
from eagle3_jax.models.moe import MoE
from eagle3_jax.models.rope import rotate, yarn_temperature
from eagle3_jax.quant.formats import FLOAT_FORMATS
from eagle3_jax.quant.weight import Weight, WeightFormats
from eagle3_jax.sharding import keep_heads

Latent = DeepseekConfig | Eagle3LatentConfig
"""Configs of models with latent attention."""


def score_scale(config: Latent) -> float:
    """Multiplier of the scores: 1 / sqrt(D + R), times the square of YaRN's temperature where there is one."""
    scale = (config.nope_dim + config.rope_dim) ** -0.5
    if config.rope.kind == "yarn" and config.rope.mscale_all_dim:
        scale *= yarn_temperature(config.rope.factor, config.rope.mscale_all_dim) ** 2
    return scale


def expands(config: Latent, new_tokens: int) -> bool:
    """Whether a pass of that many new tokens takes the direct form (see the top of the module).

    Example:
        >>> expands(kimi_k25, 170), expands(kimi_k25, 171)  # doctest: +SKIP
        (False, True)
    """
    if config.expand_from is not None:
        return new_tokens >= config.expand_from
    made = config.nope_dim + config.head_dim
    return new_tokens * (2 * config.kv_rank - made) >= config.kv_rank * made


class PerHead(nn.Module):
    """A matrix from the latent to each head, (L, N * width), kept as it is read in both forms: [N * width, L].

    Checkpoints hold k_b and v_b as one matrix in which the heads' keys and values take turns. They are parted when
    loaded: either form reads all of one and then all of the other, and a slice would copy them in every pass.
    """

    num_heads: int
    width: int
    formats: WeightFormats

    @nn.compact
    def __call__(self, rank: int) -> Weight:
        """The weight, logical shape (L, N * width).

        Raises:
            Eagle3Error: it is narrow. The absorbed form multiplies by its transpose, along which no scale is shared.
        """
        path, shape = "/".join((*self.path, "weight")), (rank, self.num_heads * self.width)
        spec = self.formats.spec(path, shape, ("latent", "heads"))
        if spec.format not in FLOAT_FORMATS:
            raise Eagle3Error(f"{path} is {spec.format}; use {', '.join(FLOAT_FORMATS)} for both halves of kv_b")
        weight = self.param("weight", dataclasses.replace(spec, layout="nk").init)
        # The absorbed form has no activations of the kind that a calibration rounds: neither form rounds any.
        return dataclasses.replace(weight, activations="wide", input_scale=None)


class LatentAttention(nn.Module):
    """Multi-head latent attention."""

    config: Latent

    @nn.compact
    def __call__(self, x: Array, angles: tuple[Array, Array], attend: Attend, cache: Any) -> tuple[Array, Any]:
        """[B, T, K] -> ([B, T, H], new cache)."""
        c = self.config

        def linear(name: str, features: int, *axes: str) -> Linear:
            return Linear(features, c.weights, axes, name=name)  # pyright: ignore[reportArgumentType]

        def norm(name: str) -> RMSNorm:
            return RMSNorm(c.latent_norm_eps, c.weights, "latent", name=name)

        query_width = c.num_heads * (c.nope_dim + c.rope_dim)
        if c.q_rank is None:
            q = linear("q", query_width, "embed", "heads")(x)
        else:
            latent = norm("q_a_norm")(linear("q_a", c.q_rank, "embed", "latent")(x))
            q = linear("q_b", query_width, "latent", "heads")(latent)
        q = keep_heads(q.reshape(*x.shape[:-1], c.num_heads, -1))
        q, q_turned = jnp.split(q, [c.nope_dim], axis=-1)
        latent, k_turned = jnp.split(linear("kv_a", sum(c.cache_row) - 1, "embed", "latent")(x), [c.kv_rank], axis=-1)
        latent, k_turned = norm("kv_a_norm")(latent)[:, :, None], k_turned[:, :, None]
        if c.interleaved:
            q_turned, k_turned = _regrouped(q_turned), _regrouped(k_turned)
        q_turned, k_turned = rotate(q_turned, angles), rotate(k_turned, angles)
        kept = jnp.concatenate([latent, k_turned], axis=-1)

        k_b = PerHead(c.num_heads, c.nope_dim, c.weights, name="k_b")(c.kv_rank)
        v_b = PerHead(c.num_heads, c.head_dim, c.weights, name="v_b")(c.kv_rank)
        if expands(c, x.shape[1]):

            def expand(rows: Array) -> tuple[Array, Array]:
                """Keys [B, C, N, D + R] and values [B, C, N, V] of cache rows [B, C, 1, L + R]."""
                latent, turned = jnp.split(rows[:, :, 0], [c.kv_rank], axis=-1)
                k, v = (w.matmul(latent).reshape(*latent.shape[:2], c.num_heads, -1) for w in (k_b, v_b))
                turned = jnp.broadcast_to(turned[:, :, None], (*k.shape[:3], c.rope_dim))
                return jnp.concatenate([k, turned], axis=-1), v

            queries = jnp.concatenate([q, q_turned], axis=-1)
            mixed, cache = attend(queries, kept, expand, cache, scale=score_scale(c))
        else:
            queries = jnp.concatenate([_by_head("btnd,ndl->btnl", q, k_b), q_turned], axis=-1)

            def latents(rows: Array) -> tuple[Array, Array]:
                return rows, rows[..., : c.kv_rank]

            mixed, cache = attend(queries, kept, latents, cache, scale=score_scale(c))
            mixed = mixed.reshape(*x.shape[:-1], c.num_heads, c.kv_rank)
            mixed = _by_head("btnl,nvl->btnv", mixed, v_b).reshape(*x.shape[:-1], -1)
        return linear("o", c.hidden_size, "heads", "embed")(mixed), cache


def _regrouped(x: Array) -> Array:
    """Columns 0, 2, 4 ... and then 1, 3, 5 ... of x [..., R]: neighbours become the pairs that `rotate` turns.

    Queries and keys are regrouped alike, so that their products stay.
    """
    return x.reshape(*x.shape[:-1], -1, 2).swapaxes(-1, -2).reshape(x.shape)


def _by_head(rule: str, x: Array, weight: Weight) -> Array:
    """Multiply each head of x [B, T, N, ...] by its own rows of a `PerHead` weight, in x's dtype."""
    rank, _ = weight.shape
    matrices = weight.value.reshape(x.shape[2], -1, rank).astype(x.dtype)
    return jnp.einsum(rule, x, matrices, preferred_element_type=jnp.float32).astype(x.dtype)


class DeepseekLayer(nn.Module):
    """One pre-norm decoder layer."""

    config: DeepseekConfig
    index: int

    @nn.compact
    def __call__(self, x: Array, angles: tuple[Array, Array], attend: Attend, cache: Any) -> tuple[Array, Any]:
        """[B, T, H] -> ([B, T, H], new cache)."""
        c = self.config
        normed = RMSNorm(c.rms_norm_eps, c.weights, name="attention_norm")(x)
        mixed, cache = LatentAttention(c, name="attention")(normed, angles, attend, cache)
        x = x + mixed
        normed = RMSNorm(c.rms_norm_eps, c.weights, name="mlp_norm")(x)
        if self.index < c.dense_layers:
            return x + SwiGLU(c.hidden_size, c.intermediate_size, c.weights, name="mlp")(normed), cache
        y = MoE(c.moe, c.weights, name="mlp")(normed)
        if c.shared_size:
            y = y + SwiGLU(c.hidden_size, c.shared_size, c.weights, name="shared")(normed)
        return x + y, cache


class Deepseek(Decoder):
    """A DeepSeek-V3 target."""

    config: DeepseekConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def layer(self, index: int) -> nn.Module:
        """The layer at `index`."""
        return DeepseekLayer(self.config, index)
