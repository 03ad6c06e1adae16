"""Mixture of experts: routing, and the products of many small groups of rows.

A token's experts are chosen in float32 and exactly: the largest scores win, of equal ones the lowest index.

The products go tile by tile: rows are sorted by expert, cut into tiles of one height and one expert each, and every
tile multiplies by its own expert's matrices. Experts that nobody chose are never read, and the padding of the last
tile of each expert is the only waste, which `tile_height` bounds. `jax.lax.ragged_dot` would do for the same
products, but multiplies all rows by all experts on CPU and on gfx950.

Dimension letters: M rows, E experts, k experts of a row, H width, I width of an expert.
"""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from eagle3_jax.config import MoEConfig
from eagle3_jax.quant.weight import Weight, WeightFormats
from eagle3_jax.sharding import MODEL, axis_size, by_device, mesh_of


def route(config: MoEConfig, logits: Array, correction: Array | None = None) -> tuple[Array, Array]:
    """Choose each row's experts (DeepSeek-V3, arXiv 2412.19437, section 2.1.2, and the simpler rules before it).

    Args:
        config: the rule.
        logits: float32 [M, E], of the router.
        correction: float32 [E], added to the scores for the choice only; None is zero.

    Returns:
        Expert indices int32 [M, k], best first, and their weights float32 [M, k].

    Example:
        >>> route(MoEConfig(num_experts=3, top_k=1, intermediate_size=8), jnp.array([[0.0, 2.0, 2.0]]))[0]
        Array([[1]], dtype=int32)
    """
    logits = logits.astype(jnp.float32)
    scores = jax.nn.sigmoid(logits) if config.scoring == "sigmoid" else jax.nn.softmax(logits, axis=-1)
    choice = scores if correction is None else scores + correction.astype(jnp.float32)
    if config.groups > 1:
        choice = _within_best_groups(config, choice)
    _, chosen = lax.top_k(choice, config.top_k)
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if config.normalize:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return chosen, weights * config.scaling


