"""Loading and saving EAGLE-3 drafts in every dialect of `eagle3_jax.checkpoint.dialects`.

The weights say what a draft is; its config.json adds what they cannot: heads, epsilon, RoPE, toggles, taps.
"""

import dataclasses
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from eagle3_jax.checkpoint.dialects import DraftTensors
from eagle3_jax.checkpoint.draft_config import Overrides, ParsedDraft, TargetFacts, parse_draft
from eagle3_jax.checkpoint.draft_writer import write_draft
from eagle3_jax.checkpoint.files import refusing_io
from eagle3_jax.checkpoint.folders import read_config
from eagle3_jax.checkpoint.loading import NarrowPolicy, load_params
from eagle3_jax.checkpoint.maps import read_target_ids
from eagle3_jax.checkpoint.names import abstract_params, check_dtype, check_finite, to_file
from eagle3_jax.checkpoint.orbax import is_orbax_folder
from eagle3_jax.checkpoint.pickles import PICKLE_FILE, PickleSource
from eagle3_jax.checkpoint.public import locate_draft
from eagle3_jax.checkpoint.quant_config import parse_quant_config
from eagle3_jax.checkpoint.targets import Target
from eagle3_jax.checkpoint.tensors import INDEX_FILE, SINGLE_FILE, open_checkpoint_folder
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.models.eagle3 import Eagle3
from eagle3_jax.quant.weight import Weight, formats_of, named_weights
from eagle3_jax.sharding import mesh_of, on_host, shard_weights

log = logging.getLogger("eagle3_jax")

_SAMPLED_ROWS = 256


@dataclasses.dataclass
class Draft:
    """A loaded draft.

    Attributes:
        name: its registered name, else the name of its folder.
        model: the module; static and hashable.
        params: its weights, a tree of `Weight`s; with a reduced vocabulary also `target_ids`, int32 [Vd]: the
            target's id of each draft id.
        tap_convention: how layer ids of the config were read: "hs", "output", "default" or "given".
        tap_reason: why.
        warnings: what looked odd but was accepted.
        target: the target it drafts for, whose embedding and head it may share.
        dialect: how its files are written, see `eagle3_jax.checkpoint.dialects`.
        taps_ambiguous: whether the files leave the taps' convention open.
    """

    name: str
    model: Eagle3
    params: Any = dataclasses.field(repr=False)
    tap_convention: str
    tap_reason: str
    warnings: tuple[str, ...]
    target: Target
    dialect: str = "safeailab"
    taps_ambiguous: bool = False


def load_draft(
    path: str | os.PathLike[str],
    target: Target,
    overrides: Mapping[str, Any] | None = None,
    widen: bool | None = None,
    activations: str | None = None,
) -> Draft:
    """Load an EAGLE-3 draft (arXiv 2503.01840; EAGLE-3.1 too) for a target.

    Args:
        path: a known name or a folder with config.json and model.safetensors or pytorch_model.bin.
        target: the target it was trained for; the draft is put on the mesh that the target lies on.
        overrides: settings that win over the file's:
            "tap_convention": "hs" or "output", how layer ids are read; "taps": hs indices, low to high;
            "norm_output", "norm_before_residual": bool; "rope_theta": float; "embedding": "own" or "target";
            "dtype": of matrices and activations, else the target's.
        widen, activations: what becomes of narrow weights and what they meet, as in `load_target`; the target's
            own weights may be in any other format.

    Raises:
        Eagle3Error: no such draft; a kind of draft or a setting that is not supported; the draft of another
            target; malformed, missing, surplus or misshapen tensors, NaN in them; a d2t that is no map into
            the target's vocabulary; an unknown override.

    Example:
        >>> draft = load_draft("smollm2-135m-eagle3", target)  # doctest: +SKIP
        >>> draft.model.config.taps  # doctest: +SKIP
        (2, 15, 27)
    """
    if overrides is not None and not isinstance(overrides, Mapping):
        raise Eagle3Error(f"overrides are a {type(overrides).__name__}; a mapping of names to values is needed")
    if not isinstance(target, Target):
        raise Eagle3Error(f"the target is a {type(target).__name__}; give what load_target gives")
    given = Overrides.read(overrides)
    name, folder = locate_draft(path)
    with refusing_io(folder):
        return _load_folder(name, folder, target, given, NarrowPolicy.default(widen, activations))


