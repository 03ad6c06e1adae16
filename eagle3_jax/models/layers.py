"""The layers targets and drafts share: linear maps, RMSNorm, embedding, attention projections, SwiGLU."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from eagle3_jax.models.attention import Attend
from eagle3_jax.models.rope import rotate
from eagle3_jax.quant.weight import Weight, WeightFormats
from eagle3_jax.sharding import keep_heads


def apply(module: nn.Module, params: Any, *args: Any, method: str | None = None) -> Any:
    """Run a module (or one of its methods) on a parameter tree."""
    return module.apply({"params": params}, *args, method=method)


def positions_of(ids: Array) -> Array:
    """Positions of tokens [B, T] that begin their texts: int32 [B, T], 0 to T - 1 in each row."""
    return jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)


class Linear(nn.Module):
    """An affine map over the last dimension.

    Attributes:
        features: output width N.
        formats: where the weight's format and layout are looked up, by this module's path.
        axes: logical axis names of (K, N).
        use_bias: add a bias [N].
    """

    features: int
    formats: WeightFormats
    axes: tuple[str, str]
    use_bias: bool = False

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """[..., K] -> [..., N], in x's dtype."""
        path = "/".join(self.path)
        spec = self.formats.spec(f"{path}/weight", (x.shape[-1], self.features), self.axes)
        y = self.param("weight", spec.init).matmul(x)
        if self.use_bias:
            bias = self.formats.spec(f"{path}/bias", (self.features,), self.axes[1:], fill=0.0)
            y = y + self.param("bias", bias.init).value.astype(y.dtype)
        return y


def rms_norm(x: Array, weight: Array, epsilon: float) -> Array:
    """Root mean square norm (arXiv 1910.07467), computed in float32: [..., H] -> [..., H], in x's dtype."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    return (normed * weight.astype(jnp.float32)).astype(x.dtype)


class RMSNorm(nn.Module):
    """`rms_norm` with its weight.

    Attributes:
        axis: logical name of the dimension; the mean runs over all of it, on however many devices it lies.
    """

    epsilon: float
    formats: WeightFormats
    axis: str = "embed"

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """[..., H] -> [..., H], in x's dtype."""
        spec = self.formats.spec("/".join((*self.path, "weight")), (x.shape[-1],), (self.axis,), fill=1.0)
        return rms_norm(x, self.param("weight", spec.init).value, self.epsilon)


class VocabularyMatrix(nn.Module):
    """The [H, V] matrix between hidden states and the vocabulary: an embedding, a head, or both when tied."""

    hidden_size: int
    vocab_size: int
    formats: WeightFormats

    @nn.compact
    def __call__(self) -> Weight:
        """The weight, logical shape (H, V)."""
        path = "/".join((*self.path, "weight"))
        spec = self.formats.spec(path, (self.hidden_size, self.vocab_size), ("embed", "vocab"))
        return self.param("weight", spec.init)


class Attention(nn.Module):
    """Grouped-query attention with rotary embedding; the mixing itself is the caller's `attend`.

    Attributes:
        qk_norm_eps: epsilon of an RMSNorm over each head of queries and keys, before they are rotated (Qwen3);
            None is no such norm.
        joint_qk_norm: that norm runs over all heads together (MiniMax-M2).
        window: tokens that a query sees, itself among them; None is all.
        use_sinks: a score of each head takes weight and has no value (gpt-oss).
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    formats: WeightFormats
    input_bias: bool = False
    output_bias: bool = False
    qk_norm_eps: float | None = None
    joint_qk_norm: bool = False
    window: int | None = None
    use_sinks: bool = False

    @nn.compact
    def __call__(self, x: Array, angles: tuple[Array, Array], attend: Attend, cache: Any) -> tuple[Array, Any]:
        """[B, T, K] -> ([B, T, H], new cache)."""

        def project(name: str, heads: int) -> Array:
            axis = "heads" if name == "q" else "kv_heads"
            linear = Linear(heads * self.head_dim, self.formats, ("embed", axis), self.input_bias, name=name)
            y = linear(x)
            norm = None
            if self.qk_norm_eps is not None and name != "v":
                axis = axis if self.joint_qk_norm else "head"
                norm = RMSNorm(self.qk_norm_eps, self.formats, axis, name=f"{name}_norm")
            if norm is not None and self.joint_qk_norm:
                y = norm(y)
            y = keep_heads(y.reshape(*x.shape[:-1], heads, self.head_dim))
            return y if norm is None or self.joint_qk_norm else norm(y)

        q, k = rotate(project("q", self.num_heads), angles), rotate(project("k", self.num_kv_heads), angles)
        v, sinks = project("v", self.num_kv_heads), None
        if self.use_sinks:
            spec = self.formats.spec("/".join((*self.path, "sinks")), (self.num_heads,), ("heads",), fill=0.0)
            sinks = self.param("sinks", spec.init).value
        mixed, cache = attend(q, k, v, cache, window=self.window, sinks=sinks)
        out = Linear(self.hidden_size, self.formats, ("heads", "embed"), self.output_bias, name="o")
        return out(mixed), cache


class SwiGLU(nn.Module):
    """The gated feed-forward layer down(silu(gate(x)) * up(x)) (arXiv 2002.05202)."""

    hidden_size: int
    intermediate_size: int
    formats: WeightFormats
    use_bias: bool = False

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """[..., H] -> [..., H]."""
        wide = [
            Linear(self.intermediate_size, self.formats, ("embed", "mlp"), self.use_bias, name=name)(x)
            for name in ("gate", "up")
        ]
        down = Linear(self.hidden_size, self.formats, ("mlp", "embed"), self.use_bias, name="down")
        return down(nn.silu(wide[0]) * wide[1])
