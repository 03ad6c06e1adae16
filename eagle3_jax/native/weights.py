"""Weights as the native kernel likes them."""

import dataclasses

import jax
import jax.numpy as jnp

from eagle3_jax.checkpoint.drafts import Draft
from eagle3_jax.quant.weight import Weight, formats_of, is_weight


def in_bfloat16(draft: Draft) -> Draft:
    """The draft with its float32 matrices in bfloat16 where that holds the same numbers, as in the files of most.

    The native kernel widens them as it reads, which halves what a draft step reads. XLA would widen them anew in
    every step: call `use_native_kernels` first. Its drafts are the same, bit for bit.

    Args:
        draft: one to decode with. To train or to save it, keep the given one.
    """

    def halved(weight: Weight) -> Weight:
        if weight.format != "f32" or weight.layout != "kn" or weight.value.ndim != 2:
            return weight
        half = weight.value.astype(jnp.bfloat16)
        same = bool(jnp.all(half.astype(jnp.float32) == weight.value))
        return dataclasses.replace(weight, value=half, format="bf16") if same else weight

    params = jax.tree.map(lambda x: halved(x) if is_weight(x) else x, draft.params, is_leaf=is_weight)
    config = dataclasses.replace(draft.model.config, weights=formats_of(params, draft.model.config.weights))
    return dataclasses.replace(draft, model=draft.model.clone(config=config), params=params)
