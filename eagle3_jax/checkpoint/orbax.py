"""Parameter trees in Orbax checkpoints: saved and restored bit for bit, synchronously."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from eagle3_jax.checkpoint.files import read_json, write_json_atomic
from eagle3_jax.checkpoint.names import check_finite
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.quant.activations import MODES
from eagle3_jax.quant.formats import NARROW_FORMATS
from eagle3_jax.quant.weight import is_weight, named_weights
from eagle3_jax.sharding import weight_shardings

META_FILE = "eagle3_jax.json"
"""Marks a folder as written by this library and says what the parameters are."""

_FORMAT, _VERSION = "eagle3_jax.orbax", 3
_PARAMS = "params"


def is_orbax_folder(folder: Path) -> bool:
    """Whether `write_params` wrote this folder."""
    return (folder / META_FILE).is_file()


def write_params(folder: Path, params: Any, kind: str, dtype: str, layout: str) -> None:
    """Write a parameter tree into an existing folder, narrow weights as they are.

    Args:
        folder: gets a folder `params` and the file `META_FILE`.
        params: a tree of `Weight`s.
        kind: what they belong to, "target" or "draft".
        dtype, layout: of the float matrices, see `eagle3_jax.checkpoint.names.weight_formats`.

    Raises:
        Eagle3Error: Orbax cannot write.
    """
    import orbax.checkpoint as ocp

    try:
        with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
            checkpointer.save(folder.absolute() / _PARAMS, args=ocp.args.StandardSave(_values(params)))  # pyright: ignore[reportCallIssue]
    except Exception as error:
        raise Eagle3Error(f"{folder}: Orbax cannot write the weights: {_first_line(error)}") from error
    weights = named_weights(params)
    meta = {
        "format": _FORMAT,
        "version": _VERSION,
        "kind": kind,
        "dtype": dtype,
        "layout": layout,
        "narrow": {path: weight.format for path, weight in weights.items() if weight.scale is not None},
        "activations": {path: w.activations for path, w in weights.items() if w.activations != "wide"},
    }
    write_json_atomic(folder / META_FILE, meta)


def read_meta(folder: Path) -> dict[str, Any]:
    """The checked contents of `META_FILE`.

    "format", "version", "kind", "dtype", "layout"; "narrow": format of each narrow weight by its path;
    "activations": their mode of each weight whose activations are rounded.

    Raises:
        Eagle3Error: malformed, or written by another version of the library.
    """
    meta = read_json(folder / META_FILE)
    fields = {"format", "version", "kind", "dtype", "layout", "narrow", "activations"}
    good = set(meta) == fields and (meta["format"], meta["version"]) == (_FORMAT, _VERSION)
    good = good and meta["layout"] in ("kn", "nk")
    for name, known in (("narrow", NARROW_FORMATS), ("activations", MODES)):
        good = good and isinstance(meta[name], dict) and all(str(value) in known for value in meta[name].values())
    if not good:
        raise Eagle3Error(f"{folder / META_FILE}: not a checkpoint that this version of eagle3_jax can read")
    return meta


def read_params(folder: Path, abstract: Any, mesh: Mesh | None = None) -> Any:
    """Restore a parameter tree.

    Args:
        folder: what `write_params` wrote.
        abstract: the tree of `eagle3_jax.checkpoint.names.abstract_params` of a model that knows which weights are
            narrow; float values are cast to its dtypes.
        mesh: where the weights go; None is JAX's default device.

    Raises:
        Eagle3Error: the folder is damaged, holds other weights than the model has, or NaN or infinity.
    """
    import orbax.checkpoint as ocp

    default = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    places = jax.tree.map(lambda _: default, abstract) if mesh is None else weight_shardings(abstract, mesh)
    wanted = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), _values(abstract), _values(places)
    )
    try:
        with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
            values = checkpointer.restore(
                folder.absolute() / _PARAMS,
                args=ocp.args.StandardRestore(wanted),  # pyright: ignore[reportCallIssue]
            )
    except Exception as error:
        raise Eagle3Error(f"{folder}: Orbax cannot restore the weights: {_first_line(error)}") from error
    params = jax.tree.map(_weight, abstract, values, is_leaf=is_weight)
    for path, weight in named_weights(params).items():
        checked, what = (weight.value, "") if weight.scale is None else (weight.scale, "the scales of ")
        for shard in checked.addressable_shards:
            if shard.replica_id == 0:
                check_finite(np.asarray(shard.data, np.float32), f"{folder}: {what}weight {path}")
    return params


def _values(params: Any) -> Any:
    """The tree with each `Weight` replaced by its arrays: what lies on disk knows no class of this library."""

    def values(leaf: Any) -> Any:
        if not is_weight(leaf):
            return leaf
        extra = {"scale": leaf.scale, "input_scale": leaf.input_scale}
        extra = {name: array for name, array in extra.items() if array is not None}
        return {"value": leaf.value, **extra} if extra else leaf.value

    return jax.tree.map(values, params, is_leaf=is_weight)


def _weight(leaf: Any, values: Any) -> Any:
    """The leaf of an abstract tree with the arrays that `_values` made of it."""
    if not is_weight(leaf):
        return values
    return leaf.replace(**values) if isinstance(values, dict) else leaf.replace(value=values)


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
