"""Which hidden states of the target feed an EAGLE-3 draft: the layer ids of its config.json, resolved.

hs[k] is the target's residual stream after k layers. An id means hs[id] to vLLM and speculators ("hs"), and
the output of layer id, hs[id + 1], to SGLang, SpecForge and TensorRT-LLM ("output"). No file says which.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from eagle3_jax.checkpoint.files import quote
from eagle3_jax.errors import Eagle3Error

IDS_FIELD = "eagle_aux_hidden_state_layer_ids"


@dataclasses.dataclass(frozen=True)
class Taps:
    """Resolved taps.

    Attributes:
        indices: hidden states hs[k], low to high.
        convention: "hs" or "output", how the ids were read; "default" where the config has none; "given"
            where the caller gave the indices; "last" where the draft reads the last hidden state only.
        reason: why, in words.
        ambiguous: whether the file itself did not decide it: a probe can, see `eagle3_jax.training.probe`.
    """

    indices: tuple[int, ...]
    convention: str
    reason: str
    ambiguous: bool = False

    @property
    def warning(self) -> str | None:
        """What a user should know, if anything."""
        if self.ambiguous:
            return f"{self.reason}; if acceptance is poor, compare with overrides={{'tap_convention': 'output'}}"
        if self.convention == "default":
            return (
                f"{self.reason}; a draft trained on others accepts next to nothing, see `eagle3-jax evaluate --probe`"
            )
        return None


def resolve_taps(
    config: Mapping[str, Any],
    num_layers: int | None,
    where: str,
    convention: str | None = None,
    given: Sequence[int] | None = None,
    speculators: bool = False,
) -> Taps:
    """Find the taps of a draft.

    Args:
        config: its config.json. where: the file's name for messages.
        num_layers: N, layers of the target; None where it is not known, and only ids can say.
        convention: "hs" or "output" overrules how ids in the file are read.
        given: hs indices to use whatever the file says.
        speculators: whether the file is in speculators' format, whose ids are hs indices.

    Raises:
        Eagle3Error: ids that are malformed, contradict each other or lie outside of the target.
    """
    taps = _resolve(config, num_layers, where, convention, given, speculators)
    k = taps.indices
    if num_layers is not None and any(not 0 <= index <= num_layers for index in k):
        raise Eagle3Error(
            f"{where}: taps {list(k)} ({taps.reason}) are not all in the target's hs[0] .. hs[{num_layers}]; "
            'this is the draft of another target, or set overrides={"taps": ...}'
        )
    if any(a >= b for a, b in itertools.pairwise(k)):
        raise Eagle3Error(
            f"{where}: taps {list(k)} ({taps.reason}) coincide or descend; "
            'set overrides={"taps": ...} to indices that rise'
        )
    return taps


def _resolve(
    config: Mapping[str, Any],
    layers: int | None,
    where: str,
    convention: str | None,
    given: Sequence[int] | None,
    speculators: bool,
) -> Taps:
    if given is not None:
        if convention is not None:
            raise Eagle3Error("overrides taps and tap_convention exclude each other: taps are hs indices already")
        return Taps(tuple(given), "given", "given by the caller as hs indices")
    top, nested = (
        _read_ids(config, where),
        _read_ids(eagle_config(config, where), f"{where}: eagle_config"),
    )
    ids = top or nested
    if ids is None:
        if convention is not None:
            raise Eagle3Error(f"{where}: has no {IDS_FIELD} for tap_convention to apply to; set taps instead")
        if layers is None:
            raise Eagle3Error(
                f"{where}: no {IDS_FIELD}, so the taps are (2, N//2, N-3) of a target of N layers; name the target"
            )
        return Taps(default_taps(layers), "default", "no ids in the config: (2, N//2, N-3), as every reader has it")
    output = tuple(i + 1 for i in ids)
    if top and nested and top != nested:
        if top == tuple(i + 1 for i in nested):
            return Taps(top, "hs", "ids at the top level (hs) and in eagle_config (output) agree")
        raise Eagle3Error(
            f"{where}: {IDS_FIELD} is {list(top)} at the top level, but {list(nested)} in eagle_config; "
            "equal ids, or hs indices at the top and layer ids one lower inside, are needed"
        )
    if convention is not None:
        return Taps(output if convention == "output" else ids, convention, "tap_convention given by the caller")
    if ids[0] == 1:
        return Taps(output, "output", f"ids {list(ids)} start at 1, as SGLang and SpecForge write them")
    if layers is not None and ids == default_taps(layers):
        return Taps(ids, "hs", f"ids {list(ids)} are the default hs indices")
    if max(ids) == layers:
        return Taps(ids, "hs", f"ids {list(ids)} include N = {layers}, which no layer's id is")
    if speculators:
        return Taps(ids, "hs", f"ids {list(ids)} in speculators' format are hs indices")
    return Taps(ids, "hs", f"ids {list(ids)} fit both readings; taken as vLLM does", ambiguous=True)


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """The taps of a draft whose config names none, for a target of N layers."""
    return 2, num_layers // 2, num_layers - 3


def eagle_config(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The nested settings of SGLang, SpecForge, ModelOpt and TensorRT-LLM; empty where there are none.

    Raises:
        Eagle3Error: not an object.
    """
    nested = config.get("eagle_config")
    if nested is not None and not isinstance(nested, Mapping):
        raise Eagle3Error(f"{where}: eagle_config is {quote(nested)}; an object {{...}} is needed")
    return nested or {}


def _read_ids(config: Mapping[str, Any], where: str) -> tuple[int, ...] | None:
    """The ids, low to high (every engine captures in that order), or None where there are none."""
    ids = config.get(IDS_FIELD)
    if ids is None or ids == []:
        return None
    if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
        raise Eagle3Error(f"{where}: {IDS_FIELD} is {quote(ids)}; a list of layer ids is needed")
    return tuple(sorted(ids))


def tap_fields(taps: Sequence[int]) -> dict[str, Any]:
    """Config fields from which every reader finds these taps.

    vLLM reads hs indices at the top level, SGLang, SpecForge and TensorRT-LLM layer ids in `eagle_config`.
    """
    fields: dict[str, Any] = {IDS_FIELD: list(taps), "eagle_config": {"use_aux_hidden_state": True}}
    if taps[0] > 0:  # hs[0] is no layer's output
        fields["eagle_config"][IDS_FIELD] = [k - 1 for k in taps]
    return fields
