"""Largest numbers over prompts, of a draft's activations and a target's cache, for scales that are fixed beforehand.

Dimension letters: T tokens, F joined feature width, H width.
"""

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jax import Array

from eagle3_jax.checkpoint.drafts import Draft
from eagle3_jax.checkpoint.targets import Target
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.models.attention import Expand, causal_attention
from eagle3_jax.models.eagle3 import shared_weights
from eagle3_jax.models.layers import Linear, apply
from eagle3_jax.quant.fp8 import E4M3FN, LEAST_SCALE, largest


def cache_scales(target: Target, prompts: Sequence[Sequence[int]]) -> tuple[float, ...]:
    """Scales of a target's FP8 cache, by which each layer's largest key or value becomes FP8's largest number.

    Args:
        target: the target. prompts: token ids of each prompt.

    Returns:
        One a layer, as `GenerationConfig.cache_scales` takes them.

    Raises:
        Eagle3Error: no prompts, one that does not fit the target, or keys and values that are not finite.

    Example:
        >>> GenerationConfig(cache_format="fp8", cache_scales=cache_scales(target, prompts))  # doctest: +SKIP
    """
    config = target.model.config
    if not prompts or not all(1 <= len(prompt) <= config.max_position for prompt in prompts):
        raise Eagle3Error(f"calibration needs prompts of 1 to {config.max_position} tokens")
    found: list[float] = []

    def attend(q: Array, k: Array, v: Array | Expand, cache: None, **options: Any) -> tuple[Array, None]:
        kept = k if callable(v) else jnp.concatenate([k, v], axis=2)
        found.append(float(jnp.max(jnp.abs(kept.astype(jnp.float32)))))
        return causal_attention(q, k, v, cache, **options)

    for prompt in prompts:
        tokens = np.asarray(prompt, np.int32)[None]
        positions = np.arange(len(prompt), dtype=np.int32)[None]
        apply(target.model, target.params, tokens, positions, attend, (None,) * config.num_layers)
    # Layer by layer within prompt by prompt.
    maxima = np.max(np.reshape(found, (len(prompts), config.num_layers)), axis=0)
    if not np.isfinite(maxima).all():
        raise Eagle3Error(f"{target.name}: keys or values are not finite; the weights are at fault")
    return tuple(max(float(x) / largest(E4M3FN), LEAST_SCALE) for x in maxima)


def activation_maxima(draft: Draft, prompts: Sequence[Sequence[int]]) -> dict[str, float]:
    """The largest magnitude that each matrix of a draft multiplies.

    The draft passes over every prompt twice, as in its first step, which reads the target's features, and in its
    second, which reads its own.

    Args:
        draft: the draft, with its target.
        prompts: token ids of each prompt, three at least.

    Returns:
        By the weight's path in the parameter tree, e.g. "attention/q/weight"; its own head too.

    Raises:
        Eagle3Error: no prompts, one that is too short or long for the target, or activations that are not finite.

    Example:
        >>> activation_maxima(draft, [[1, 5, 9, 2]])["fc/weight"]  # doctest: +SKIP
        3.25
    """
    longest = draft.target.model.config.max_position
    if not prompts or not all(3 <= len(prompt) <= longest for prompt in prompts):
        raise Eagle3Error(f"calibration needs prompts of 3 to {longest} tokens")
    maxima: dict[str, float] = {}

    def note(path: tuple[str, ...], values: Array) -> None:
        name = "/".join((*path, "weight"))
        maxima[name] = max(maxima.get(name, 0.0), float(jnp.max(jnp.abs(values.astype(jnp.float32)))))

    def record(call: Callable, args: tuple, kwargs: dict[str, Any], context: nn.module.InterceptorContext) -> Any:
        result = call(*args, **kwargs)
        path = context.module.path
        if context.method_name == "__call__" and isinstance(context.module, Linear):
            note(path, args[0])
        if context.method_name == "__call__" and path == ("final_norm",):
            note(("head",), result)
        return result

    for prompt in prompts:
        _draft_twice(draft, np.asarray(prompt, np.int32)[None], record)
    if bad := [name for name, value in maxima.items() if not np.isfinite(value)]:
        raise Eagle3Error(f"the activations of {bad[0]} are not finite; the draft or its target is at fault")
    return maxima


def _draft_twice(draft: Draft, tokens: np.ndarray, record: Callable) -> None:
    """One pass on the target's features [1, T, F] of tokens [1, T], and one on the draft's own [1, T-2, H]."""
    target, config = draft.target, draft.model.config
    positions = np.arange(tokens.shape[1], dtype=np.int32)[None]
    caches, shared = (None,) * target.model.config.num_layers, shared_weights(target.params)
    out = apply(target.model, target.params, tokens, positions, causal_attention, caches, config.taps)
    rest = (causal_attention, (None,) * config.num_layers, shared)
    with nn.intercept_methods(record):
        g = apply(draft.model, draft.params, out.features[:, :-1], shared, method="fuse")
        y, _ = apply(draft.model, draft.params, g, tokens[:, 1:], positions[:, :-1], *rest)
        fed = apply(draft.model, draft.params, y, method="feedback")[:, :-1]
        again, _ = apply(draft.model, draft.params, fed, tokens[:, 2:], positions[:, 1:-1], *rest)
        for hidden in (y, again):
            apply(draft.model, draft.params, hidden, shared, method="logits")
