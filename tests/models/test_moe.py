"""Routing and the experts' products, against plain restatements in NumPy; how much is computed, and what is read."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

from eagle3_jax.config import MoEConfig
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.models.layers import apply
from eagle3_jax.models.moe import Experts, MoE, mix_experts, route, tile_height
from eagle3_jax.quant.weight import WeightFormats


def chosen_by_hand(config: MoEConfig, logits: np.ndarray, correction: np.ndarray | None) -> list[dict[int, float]]:
    """Each row's experts and their weights, one row at a time, in float64 but for the scores that decide."""
    rows = []
    for row in logits.astype(np.float32):
        if config.scoring == "sigmoid":
            scores = [1 / (1 + math.exp(-float(z))) for z in row]
        else:
            powers = [math.exp(float(z) - float(row.max())) for z in row]
            scores = [p / sum(powers) for p in powers]
        choice = [s + (0.0 if correction is None else float(correction[e])) for e, s in enumerate(scores)]
        size = config.num_experts // config.groups
        worth = [sum(sorted(choice[g * size : (g + 1) * size])[-2:]) for g in range(config.groups)]
        groups = sorted(range(config.groups), key=lambda g: (-round(worth[g], 6), g))[: config.top_groups]
        allowed = [e for e in range(config.num_experts) if e // size in groups]
        best = sorted(allowed, key=lambda e: (-round(choice[e], 6), e))[: config.top_k]
        total = sum(scores[e] for e in best) if config.normalize else 1.0
        rows.append({e: config.scaling * scores[e] / total for e in best})
    return rows


RULES = {
    "softmax": MoEConfig(num_experts=8, top_k=3, intermediate_size=4, normalize=False),
    "softmax over the chosen": MoEConfig(num_experts=8, top_k=3, intermediate_size=4),
    "sigmoid, corrected": MoEConfig(
        num_experts=8, top_k=2, intermediate_size=4, scoring="sigmoid", correction_bias=True
    ),
    "grouped": MoEConfig(
        num_experts=12,
        top_k=4,
        intermediate_size=4,
        scoring="sigmoid",
        correction_bias=True,
        groups=4,
        top_groups=2,
        scaling=2.5,
    ),
    "groups of one": MoEConfig(num_experts=4, top_k=2, intermediate_size=4, groups=4, top_groups=3),
}


@pytest.mark.parametrize("spread", ["normal", "ties", "all equal"])
@pytest.mark.parametrize("name", RULES)
def test_routing_is_the_rule_by_hand(name: str, spread: str) -> None:
    config, rng = RULES[name], np.random.default_rng(3)
    logits = rng.standard_normal((64, config.num_experts)).astype(np.float32)
    correction = rng.uniform(-2.0, 0.5, config.num_experts).astype(np.float32) if config.correction_bias else None
    if spread != "normal":  # whole logits and no bias: most rows hold experts of one score
        logits, correction = np.round(logits), None if correction is None else np.zeros_like(correction)
    if spread == "all equal":
        logits[:] = -1.5
    indices, weights = jax.jit(route, static_argnums=0)(config, logits, correction)
    assert indices.dtype == jnp.int32 and weights.dtype == jnp.float32
    for row, wanted in enumerate(chosen_by_hand(config, logits, correction)):
        assert indices[row].tolist() == list(wanted)
        np.testing.assert_allclose(weights[row], list(wanted.values()), rtol=1e-5)


def test_the_bias_moves_the_choice_and_not_the_weights() -> None:
    config = MoEConfig(num_experts=3, top_k=1, intermediate_size=4, scoring="sigmoid", normalize=False)
    logits = jnp.array([[2.0, 0.0, -2.0]])
    assert route(config, logits)[0].tolist() == [[0]]
    chosen, weights = route(config, logits, jnp.array([-1.0, 0.0, 0.0]))
    assert chosen.tolist() == [[1]] and weights.tolist() == [[0.5]]


def test_experts_of_other_groups_stay_out_when_every_choice_is_negative() -> None:
    config = MoEConfig(
        num_experts=4, top_k=2, intermediate_size=4, scoring="sigmoid", groups=2, top_groups=1, correction_bias=True
    )
    chosen, _ = route(config, jnp.array([[-9.0, 3.0, 1.0, 1.0]]), jnp.full((4,), -5.0))
    assert chosen.tolist() == [[2, 3]]


def test_bfloat16_logits_are_compared_in_float32() -> None:
    """A bias below bfloat16's resolution decides."""
    config = MoEConfig(num_experts=2, top_k=1, intermediate_size=4, scoring="sigmoid")
    chosen, _ = route(config, jnp.ones((1, 2), jnp.bfloat16), jnp.array([0.0, 1e-4]))
    assert chosen.tolist() == [[1]]


@pytest.mark.parametrize(
    "change",
    [{"top_k": 9}, {"top_k": 0}, {"groups": 3}, {"groups": 4, "top_groups": 5}, {"scoring": "max"}, {"groups": 4}],
    ids=str,
)
def test_impossible_choices_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(Eagle3Error, match=r"cannot be chosen|are scored by"):
        MoEConfig(**{"num_experts": 8, "top_k": 3, "intermediate_size": 4, **change})


def layer(config: MoEConfig, width: int) -> tuple[MoE, Any]:
    """A layer whose biases are not where they start."""
    module, rng = MoE(config, WeightFormats()), np.random.default_rng(0)
    shapes = jax.eval_shape(module.init, jax.random.key(0), jax.ShapeDtypeStruct((1, width), jnp.float32))
    return module, jax.tree.map(
        lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape) * 0.3, jnp.float32), shapes["params"]
    )


