"""What a model computes, as plain functions: text to ids, scores, chains of a draft; number formats of its weights.

Dimension letters: B rows, T tokens, P padded prompt length, N layers, H width, V vocabulary, A taps,
Vd the draft's vocabulary.
"""

import dataclasses
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from eagle3_jax.cache.paged import blocks_for
from eagle3_jax.checkpoint.drafts import Draft
from eagle3_jax.checkpoint.drafts import load_draft as read_draft
from eagle3_jax.checkpoint.names import FORMATS, check_dtype, default_layout
from eagle3_jax.checkpoint.targets import Target
from eagle3_jax.decoding.batches import bucket, pad_rows
from eagle3_jax.decoding.drafters import Eagle3Drafter, Verified
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.models.attention import causal_attention
from eagle3_jax.models.decoder import Decoder
from eagle3_jax.models.eagle3 import Eagle3, shared_weights
from eagle3_jax.models.layers import apply, positions_of
from eagle3_jax.quant.quantize import KEPT, dequantize_tree, quantize_tree
from eagle3_jax.quant.weight import formats_of
from eagle3_jax.sharding import mesh_of, shard_weights
from eagle3_jax.text import Message

_BLOCK_SIZE = 32
_PROBE_PROMPTS = 8


@struct.dataclass
class Score:
    """What a target computes for given tokens.

    Attributes:
        logits: float32 [B, T, V], of the token after each position.
        hidden_states: [N+1, B, T, H]; [k] is the residual stream after k layers, before the final norm.
    """

    logits: Array
    hidden_states: Array


def load_draft(
    path: str | os.PathLike[str],
    target: Target,
    overrides: Mapping[str, Any] | None = None,
    widen: bool | None = None,
    activations: str | None = None,
) -> Draft:
    """Load an EAGLE-3 draft (arXiv 2503.01840; EAGLE-3.1 too) for a target.

    Where its files leave open which hidden states its layer ids name, the target writes a little text and the
    reading under which the draft predicts it better is taken (see `eagle3_jax.training.probe`).

    Args:
        path, target, overrides, widen, activations: as in `eagle3_jax.checkpoint.drafts.load_draft`.

    Raises:
        Eagle3Error: as there.

    Example:
        >>> draft = load_draft("smollm2-135m-eagle3", target)  # doctest: +SKIP
        >>> draft.model.config.taps  # doctest: +SKIP
        (2, 15, 27)
    """
    draft = read_draft(path, target, overrides, widen, activations)
    if not draft.taps_ambiguous:
        return draft
    from eagle3_jax.training.probe import settle_taps

    return settle_taps(draft, _probe_prompts(target))


def _probe_prompts(target: Target) -> list[list[int]]:
    """Prompts for the target to write something after."""
    if target.tokenizer is not None and target.tokenizer.has_chat_template:
        from eagle3_jax.bench.workloads import load_workload

        return [target.tokenizer.encode_chat(chat) for chat in load_workload("dev").chats[:_PROBE_PROMPTS]]
    return [[int(i)] for i in np.linspace(0, target.model.config.vocab_size - 1, _PROBE_PROMPTS)]


Quantizable = TypeVar("Quantizable")


def quantize(
    model: Quantizable, scheme: str, exclude: Collection[str] = KEPT, activations: str | None = None
) -> Quantizable:
    """Quantise a target, a draft, a tree of weights or one weight.

    Sources: AMD Quark's schemes ptpc_fp8, fp8 and mxfp4; DeepSeek-V3 (arXiv 2412.19437), section 3.3, for
    fp8_block; compressed-tensors' symmetric groups of 32 for int4.

    Args:
        model: with wide weights. Of a tree alone, the model's config must be told the new formats:
            `eagle3_jax.quant.weight.formats_of`.
        scheme: "ptpc_fp8" (one scale an output), "fp8" (one a matrix), "fp8_block" (one for 128 x 128), "mxfp4" or
            "int4".
        exclude: regular expressions; a module whose whole path in the tree, e.g. "layers_3/mlp/down", matches one
            keeps its weight. By default: embedding, head, a draft's fc, routers.
        activations: how those that meet the weights are rounded: None is as a card does it for FP8, "wide" not at
            all, "fake_quant" as a card does it, "mxfp8" the same with MXFP8 for MXFP4 weights.

    Returns:
        The same with narrow matrices: codes [out, in / pack] and scales; what was given is not changed.

    Raises:
        Eagle3Error: an unknown scheme, a malformed pattern, or weights that are narrow already, not finite, or of a
            width that the scheme cannot group.

    Example:
        >>> draft = quantize(draft, "ptpc_fp8")  # doctest: +SKIP
    """
    return _with_params(model, lambda params: quantize_tree(params, scheme, exclude, activations))


