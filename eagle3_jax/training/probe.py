"""A short probe of how a draft is wired: does it predict text that its target wrote?

A file's layer ids mean hs[i] to some engines and hs[i + 1] to others (see `eagle3_jax.checkpoint.taps`). Read one
layer off, a draft proposes nonsense and nothing else shows it; so both readings are tried on the target's own text.

Dimension letters: B rows, T tokens, F joined feature width, V vocabulary.
"""

import dataclasses
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from eagle3_jax.checkpoint.drafts import Draft
from eagle3_jax.decoding.batches import answers, pad_rows
from eagle3_jax.decoding.loop import generate
from eagle3_jax.decoding.request import GenerationConfig
from eagle3_jax.decoding.sampling import Sampling, row_keys
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.models.attention import causal_attention
from eagle3_jax.models.decoder import Decoder
from eagle3_jax.models.eagle3 import Eagle3, shared_weights
from eagle3_jax.models.layers import apply, positions_of

log = logging.getLogger("eagle3_jax")

WIRING_FAULT = 0.2
"""Accuracy of the first draft below which no trained draft is, but a wrongly read one."""

_MARGIN = 0.02
_generate = jax.jit(generate, static_argnames=("model", "config"))


@dataclasses.dataclass(frozen=True)
class Probe:
    """What a probe found.

    Attributes:
        taps: of each convention, the hs indices it reads the file's ids as.
        accuracy: of each convention, the share of the target's tokens that the first draft predicts; None where
            its taps lie outside of the target.
        in_use: the convention the draft was loaded with.
        tokens: how many tokens that is over.
    """

    taps: dict[str, tuple[int, ...]]
    accuracy: dict[str, float | None]
    in_use: str
    tokens: int

    @property
    def best(self) -> str:
        """The convention in use, unless another one is clearly better."""
        found = {name: value for name, value in self.accuracy.items() if value is not None}
        better = max(found, key=lambda name: found[name])
        return better if found[better] > found[self.in_use] + _MARGIN else self.in_use

    @property
    def verdict(self) -> str:
        """In words."""
        accuracy = self.accuracy[self.in_use]
        assert accuracy is not None
        if self.best != self.in_use:
            return (
                f"tap convention {self.best} fits better than {self.in_use}: load the draft with "
                f"--draft-set tap_convention={self.best}"
            )
        if accuracy < WIRING_FAULT:
            return (
                f"wiring fault: {accuracy:.0%} of the tokens predicted, where even weak drafts reach "
                f"{WIRING_FAULT:.0%}; its taps, norms, embedding or target are not those it was trained with"
            )
        return f"taps {list(self.taps[self.in_use])} are read as they were trained"


def probe_taps(draft: Draft, prompts: Sequence[Sequence[int]], max_new_tokens: int = 64) -> Probe:
    """Compare both readings of a draft's layer ids on text that the target writes.

    The target answers the prompts greedily; the draft then predicts each token of the answers from the true
    features two rows before it.

    Args:
        draft: the draft. prompts: token ids of each prompt. max_new_tokens: length of the answers.

    Raises:
        Eagle3Error: no prompts, or prompts and answers longer than the target's context, or logits that are not
            finite.

    Example:
        >>> probe_taps(draft, prompts).accuracy  # doctest: +SKIP
        {'hs': 0.63, 'output': 0.11}
    """
    if not prompts or not all(prompts):
        raise Eagle3Error("a probe needs prompts that are not empty")
    config, in_use = draft.model.config, "hs" if draft.tap_convention in ("default", "given") else draft.tap_convention
    ids = tuple(k - 1 for k in config.taps) if in_use == "output" else config.taps
    readings = {"last": ids} if in_use == "last" else {"hs": ids, "output": tuple(i + 1 for i in ids)}
    layers = draft.target.model.config.num_layers
    inside = {name: taps for name, taps in readings.items() if max(taps) <= layers}
    wanted = tuple(sorted({k for taps in inside.values() for k in taps}))
    tokens, answers = _text(draft, prompts, max_new_tokens)
    features = _target_features(draft.target.model, wanted, draft.target.params, tokens)
    # Which hidden states its taps are changes nothing in the draft's own program.
    model, right = Eagle3(dataclasses.replace(config, taps=tuple(range(len(ids))))), {}
    for name, taps in inside.items():
        own = jnp.concatenate([features[wanted.index(k)] for k in taps], axis=-1)
        predicted = _first_drafts(model, draft.params, draft.target.params, own[:, :-2], tokens[:, 1:-1])
        right[name] = np.asarray(predicted) == np.asarray(tokens)[:, 2:]
    counted = answers[:, 2:]
    accuracy = {name: float(np.mean(right[name][counted])) if name in right else None for name in readings}
    return Probe(readings, accuracy, in_use, int(counted.sum()))


