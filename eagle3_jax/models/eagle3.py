"""The EAGLE-3 draft: one decoder layer over the next token's embedding and the target's features.

Source: EAGLE-3 (arXiv 2503.01840), section 3; the EAGLE-3.1 toggles `fc_norm` and `norm_output`.

Row t of a draft pass holds the token x_{t+1} and the feature of position t, so that its output predicts
x_{t+2}. Features come from the target where it has verified the token, from the draft itself further on.
"""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from flax import struct
from jax import Array

from eagle3_jax.config import Eagle3Config
from eagle3_jax.models.attention import Attend, causal_attention
from eagle3_jax.models.layers import Attention, Linear, RMSNorm, SwiGLU, VocabularyMatrix
from eagle3_jax.models.rope import rope_angles
from eagle3_jax.quant.weight import Weight


@struct.dataclass
class SharedWeights:
    """The target's weights a draft may read instead of own ones; logical shapes (Ht, V)."""

    embedding: Weight
    head: Weight


def shared_weights(target_params: Any) -> SharedWeights:
    """The embedding and head of a target's parameter tree; a tied target's head is its embedding."""
    embedding = target_params["embed"]["weight"]
    return SharedWeights(embedding, target_params.get("head", target_params["embed"])["weight"])


class Eagle3(nn.Module):
    """An EAGLE-3 draft model. Methods: `fuse`, `__call__`, `feedback`, `logits`."""

    config: Eagle3Config

    def setup(self) -> None:
        """Declare the submodules; their names are the parameter tree."""
        c = self.config

        def norm() -> RMSNorm:
            return RMSNorm(c.rms_norm_eps, c.weights)

        self.fc = Linear(c.hidden_size, c.weights, ("taps", "embed"), c.fc_bias)
        if c.fc_norm:
            self.fc_norms = [norm() for _ in c.taps]
        self.embed_norm, self.hidden_norm, self.mlp_norm, self.final_norm = norm(), norm(), norm(), norm()
        self.attention = Attention(c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim, c.weights, c.attention_bias)
        self.mlp = SwiGLU(c.hidden_size, c.intermediate_size, c.weights, c.mlp_bias)
        if not c.shares_embedding:
            self.embed = VocabularyMatrix(c.hidden_size, c.vocab_size, c.weights)
        if not c.shares_head:
            self.head = VocabularyMatrix(c.hidden_size, c.draft_vocab_size, c.weights)
        if c.draft_vocab_size < c.vocab_size:
            self.target_ids = self.param("target_ids", lambda _: jnp.arange(c.draft_vocab_size, dtype=jnp.int32))

    def fuse(self, features: Array) -> Array:
        """Join the target's tapped hidden states into one vector g: [B, T, A*Ht] -> [B, T, H]."""
        c = self.config
        features = features.astype(c.dtype)
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
        cache: Any,
        shared: SharedWeights,
    ) -> tuple[Array, Any]:
        """Run the layer.

        Args:
            g: [B, T, H], output of `fuse` or `feedback`.
            token_ids: int32 [B, T], token x_{t+1} of row t, in the target's vocabulary.
            positions: int32 [B, T], position t of row t.
            attend, cache: as in `eagle3_jax.models.attention`.
            shared: the target's embedding and head.

        Returns:
            y [B, T, H], before the final norm, and the new cache.
        """
        c = self.config
        embedding = shared.embedding if c.shares_embedding else self.embed()
        embedded = embedding.outputs(token_ids).astype(c.dtype)
        normed = self.hidden_norm(g)
        x = jnp.concatenate([self.embed_norm(embedded), normed], axis=-1)
        mixed, cache = self.attention(x, rope_angles(c.rope, c.head_dim, positions), attend, cache)
        h = (normed if c.norm_before_residual else g) + mixed
        return h + self.mlp(self.mlp_norm(h)), cache

    def feedback(self, y: Array) -> Array:
        """The feature that the next draft step takes in the place of `fuse`'s output: [B, T, H]."""
        return self.final_norm(y) if self.config.norm_output else y

    def logits(self, y: Array, shared: SharedWeights) -> Array:
        """Draft-vocabulary logits of y: [..., H] -> float32 [..., Vd]."""
        head = shared.head if self.config.shares_head else self.head()
        return head.matmul(self.final_norm(y)).astype(jnp.float32)

    def describe(self, features: Array, token_ids: Array, shared: SharedWeights) -> Array:
        """Touch every weight once: the method `init` and `jax.eval_shape` trace for the weight tree."""
        y, _ = self(self.fuse(features), token_ids, jnp.zeros_like(token_ids), causal_attention, None, shared)
        return self.logits(y, shared)
