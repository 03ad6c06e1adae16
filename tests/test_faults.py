"""Faults that cost other engines their acceptance, injected: each must move what the parity tests compare.

The faults of the decoding loop itself (stale keys, stale features, shifted tokens) are injected in
decoding/test_loop.py.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from loading import DRAFTS, TARGET_OF, TARGETS, draft, expected, target

import eagle3_jax as e3
from eagle3_jax.checkpoint.drafts import Draft
from eagle3_jax.models.eagle3 import Eagle3

SEEN = 1e-2  # fifty times the tolerance of the parity tests


def changed(name: str, **fields: Any) -> Draft:
    """A fixture draft with config fields changed and all weights kept."""
    whole = draft(name)
    return dataclasses.replace(whole, model=Eagle3(dataclasses.replace(whole.model.config, **fields)))


def reweighted(name: str, path: tuple[str, ...], edit: Callable[[Any], Any]) -> Draft:
    """A fixture draft with one leaf of its weights changed."""
    whole = draft(name)
    params = dict(whole.params)
    if len(path) == 1:
        params[path[0]] = edit(params[path[0]])
    else:
        weight = params[path[0]][path[1]]
        params[path[0]] = {**params[path[0]], path[1]: dataclasses.replace(weight, value=edit(weight.value))}
    return dataclasses.replace(whole, params=params)


def chain_difference(faulty: Draft, name: str) -> float:
    """How far the fixture's chain logits and the fault's part; the first step is the extend pass's last row."""
    x = expected(DRAFTS / name)
    n = int(x["chain_prefix"][-1])
    ids, logits = e3.propose(faulty, x["features"][:, :n], x["next_ids"][:, :n], 4)
    moved = float(np.max(np.abs(np.asarray(logits) - x["chain_logits"][-1])))
    return moved if np.array_equal(ids, x["chain_tokens"][-1]) else max(moved, 1.0)


FAULTS: dict[str, Callable[[str], Draft]] = {
    "norm_before_residual flipped": lambda name: changed(name, norm_before_residual=True),
    "norm_output flipped": lambda name: changed(name, norm_output=not draft(name).model.config.norm_output),
    "rope base of the target": lambda name: changed(name, rope=target(TARGET_OF[name]).model.config.rope),
    "epsilon of another model": lambda name: changed(name, rms_norm_eps=0.1),
    "draft ids taken for target ids": lambda name: reweighted(
        name, ("target_ids",), lambda ids: jnp.arange(len(ids), dtype=ids.dtype)
    ),
    "embedding norm skipped": lambda name: reweighted(name, ("embed_norm", "weight"), jnp.ones_like),
    "hidden norm skipped": lambda name: reweighted(name, ("hidden_norm", "weight"), jnp.ones_like),
    "final norm skipped": lambda name: reweighted(name, ("final_norm", "weight"), jnp.ones_like),
    "gate and up swapped": lambda name: dataclasses.replace(
        draft(name),
        params={
            **draft(name).params,
            "mlp": {
                **draft(name).params["mlp"],
                "gate": draft(name).params["mlp"]["up"],
                "up": draft(name).params["mlp"]["gate"],
            },
        },
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", ["a_safeailab", "c_eagle31"])
def test_a_misread_draft_is_seen(name: str, fault: str) -> None:
    assert chain_difference(draft(name), name) < 2e-4
    assert chain_difference(FAULTS[fault](name), name) > SEEN


@pytest.mark.parametrize("name", ["a_safeailab", "c_eagle31"])
def test_features_of_the_wrong_layers_are_seen(name: str) -> None:
    x = expected(DRAFTS / name)
    hs = expected(TARGETS / TARGET_OF[name])["hs"]
    whole, taps = draft(name), draft(name).model.config.taps

    def logits_at(layers: tuple[int, ...]) -> np.ndarray:
        return np.asarray(e3.score_draft(whole, np.concatenate([hs[k] for k in layers], axis=-1), x["next_ids"]))

    assert np.max(np.abs(logits_at(taps) - x["logits"])) < 2e-4
    for wrong in (tuple(k - 1 for k in taps), tuple(k + 1 for k in taps), taps[::-1]):
        assert np.max(np.abs(logits_at(wrong) - x["logits"])) > SEEN, wrong


@pytest.mark.parametrize("name", ["a_safeailab", "c_eagle31"])
def test_tokens_beside_the_wrong_feature_are_seen(name: str) -> None:
    x = expected(DRAFTS / name)
    shifted = np.roll(x["next_ids"], 1, axis=1)
    assert np.max(np.abs(np.asarray(e3.score_draft(draft(name), x["features"], shifted)) - x["logits"])) > SEEN


def test_no_drafts_at_all_is_refused_not_run() -> None:
    with pytest.raises(e3.Eagle3Error, match="from 1 to 64"):
        e3.Chain(0)


def test_a_key_used_twice_would_repeat_itself_and_ours_do_not() -> None:
    keys = e3.row_keys(0, 2)
    from eagle3_jax.decoding.sampling import gumbel_noise

    noise = np.asarray(gumbel_noise(keys, jnp.arange(6, dtype=jnp.int32)[None].repeat(2, axis=0), 32)).reshape(12, 32)
    assert len(np.unique(noise[:, 0])) == 12
    assert np.max(np.abs(np.corrcoef(noise) - np.eye(12))) < 0.7
