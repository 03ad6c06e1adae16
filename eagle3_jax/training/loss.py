"""The training-time test loss: the draft is trained on the states its own chain reaches.

Source: EAGLE-3 (arXiv 2503.01840), section 3.2. Step 0 runs on the target's features; step j >= 1 runs on
the draft's own output of step j - 1, with tokens, targets and loss mask moved one more to the left. A query
of step j sees the keys of step 0 causally and, of every later step, only its own row: what the cache of its
chain would hold.

Dimension letters: B rows, T positions of a row, J steps, N query heads, G query heads per key-value head,
D head width, Dv width of a value head, Vd draft vocabulary, F joined feature width.
"""

import dataclasses
import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax

from eagle3_jax.errors import Eagle3Error
from eagle3_jax.models.attention import MASKED, Attend, Expand, keys_and_values
from eagle3_jax.models.eagle3 import Eagle3, SharedWeights
from eagle3_jax.models.layers import apply, positions_of

OBJECTIVES = ("cross_entropy", "kl", "lk")
LK_RATE = 3.0
"""How fast an overlap turns the "lk" objective from divergence to overlap; the paper's best."""
PARTS = 4
"""Parts of the rows in which a step's causal attention is computed."""


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """Static settings of the loss.

    Attributes:
        steps: J, how many tokens deep the chain is unrolled.
        decay: step j weighs decay^j.
        objective: "cross_entropy" (SafeAILab), "kl" (the same gradient, less the target's entropy) or "lk" (see
            `lk_loss`: more drafts are accepted above temperature 0).
        drop_uncovered: leave out rows whose most likely target token the draft's vocabulary lacks, as
            SafeAILab does.

    Raises:
        Eagle3Error: no step, a decay outside (0, 1], or an unknown objective.
    """

    steps: int = 3
    decay: float = 0.8
    objective: str = "cross_entropy"
    drop_uncovered: bool = True

    def __post_init__(self) -> None:
        """Refuse impossible values."""
        if not 1 <= self.steps <= 64:
            raise Eagle3Error(f"{self.steps} training-time test steps are impossible; use 1 to 64")
        if not 0 < self.decay <= 1:
            raise Eagle3Error(f"step decay {self.decay} must lie in (0, 1]")
        if self.objective not in OBJECTIVES:
            raise Eagle3Error(f"objective {self.objective!r} is not known; use {' or '.join(OBJECTIVES)}")


@struct.dataclass
class Batch:
    """Rows to train on; row t holds the feature of position t and the token after it.

    Attributes:
        features: [B, T, F], the target's tapped hidden states of position t.
        token_ids: int32 [B, T], token x_{t+1}.
        target_logits: float32 [B, T, Vd], the target's logits for x_{t+2}, at the draft vocabulary's tokens.
        target_argmax: int32 [B, T], the target's most likely x_{t+2} in its whole vocabulary.
        loss_mask: bool [B, T], whether x_{t+2} is a token to learn.
        segment_ids: int32 [B, T], which text of a packed row position t belongs to.
    """

    features: Array
    token_ids: Array
    target_logits: Array
    target_argmax: Array
    loss_mask: Array
    segment_ids: Array


@struct.dataclass
class Metrics:
    """Sums over the rows of a batch, so that batches can be added up.

    Attributes:
        loss: float32 [J], sum of the losses of the rows counted in `weight`.
        weight: float32 [J], rows that the loss covers.
        correct: float32 [J], rows whose most likely draft token is the target's.
        chain_correct: float32 [J], rows where that also held at every earlier step.
        count: float32 [J], rows of the loss mask.
    """

    loss: Array
    weight: Array
    correct: Array
    chain_correct: Array
    count: Array


