"""Where arrays lie on a mesh of devices: weights and caches over "model", rows over "data".

Placement never changes what is computed. Over "model" XLA splits the work as the arrays lie (GSPMD, arXiv
2105.04663). Over "data" each group of devices decodes its own rows, with their cache; groups only go in step.

The mesh is the one that the weights lie on (`mesh_of`), also inside of `jax.jit`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.core
import numpy as np
from jax import Array
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

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


def abstract_mesh(data: int, model: int) -> AbstractMesh:
    """A mesh of data * model devices that need not be there: enough to trace and lower a program for them.

    Example:
        >>> abstract_mesh(2, 4).shape
        OrderedDict({'data': 2, 'model': 4})
    """
    return AbstractMesh((data, model), (DATA, MODEL), axis_types=_automatic(2))


def _automatic(count: int) -> tuple:
    return (AxisType.Auto,) * count


AnyMesh = Mesh | AbstractMesh
"""A mesh, or, inside of `jax.jit`, its shape."""


def mesh_of(tree: Any) -> AnyMesh | None:
    """The mesh that a tree's arrays lie on, inside of `jax.jit` an abstract one; None for a single device."""
    for leaf in jax.tree.leaves(tree):
        kind = jax.typeof(leaf) if isinstance(leaf, jax.core.Tracer) else leaf
        sharding = getattr(kind, "sharding", None)
        if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1:
            return sharding.mesh
    return None


def axis_size(mesh: AnyMesh | None, axis: str) -> int:
    """Parts that XLA may split work into along an axis; 1 where the mesh lacks it, or it is split already."""
    kinds = {} if mesh is None else dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return 1 if mesh is None or kinds.get(axis, AxisType.Manual) == AxisType.Manual else mesh.shape[axis]


def weight_shardings(tree: Any, mesh: AnyMesh) -> Any:
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


def _spec(weight: Weight, shape: tuple[int, ...], mesh: AnyMesh) -> PartitionSpec:
    axes = list(weight.axes)
    if weight.layout == "nk":
        axes[-2:] = reversed(axes[-2:])
    taken: list[str | None] = []
    for axis, size in zip(axes, shape, strict=True):
        name = RULES.get(axis)
        fits = name in mesh.shape and name not in taken and size % mesh.shape[name] == 0
        taken.append(name if fits else None)
    return _partition(*taken)


def _partition(*axes: str | None) -> PartitionSpec:
    """Without trailing None, as XLA reports its results: another spelling would be another program."""
    named = [i for i, axis in enumerate(axes) if axis is not None]
    return PartitionSpec(*axes[: max(named, default=-1) + 1])


def pool_shardings(pools: Any, mesh: AnyMesh, rows: str | None = None) -> Any:
    """The sharding of every cache pool [S, R, D] of a tree: R, the heads for keys and values, over "model".

    What "model" does not divide lies whole on every device; so do latents, which all heads share.

    Args:
        pools: arrays, abstract or traced ones too. mesh: of `check_mesh`.
        rows: mesh axis of the slots, see `row_axis`.
    """
    parts = axis_size(mesh, MODEL)

    def place(pool: Any) -> NamedSharding:
        split = parts > 1 and pool.shape[1] % parts == 0
        return NamedSharding(mesh, _partition(rows, MODEL if split else None))

    return jax.tree.map(place, pools)


def keep_heads(x: Array) -> Array:
    """Inside of `jax.jit`: x [B, T, N, D], with its heads over "model", or whole where that does not divide them.

    A projection is split evenly, by its columns. Where parts of a head would lie apart, XLA would exchange them in
    every step from here on.
    """
    mesh = mesh_of(x)
    parts, free = axis_size(mesh, MODEL), PartitionSpec.UNCONSTRAINED
    if mesh is None or parts == 1:
        return x
    heads = MODEL if x.shape[2] % parts == 0 else None
    return keep(x, NamedSharding(mesh, PartitionSpec(free, free, heads, None)))


def row_shardings(tree: Any, mesh: AnyMesh, rows: str | None) -> Any:
    """The sharding of every array [B, ...] of a tree, with its rows over a mesh axis, see `row_axis`."""
    return jax.tree.map(lambda _: NamedSharding(mesh, _partition(rows)), tree)


def row_axis(batch: int, mesh: AnyMesh | None) -> str | None:
    """The mesh axis that rows [B, ...] are split over: "data" where it divides B, else None."""
    parts = axis_size(mesh, DATA)
    return DATA if parts > 1 and batch % parts == 0 else None


