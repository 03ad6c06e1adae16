"""The frame of every target: embedding, layers on a residual stream with taps, final norm, head."""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from flax import struct
from jax import Array

from eagle3_jax.config import DecoderConfig
from eagle3_jax.models.attention import Attend, causal_attention
from eagle3_jax.models.layers import RMSNorm, VocabularyMatrix
from eagle3_jax.models.rope import rope_angles


@struct.dataclass
class TargetOutput:
    """What one pass of a target gives.

    Attributes:
        hidden: [B, T, H], residual stream after the last layer, before the final norm.
        features: [B, T, A*H], the tapped hidden states joined low to high; A may be 0.
        caches: one cache per layer.
    """

    hidden: Array
    features: Array
    caches: tuple


class Decoder(nn.Module):
    """A target. Apply with `method="logits"` for the head. A family says what a layer is.

    Layers are unrolled: scanning stacked layers copies every layer's weights each step on CPU.
    """

    config: DecoderConfig

    def layer(self, index: int) -> nn.Module:
        """The layer at `index`: (x [B, T, H], angles, attend, cache) -> (x, new cache)."""
        raise NotImplementedError

    def setup(self) -> None:
        """Declare the submodules; their names are the parameter tree."""
        c = self.config
        self.embed = VocabularyMatrix(c.hidden_size, c.vocab_size, c.weights)
        self.layers = [self.layer(i) for i in range(c.num_layers)]
        self.final_norm = RMSNorm(c.rms_norm_eps, c.weights)
        if not c.tied:
            self.head = VocabularyMatrix(c.hidden_size, c.vocab_size, c.weights)

    def __call__(
        self,
        token_ids: Array,
        positions: Array,
        attend: Attend,
        caches: tuple,
        taps: tuple[int, ...] = (),
    ) -> TargetOutput:
        """Run the decoder.

        Args:
            token_ids: int32 [B, T]. positions: int32 [B, T].
            attend: how queries meet keys, e.g. `paged_attention(step)`.
            caches: one cache per layer, as `attend` takes it.
            taps: indices k of hidden states hs[k] (residual stream after k layers) to return.
        """
        c = self.config
        x = self.embed().outputs(token_ids).astype(c.dtype)
        angles = rope_angles(c.rope, c.rotary_dim, positions)
        stream, new_caches = [x], []
        for layer, cache in zip(self.layers, caches, strict=True):
            x, cache = layer(x, angles, attend, cache)
            stream.append(x)
            new_caches.append(cache)
        tapped = [stream[k] for k in taps]
        features = jnp.concatenate(tapped, axis=-1) if tapped else jnp.zeros((*token_ids.shape, 0), c.dtype)
        return TargetOutput(x, features, tuple(new_caches))

    def logits(self, hidden: Array) -> Array:
        """Vocabulary logits of hidden states before the final norm: [..., H] -> float32 [..., V]."""
        normed = self.final_norm(hidden)
        head = self.embed() if self.config.tied else self.head()
        return head.matmul(normed).astype(jnp.float32)

    def describe(self, token_ids: Array) -> Any:
        """Touch every weight once: the method `init` and `jax.eval_shape` trace for the weight tree."""
        out = self(token_ids, jnp.zeros_like(token_ids), causal_attention, (None,) * self.config.num_layers)
        return self.logits(out.hidden)
