"""Drafts from one dialect into another, or with a smaller head, tensor by tensor: no weight is rounded."""

import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from eagle3_jax.checkpoint.dialects import DraftTensors, flatten, is_speculators
from eagle3_jax.checkpoint.draft_config import Overrides, ParsedDraft, TargetFacts, parse_draft
from eagle3_jax.checkpoint.draft_writer import FILLED_IN, write_draft
from eagle3_jax.checkpoint.drafts import open_draft_folder
from eagle3_jax.checkpoint.files import refusing_io
from eagle3_jax.checkpoint.folders import read_config
from eagle3_jax.checkpoint.maps import read_target_ids
from eagle3_jax.checkpoint.names import FORMATS, HeadRows, abstract_params, check_finite
from eagle3_jax.checkpoint.public import locate_draft
from eagle3_jax.checkpoint.taps import IDS_FIELD, eagle_config
from eagle3_jax.checkpoint.target_files import read_target_config, read_target_embedding
from eagle3_jax.checkpoint.tensors import DTYPES
from eagle3_jax.config import Fields
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.models.eagle3 import Eagle3
from eagle3_jax.quant.weight import named_weights

_DTYPE_NAMES = {DTYPES[stored]: name for stored, name in zip(("F32", "BF16", "F16"), FORMATS, strict=True)}
_TAPS = 3


