"""EAGLE-3 drafts. Their config.json files are read by `eagle3_jax.checkpoint.draft_config`."""

import dataclasses

from eagle3_jax.config.rope import RopeConfig
from eagle3_jax.quant.weight import WeightFormats


@dataclasses.dataclass(frozen=True)
class Eagle3Config:
    """An EAGLE-3 draft (arXiv 2503.01840) with the EAGLE-3.1 toggles.

    Attributes:
        hidden_size: width H of the draft's own layer; `target_hidden_size` is Ht, the width of one tap.
        vocab_size: the target's vocabulary V; `draft_vocab_size` is Vd <= V, the rows of the draft's head.
        taps: indices k of the target's hidden states hs[k] (residual stream after k layers), low to high.
        num_layers: decoder layers; those after the first are plain ones of width H.
        fuses: `fc` joins the taps; without it the feature is the target's final norm (epsilon
            `target_norm_eps`) of its last hidden state, the only tap.
        norm_before_residual: the residual is hidden_norm(g) instead of g.
        norm_before_fc: one RMSNorm over the joined taps before `fc`.
        fc_norm: EAGLE-3.1: RMSNorm on each tap before `fc`.
        norm_output: EAGLE-3.1: feed norm(y) to the next draft step instead of y.
        qk_norm: RMSNorm over each head of queries and keys, as in Qwen3.
        fc_bias, attention_bias, mlp_bias: biases present in the checkpoint.
        shares_embedding, shares_head: read the target's weight instead of an own one.
        rope, rms_norm_eps, dtype, weights, the sizes: as in `LlamaConfig`.
    """

    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    taps: tuple[int, ...]
    num_layers: int = 1
    rms_norm_eps: float = 1e-5
    target_norm_eps: float = 1e-5
    rope: RopeConfig = RopeConfig()
    fuses: bool = True
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    qk_norm: bool = False
    fc_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    shares_embedding: bool = True
    shares_head: bool = False
    dtype: str = "float32"
    weights: WeightFormats = WeightFormats()

    @property
    def cache_row(self) -> tuple[int, int]:
        """What the draft's cache keeps of a token: a row a head, its key and then its value, and their width."""
        return self.num_kv_heads, 2 * self.head_dim

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that the rotary embedding turns."""
        return self.head_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3LatentConfig(Eagle3Config):
    """An EAGLE-3 draft with latent attention (an MLA draft), as Kimi's targets have it.

    Attributes:
        num_kv_heads, head_dim: every query head has its own keys and values; `head_dim` is the width of a value.
        q_rank, kv_rank, nope_dim, rope_dim, interleaved, expand_from: as in `DeepseekConfig`.
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    interleaved: bool = True
    expand_from: int | None = None

    @property
    def latent_norm_eps(self) -> float:
        """Epsilon of the norms of both latents: the draft's own, as trainers and engines of such drafts have it."""
        return self.rms_norm_eps

    @property
    def cache_row(self) -> tuple[int, int]:
        """What the draft's cache keeps of a token: one row, the latent and the turned key that all heads share."""
        return 1, self.kv_rank + self.rope_dim

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that the rotary embedding turns."""
        return self.rope_dim
