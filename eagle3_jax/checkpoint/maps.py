"""The map from a draft's reduced vocabulary to the target's: d2t, checked in every way a file allows."""

import numpy as np

from eagle3_jax.checkpoint.tensors import TensorSource
from eagle3_jax.errors import Eagle3Error

_OFFSETS = "d2t holds offsets: target id = draft id + d2t"


def read_target_ids(source: TensorSource, size: int, vocab_size: int) -> np.ndarray | None:
    """The target's id of each draft id, from the offsets in d2t.

    Args:
        source: the draft. size: Vd, rows of its head. vocab_size: V, the target's.

    Returns:
        int32 [Vd]; None without a d2t.

    Raises:
        Eagle3Error: d2t is missing although the vocabulary is reduced; is no increasing map into the target's
            vocabulary; was never filled in or holds ids, not offsets; or t2d is not its other side.
    """
    ids = offsets = None
    if "d2t" in source:
        offsets = _integers(source, "d2t", size)
        ids = np.arange(size, dtype=np.int64) + np.clip(offsets, -(2**40), 2**40)
        if ids.min() < 0 or ids.max() >= vocab_size:
            bad = int(np.flatnonzero((ids < 0) | (ids >= vocab_size))[0])
            raise Eagle3Error(
                f"{source.path}: d2t maps draft id {bad} to {ids[bad]}, outside of the target's {vocab_size} "
                f"ids; {_OFFSETS}"
            )
        if size > 1 and np.diff(ids).min() <= 0:
            bad = int(np.flatnonzero(np.diff(ids) <= 0)[0])
            raise Eagle3Error(
                f"{source.path}: d2t maps draft ids {bad} and {bad + 1} to {ids[bad]} and {ids[bad + 1]}; "
                f"the map must increase ({_OFFSETS})"
            )
    elif size < vocab_size:
        raise Eagle3Error(
            f"{source.path}: d2t is missing; a draft of {size} of the target's {vocab_size} ids needs the map"
        )
    if "t2d" in source:
        used = _integers(source, "t2d", vocab_size)
        mapped = np.flatnonzero(used)
        if not np.array_equal(mapped, np.arange(size) if ids is None else ids):
            raise Eagle3Error(
                f"{source.path}: the {len(mapped)} ids that t2d marks are not the {size} that d2t maps to; "
                "one of the two is damaged"
            )
    elif offsets is not None and size < vocab_size:
        _check_alone(offsets, f"{source.path}: d2t")
    return None if ids is None else ids.astype(np.int32)


def _check_alone(offsets: np.ndarray, what: str) -> None:
    """Refuse maps that are well-formed, but that no builder of vocabularies writes; for files without a t2d."""
    if not offsets.any():
        raise Eagle3Error(f"{what} is all zeros, as if it had never been filled in; a t2d that confirms it is needed")
    if len(offsets) > 1 and np.diff(offsets).min() > 0:
        # Offsets repeat wherever two neighbours of the target's vocabulary are both kept.
        raise Eagle3Error(f"{what} rises from each id to the next, as if it held target ids; {_OFFSETS}")


def _integers(source: TensorSource, name: str, length: int) -> np.ndarray:
    """A whole-number tensor as int64 [length]."""
    if source.shape(name) != (length,):
        raise Eagle3Error(f"{source.path}: {name} has shape {source.shape(name)}; ({length},) is needed")
    if source.dtype(name).kind not in "iub":
        raise Eagle3Error(f"{source.path}: {name} is stored as {source.format(name)}; whole numbers are needed")
    return source.read(name).astype(np.int64)