def dequantize(model: Quantizable, dtype: str = "float32") -> Quantizable:
    """Make the narrow weights of a target, a draft, a tree or one weight wide again.

    Activations are rounded as before, so that on CPU the result computes what a card does with the narrow weights.

    Args:
        model: what `quantize` or a loader gives.
        dtype: of the wide matrices, "float32", "bfloat16" or "float16".

    Raises:
        Eagle3Error: another dtype.

    Example:
        >>> wide = dequantize(load_target("MiniMax-M2.5", widen=False))  # doctest: +SKIP
    """
    return _with_params(model, lambda params: dequantize_tree(params, FORMATS[check_dtype(dtype)], default_layout()))


def _with_params(model: Any, change: Callable[[Any], Any]) -> Any:
    """A target or draft with changed weights and a config that describes them; or the changed tree alone."""
    if not isinstance(model, Target | Draft):
        return change(model)
    params, config = shard_weights(change(model.params), mesh_of(model.params)), model.model.config
    module: Any = type(model.model)
    described = module(dataclasses.replace(config, weights=formats_of(params, config.weights)))
    return dataclasses.replace(model, model=described, params=params)


def encode(
    target: Target, chats: Sequence[Sequence[Message]], bucket_sizes: Sequence[int] | None = None
) -> tuple[Array, Array]:
    """Token ids of chats, ready for the assistant's answer.

    Args:
        target: the target, with a tokenizer and a chat template.
        chats: a list of chats; each is a list of {"role": str, "content": str}.
        bucket_sizes: as in `encode_ids`.

    Returns:
        int32 [B, P] ids padded at the end, and int32 [B] lengths.

    Raises:
        Eagle3Error: no tokenizer, malformed chats, or a chat that does not fit the context.

    Example:
        >>> ids, lengths = encode(target, [[{"role": "user", "content": "Hi"}]])  # doctest: +SKIP
    """
    if target.tokenizer is None:
        raise Eagle3Error(f"{target.name} has no tokenizer; give token ids to encode_ids instead")
    if not isinstance(chats, list | tuple) or not all(isinstance(chat, list | tuple) for chat in chats):
        raise Eagle3Error("chats must be a list of chats, each a list of messages {role, content}")
    return encode_ids(target, [target.tokenizer.encode_chat(chat) for chat in chats], bucket_sizes)


def encode_ids(
    target: Target, rows: Sequence[Sequence[int]], bucket_sizes: Sequence[int] | None = None
) -> tuple[Array, Array]:
    """Prompts of token ids as one padded batch.

    The padded length is a bucket, so that prompts of similar lengths share one compiled program.

    Args:
        target: the target.
        rows: a list of prompts, each a non-empty list of ids.
        bucket_sizes: padded lengths to choose from; None is powers of two from 32 up to the context.

    Returns:
        int32 [B, P] ids padded at the end with 0, and int32 [B] lengths.

    Raises:
        Eagle3Error: no prompts, an empty one, one longer than the context or the largest bucket, or an id
            that is not in the vocabulary.

    Example:
        >>> encode_ids(target, [[1, 2, 3]])[0].shape  # doctest: +SKIP
        (1, 32)
    """
    config = target.model.config
    if not isinstance(rows, list | tuple) or not rows or not all(isinstance(r, list | tuple) and r for r in rows):
        raise Eagle3Error("prompts must be a non-empty list of non-empty lists of token ids")
    for row in rows:
        for i in row:
            if isinstance(i, bool) or not isinstance(i, int | np.integer) or not 0 <= i < config.vocab_size:
                raise Eagle3Error(f"{i!r:.40} is no token id; ids from 0 to {config.vocab_size - 1} are needed")
    longest = max(map(len, rows))
    if longest >= config.max_position:
        raise Eagle3Error(
            f"a prompt of {longest} tokens leaves no room in the context of {config.max_position}; shorten it"
        )
    ids, lengths = pad_rows(rows, _bucket(longest, config.max_position, bucket_sizes))
    return jnp.asarray(ids), jnp.asarray(lengths)


