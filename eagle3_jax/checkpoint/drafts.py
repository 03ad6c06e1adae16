"""Loading and saving EAGLE-3 drafts in the dialect of SafeAILab, SGLang and SpecForge (`midlayer.*`).

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

from eagle3_jax.checkpoint.draft_config import NO_OVERRIDES, Overrides, ParsedDraft, parse_draft
from eagle3_jax.checkpoint.files import refusing_io, write_json_atomic
from eagle3_jax.checkpoint.folders import atomic_folder, read_config, rope_fields
from eagle3_jax.checkpoint.names import (
    EAGLE3,
    abstract_params,
    check_dtype,
    check_finite,
    load_params,
    named_weights,
    to_file,
)
from eagle3_jax.checkpoint.orbax import is_orbax_folder
from eagle3_jax.checkpoint.registry import locate
from eagle3_jax.checkpoint.taps import tap_fields
from eagle3_jax.checkpoint.targets import Target
from eagle3_jax.checkpoint.tensors import SINGLE_FILE, TensorSource, open_checkpoint_folder, write_safetensors
from eagle3_jax.config import Eagle3Config
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.models.eagle3 import Eagle3
from eagle3_jax.quant.weight import Weight

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
    """

    name: str
    model: Eagle3
    params: Any = dataclasses.field(repr=False)
    tap_convention: str
    tap_reason: str
    warnings: tuple[str, ...]
    target: Target


def load_draft(path: str | os.PathLike[str], target: Target, overrides: Mapping[str, Any] | None = None) -> Draft:
    """Load an EAGLE-3 draft (arXiv 2503.01840; EAGLE-3.1 too) for a target.

    Args:
        path: a known name or a folder with config.json and safetensors weights.
        target: the target it was trained for.
        overrides: settings that win over the file's:
            "tap_convention": "hs" or "output", how layer ids are read; "taps": hs indices, low to high;
            "norm_output": bool; "rope_theta": float; "embedding": "own" or "target"; "dtype": of matrices and
            activations, else the target's.

    Raises:
        Eagle3Error: no such draft; another dialect or a setting that is not supported; the draft of another
            target; malformed, missing, surplus or misshapen tensors, NaN in them; a d2t that is no map into
            the target's vocabulary; an unknown override.

    Example:
        >>> draft = load_draft("smollm2-135m-eagle3", target)  # doctest: +SKIP
        >>> draft.model.config.taps  # doctest: +SKIP
        (2, 15, 27)
    """
    if overrides is not None and not isinstance(overrides, Mapping):
        raise Eagle3Error(f"overrides are a {type(overrides).__name__}; a mapping of names to values is needed")
    given = Overrides.read(overrides) if overrides else NO_OVERRIDES
    name, folder = locate(path, "draft")
    with refusing_io(folder):
        return _load_folder(name, folder, target, given)


def _load_folder(name: str, folder: Path, target: Target, given: Overrides) -> Draft:
    if not folder.is_dir():
        raise Eagle3Error(f"{folder}: is a file; give the draft's folder, with config.json and {SINGLE_FILE}")
    if is_orbax_folder(folder):
        raise Eagle3Error(f"{folder}: an Orbax folder is no draft; give a folder with config.json and {SINGLE_FILE}")
    config = read_config(folder)
    source = open_checkpoint_folder(folder)
    parsed = parse_draft(config, source, target.model.config, str(folder / "config.json"), given)
    model = Eagle3(parsed.config)
    target_ids = _target_ids(source, parsed.config)
    ignored = () if not parsed.config.shares_embedding else ("embed_tokens.weight",)
    params = load_params(abstract_params(model), source, EAGLE3, ignored)
    if "target_ids" in params:
        params["target_ids"] = jnp.asarray(target_ids)
    warnings = [*parsed.warnings, *_embedding_warnings(params, parsed, target)]
    for warning in warnings:
        log.warning("%s: %s", folder, warning)
    taps = parsed.taps
    return Draft(name, model, params, taps.convention, taps.reason, tuple(warnings), target)


def _target_ids(source: TensorSource, config: Eagle3Config) -> np.ndarray | None:
    """The target's id of each draft id, int32 [Vd], from the offsets in d2t; None without a d2t.

    Raises:
        Eagle3Error: d2t is missing although the vocabulary is reduced, or is no increasing map into the
            target's vocabulary, or t2d is not its other side.
    """
    size, vocab_size = config.draft_vocab_size, config.vocab_size
    ids = None
    if "d2t" in source:
        offsets = _integers(source, "d2t", size)
        ids = np.arange(size, dtype=np.int64) + np.clip(offsets, -(2**40), 2**40)
        if ids.min() < 0 or ids.max() >= vocab_size:
            bad = int(np.flatnonzero((ids < 0) | (ids >= vocab_size))[0])
            raise Eagle3Error(
                f"{source.path}: d2t maps draft id {bad} to {ids[bad]}, outside of the target's {vocab_size} "
                "ids; d2t holds offsets: target id = draft id + d2t"
            )
        if size > 1 and np.diff(ids).min() <= 0:
            bad = int(np.flatnonzero(np.diff(ids) <= 0)[0])
            raise Eagle3Error(
                f"{source.path}: d2t maps draft ids {bad} and {bad + 1} to {ids[bad]} and {ids[bad + 1]}; "
                "the map must increase (d2t holds offsets: target id = draft id + d2t)"
            )
    elif size < vocab_size:
        raise Eagle3Error(
            f"{source.path}: d2t is missing; a draft of {size} of the target's {vocab_size} ids needs the map"
        )
    if "t2d" in source:
        used = _integers(source, "t2d", vocab_size)
        mapped = np.flatnonzero(used)
        expected = np.arange(size) if ids is None else ids
        if not np.array_equal(mapped, expected):
            raise Eagle3Error(
                f"{source.path}: the {len(mapped)} ids that t2d marks are not the {size} that d2t maps to; "
                "one of the two is damaged"
            )
    return None if ids is None else ids.astype(np.int32)


