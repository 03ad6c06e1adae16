"""What a checkpoint is, from its headers and config files: weights stay on disk."""

import dataclasses
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eagle3_jax.checkpoint.convert import guess_target
from eagle3_jax.checkpoint.dialects import find_layers, flatten, is_speculators
from eagle3_jax.checkpoint.draft_config import Overrides, TargetFacts, dialect_of, parse_draft
from eagle3_jax.checkpoint.draft_kind import check_kind
from eagle3_jax.checkpoint.drafts import open_draft_folder
from eagle3_jax.checkpoint.families import FAMILIES, family_of
from eagle3_jax.checkpoint.files import refusing_io
from eagle3_jax.checkpoint.folders import is_draft, read_config
from eagle3_jax.checkpoint.gguf import GGUFSource
from eagle3_jax.checkpoint.maps import read_target_ids
from eagle3_jax.checkpoint.names import abstract_params
from eagle3_jax.checkpoint.orbax import is_orbax_folder, read_meta
from eagle3_jax.checkpoint.public import locate_draft, public_drafts
from eagle3_jax.checkpoint.quant_config import parse_quant_config
from eagle3_jax.checkpoint.registry import entries, locate
from eagle3_jax.checkpoint.taps import IDS_FIELD, eagle_config
from eagle3_jax.checkpoint.target_files import read_target_config
from eagle3_jax.checkpoint.tensors import TensorSource, open_checkpoint_folder
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.quant.weight import named_weights

log = logging.getLogger("eagle3_jax")


@dataclasses.dataclass
class Description:
    """What a checkpoint is.

    Attributes:
        kind: "draft" or "target". architecture: as its config names it.
        dialect: of a draft, one of `eagle3_jax.checkpoint.dialects.DIALECTS`; of a target, the container:
            "huggingface", "gguf" or "orbax".
        taps: hs indices a draft reads; None for a target, and where only the target could tell.
        tap_convention, tap_reason: how they were found.
        config: the settings it loads with, if it loads.
        tensors: {name in the file: {"shape", "format"}}.
        warnings: what looks odd. refusal: why it does not load, if it does not.
    """

    kind: str
    architecture: str | None
    dialect: str | None
    taps: list[int] | None = None
    tap_convention: str | None = None
    tap_reason: str | None = None
    config: dict[str, Any] | None = None
    tensors: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    warnings: list[str] = dataclasses.field(default_factory=list)
    refusal: str | None = None


def describe(
    path: str | os.PathLike[str],
    target: str | os.PathLike[str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Description:
    """Find out what a checkpoint is without reading its weights.

    Args:
        path: a known name, a folder, or a GGUF file.
        target: of a draft: its target, as `load_target` takes it; a registered draft's is known.
        overrides: of a draft, as in `load_draft`.

    Raises:
        Eagle3Error: no such checkpoint, or files that are damaged. What is whole and yet does not load is
            described all the same, see `Description.refusal`.

    Example:
        >>> describe("smollm2-135m-eagle3").taps  # doctest: +SKIP
        [2, 15, 27]
    """
    known = entries()
    entry = known.get(os.fspath(path)) if isinstance(path, str | os.PathLike) else None
    kind = "draft" if entry is not None and entry.kind == "draft" else "target"
    _, place = locate_draft(path) if kind == "draft" or path in public_drafts() else locate(path, kind)
    if target is None and entry is not None:
        target = entry.target
    with refusing_io(place), _warnings() as heard:
        if not place.is_dir():
            found = _describe_gguf(place)
        elif is_orbax_folder(place):
            found = _describe_orbax(place)
        else:
            found = _describe_folder(place, target, Overrides.read(overrides))
    found.warnings += [message for message in heard if message not in found.warnings]
    return found


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """The messages that the library warns with meanwhile."""
    heard: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    listener = Listener(logging.WARNING)
    # The caller gets them all in one place.
    propagate, log.propagate = log.propagate, False
    log.addHandler(listener)
    try:
        yield heard
    finally:
        log.removeHandler(listener)
        log.propagate = propagate


def _table(source: TensorSource) -> dict[str, dict[str, Any]]:
    return {name: {"shape": list(source.shape(name)), "format": source.format(name)} for name in source}


def _plain(config: Any) -> dict[str, Any]:
    """A frozen config for JSON, without the layout of its weights."""
    fields = dataclasses.asdict(config)
    fields.pop("weights", None)
    return fields


def _architecture(config: Mapping[str, Any]) -> str | None:
    return (config.get("architectures") or [None])[0]


def _describe_target(found: Description, config: Mapping[str, Any], where: str) -> Any:
    try:
        parsed = family_of(config, where).parse(config, where)
        parse_quant_config(config, where)
    except Eagle3Error as error:
        found.refusal = str(error)
        return None
    found.architecture = FAMILIES[parsed.family].architecture
    found.config = _plain(parsed)
    return parsed


def _describe_gguf(file: Path) -> Description:
    source = GGUFSource(file)
    found = Description("target", None, "gguf", tensors=_table(source))
    config = source.config()
    config.pop("rope_freq_factors", None)
    _describe_target(found, config, str(file))
    return found


def _describe_orbax(folder: Path) -> Description:
    meta, config = read_meta(folder), read_config(folder)
    found = Description(str(meta["kind"]), _architecture(config), "orbax")
    if (parsed := _describe_target(found, config, str(folder / "config.json"))) is not None:
        weights = named_weights(abstract_params(FAMILIES[parsed.family].model(parsed)))
        # Orbax has them as the library holds them: [in, out].
        found.tensors = {name: {"shape": list(w.shape), "format": str(meta["dtype"])} for name, w in weights.items()}
    return found


def _names_taps(config: Mapping[str, Any], where: str) -> bool:
    flat = flatten(config, where)[0] if is_speculators(config) else config
    return bool(flat.get(IDS_FIELD) or eagle_config(flat, where).get(IDS_FIELD))


def _describe_folder(folder: Path, target: str | os.PathLike[str] | None, overrides: Overrides) -> Description:
    config, where = read_config(folder), str(folder / "config.json")
    source = open_draft_folder(folder)
    if not is_draft(config, source):
        found = Description("target", _architecture(config), "huggingface")
        found.tensors = _table(open_checkpoint_folder(folder))
        _describe_target(found, config, where)
        return found
    found = Description("draft", _architecture(config), None)
    found.tensors = {source.stored(name): about for name, about in _table(source).items()}
    try:
        check_kind(config, source, where)
        layers = find_layers(source)
        found.dialect = dialect_of(config, layers)
        facts = guess_target(config, source, where) if target is None else TargetFacts.of(read_target_config(target))
        if facts.num_layers is None and not _names_taps(config, where) and overrides.taps is None:
            found.tap_convention = "default" if "fc.weight" in source else "last"
            found.tap_reason = "its files name no taps, so they depend on the target's layers; name it with --target"
            return found
        parsed = parse_draft(config, source, facts, where, overrides)
        read_target_ids(source, parsed.config.draft_vocab_size, parsed.config.vocab_size)
        parse_quant_config(config, where)
    except Eagle3Error as error:
        found.refusal = str(error)
        return found
    found.taps, found.tap_convention = list(parsed.taps.indices), parsed.taps.convention
    found.tap_reason, found.config = parsed.taps.reason, _plain(parsed.config)
    found.warnings = list(parsed.warnings)
    return found
