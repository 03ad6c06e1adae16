"""A tiny random DeepSeek-V3 target and a draft like it, for the tests of latent attention and of the cache."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tiny
from jax import Array

from eagle3_jax.checkpoint.names import abstract_params
from eagle3_jax.config import DeepseekConfig, Eagle3LatentConfig, MoEConfig, RopeConfig
from eagle3_jax.models.deepseek import Deepseek
from eagle3_jax.models.eagle3 import Eagle3

TARGET = DeepseekConfig(
    vocab_size=tiny.VOCAB,
    hidden_size=24,
    intermediate_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=6,
    q_rank=None,
    kv_rank=10,
    nope_dim=8,
    rope_dim=4,
    moe=MoEConfig(
        num_experts=4, top_k=2, intermediate_size=16, scoring="sigmoid", correction_bias=True, scaling=1.8, groups=2
    ),
    dense_layers=1,
    shared_size=16,
    rope=RopeConfig(kind="yarn", factor=8.0, original_max_position=32, mscale=1.0, mscale_all_dim=0.7),
    max_position=128,
)
DRAFT = Eagle3LatentConfig(
    vocab_size=tiny.VOCAB,
    draft_vocab_size=tiny.VOCAB,
    hidden_size=24,
    target_hidden_size=24,
    intermediate_size=32,
    num_heads=3,
    num_kv_heads=3,
    head_dim=5,
    taps=(0, 1, 2),
    rope=RopeConfig(kind="yarn", factor=8.0, original_max_position=32, mscale=1.0, mscale_all_dim=0.7),
    q_rank=7,
    kv_rank=9,
    nope_dim=8,
    rope_dim=4,
)


@cache
def target() -> tuple[Deepseek, Any]:
    """A random model; drawn in numpy, which compiles nothing."""
    return Deepseek(TARGET), drawn(abstract_params(Deepseek(TARGET)))


@cache
def draft() -> tuple[Eagle3, Any]:
    """A random draft with latent attention."""
    return Eagle3(DRAFT), drawn(abstract_params(Eagle3(DRAFT)))


def drawn(abstract: Any) -> Any:
    """Random weights of these shapes: matrices around 0, norms around 1, the router's corrections above 0."""
    rng = np.random.default_rng(0)

    def draw(path: Any, x: jax.ShapeDtypeStruct) -> Array:
        if x.ndim > 1:
            return jnp.asarray(0.4 * rng.standard_normal(x.shape), x.dtype)
        low = 0.0 if "correction" in jax.tree_util.keystr(path) else 0.5
        return jnp.asarray(rng.uniform(low, low + 1.0, x.shape), x.dtype)

    return jax.tree_util.tree_map_with_path(draw, abstract)