def _integers(source: TensorSource, name: str, length: int) -> np.ndarray:
    """A whole-number tensor as int64 [length]."""
    if source.shape(name) != (length,):
        raise Eagle3Error(f"{source.path}: {name} has shape {source.shape(name)}; ({length},) is needed")
    if source.dtype(name).kind not in "iub":
        raise Eagle3Error(f"{source.path}: {name} is stored as {source.format(name)}; whole numbers are needed")
    return source.read(name).astype(np.int64)


def _embedding_warnings(params: Any, parsed: ParsedDraft, target: Target) -> list[str]:
    """A note if the draft's own embedding has nothing in common with the target's."""
    c = parsed.config
    if c.shares_embedding or c.hidden_size != c.target_hidden_size:
        return []
    ids = jnp.asarray(np.linspace(0, c.vocab_size - 1, min(_SAMPLED_ROWS, c.vocab_size)).astype(np.int32))
    own, theirs = (
        np.asarray(weight.outputs(ids)).astype(np.float32)
        for weight in (params["embed"]["weight"], target.params["embed"]["weight"])
    )
    lengths = np.linalg.norm(own, axis=1) * np.linalg.norm(theirs, axis=1)
    likeness = float(np.mean(np.sum(own * theirs, axis=1) / np.maximum(lengths, 1e-30)))
    if likeness > 0.5:
        return []
    return [
        f"its own embedding is unlike the target's (mean cosine {likeness:.2f}), as if it were untrained; "
        'it is used all the same: compare with overrides={"embedding": "target"}'
    ]


def save_draft(draft: Draft, path: str | os.PathLike[str], dtype: str = "bfloat16") -> None:
    """Save a draft as SafeAILab, SGLang, SpecForge and vLLM read it: config.json and model.safetensors.

    The folder appears complete or not at all; other files in an old folder of that name stay.

    Args:
        draft: the draft; its weights are rounded to `dtype`.
        path: the folder.
        dtype: "bfloat16", "float32" or "float16".

    Raises:
        Eagle3Error: another dtype, weights that are not finite in it, or the folder cannot be written.

    Example:
        >>> save_draft(draft, "my-draft", dtype="float32")  # doctest: +SKIP
    """
    check_dtype(dtype)
    config = draft.model.config
    tensors: dict[str, np.ndarray] = {}
    for place, weight in named_weights(draft.params).items():
        name = EAGLE3.file_name(place)
        tensors[name] = _saved(weight, dtype, f"{path}: tensor {name} in {dtype}")
    if "target_ids" in draft.params:
        ids = np.asarray(draft.params["target_ids"]).astype(np.int64)
        tensors["d2t"] = ids - np.arange(len(ids))
        tensors["t2d"] = np.zeros(config.vocab_size, bool)
        tensors["t2d"][ids] = True
    with atomic_folder(path) as folder:
        write_safetensors(folder / SINGLE_FILE, tensors, {"format": "pt"})
        write_json_atomic(folder / "config.json", _config_fields(config, draft.target, dtype))


def _saved(weight: Weight, dtype: str, what: str) -> np.ndarray:
    if weight.scale is not None:
        raise Eagle3Error(f"{what}: weights in the narrow format {weight.format} cannot be saved yet")
    tensor = to_file(weight, dtype)
    check_finite(tensor, what)
    return tensor


def _config_fields(config: Eagle3Config, target: Target, dtype: str) -> dict[str, Any]:
    """The config.json that `parse_draft` reads as this config."""
    fields = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.target_hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        **rope_fields(config.rope),
        "max_position_embeddings": target.model.config.max_position,
        "tie_word_embeddings": False,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "bias": config.fc_bias,
        "norm_before_residual": config.norm_before_residual,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        **tap_fields(config.taps),
        "torch_dtype": dtype,
    }
    # SafeAILab and SGLang take the file's own embedding if, and only if, this field is there.
    if config.shares_embedding:
        del fields["target_hidden_size"]
    # SGLang takes the target's head only where no draft vocabulary is named.
    if config.shares_head:
        del fields["draft_vocab_size"]
    return fields