def _bucket(length: int, context: int, sizes: Sequence[int] | None) -> int:
    if sizes is None:
        return bucket(length, context)
    if not isinstance(sizes, list | tuple) or not all(type(size) is int and size > 0 for size in sizes):
        raise Eagle3Error(f"bucket_sizes is {sizes!r:.80}; a list of positive integers is needed")
    fitting = [size for size in sizes if length <= size <= context]
    if not fitting:
        raise Eagle3Error(f"no bucket of {list(sizes)} holds a prompt of {length} tokens within {context}")
    return min(fitting)


def score(target: Target, ids: Array | np.ndarray, lengths: Array | np.ndarray | None = None) -> Score:
    """Logits and all hidden states of a target at every position.

    Args:
        target: the target.
        ids: int [B, T], padded at the end.
        lengths: int [B], real tokens of each row; what lies past them comes back as 0. None: all are real.

    Returns:
        The scores; attention is causal, so padding changes no real row.

    Raises:
        Eagle3Error: shapes that do not fit, more tokens than the context, or ids not in the vocabulary.

    Example:
        >>> score(target, jnp.array([[1, 2, 3]])).logits.shape  # doctest: +SKIP
        (1, 3, 49152)
    """
    config = target.model.config
    tokens = _check_ids(ids, config.vocab_size, config.max_position)
    batch, width = tokens.shape
    if lengths is None:
        counts = np.full(batch, width, np.int32)
    else:
        counts = _as_array("lengths", lengths)
        whole = counts.dtype.kind in "iu" and counts.shape == (batch,)
        if not whole or np.any(counts < 1) or np.any(counts > width):
            raise Eagle3Error(f"lengths {lengths!r:.80} do not fit ids of shape {tokens.shape}; one in [1, T] a row")
    return _score(target.model, target.params, jnp.asarray(tokens), jnp.asarray(counts, jnp.int32))


@partial(jax.jit, static_argnums=0)
def _score(model: Decoder, params: Any, ids: Array, lengths: Array) -> Score:
    layers, (batch, width) = model.config.num_layers, ids.shape
    taps = tuple(range(layers + 1))
    out = apply(model, params, ids, positions_of(ids), causal_attention, (None,) * layers, taps)
    logits = apply(model, params, out.hidden, method="logits")
    hidden = out.features.reshape(batch, width, layers + 1, -1).transpose(2, 0, 1, 3)
    real = (jnp.arange(width, dtype=jnp.int32) < lengths[:, None])[..., None]
    return Score(jnp.where(real, logits, 0), jnp.where(real, hidden, 0))


def score_draft(draft: Draft, features: Array | np.ndarray, token_ids: Array | np.ndarray) -> Array:
    """Logits of a draft at every position, from the target's true features.

    Args:
        draft: the draft.
        features: [B, T, A*Ht], the target's tapped hidden states of each position, low to high.
        token_ids: int [B, T]; [:, t] is x_{t+1}, the token after position t. Nothing is shifted here.

    Returns:
        float32 [B, T, Vd]; [:, t] predicts x_{t+2}.

    Raises:
        Eagle3Error: shapes that do not fit the draft, or ids not in the vocabulary.

    Example:
        >>> score_draft(draft, features, next_ids)  # doctest: +SKIP
    """
    rows = _check_rows(draft, features, token_ids)
    return _score_draft(draft.model, draft.params, draft.target.params, *rows)