def _within_best_groups(config: MoEConfig, choice: Array) -> Array:
    """The choice scores [M, E] with -inf outside of each row's best groups; a group's worth is its best two."""
    grouped = choice.reshape(-1, config.groups, config.num_experts // config.groups)
    worth = jnp.sum(lax.top_k(grouped, min(2, grouped.shape[-1]))[0], axis=-1)
    _, best = lax.top_k(worth, config.top_groups)
    kept = jnp.any(best[:, :, None] == jnp.arange(config.groups), axis=1)
    return jnp.where(kept[:, :, None], grouped, -jnp.inf).reshape(choice.shape)


def tile_height(assignments: int, num_experts: int) -> int:
    """Rows of a tile: the largest power of two for which padding adds at most 30% to any routing's products.

    An expert's last tile is padded by at most height - 1 rows, so E (height - 1) <= 0.3 M k. Taller tiles read an
    expert's weights less often.
    """
    slack = 1 + 3 * assignments // (10 * num_experts)
    return min(1 << (slack.bit_length() - 1), 256)


def mix_experts(
    x: Array,
    chosen: Array,
    weights: Array,
    num_experts: int,
    expert: Callable[[Array, Array], Array],
    devices: int = 1,
) -> Array:
    """The weighted sum of each row's experts.

    Args:
        x: [M, H].
        chosen: int32 [M, k], the experts of each row, all different; `num_experts` means none, or one that
            another device holds.
        weights: float32 [M, k].
        num_experts: E.
        expert: what one expert computes: (its index int32 [], rows [h, H]) -> [h, H].
        devices: how many share the assignments, each with E experts; the height of tiles goes by all of them.

    Returns:
        float32 [M, H]. A row adds its experts in ascending order, whatever other rows are there.
    """
    rows, per_row = chosen.shape
    height = tile_height(rows * per_row, num_experts * devices)
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    count = jnp.zeros((num_experts,), jnp.int32).at[flat].add(1, mode="drop")
    first = jnp.cumsum(count, dtype=jnp.int32) - count
    tiles = (count + height - 1) // height
    end = jnp.cumsum(tiles, dtype=jnp.int32)

    def add_tile(tile: Array, total: Array) -> Array:
        index = jnp.sum(end <= tile, dtype=jnp.int32)
        offset = (tile - end[index] + tiles[index]) * height + jnp.arange(height, dtype=jnp.int32)
        real = offset < count[index]
        assignment = order[jnp.minimum(first[index] + offset, flat.shape[0] - 1)]
        row = assignment // per_row
        y = expert(index, x[row]).astype(jnp.float32) * weights.reshape(-1)[assignment][:, None]
        return total.at[jnp.where(real, row, rows)].add(y, mode="drop")

    return lax.fori_loop(0, end[-1], add_tile, jnp.zeros(x.shape, jnp.float32))


class Router(nn.Module):
    """The choice of experts; its logits are float32 whatever the model computes in."""

    config: MoEConfig
    formats: WeightFormats

    @nn.compact
    def __call__(self, x: Array) -> tuple[Array, Array]:
        """[M, H] -> what `route` gives."""
        c, path = self.config, "/".join(self.path)

        def vector(name: str) -> Array:
            spec = self.formats.spec(f"{path}/{name}", (c.num_experts,), ("router",), fill=0.0)
            return self.param(name, spec.init).value.astype(jnp.float32)

        spec = self.formats.spec(f"{path}/weight", (x.shape[-1], c.num_experts), ("embed", "router"))
        logits = self.param("weight", spec.init).matmul(x.astype(jnp.float32))
        if c.router_bias:
            logits = logits + vector("bias")
        return route(c, logits, vector("correction") if c.correction_bias else None)


class ExpertStack(nn.Module):
    """One of the experts' matrices, of all experts: a `Weight` (E, K, N), and a bias (E, N) or None."""

    num_experts: int
    shape: tuple[int, int]
    axes: tuple[str, str]
    formats: WeightFormats
    use_bias: bool

    @nn.compact
    def __call__(self) -> tuple[Weight, Weight | None]:
        """The weight and the bias."""
        path, (width, features) = "/".join(self.path), self.shape
        spec = self.formats.spec(f"{path}/weight", (self.num_experts, width, features), ("experts", *self.axes))
        weight = self.param("weight", spec.init)
        if not self.use_bias:
            return weight, None
        axes = ("experts", self.axes[1])
        spec = self.formats.spec(f"{path}/bias", (self.num_experts, features), axes, fill=0.0)
        return weight, self.param("bias", spec.init)


class Experts(nn.Module):
    """Feed-forward experts, each down(silu(gate(x)) * up(x)) or gpt-oss' clamped form of it.

    On a mesh whose "model" axis divides the experts, each device multiplies by those it has, and the sums meet once:
    XLA left to itself would gather the stacks.
    """

    config: MoEConfig
    formats: WeightFormats

    @nn.compact
    def __call__(self, x: Array, chosen: Array, weights: Array) -> Array:
        """Rows [M, H], their experts and weights [M, k] -> float32 [M, H]."""
        c, hidden, inner = self.config, x.shape[-1], self.config.intermediate_size

        def stack(name: str, shape: tuple[int, int], axes: tuple[str, str]) -> tuple[Weight, Weight | None]:
            return ExpertStack(c.num_experts, shape, axes, self.formats, c.expert_bias, name=name)()

        stacks: Stacks = {name: stack(name, (hidden, inner), ("embed", "mlp")) for name in ("gate", "up")}
        stacks["down"] = stack("down", (inner, hidden), ("mlp", "embed"))

        mesh = mesh_of(stacks)
        parts = axis_size(mesh, MODEL)
        if mesh is None or parts == 1 or c.num_experts % parts:
            return _mixed(c, stacks, x, chosen, weights)

        def own(stacks: Stacks, x: Array, chosen: Array, weights: Array) -> Array:
            held = c.num_experts // parts
            index = chosen - lax.axis_index(MODEL) * held
            index = jnp.where((index >= 0) & (index < held), index, held)
            return lax.psum(_mixed(c, stacks, x, index, weights, parts), MODEL)

        whole = PartitionSpec()
        inputs = (PartitionSpec(MODEL), whole, whole, whole)
        return by_device(own, mesh, MODEL, inputs, whole)(stacks, x, chosen, weights)


Stacks = dict[str, tuple[Weight, Weight | None]]
"""Weights and biases of the experts' matrices "gate", "up" and "down"."""


def _mixed(config: MoEConfig, stacks: Stacks, x: Array, chosen: Array, weights: Array, devices: int = 1) -> Array:
    """`mix_experts` of the experts in the stacks, which may be one device's."""

    def expert(index: Array, rows: Array) -> Array:
        def linear(name: str, rows: Array) -> Array:
            weight, bias = stacks[name]
            y = weight.expert(index).matmul(rows)
            return y if bias is None else y + bias.value[index].astype(y.dtype)

        return linear("down", gated(config, linear("gate", rows), linear("up", rows)))

    return mix_experts(x, chosen, weights, config.num_experts // devices, expert, devices)


def gated(config: MoEConfig, gate: Array, up: Array) -> Array:
    """An expert's inner activation of two [M, I]: SwiGLU (arXiv 2002.05202), or gpt-oss' clamped form."""
    if config.gate_limit is None:
        return nn.silu(gate) * up
    gate = jnp.minimum(gate, config.gate_limit)
    up = jnp.clip(up, -config.gate_limit, config.gate_limit)
    return gate * nn.sigmoid(config.gate_slope * gate) * (up + 1)


class MoE(nn.Module):
    """A feed-forward layer of routed experts."""

    config: MoEConfig
    formats: WeightFormats

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """[..., H] -> [..., H], in x's dtype."""
        rows = x.reshape(-1, x.shape[-1])
        chosen, weights = Router(self.config, self.formats, name="router")(rows)
        y = Experts(self.config, self.formats, name="experts")(rows, chosen, weights)
        return y.astype(x.dtype).reshape(x.shape)
