"""The EAGLE-3 draft: a decoder layer over the next token's embedding and the target's features.

Source: EAGLE-3 (arXiv 2503.01840), section 3; the EAGLE-3.1 toggles `fc_norm` and `norm_output`.

Row t of a draft pass holds the token x_{t+1} and the feature of position t, so that its output predicts
x_{t+2}. Features come from the target where it has verified the token, from the draft itself further on.
"""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from flax import struct
from jax import Array

from eagle3_jax.config import Eagle3Config, Eagle3LatentConfig
from eagle3_jax.models.attention import Attend, causal_attention
from eagle3_jax.models.deepseek import LatentAttention
from eagle3_jax.models.layers import Attention, Linear, RMSNorm, SwiGLU, VocabularyMatrix, rms_norm
from eagle3_jax.models.rope import rope_angles
from eagle3_jax.quant.weight import Weight


@struct.dataclass
class SharedWeights:
    """The target's weights a draft may read instead of own ones; logical shapes (Ht, V), (Ht, V), (Ht,)."""

    embedding: Weight
    head: Weight
    final_norm: Weight


def shared_weights(target_params: Any) -> SharedWeights:
    """The embedding, head and final norm of a target's parameters; a tied target's head is its embedding."""
    embedding = target_params["embed"]["weight"]
    head = target_params.get("head", target_params["embed"])["weight"]
    return SharedWeights(embedding, head, target_params["final_norm"]["weight"])


def _norm(config: Eagle3Config) -> RMSNorm:
    return RMSNorm(config.rms_norm_eps, config.weights)


def _attention(config: Eagle3Config) -> Attention | LatentAttention:
    c = config
    if isinstance(c, Eagle3LatentConfig):
        return LatentAttention(c)
    eps = c.rms_norm_eps if c.qk_norm else None
    return Attention(
        c.hidden_size,
        c.num_heads,
        c.num_kv_heads,
        c.head_dim,
        c.weights,
        c.attention_bias,
        qk_norm_eps=eps,
    )


def _mlp(config: Eagle3Config) -> SwiGLU:
    return SwiGLU(config.hidden_size, config.intermediate_size, config.weights, config.mlp_bias)


class DeeperLayer(nn.Module):
    """A layer after the first: a plain pre-norm decoder layer of width H."""

    config: Eagle3Config

    def setup(self) -> None:
        """Declare the submodules; their names are the parameter tree."""
        self.attention_norm, self.mlp_norm = _norm(self.config), _norm(self.config)
        self.attention, self.mlp = _attention(self.config), _mlp(self.config)

    def __call__(self, x: Array, angles: tuple[Array, Array], attend: Attend, cache: Any) -> tuple[Array, Any]:
        """[B, T, H] -> ([B, T, H], new cache)."""
        mixed, cache = self.attention(self.attention_norm(x), angles, attend, cache)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), cache


class Eagle3(nn.Module):
    """An EAGLE-3 draft model. Methods: `fuse`, `__call__`, `feedback`, `logits`."""

    config: Eagle3Config

    def setup(self) -> None:
        """Declare the submodules; their names are the parameter tree."""
        c = self.config
        if c.fuses:
            self.fc = Linear(c.hidden_size, c.weights, ("taps", "embed"), c.fc_bias)
        if c.norm_before_fc:
            self.input_norm = _norm(c)
        if c.fc_norm:
            self.fc_norms = [_norm(c) for _ in c.taps]
        self.embed_norm, self.hidden_norm, self.mlp_norm, self.final_norm = (_norm(c) for _ in range(4))
        self.attention, self.mlp = _attention(c), _mlp(c)
        self.layers = {str(i): DeeperLayer(c) for i in range(1, c.num_layers)}
        if not c.shares_embedding:
            self.embed = VocabularyMatrix(c.hidden_size, c.vocab_size, c.weights)
        if not c.shares_head:
            self.head = VocabularyMatrix(c.hidden_size, c.draft_vocab_size, c.weights)
        if c.draft_vocab_size < c.vocab_size:
            self.target_ids = self.param("target_ids", lambda _: jnp.arange(c.draft_vocab_size, dtype=jnp.int32))

    def fuse(self, features: Array, shared: SharedWeights) -> Array:
        """Join the target's tapped hidden states into one vector g: [B, T, A*Ht] -> [B, T, H]."""
        c = self.config
        features = features.astype(c.dtype)
        if not c.fuses:
            return rms_norm(features, shared.final_norm.value, c.target_norm_eps)
        if c.norm_before_fc:
            features = self.input_norm(features)
        if c.fc_norm:
            parts = jnp.split(features, len(c.taps), axis=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norms, parts, strict=True)]
            features = jnp.concatenate(normed, axis=-1)
        return self.fc(features)

    def __call__(
        self,
        g: Array,
        token_ids: Array,
        positions: Array,
        attend: Attend,
        caches: tuple,
        shared: SharedWeights,
    ) -> tuple[Array, tuple]:
        """Run the layers.

        Args:
            g: [B, T, H], output of `fuse` or `feedback`.
            token_ids: int32 [B, T], token x_{t+1} of row t, in the target's vocabulary.
            positions: int32 [B, T], position t of row t.
            attend, caches: as in `eagle3_jax.models.attention`, one cache per layer.
            shared: the target's embedding and head.

        Returns:
            y [B, T, H], before the final norm, and the new caches.
        """
        c = self.config
        embedding = shared.embedding if c.shares_embedding else self.embed()
        embedded = embedding.outputs(token_ids).astype(c.dtype)
        normed = self.hidden_norm(g)
        x = jnp.concatenate([self.embed_norm(embedded), normed], axis=-1)
        angles = rope_angles(c.rope, c.rotary_dim, positions)
        mixed, first = self.attention(x, angles, attend, caches[0])
        h = (normed if c.norm_before_residual else g) + mixed
        y, new_caches = h + self.mlp(self.mlp_norm(h)), [first]
        for layer, cache in zip(self.layers.values(), caches[1:], strict=True):
            y, cache = layer(y, angles, attend, cache)
            new_caches.append(cache)
        return y, tuple(new_caches)

    def feedback(self, y: Array) -> Array:
        """The feature that the next draft step takes in the place of `fuse`'s output: [B, T, H]."""
        return self.final_norm(y) if self.config.norm_output else y

    def logits(self, y: Array, shared: SharedWeights) -> Array:
        """Draft-vocabulary logits of y: [..., H] -> float32 [..., Vd]."""
        head = shared.head if self.config.shares_head else self.head()
        return head.matmul(self.final_norm(y)).astype(jnp.float32)

    def describe(self, features: Array, token_ids: Array, shared: SharedWeights) -> Array:
        """Touch every weight once: the method `init` and `jax.eval_shape` trace for the weight tree."""
        g, caches = self.fuse(features, shared), (None,) * self.config.num_layers
        y, _ = self(g, token_ids, jnp.zeros_like(token_ids), causal_attention, caches, shared)
        return self.logits(y, shared)
