"""Targets over a mesh of devices compute what one device computes."""

import dataclasses

import numpy as np
import pytest
from loading import TARGETS, expected, target

from eagle3_jax.api import score
from eagle3_jax.sharding import make_mesh, shard_weights


@pytest.mark.parametrize("name", ["minimax_m2", "gpt_oss"])
def test_logits_do_not_depend_on_the_mesh(name: str) -> None:
    """Norms over all heads, experts, sinks and biases, each split over the devices."""
    loaded, x = target(name), expected(TARGETS / name)
    params = shard_weights(loaded.params, make_mesh(1, 4))
    attention, experts = (params["layers_0"][part] for part in ("attention", "mlp"))
    split = [attention["q"], experts["experts"]["up"]]
    split.append(attention["q_norm"] if name == "minimax_m2" else attention["sinks"])
    for module in split:
        value = module["weight"].value if isinstance(module, dict) else module.value
        assert not value.sharding.is_fully_replicated
    got = score(dataclasses.replace(loaded, params=params), x["input_ids"])
    np.testing.assert_allclose(got.logits, x["logits"], atol=2e-4, rtol=0)
    np.testing.assert_allclose(got.hidden_states, x["hs"], atol=2e-4, rtol=0)
