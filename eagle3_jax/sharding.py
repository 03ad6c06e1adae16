"""Where arrays lie on a mesh of devices: weights over "model" by their logical axes, batches over "data".

Placement never changes what is computed: XLA splits the work as the arrays lie (GSPMD, arXiv 2105.04663).
"""

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from eagle3_jax.errors import Eagle3Error
from eagle3_jax.quant.weight import Weight, is_weight

DATA, MODEL = "data", "model"
"""Names of the mesh's axes."""
RULES: dict[str, str] = dict.fromkeys(("heads", "kv_heads", "mlp", "vocab", "experts"), MODEL)
"""The mesh axis of a weight's logical axis; those not named lie whole on every device."""


def make_mesh(data: int, model: int) -> Mesh:
    """A mesh of data * model devices, the first of those there are.

    Raises:
        Eagle3Error: a size below 1, or fewer devices.

    Example:
        >>> make_mesh(1, 1).shape
        OrderedDict({'data': 1, 'model': 1})
    """
    devices = jax.devices()
    if min(data, model) < 1 or data * model > len(devices):
        raise Eagle3Error(f"a mesh of {data} x {model} devices: sizes from 1 are needed, and there are {len(devices)}")
    return jax.make_mesh((data, model), (DATA, MODEL), devices=devices[: data * model], axis_types=_automatic(2))


def check_mesh(mesh: Mesh) -> Mesh:
    """The mesh with axes that XLA splits work over by itself, as the package's programs want them.

    Raises:
        Eagle3Error: axes other than "data" and "model".
    """
    if not set(mesh.axis_names) <= {DATA, MODEL}:
        raise Eagle3Error(f"the mesh has axes {', '.join(mesh.axis_names)}; it may have {DATA} and {MODEL}")
    return Mesh(mesh.devices, mesh.axis_names, axis_types=_automatic(len(mesh.axis_names)))


def _automatic(count: int) -> tuple:
    return (jax.sharding.AxisType.Auto,) * count


def weight_shardings(tree: Any, mesh: Mesh) -> Any:
    """The sharding of every array of a tree of weights (params, or an optimiser's moments of them).

    A dimension that its mesh axis does not divide, and whatever is no `Weight`, lies whole on every device. A narrow
    weight's scales lie as its codes do, where there are enough of them.

    Args:
        tree: arrays, abstract or traced ones too. mesh: of `check_mesh`.
    """
    whole = NamedSharding(mesh, PartitionSpec())

    def place(leaf: Any) -> Any:
        if not is_weight(leaf):
            return whole
        places = jax.tree.map(lambda x: whole, leaf)
        places = places.replace(value=NamedSharding(mesh, _spec(leaf, leaf.value.shape, mesh)))
        if leaf.scale is not None:
            places = places.replace(scale=NamedSharding(mesh, _spec(leaf, leaf.scale.shape, mesh)))
        return places

    return jax.tree.map(place, tree, is_leaf=is_weight)


def _spec(weight: Weight, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    axes = list(weight.axes)
    if weight.layout == "nk":
        axes[-2:] = reversed(axes[-2:])
    taken: list[str | None] = []
    for axis, size in zip(axes, shape, strict=True):
        name = RULES.get(axis)
        fits = name in mesh.shape and name not in taken and size % mesh.shape[name] == 0
        taken.append(name if fits else None)
    # Without trailing None, as XLA reports its results: another spelling would be another program.
    while taken and taken[-1] is None:
        taken.pop()
    return PartitionSpec(*taken)


def shard_weights(tree: Any, mesh: Mesh | None) -> Any:
    """Put a tree of weights on the mesh as `weight_shardings` says; without a mesh it stays where it is."""
    return tree if mesh is None else jax.device_put(tree, weight_shardings(tree, mesh))


def keep_sharded(tree: Any, mesh: Mesh | None) -> Any:
    """Inside `jax.jit`: the tree of weights, with results laid out as `weight_shardings` says."""
    return tree if mesh is None else jax.lax.with_sharding_constraint(tree, weight_shardings(tree, mesh))


def shard_batch(tree: Any, mesh: Mesh | None) -> Any:
    """Put arrays [B, ...] on the mesh, rows over "data" where it divides B; without a mesh they stay as they are."""
    if mesh is None:
        return tree
    parts = mesh.shape.get(DATA, 1)

    def place(x: Any) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(DATA) if parts > 1 and x.shape[0] % parts == 0 else PartitionSpec())

    return jax.device_put(tree, jax.tree.map(place, tree))