def _load_folder(name: str, folder: Path, target: Target, given: Overrides, policy: NarrowPolicy) -> Draft:
    if not folder.is_dir():
        raise Eagle3Error(f"{folder}: is a file; give the draft's folder, with config.json and {SINGLE_FILE}")
    if is_orbax_folder(folder):
        raise Eagle3Error(f"{folder}: an Orbax folder is no draft; give a folder with config.json and {SINGLE_FILE}")
    config = read_config(folder)
    source = open_draft_folder(folder)
    facts = TargetFacts.of(target.model.config)
    parsed = parse_draft(config, source, facts, str(folder / "config.json"), given)
    target_ids = read_target_ids(source, parsed.config.draft_vocab_size, parsed.config.vocab_size)
    ignored = ["d2t", "t2d"]
    if parsed.config.shares_embedding:
        ignored.append("embed_tokens.weight")
    policy = dataclasses.replace(policy, config=parse_quant_config(config, str(folder / "config.json")))
    abstract = abstract_params(Eagle3(parsed.config))
    mesh = mesh_of(target.params)
    params = load_params(abstract, source, parsed.layers.key_map(), ignored, policy=policy, mesh=mesh)
    model = Eagle3(dataclasses.replace(parsed.config, weights=formats_of(params, parsed.config.weights)))
    if "target_ids" in params:
        params["target_ids"] = shard_weights(target_ids, mesh)
    warnings = [*parsed.warnings, *_embedding_warnings(params, parsed, target)]
    taps = parsed.taps
    log.info("%s: taps hs%s (%s)", folder, list(taps.indices), taps.reason)
    for warning in warnings:
        log.warning("%s: %s", folder, warning)
    notes = tuple(warnings)
    return Draft(name, model, params, taps.convention, taps.reason, notes, target, parsed.dialect, taps.ambiguous)


def open_draft_folder(folder: Path) -> DraftTensors:
    """The weights of a draft's folder: safetensors, or else a pytorch_model.bin.

    Raises:
        Eagle3Error: neither is there, or any fault of the files.
    """
    safetensors = any(os.path.exists(folder / name) for name in (SINGLE_FILE, INDEX_FILE))
    if not safetensors and os.path.exists(folder / PICKLE_FILE):
        return DraftTensors(PickleSource(folder / PICKLE_FILE))
    return DraftTensors(open_checkpoint_folder(folder))


def _embedding_warnings(params: Any, parsed: ParsedDraft, target: Target) -> list[str]:
    """A note if the draft's own embedding has nothing in common with the target's.

    Raises:
        Eagle3Error: it is empty, as some exporters leave it.
    """
    c = parsed.config
    if c.shares_embedding:
        return []
    ids = jnp.asarray(np.linspace(0, c.vocab_size - 1, min(_SAMPLED_ROWS, c.vocab_size)).astype(np.int32))
    own, theirs = (
        on_host(weight.outputs(ids)).astype(np.float32)
        for weight in (params["embed"]["weight"], target.params["embed"]["weight"])
    )
    if c.vocab_size > 1 and np.all(own == own[0]):
        raise Eagle3Error(
            'its embed_tokens.weight has the same row for every token; set overrides={"embedding": "target"} to use '
            "the target's"
        )
    if c.hidden_size != c.target_hidden_size:
        return []
    lengths = np.linalg.norm(own, axis=1) * np.linalg.norm(theirs, axis=1)
    likeness = float(np.mean(np.sum(own * theirs, axis=1) / np.maximum(lengths, 1e-30)))
    if likeness > 0.5:
        return []
    return [
        f"its own embedding is unlike the target's (mean cosine {likeness:.2f}), as if it were untrained; "
        'it is used all the same: compare with overrides={"embedding": "target"}'
    ]


def save_draft(
    draft: Draft, path: str | os.PathLike[str], dtype: str = "bfloat16", dialect: str | None = None
) -> None:
    """Save a draft as other engines read it: config.json and model.safetensors.

    The folder appears complete or not at all; other files in an old folder of that name stay.

    Args:
        draft: the draft; its weights are rounded to `dtype`.
        path: the folder.
        dtype: "bfloat16", "float32" or "float16".
        dialect: "safeailab" (SafeAILab, SGLang, SpecForge, vLLM), "vllm" or "speculators"; None keeps its own.

    Raises:
        Eagle3Error: another dtype, weights that are not finite in it, a dialect that cannot say what the draft
            is, or the folder cannot be written.

    Example:
        >>> save_draft(draft, "my-draft", dtype="float32")  # doctest: +SKIP
    """
    check_dtype(dtype)
    if not isinstance(draft, Draft):
        raise Eagle3Error(f"a {type(draft).__name__} is no draft to save; give what load_draft gives")
    tensors = {
        place: _saved(weight, dtype, f"{path}: {place} in {dtype}")
        for place, weight in named_weights(draft.params).items()
    }
    ids, target = draft.params.get("target_ids"), draft.target
    # Speculators loads the target's embedding from what the file calls it.
    verifier = str(target.source) if target.source is not None and target.source.is_dir() else target.name
    max_position, dialect = target.model.config.max_position, dialect or draft.dialect
    embedding = None
    if dialect == "speculators" and draft.model.config.shares_embedding:
        embedding = _saved(target.params["embed"]["weight"], dtype, f"{path}: the target's embedding in {dtype}")
    write_draft(path, tensors, ids, draft.model.config, dialect, dtype, max_position, verifier, embedding)


def _saved(weight: Weight, dtype: str, what: str) -> np.ndarray:
    if weight.scale is not None:
        raise Eagle3Error(f"{what}: weights in the narrow format {weight.format} cannot be saved yet")
    tensor = to_file(weight, dtype)
    check_finite(tensor, what)
    return tensor
