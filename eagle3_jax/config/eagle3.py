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
        norm_before_residual: the residual is hidden_norm(g) instead of g.
        fc_norm: EAGLE-3.1: RMSNorm on each tap before `fc`.
        norm_output: EAGLE-3.1: feed norm(y) to the next draft step instead of y.
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
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = RopeConfig()
    norm_before_residual: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    fc_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    shares_embedding: bool = True
    shares_head: bool = False
    dtype: str = "float32"
    weights: WeightFormats = WeightFormats()