@partial(jax.jit, static_argnums=0)
def run(module: MoE, params: Any, x: Any) -> jax.Array:
    return apply(module, params, x)


def layer_by_hand(config: MoEConfig, params: Any, x: np.ndarray) -> np.ndarray:
    """Row by row and expert by expert, in float64."""

    def array(*path: str) -> np.ndarray:
        node = params
        for name in path:
            node = node[name]
        return np.asarray(node.value, np.float64)

    logits = x.astype(np.float64) @ array("router", "weight")
    logits += array("router", "bias") if config.router_bias else 0
    correction = array("router", "correction") if config.correction_bias else None
    out = np.zeros(x.shape)
    for row, experts in enumerate(chosen_by_hand(config, logits, correction)):
        for e, weight in experts.items():
            inner = {}
            for name in ("gate", "up"):
                inner[name] = x[row] @ array("experts", name, "weight")[e]
                inner[name] += array("experts", name, "bias")[e] if config.expert_bias else 0
            gate, up = inner["gate"], inner["up"]
            if config.gate_limit is None:
                middle = gate / (1 + np.exp(-gate)) * up
            else:
                gate, up = np.minimum(gate, config.gate_limit), np.clip(up, -config.gate_limit, config.gate_limit)
                middle = gate / (1 + np.exp(-config.gate_slope * gate)) * (up + 1)
            y = middle @ array("experts", "down", "weight")[e]
            out[row] += weight * (y + (array("experts", "down", "bias")[e] if config.expert_bias else 0))
    return out


LAYERS = {
    "plain": MoEConfig(num_experts=6, top_k=2, intermediate_size=10),
    "gpt-oss": MoEConfig(
        num_experts=6, top_k=2, intermediate_size=10, router_bias=True, expert_bias=True, gate_limit=0.5
    ),
    "grouped": RULES["grouped"],
}


@pytest.mark.parametrize("rows", [1, 7, 150])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_its_experts_sum(name: str, rows: int) -> None:
    config = LAYERS[name]
    module, params = layer(config, 12)
    x = np.random.default_rng(rows).standard_normal((rows, 12)).astype(np.float32)
    got = run(module, params, x[None])
    assert tile_height(2 * 150, 6) > 1 == tile_height(2 * 7, 6)
    np.testing.assert_allclose(got[0], layer_by_hand(config, params, x), atol=2e-5)


def test_all_rows_on_the_same_experts_and_experts_without_rows() -> None:
    config = MoEConfig(num_experts=6, top_k=2, intermediate_size=10)
    module, params = layer(config, 12)
    x = np.tile(np.random.default_rng(0).standard_normal((1, 12)).astype(np.float32), (50, 1))
    got = run(module, params, x)
    np.testing.assert_allclose(got, layer_by_hand(config, params, x), atol=2e-5)