def convert_draft(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    dialect: str,
    target: str | os.PathLike[str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    vocabulary: Callable[[int], np.ndarray] | None = None,
) -> ParsedDraft:
    """Write a draft in another dialect. Tensors keep their bits.

    With `vocabulary` the head keeps only some of its rows, as FR-Spec (arXiv 2502.14856) has it: the draft reads less
    and proposes fewer words, and what is emitted stays the target's.

    Args:
        path: as `eagle3_jax.load_draft` takes it. out: the folder to write.
        dialect: one of `eagle3_jax.checkpoint.dialects.DIALECTS`.
        target: the target, as `load_target` takes it; not needed where the draft's own files say all.
        overrides: settings that win over the file's, as in `load_draft`; the new files say them.
        vocabulary: of V, the target's vocabulary: the target's ids that the head keeps, int [Vd], ascending.

    Returns:
        What the draft is.

    Raises:
        Eagle3Error: whatever loading refuses; taps that the files leave open; narrow weights; a dialect that cannot
            say what the draft is; or a head that is reduced already or the target's.

    Example:
        >>> convert_draft("my-draft", "my-speculator", "speculators")  # doctest: +SKIP
    """
    given = Overrides.read(overrides)
    name, folder = locate_draft(path)
    with refusing_io(folder):
        config, source = read_config(folder), open_draft_folder(folder)
        where = str(folder / "config.json")
        facts = guess_target(config, source, where) if target is None else TargetFacts.of(read_target_config(target))
        parsed = parse_draft(config, source, facts, where, given)
        if parsed.taps.ambiguous:
            raise Eagle3Error(
                f"{where}: {parsed.taps.reason}; say which is right: --draft-set tap_convention=hs or output "
                "(`eagle3-jax evaluate --probe` finds out)"
            )
        tensors, ids = _read_tensors(source, parsed)
        if FILLED_IN.items() <= source.metadata.items():
            del tensors["embed/weight"]
            parsed = dataclasses.replace(parsed, config=dataclasses.replace(parsed.config, shares_embedding=True))
    if vocabulary is not None:
        ids = np.asarray(vocabulary(parsed.config.vocab_size))
        tensors, parsed = _reduced(tensors, parsed, ids, where)
    settings = flatten(config, where)[0] if is_speculators(config) else config
    length = Fields(settings, where).size("max_position_embeddings", 2048)
    dtype = _DTYPE_NAMES.get(tensors["attention/o/weight"].dtype, "float32")
    verifier = _verifier(config) if target is None else os.fspath(target)
    embedding = None
    if dialect == "speculators" and parsed.config.shares_embedding and target is not None:
        embedding = read_target_embedding(target)
    write_draft(out, tensors, ids, parsed.config, dialect, dtype, length, verifier or name, embedding)
    return parsed


def _reduced(
    tensors: Mapping[str, np.ndarray], parsed: ParsedDraft, ids: np.ndarray, where: str
) -> tuple[dict[str, np.ndarray], ParsedDraft]:
    """The draft with only the head's rows of these target ids."""
    c = parsed.config
    if c.shares_head:
        raise Eagle3Error(f"{where}: the draft's head is its target's; only a head of its own can be reduced")
    if c.draft_vocab_size < c.vocab_size:
        raise Eagle3Error(
            f"{where}: the head has {c.draft_vocab_size} of the target's {c.vocab_size} tokens already; give a draft "
            "with all of them"
        )
    if len(ids) >= c.vocab_size:
        raise Eagle3Error(f"{where}: a head of {len(ids)} tokens is no smaller than the target's {c.vocab_size}")
    config = dataclasses.replace(c, draft_vocab_size=len(ids))
    return {**tensors, "head/weight": tensors["head/weight"][ids]}, dataclasses.replace(parsed, config=config)


def guess_target(config: Mapping[str, Any], source: DraftTensors, where: str) -> TargetFacts:
    """What a draft's own files say of its target; its number of layers they never do.

    Raises:
        Eagle3Error: they do not say enough.
    """
    if is_speculators(config):
        config = flatten(config, where)[0]
    fields = Fields(config, where)
    hidden = fields.size("target_hidden_size", 0) if fields.get("target_hidden_size") is not None else 0
    if not hidden and "fc.weight" in source and len(source.shape("fc.weight")) == 2:
        ids = config.get(IDS_FIELD) or eagle_config(config, where).get(IDS_FIELD)
        count = len(ids) if isinstance(ids, list) else fields.get("num_aux_hidden_states", _TAPS)
        width = source.shape("fc.weight")[1]
        if type(count) is int and count > 0 and width % count == 0:
            hidden = width // count
    hidden = hidden or fields.size("hidden_size")
    if fields.get("vocab_size") is not None:
        return TargetFacts(fields.size("vocab_size"), hidden, None)
    for name in ("embed_tokens.weight", "t2d"):
        if name in source and source.shape(name):
            return TargetFacts(source.shape(name)[0], hidden, None)
    raise Eagle3Error(f"{where}: nothing in it tells the target's vocabulary; name the target with --target")


def _read_tensors(source: DraftTensors, parsed: ParsedDraft) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
    """Every weight as it is stored, by its path in the parameter tree, and the map of a reduced vocabulary."""
    weights, names, c = named_weights(abstract_params(Eagle3(parsed.config))), parsed.layers.key_map(), parsed.config
    ids = read_target_ids(source, c.draft_vocab_size, c.vocab_size)
    tensors = {}
    for path, weight in weights.items():
        place, name = names.place(path), names.file_name(path)
        shape = place.stored_shape(weight) if isinstance(place, HeadRows) else weight.shape[::-1]
        if name not in source or source.shape(name) != shape or source.dtype(name).kind not in "fV":
            raise Eagle3Error(f"{source.path}: tensor {name} is missing or no plain matrix {shape}")
        tensors[path] = place.take(source.read(name)) if isinstance(place, HeadRows) else source.read(name)
        check_finite(tensors[path], f"{source.path}: tensor {name}")
    known = {*map(names.file_name, weights), "d2t", "t2d"} | ({"embed_tokens.weight"} if c.shares_embedding else set())
    if extra := [n for n in source if n not in known and not any(re.fullmatch(p, n) for p in names.ignored)]:
        raise Eagle3Error(f"{source.path}: tensor {extra[0]} has no place in a draft of float weights")
    return tensors, ids if c.draft_vocab_size < c.vocab_size else None


def _verifier(config: Mapping[str, Any]) -> str | None:
    """The target's name as speculators writes it down."""
    settings = config.get("speculators_config")
    verifier = settings.get("verifier") if isinstance(settings, Mapping) else None
    name = verifier.get("name_or_path") if isinstance(verifier, Mapping) else None
    return name if isinstance(name, str) else None
