"""Tiny random models and drafters for the decoding tests."""

import dataclasses
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from eagle3_jax.config import Eagle3Config, LlamaConfig
from eagle3_jax.decoding.drafters import Eagle3Drafter, Pick, Verified
from eagle3_jax.models.attention import causal_attention
from eagle3_jax.models.eagle3 import Eagle3, shared_weights
from eagle3_jax.models.layers import apply
from eagle3_jax.models.llama import Llama

VOCAB = 40
TARGET = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=24,
    intermediate_size=32,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position=128,
)
DRAFT = Eagle3Config(
    vocab_size=VOCAB,
    draft_vocab_size=28,
    hidden_size=24,
    target_hidden_size=24,
    intermediate_size=32,
    num_heads=2,
    num_kv_heads=1,
    head_dim=12,
    taps=(0, 1, 3),
)


@cache
def target(seed: int = 0, max_position: int = 128) -> tuple[Llama, Any]:
    """A random target whose logits are peaked enough for greedy text to vary."""
    model = Llama(dataclasses.replace(TARGET, max_position=max_position))
    init = jax.jit(lambda key: model.init(key, jnp.zeros((1, 2), jnp.int32), method="describe")["params"])
    params = init(jax.random.key(seed))
    return model, jax.tree.map(lambda x: x * 2.0 if x.ndim == 2 else x, params)


@cache
def draft(config: Eagle3Config = DRAFT, seed: int = 1) -> tuple[Eagle3, Any]:
    """A random draft of the tiny target, over a random part of its vocabulary."""
    model, shared = Eagle3(config), shared_weights(target()[1])
    features = jnp.zeros((1, 2, len(config.taps) * config.target_hidden_size))
    init = jax.jit(
        lambda key: model.init(key, features, jnp.zeros((1, 2), jnp.int32), shared, method="describe")["params"]
    )
    # Norms start at one, which would hide a norm left out or applied twice.
    rng = np.random.default_rng(seed)
    params = jax.tree.map(
        lambda x: x * rng.uniform(0.5, 1.5, x.shape).astype(np.float32) if x.ndim == 1 and x.dtype != jnp.int32 else x,
        init(jax.random.key(seed)),
    )
    if "target_ids" in params:
        chosen = np.sort(rng.permutation(config.vocab_size)[: config.draft_vocab_size])
        params = {**params, "target_ids": jnp.asarray(chosen, jnp.int32)}
    return model, params


def prompts(batch: int, width: int = 24, seed: int = 0) -> tuple[Array, Array]:
    """Random prompts int32 [B, P] of lengths 1 .. P."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, VOCAB, (batch, width))
    return jnp.asarray(ids, jnp.int32), jnp.asarray(rng.integers(1, width + 1, batch), jnp.int32)


def whole_rows(ids: Array, lengths: Array, tokens: Array) -> np.ndarray:
    """Prompt and output of each row, joined: [B, P + max_new_tokens]."""
    rows = np.concatenate([np.asarray(ids), np.zeros_like(tokens)], axis=1)
    for b, n in enumerate(np.asarray(lengths)):
        rows[b, n : n + tokens.shape[1]] = tokens[b]
    return rows


def corrupted(rows: np.ndarray, share: float, seed: int = 0) -> np.ndarray:
    """Rows with a share of the tokens replaced, so that an oracle over them is right now and then."""
    rng = np.random.default_rng(seed)
    wrong = rng.random(rows.shape) < share
    return np.where(wrong, (rows + 1 + rng.integers(0, VOCAB - 1, rows.shape)) % VOCAB, rows)


@dataclasses.dataclass(frozen=True)
class Steered(Eagle3Drafter):
    """EAGLE-3 whose cache is kept as ever, but whose proposals come from given rows (as `Oracle`'s).

    Draft params are (EAGLE-3 params, int32 [B, L] rows), so any acceptance can be forced. Where a row holds -1 it
    proposes what EAGLE-3 would.
    """

    def extend(self, params: tuple[Any, Any], cache: tuple, rows: Verified, block_size: int) -> tuple:
        return super().extend((params[0][0], params[1]), cache, rows, block_size)

    def propose(
        self, params: tuple[Any, Any], cache: tuple, rows: Verified, length: int, pick: Pick, block_size: int
    ) -> tuple[Array, Array]:
        own, cache = self.own(params, cache, rows, length, pick, block_size)
        index = (rows.start + rows.count)[:, None] + 1 + jnp.arange(length, dtype=jnp.int32)
        given = jnp.take_along_axis(params[0][1], index, axis=1, mode="fill", fill_value=0)
        return jnp.where(given < 0, own, given), cache

    def own(
        self, params: tuple[Any, Any], cache: tuple, rows: Verified, length: int, pick: Pick, block_size: int
    ) -> tuple[Array, Array]:
        """What EAGLE-3 itself proposes here."""
        return super().propose((params[0][0], params[1]), cache, rows, length, pick, block_size)


WIDTH = 64
"""Rows are padded to this length where no cache is used: causal attention does not see the padding."""


def naive_chain(drafted: tuple[Eagle3, Any], row: np.ndarray, n: int, length: int) -> list[int]:
    """The greedy chain after the n verified tokens x_0 .. x_{n-1} and x_n, without any cache.

    Every step recomputes the whole sequence with plain causal attention: true features for rows 0 .. n-1, then
    the draft's own. `row` holds x_0 .. x_n at least.
    """
    model, params = drafted
    features, _ = _whole_pass(model.config.taps, row)
    g = np.zeros((1, WIDTH, model.config.hidden_size), np.float32)
    g[:, :n] = np.asarray(apply(model, params, features, shared_weights(target()[1]), method="fuse"))[:, :n]
    ids = np.asarray(params.get("target_ids", np.arange(model.config.vocab_size)))
    tokens = np.zeros((1, WIDTH), np.int32)
    tokens[0, :n] = row[1 : n + 1]
    for j in range(length):
        feedback, logits = _draft_pass(model, params, jnp.asarray(g), jnp.asarray(tokens))
        last = n - 1 + j
        tokens[0, last + 1] = ids[int(np.argmax(np.asarray(logits)[0, last]))]
        g[0, last + 1] = np.asarray(feedback)[0, last]
    return tokens[0, n : n + length].tolist()


def causal_logits(row: np.ndarray) -> np.ndarray:
    """The tiny target's logits [T, V] of one whole row int [T], computed without a cache."""
    return np.asarray(_whole_pass((), row)[1])[0, : len(row)]


def _positions(ids: Array) -> Array:
    return jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)


def _whole_pass(taps: tuple[int, ...], row: np.ndarray) -> tuple[Array, Array]:
    padded = np.zeros((1, WIDTH), np.int32)
    padded[0, : len(row)] = row
    return _target_pass(taps, target()[1], jnp.asarray(padded))


@partial(jax.jit, static_argnums=0)
def _target_pass(taps: tuple[int, ...], params: Any, ids: Array) -> tuple[Array, Array]:
    model = target()[0]
    out = apply(model, params, ids, _positions(ids), causal_attention, (None,) * model.config.num_layers, taps)
    return out.features, apply(model, params, out.hidden, method="logits")


@partial(jax.jit, static_argnums=0)
def _draft_pass(model: Eagle3, params: Any, g: Array, tokens: Array) -> tuple[Array, Array]:
    shared = shared_weights(target()[1])
    y, _ = apply(
        model, params, g, tokens, _positions(tokens), causal_attention, (None,) * model.config.num_layers, shared
    )
    return apply(model, params, y, method="feedback"), apply(model, params, y, shared, method="logits")
