"""What every target model has, whatever its attention and its feed-forward layers."""

import dataclasses

from eagle3_jax.config.rope import RopeConfig
from eagle3_jax.quant.weight import WeightFormats

MOST_LAYERS = 10_000
"""More than any model has; a damaged config that names more would keep a loader busy for hours."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A decoder: embedding, layers on a residual stream, final norm, head.

    Attributes:
        family: what it is called in `eagle3_jax.checkpoint.families`.
        vocab_size, hidden_size, num_layers: sizes.
        intermediate_size: width of a dense feed-forward layer.
        num_heads, num_kv_heads, head_dim: heads of a layer, and the width of one. With latent attention every
            query head has its own keys and values, and `head_dim` is the width of a value.
        rms_norm_eps: epsilon inside the norms' square root.
        rope: rotary embedding.
        max_position: context length in tokens; a longer prompt is refused.
        tied: the head reads the embedding's weight.
        dtype: dtype of activations ("float32", "bfloat16").
        weights: format and layout of every weight.
    """

    family: str
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
    dtype: str = "float32"
    weights: WeightFormats = WeightFormats()

    @property
    def cache_row(self) -> tuple[int, int]:
        """What the cache keeps of a token in a layer: rows and their width."""
        raise NotImplementedError

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that the rotary embedding turns."""
        raise NotImplementedError