def settle_taps(draft: Draft, prompts: Sequence[Sequence[int]]) -> Draft:
    """A draft whose files left its taps open, with the convention that a probe finds; see `probe_taps`.

    Args:
        draft: the draft. prompts: token ids of each prompt.

    Raises:
        Eagle3Error: as `probe_taps`.
    """
    found = probe_taps(draft, prompts)
    shares = ", ".join(f"{value:.0%} as {name}" for name, value in found.accuracy.items() if value is not None)
    reason = f"the ids fit both readings; over {found.tokens} tokens of the target a probe found {shares}"
    warnings = [warning for warning in draft.warnings if "fit both readings" not in warning]
    best = found.accuracy[found.best]
    if best is not None and best < WIRING_FAULT:
        warnings.append(f"{reason}: a wiring fault, or another target's draft")
        log.warning("%s: %s", draft.name, warnings[-1])
    taps = found.taps[found.best]
    log.info("%s: taps hs%s (%s)", draft.name, list(taps), reason)
    model = Eagle3(dataclasses.replace(draft.model.config, taps=taps))
    settled = {"tap_convention": found.best, "tap_reason": reason, "warnings": tuple(warnings)}
    return dataclasses.replace(draft, model=model, taps_ambiguous=False, **settled)


def _text(draft: Draft, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> tuple[Array, np.ndarray]:
    """Prompts and greedy answers, int32 [B, T], and which tokens are of an answer, bool [B, T]."""
    target, count, longest = draft.target, len(prompts), max(map(len, prompts))
    room = target.model.config.max_position - longest
    if room < 3:
        raise Eagle3Error(f"a prompt of {longest} tokens leaves no room for a probe; give shorter ones")
    ids, lengths = pad_rows(prompts)
    config = GenerationConfig(min(max_new_tokens, room), transforms=())
    sampling = Sampling.make(count, eos_ids=target.eos_ids)
    keys = row_keys(0, count)
    arrays = (jnp.asarray(ids), jnp.asarray(lengths), keys, sampling)
    out = _generate(target.params, *arrays, model=target.model, config=config)
    texts = [[*prompt, *answer] for prompt, answer in zip(prompts, answers(out, target.name), strict=True)]
    tokens, ends = pad_rows(texts)
    place = np.arange(tokens.shape[1])
    written = (place >= lengths[:, None]) & (place < ends[:, None])
    if not written[:, 2:].any():
        raise Eagle3Error(f"{target.name} answers nothing to probe with; give other prompts")
    return jnp.asarray(tokens), written


@partial(jax.jit, static_argnums=(0, 1))
def _target_features(model: Decoder, taps: tuple[int, ...], params: Any, tokens: Array) -> Array:
    """Tapped hidden states of int32 [B, T]: [len(taps), B, T, Ht]."""
    out = apply(model, params, tokens, positions_of(tokens), causal_attention, (None,) * model.config.num_layers, taps)
    return jnp.stack(jnp.split(out.features, len(taps), axis=-1))


@partial(jax.jit, static_argnums=0)
def _first_drafts(model: Eagle3, params: Any, target_params: Any, features: Array, next_ids: Array) -> Array:
    """The draft's most likely token after each row, in the target's vocabulary: int32 [B, T]."""
    shared, caches = shared_weights(target_params), (None,) * model.config.num_layers
    g = apply(model, params, features, shared, method="fuse")
    y, _ = apply(model, params, g, next_ids, positions_of(next_ids), causal_attention, caches, shared)

    def best(row: Array) -> Array:
        return jnp.argmax(apply(model, params, row, shared, method="logits"), axis=-1).astype(jnp.int32)

    # Row by row: the logits of all rows would be the largest array.
    drafts, ids = jax.lax.map(best, y), params.get("target_ids")
    return drafts if ids is None else ids[drafts]