def ttt_attention(segment_ids: Array) -> Attend:
    """Attention of one step; the cache is the tuple of all earlier steps' (keys, values).

    Args:
        segment_ids: int32 [B, T]; texts packed into one row do not see each other.
    """
    # One product a head is 3 times as fast on CPU as a batched one; accelerators want the batch.
    each_head = lax.map if jax.default_backend() == "cpu" else lambda f, xs: jax.vmap(f)(xs)

    def one_head(window: int | None, arrays: tuple[Array, Array, Array, Array, Array | None]) -> Array:
        """Queries [G, T, D], keys [J, T, D], values [J, T, Dv], segment ids [T], sinks [G] -> float32 [G, T, Dv].

        Part by part of the queries, as no part looks past its end: the triangle costs 5/8 of the square.
        """
        length = arrays[0].shape[1]
        ends = [-(-length * part // PARTS) for part in range(PARTS + 1)]
        parts = [_attend_part(window, begin, end, *arrays) for begin, end in itertools.pairwise(ends) if begin < end]
        return jnp.concatenate(parts, axis=1)

    def attend(
        q: Array,
        k: Array,
        v: Array | Expand,
        cache: tuple,
        *,
        scale: float | None = None,
        window: int | None = None,
        sinks: Array | None = None,
    ) -> tuple[Array, tuple]:
        if window is not None and cache:
            raise Eagle3Error(f"a draft with a window of {window} tokens cannot be trained; use one without")
        k, v = keys_and_values(k, v)
        cache = (*cache, (k, v))
        batch, length, _, width = q.shape
        kv_heads = k.shape[2]

        def by_head(pairs: list[Array]) -> Array:
            stacked = jnp.stack(pairs).transpose(1, 3, 0, 2, 4)
            return stacked.reshape(batch * kv_heads, len(pairs), length, -1)

        factor = width**-0.5 if scale is None else scale
        queries = (q.astype(jnp.float32) * factor).astype(q.dtype).reshape(batch, length, kv_heads, -1, width)
        queries = queries.transpose(0, 2, 3, 1, 4).reshape(batch * kv_heads, -1, length, width)
        keys, values = by_head([k for k, _ in cache]), by_head([v for _, v in cache])
        if sinks is not None:
            sinks = jnp.tile(sinks.astype(jnp.float32).reshape(kv_heads, -1), (batch, 1))
        segments = jnp.repeat(segment_ids, kv_heads, axis=0)
        mixed = each_head(partial(one_head, window), (queries, keys, values, segments, sinks))
        mixed = mixed.reshape(batch, kv_heads, -1, length, v.shape[-1]).transpose(0, 3, 1, 2, 4)
        return mixed.reshape(batch, length, -1).astype(q.dtype), cache

    return attend


def _attend_part(
    window: int | None,
    begin: int,
    end: int,
    queries: Array,
    keys: Array,
    values: Array,
    segments: Array,
    sinks: Array | None,
) -> Array:
    """Positions begin..end of one head, see `ttt_attention`: float32 [G, end - begin, Dv]."""
    queries = queries[:, begin:end]
    group, length, width = queries.shape
    scores = jnp.matmul(queries.reshape(-1, width), keys[0, :end].T, preferred_element_type=jnp.float32)
    distance = jnp.arange(begin, end)[:, None] - jnp.arange(end)
    visible = (distance >= 0) & (segments[begin:end, None] == segments[:end])
    if window is not None:
        visible &= distance < window
    scores = jnp.where(visible, scores.reshape(group, length, end), MASKED)
    own = jnp.einsum("gtd,jtd->gtj", queries, keys[1:, begin:end], preferred_element_type=jnp.float32)
    highest = jnp.max(scores, axis=-1, keepdims=True)
    if keys.shape[0] > 1:
        highest = jnp.maximum(highest, jnp.max(own, axis=-1, keepdims=True))
    if sinks is not None:
        highest = jnp.maximum(highest, sinks[:, None, None])
    highest = lax.stop_gradient(highest)
    weights, own = jnp.exp(scores - highest), jnp.exp(own - highest)
    total = jnp.sum(weights, axis=-1) + jnp.sum(own, axis=-1)
    if sinks is not None:
        total += jnp.exp(sinks[:, None] - highest[..., 0])
    flat = weights.reshape(-1, end).astype(values.dtype)
    mixed = jnp.matmul(flat, values[0, :end], preferred_element_type=jnp.float32).reshape(group, length, -1)
    own = own.astype(values.dtype)
    mixed += jnp.einsum("gtj,jtd->gtd", own, values[1:, begin:end], preferred_element_type=jnp.float32)
    return mixed / total[..., None]


def ttt_outputs(model: Eagle3, params: Any, shared: SharedWeights, batch: Batch, steps: int) -> list[Array]:
    """What the draft gives at each step: `steps` arrays y [B, T, H], before the final norm.

    Rows t >= T - j of step j have no token left; they are fed token 0 and mean nothing.
    """
    attend, caches = ttt_attention(batch.segment_ids), ((),) * model.config.num_layers
    positions = positions_of(batch.token_ids)
    g = apply(model, params, batch.features, shared, method="fuse")
    outputs = []
    for j in range(steps):
        token_ids = shift_left(batch.token_ids, j)
        y, caches = apply(model, params, g, token_ids, positions + j, attend, caches, shared)
        outputs.append(y)
        g = apply(model, params, y, method="feedback")
    return outputs


def ttt_loss(
    model: Eagle3, params: Any, shared: SharedWeights, batch: Batch, config: LossConfig
) -> tuple[Array, Metrics]:
    """The training-time test loss, sum over j of decay^j times the mean loss of step j.

    Args:
        model: the draft. params: its weights. shared: the target's embedding and head.
        batch: the rows. config: static settings.

    Returns:
        The loss, float32 [], and the sums behind it.
    """
    target_ids = params.get("target_ids")
    learned = batch.loss_mask
    if config.drop_uncovered and target_ids is not None:
        learned &= jnp.isin(batch.target_argmax, target_ids)
    log_partition = jax.nn.logsumexp(batch.target_logits, axis=-1)
    probabilities = jnp.exp(batch.target_logits - log_partition[..., None])
    offset = jnp.zeros_like(log_partition)
    if config.objective != "cross_entropy":
        offset = log_partition - jnp.sum(probabilities * batch.target_logits, axis=-1)
    chain = jnp.ones_like(batch.loss_mask)
    total, sums = jnp.float32(0), []
    for j, y in enumerate(ttt_outputs(model, params, shared, batch, config.steps)):
        logits = apply(model, params, y, shared, method="logits")
        weight = counted_rows(batch, learned, j).astype(jnp.float32)
        counted = counted_rows(batch, batch.loss_mask, j)
        expected_logit = jnp.sum(shift_left(probabilities, j) * logits, axis=-1)
        row_loss = jax.nn.logsumexp(logits, axis=-1) - expected_logit - shift_left(offset, j)
        if config.objective == "lk":
            row_loss = lk_loss(row_loss, shift_left(probabilities, j), logits)
        best = most_likely(logits)
        hit = (best if target_ids is None else target_ids[best]) == shift_left(batch.target_argmax, j)
        chain &= hit
        loss = jnp.sum(row_loss * weight)
        total += config.decay**j * loss / jnp.maximum(jnp.sum(weight), 1.0)
        sums.append((loss, *map(_count, (weight > 0, hit & counted, chain & counted, counted))))
    return total, Metrics(*(jnp.stack(column) for column in zip(*sums, strict=True)))


def lk_loss(divergence: Array, probabilities: Array, logits: Array) -> Array:
    """The hybrid LK loss (arXiv 2602.23881) of each row: float32 [...].

    The share of drafts that are accepted at temperature 1 is the overlap sum(min(p, q)). Its own gradient vanishes
    where there is none, so that the divergence leads there, and the overlap the more the larger it is.

    Args:
        divergence: KL(p, q), [...]. probabilities: the target's p, [..., Vd]. logits: the draft's, whose softmax is q.
    """
    overlap = jnp.sum(jnp.minimum(probabilities, jax.nn.softmax(logits, axis=-1)), axis=-1)
    share = lax.stop_gradient(jnp.exp(-LK_RATE * overlap))
    return share * divergence + (1 - share) * (1 - overlap)


def most_likely(logits: Array) -> Array:
    """The first of the largest logits [..., V]: int32 [...]. On CPU XLA's own argmax takes several times as long."""
    ids, last = jnp.arange(logits.shape[-1], dtype=jnp.int32), logits.shape[-1] - 1
    return jnp.min(jnp.where(logits == jnp.max(logits, axis=-1, keepdims=True), ids, last), axis=-1)


def _count(mask: Array) -> Array:
    return jnp.sum(mask, dtype=jnp.float32)


def counted_rows(batch: Batch, mask: Array, step: int) -> Array:
    """Rows of a step whose token the mask has and whose text is still the row's own: bool [B, T].

    Args:
        batch: the rows. mask: bool [B, T], such as the batch's `loss_mask`. step: j.
    """
    same_text = batch.segment_ids == shift_left(batch.segment_ids, step, fill=-1)
    return shift_left(mask, step) & same_text


def shift_left(x: Array, by: int, fill: int = 0) -> Array:
    """Move axis 1 of x [B, T, ...] to the left, filling the end: row t becomes row t + by."""
    if by == 0:
        return x
    end = jnp.full_like(x[:, :by], fill)
    return jnp.concatenate([x[:, by:], end], axis=1)
