"""Parameter trees in Orbax checkpoints: saved and restored bit for bit, synchronously."""

from pathlib import Path
from typing import Any

import jax
import numpy as np

from eagle3_jax.checkpoint.files import read_json, write_json_atomic
from eagle3_jax.checkpoint.names import check_finite, named_weights
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.quant.weight import is_weight

META_FILE = "eagle3_jax.json"
"""Marks a folder as written by this library and says what the parameters are."""

_FORMAT = "eagle3_jax.orbax"
_PARAMS = "params"


def is_orbax_folder(folder: Path) -> bool:
    """Whether `write_params` wrote this folder."""
    return (folder / META_FILE).is_file()


def write_params(folder: Path, params: Any, kind: str, dtype: str) -> None:
    """Write a parameter tree into an existing folder.

    Args:
        folder: gets a folder `params` and the file `META_FILE`.
        params: a tree of `Weight`s.
        kind: what they belong to, "target" or "draft". dtype: dtype of the weights.

    Raises:
        Eagle3Error: a weight has a scale (narrow formats), or Orbax cannot write.
    """
    if any(weight.scale is not None for weight in named_weights(params).values()):
        raise Eagle3Error(f"{folder}: weights in a narrow format cannot be saved with Orbax yet; use float weights")
    import orbax.checkpoint as ocp

    try:
        with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
            checkpointer.save(folder.absolute() / _PARAMS, args=ocp.args.StandardSave(_values(params)))  # pyright: ignore[reportCallIssue]
    except Exception as error:
        raise Eagle3Error(f"{folder}: Orbax cannot write the weights: {_first_line(error)}") from error
    write_json_atomic(folder / META_FILE, {"format": _FORMAT, "version": 1, "kind": kind, "dtype": dtype})


def read_meta(folder: Path) -> dict[str, Any]:
    """The checked contents of `META_FILE`: "format", "version", "kind" and "dtype".

    Raises:
        Eagle3Error: malformed, or written by a later version of the library.
    """
    meta = read_json(folder / META_FILE)
    good = set(meta) == {"format", "version", "kind", "dtype"} and meta["format"] == _FORMAT
    if not good or meta["version"] != 1:
        raise Eagle3Error(f"{folder / META_FILE}: not a checkpoint that this version of eagle3_jax can read")
    return meta


def read_params(folder: Path, abstract: Any) -> Any:
    """Restore a parameter tree.

    Args:
        folder: what `write_params` wrote.
        abstract: the tree of `eagle3_jax.checkpoint.names.abstract_params`; values are cast to its dtypes.

    Raises:
        Eagle3Error: the folder is damaged, holds other weights than the model has, or NaN or infinity.
    """
    import orbax.checkpoint as ocp

    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), _values(abstract))
    try:
        with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
            values = checkpointer.restore(
                folder.absolute() / _PARAMS,
                args=ocp.args.StandardRestore(wanted),  # pyright: ignore[reportCallIssue]
            )
    except Exception as error:
        raise Eagle3Error(f"{folder}: Orbax cannot restore the weights: {_first_line(error)}") from error
    params = jax.tree.map(
        lambda leaf, value: leaf.replace(value=value) if is_weight(leaf) else value,
        abstract,
        values,
        is_leaf=is_weight,
    )
    for path, weight in named_weights(params).items():
        check_finite(np.asarray(weight.value), f"{folder}: weight {path}")
    return params


def _values(params: Any) -> Any:
    """The tree with each `Weight` replaced by its array: what lies on disk knows no class of this library."""
    return jax.tree.map(lambda leaf: leaf.value if is_weight(leaf) else leaf, params, is_leaf=is_weight)


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