def test_experts_that_nobody_chose_are_not_touched() -> None:
    """Not even times zero: their NaN would show."""
    config = MoEConfig(num_experts=64, top_k=8, intermediate_size=10)
    module, params = layer(config, 12)
    x = np.random.default_rng(0).standard_normal((1, 12)).astype(np.float32)
    expected = run(module, params, x)
    (used,) = chosen_by_hand(config, x @ np.asarray(params["router"]["weight"].value), None)
    unused = jnp.asarray([e not in used for e in range(64)])
    spoilt = jax.tree.map(lambda v: jnp.where(unused[:, None, None], jnp.nan, v), params["experts"])
    got = run(module, {**params, "experts": spoilt}, x)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("rows", [3, 200])
def test_devices_that_hold_some_of_the_experts_add_up(rows: int) -> None:
    """What an expert-parallel mesh does: each part has its own experts, and the others' index is out of range."""
    config = MoEConfig(num_experts=8, top_k=3, intermediate_size=10)
    module, params = layer(config, 12)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((rows, 12)), jnp.float32)
    whole = run(module, params, x)
    chosen, weights = route(config, params["router"]["weight"].matmul(x))
    stacks = params["experts"]
    parts = []
    for first, count in ((0, 5), (5, 3)):
        local = jnp.where((chosen >= first) & (chosen < first + count), chosen - first, count)

        def expert(index: jax.Array, rows: jax.Array, first: int = first) -> jax.Array:
            one = {name: stack["weight"].expert(first + index) for name, stack in stacks.items()}
            return one["down"].matmul(jax.nn.silu(one["gate"].matmul(rows)) * one["up"].matmul(rows))

        parts.append(jax.jit(mix_experts, static_argnums=(3, 4))(x, local, weights, count, expert))
    np.testing.assert_allclose(sum(parts), whole, atol=1e-5)


@pytest.mark.parametrize("assignments", [1, 8, 40, 512, 16384, 65536])
@pytest.mark.parametrize("experts", [8, 32, 64, 128, 256, 384])
def test_padding_is_bounded_whatever_the_routing(assignments: int, experts: int) -> None:
    height = tile_height(assignments, experts)
    # The worst routing leaves one row in the last tile of as many experts as it can.
    used = min(experts, assignments)
    assert used * (height - 1) <= 0.3 * assignments
    assert tile_height(assignments, 1) <= 256


WIDTH, INNER = 64, 96


@pytest.mark.parametrize("experts", [64, 384])
@pytest.mark.parametrize("rows", [1, 5, 64, 2048])
def test_products_are_at_most_1_3_times_the_fewest(rows: int, experts: int) -> None:
    """XLA's own count of the compiled layer. It counts a loop's body once, so the tiles are added by hand."""
    config = MoEConfig(num_experts=experts, top_k=8, intermediate_size=INNER)
    module = Experts(config, WeightFormats())
    shapes = (
        jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32),
        jax.ShapeDtypeStruct((rows, 8), jnp.int32),
        jax.ShapeDtypeStruct((rows, 8), jnp.float32),
    )
    params = jax.eval_shape(module.init, jax.random.key(0), *shapes)
    once = _flops(module.apply, params, *shapes)
    (loop,) = [e for e in jax.make_jaxpr(module.apply)(params, *shapes).eqns if e.primitive.name == "while"]
    body = loop.params["body_jaxpr"]
    tile = _flops(jaxpr_as_fun(body), *[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in body.in_avals])
    height, least = tile_height(rows * 8, experts), rows * 8 * 6 * WIDTH * INNER
    assert tile >= height * 6 * WIDTH * INNER, "the loop's body must hold the products"
    for count in _loads(rows, experts, height):
        tiles = int(np.sum(-(-count // height)))
        assert once + (tiles - 1) * tile <= 1.3 * least


def _loads(rows: int, experts: int, height: int) -> list[np.ndarray]:
    """Rows of each expert: by chance, on as few experts as possible, and the worst for tiles of this height."""
    rng = np.random.default_rng(rows)
    by_chance = np.bincount(np.argsort(rng.random((rows, experts)), axis=1)[:, :8].reshape(-1), minlength=experts)
    few = np.zeros(experts, int)
    few[:8] = rows
    worst = np.full(experts, 1) if rows * 8 >= experts else np.arange(experts) < rows * 8
    worst = worst.astype(int)
    while (left := rows * 8 - worst.sum()) > 0:
        step = min(height, left)
        worst[int(np.argmin(worst))] += step
    return [by_chance, few, worst]


def _flops(function: Any, *arguments: Any) -> float:
    return jax.jit(function).lower(*arguments).compile().cost_analysis()["flops"]