def over_rows(function: Callable[..., Any], shared: Any, *rows: Any) -> Any:
    """Call function(shared, *rows), on a mesh once for each group of devices along "data", with its share of the rows.

    Where "data" does not divide B, every group computes all rows.

    Args:
        function: has its loops and branches decided by `in_step`. Its result is a tree of arrays [B, ...] too.
        shared: a tree of arrays that all groups have whole (weights: but for "model"). rows: trees of arrays [B, ...].
    """
    mesh = mesh_of(shared)
    if mesh is None or row_axis(jax.tree.leaves(rows)[0].shape[0], mesh) is None:
        return function(shared, *rows)
    specs = (PartitionSpec(), *(PartitionSpec(DATA) for _ in rows))
    return by_device(function, mesh, DATA, specs, PartitionSpec(DATA))(shared, *rows)


def in_step(value: Array) -> Array:
    """Inside of `over_rows` the largest of the groups' values (true where it is for any), else the value itself.

    Bounds of loops and conditions of branches that come from the rows must pass through here: XLA may put exchanges
    in there in which all groups have to take part.
    """
    if DATA not in jax.sharding.get_abstract_mesh().manual_axes:
        return value
    return jax.lax.pmax(value.astype(np.int32), DATA).astype(value.dtype)


def each_row_on_cpu(function: Callable[[Any], Any], rows: Any) -> Any:
    """function(rows), of and to trees of arrays [B, ...] whose rows do not meet; on CPU one row after the other.

    What a row works on stays in the processor's caches there, and what only some rows ask for is done for those.
    """
    if jax.tree.leaves(rows)[0].shape[0] == 1:
        return function(rows)

    def one(row: Any) -> Any:
        return jax.tree.map(lambda x: x[0], function(jax.tree.map(lambda x: x[None], row)))

    return jax.lax.platform_dependent(rows, cpu=lambda rows: jax.lax.map(one, rows), default=function)


def by_device(function: Callable[..., Any], mesh: AnyMesh, axis: str, inputs: Any, outputs: Any) -> Callable[..., Any]:
    """The function as each group of devices along one axis of the mesh runs it, on its own parts of the arrays.

    Args:
        function: takes and gives trees of arrays; `jax.lax` knows the axis by its name in it.
        mesh: whose other axes stay XLA's to split. inputs, outputs: partitions along the axis, as in `jax.shard_map`.
    """
    # Without jit, JAX cannot leave the other axes to XLA.
    return jax.jit(
        jax.shard_map(
            function, mesh=mesh, in_specs=inputs, out_specs=outputs, axis_names=frozenset({axis}), check_vma=False
        )
    )


def keep(tree: Any, shardings: Any) -> Any:
    """Inside `jax.jit`: the tree of arrays, laid out as a tree of shardings says."""
    return jax.lax.with_sharding_constraint(tree, shardings)


def keep_whole(tree: Any, mesh: AnyMesh | None) -> Any:
    """Inside `jax.jit`: the tree of arrays, whole on every device of the mesh."""
    return tree if mesh is None else keep(tree, NamedSharding(mesh, PartitionSpec()))


def on_host(tree: Any) -> Any:
    """NumPy copies of a tree of arrays, also of those that lie on devices of other hosts in part.

    With several hosts all of them must call this.
    """

    def copy(x: Any) -> np.ndarray:
        place = getattr(x, "sharding", None)
        if isinstance(place, NamedSharding) and not (x.is_fully_addressable or x.is_fully_replicated):
            x = jax.jit(lambda x: x, out_shardings=NamedSharding(place.mesh, PartitionSpec()))(x)
        return np.asarray(x)

    return jax.tree.map(copy, tree)


def shard_weights(tree: Any, mesh: AnyMesh | None) -> Any:
    """Put a tree of weights on the mesh as `weight_shardings` says; without a mesh arrays stay where they are.

    NumPy arrays may lie on a mesh of several hosts, each of which has them whole and keeps its part.
    """
    if mesh is None:
        return jax.tree.map(lambda x: x if isinstance(x, jax.Array) else jax.device_put(x), tree)

    def put(x: Any, place: NamedSharding) -> jax.Array:
        if isinstance(x, jax.Array):
            return jax.device_put(x, place)
        return jax.make_array_from_callback(x.shape, place, lambda index: x[index])

    return jax.tree.map(put, tree, weight_shardings(tree, mesh))


def keep_sharded(tree: Any, mesh: Mesh | None) -> Any:
    """Inside `jax.jit`: the tree of weights, with results laid out as `weight_shardings` says."""
    return tree if mesh is None else keep(tree, weight_shardings(tree, mesh))


def shard_batch(tree: Any, mesh: Mesh | None) -> Any:
    """Put arrays [B, ...] on the mesh, rows over "data" where it divides B; without a mesh they stay as they are."""
    if mesh is None:
        return tree
    return jax.device_put(tree, jax.tree.map(lambda x: row_shardings(x, mesh, row_axis(x.shape[0], mesh)), tree))