@partial(jax.jit, static_argnums=0)
def _score_draft(model: Eagle3, params: Any, target_params: Any, features: Array, token_ids: Array) -> Array:
    shared = shared_weights(target_params)
    g = apply(model, params, features, shared, method="fuse")
    caches = (None,) * model.config.num_layers
    y, _ = apply(model, params, g, token_ids, positions_of(token_ids), causal_attention, caches, shared)
    return apply(model, params, y, shared, method="logits")


def propose(draft: Draft, features: Array | np.ndarray, token_ids: Array | np.ndarray, n: int) -> tuple[Array, Array]:
    """The greedy chain a draft proposes after the last row (arXiv 2503.01840, section 3.1).

    Args:
        draft: the draft.
        features: [B, T, A*Ht], as in `score_draft`.
        token_ids: int [B, T], as in `score_draft`; the last is the token just emitted.
        n: tokens to propose.

    Returns:
        int32 [B, n] tokens in the target's vocabulary, and their logits, float32 [B, n, Vd].

    Raises:
        Eagle3Error: as `score_draft`, or n below 1.

    Example:
        >>> ids, logits = propose(draft, features, next_ids, 4)  # doctest: +SKIP
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise Eagle3Error(f"{n!r} tokens cannot be proposed; at least 1 is needed")
    rows = _check_rows(draft, features, token_ids)
    return _propose(draft.model, n, draft.params, draft.target.params, *rows)


@partial(jax.jit, static_argnums=(0, 1))
def _propose(
    model: Eagle3, n: int, params: Any, target_params: Any, features: Array, token_ids: Array
) -> tuple[Array, Array]:
    batch, length = token_ids.shape
    blocks = int(blocks_for(length + n, _BLOCK_SIZE))
    table = jnp.arange(batch * blocks, dtype=jnp.int32).reshape(batch, blocks)
    start = jnp.zeros((batch,), jnp.int32)
    rows = Verified(features, token_ids, start, jnp.full_like(start, length), table)
    recorded: list[Array] = []

    def pick(j: int, logits: Array, target_ids: Array | None) -> Array:
        recorded.append(logits)
        best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return best if target_ids is None else target_ids[best]

    drafter = Eagle3Drafter(model)
    cache = drafter.make_cache(batch * blocks * _BLOCK_SIZE, mesh_of(params))
    ids, _ = drafter.propose((params, target_params), cache, rows, n, pick, _BLOCK_SIZE)
    return ids, jnp.stack(recorded, axis=1)


def _as_array(name: str, values: Any) -> np.ndarray:
    try:
        return np.asarray(values)
    except (ValueError, TypeError) as error:
        raise Eagle3Error(f"{name} are {values!r:.80}; an array without gaps is needed") from error


def _check_ids(ids: Array | np.ndarray, vocab_size: int, longest: int) -> np.ndarray:
    """Token ids as int32 [B, T]."""
    array = _as_array("token ids", ids)
    if array.ndim != 2 or array.dtype.kind not in "iu" or not array.size:
        raise Eagle3Error(f"token ids have shape {array.shape} and dtype {array.dtype}; integers [B, T] are needed")
    if array.shape[1] > longest:
        raise Eagle3Error(f"{array.shape[1]} tokens do not fit the context of {longest}; shorten them")
    if array.min() < 0 or array.max() >= vocab_size:
        raise Eagle3Error(
            f"token ids reach from {array.min()} to {array.max()}; ids from 0 to {vocab_size - 1} are needed"
        )
    return array.astype(np.int32)


def _check_rows(draft: Draft, features: Array | np.ndarray, token_ids: Array | np.ndarray) -> tuple[Array, Array]:
    config = draft.model.config
    tokens = _check_ids(token_ids, config.vocab_size, draft.target.model.config.max_position)
    joined = features if isinstance(features, Array) else _as_array("features", features)
    needed = (*tokens.shape, len(config.taps) * config.target_hidden_size)
    if joined.shape != needed or not jnp.issubdtype(joined.dtype, jnp.floating):
        raise Eagle3Error(f"features have shape {joined.shape} and dtype {joined.dtype}; floats {needed} are needed")
    return jnp.asarray(joined), jnp.asarray(tokens)
