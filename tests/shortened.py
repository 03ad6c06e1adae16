"""The fixtures' targets cut to their first layers, which compile sooner, and a random draft for them."""

import dataclasses
from functools import cache
from typing import Any

import jax.numpy as jnp
import latent
from loading import target

from eagle3_jax.checkpoint.names import abstract_params
from eagle3_jax.config import Eagle3Config
from eagle3_jax.models.eagle3 import Eagle3

LAYERS = 2
DRAFT_VOCAB = 44


@cache
def short_target(name: str) -> tuple[Any, Any]:
    """Module and weights."""
    loaded = target(name)
    config, module = loaded.model.config, type(loaded.model)
    changes = {"windows": config.windows[:LAYERS]} if getattr(config, "windows", ()) else {}
    model = module(dataclasses.replace(config, num_layers=LAYERS, **changes))
    cut = {f"layers_{i}" for i in range(LAYERS, config.num_layers)}
    return model, {key: value for key, value in loaded.params.items() if key not in cut}


@cache
def short_draft(name: str) -> tuple[Eagle3, Any]:
    """Module and weights; four heads for keys and values, and every other token of the target's first 88."""
    c = short_target(name)[0].config
    model = Eagle3(
        Eagle3Config(
            vocab_size=c.vocab_size,
            draft_vocab_size=DRAFT_VOCAB,
            hidden_size=c.hidden_size,
            target_hidden_size=c.hidden_size,
            intermediate_size=16,
            num_heads=8,
            num_kv_heads=4,
            head_dim=8,
            taps=tuple(range(LAYERS + 1)),
        )
    )
    drawn = latent.drawn(abstract_params(model))
    return model, {**drawn, "target_ids": 2 * jnp.arange(DRAFT_VOCAB, dtype=jnp.int32)}
