"""Loading target models: Hugging Face folders, GGUF files and Orbax folders."""

import dataclasses
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from eagle3_jax.checkpoint.families import FAMILIES, config_fields, family_of
from eagle3_jax.checkpoint.files import read_json, refusing_io, write_json_atomic
from eagle3_jax.checkpoint.folders import (
    atomic_folder,
    check_eos_ids,
    is_draft,
    read_config,
    read_eos_ids,
)
from eagle3_jax.checkpoint.gguf import GGUFSource
from eagle3_jax.checkpoint.loading import WIDE, NarrowPolicy, load_params
from eagle3_jax.checkpoint.names import abstract_params, check_dtype, weight_formats
from eagle3_jax.checkpoint.orbax import is_orbax_folder, read_meta, read_params, write_params
from eagle3_jax.checkpoint.quant_config import parse_quant_config
from eagle3_jax.checkpoint.registry import locate
from eagle3_jax.checkpoint.tensors import TensorSource, open_checkpoint_folder
from eagle3_jax.config import MOST_LAYERS, DecoderConfig, RopeConfig
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.models.decoder import Decoder
from eagle3_jax.models.rope import inverse_frequencies
from eagle3_jax.quant.weight import WeightFormats, formats_of, named_weights
from eagle3_jax.sharding import check_mesh, shard_weights
from eagle3_jax.text import Tokenizer

_TOKENIZERS = ("tokenizer.json", "tiktoken.model")
_TOKENIZER_FILES = (
    *_TOKENIZERS,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
_GGUF_TOKENIZER_FILE = "tokenizer.gguf.json"
TEXT_FILES = (*_TOKENIZER_FILES, _GGUF_TOKENIZER_FILE, "generation_config.json")
"""What a target's folder says of text and stop ids beside config.json."""


@dataclasses.dataclass
class Target:
    """A loaded target model.

    Attributes:
        name: its registered name, else the name of its file or folder.
        model: the module; static and hashable.
        params: its weights, a tree of `Weight`s.
        tokenizer: the checkpoint's tokenizer; None where the folder has none.
        eos_ids: ids that end a generation; may be empty.
        source: the file or folder it was loaded from, if any.
    """

    name: str
    model: Decoder
    params: Any = dataclasses.field(repr=False)
    tokenizer: Tokenizer | None
    eos_ids: tuple[int, ...]
    source: Path | None = None


def check_target(target: Any) -> None:
    """Refuse to save what is no target, such as a draft.

    Raises:
        Eagle3Error: it is something else.
    """
    if not isinstance(target, Target):
        raise Eagle3Error(f"a {type(target).__name__} is no target to save; give what load_target gives")


def default_dtype() -> str:
    """float32 on CPU, bfloat16 on accelerators."""
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def load_target(
    path: str | os.PathLike[str],
    dtype: str | None = None,
    widen: bool | None = None,
    activations: str | None = None,
    mesh: Mesh | None = None,
) -> Target:
    """Load a target model.

    Args:
        path: a known name, a Hugging Face folder, a GGUF file, or a folder of `save_target_orbax`.
        dtype: "float32", "bfloat16" or "float16", of matrices and activations; norms and biases stay float32.
            None is float32 on CPU and bfloat16 on accelerators; for an Orbax folder, what was saved.
            Matrices lie as suits the platform, those of an Orbax folder as they were saved.
        widen: turn narrow weights (FP8, MXFP4, INT4) into `dtype` once, now; else they are kept and used as they
            are stored. None widens on CPU only.
        activations: how those that meet narrow weights are rounded. None: as a card does for FP8 weights that stay
            narrow, else not at all. "wide": not at all. "fake_quant": as a card does, also for weights that were
            widened. "mxfp8": the same, with MXFP8 for MXFP4 weights.
        mesh: devices to share the weights and all that is computed with them, see `eagle3_jax.sharding.make_mesh`;
            None is JAX's default device.

    Raises:
        Eagle3Error: no such checkpoint; another architecture or a setting that is not supported; malformed,
            missing, surplus or misshapen tensors, or NaN in them; quantised weights and a quantization_config that
            contradict each other; it is a draft; or a mesh with axes other than "data" and "model".

    Example:
        >>> target = load_target("smollm2-135m")  # doctest: +SKIP
        >>> target.eos_ids  # doctest: +SKIP
        (2,)
    """
    if dtype is not None:
        check_dtype(dtype)
    policy = NarrowPolicy.default(widen, activations)
    mesh = None if mesh is None else check_mesh(mesh)
    name, place = locate(path, "target")
    with refusing_io(place):
        if not place.is_dir():
            return _load_gguf(name, place, dtype or default_dtype(), mesh)
        if is_orbax_folder(place):
            return _load_orbax(name, place, dtype, policy, mesh)
        return _load_folder(name, place, dtype or default_dtype(), policy, mesh)


def _load_folder(name: str, folder: Path, dtype: str, policy: NarrowPolicy, mesh: Mesh | None) -> Target:
    config = read_config(folder)
    _refuse_draft(folder, is_draft(config))
    model = _model(config, str(folder / "config.json"), dtype)
    source = open_checkpoint_folder(folder)
    _refuse_draft(folder, is_draft(config, source))
    tokenizer, eos_ids = _read_text(folder, config, model.config)
    policy = dataclasses.replace(policy, config=parse_quant_config(config, str(folder / "config.json")))
    model, params = _load_weights(model, source, policy, mesh)
    return Target(name, model, params, tokenizer, eos_ids, folder)


def _load_gguf(name: str, file: Path, dtype: str, mesh: Mesh | None) -> Target:
    source = GGUFSource(file)
    config = source.config()
    if (factors := config.pop("rope_freq_factors", None)) is not None:
        config["rope_scaling"] = _llama3_scaling(factors, config, str(file))
    model = _model(config, str(file), dtype)
    eos_ids = check_eos_ids(source.eos_ids, model.config.vocab_size, str(file))
    tokenizer = Tokenizer.from_gguf(source.metadata, str(file))
    return Target(name, *_load_weights(model, source, WIDE, mesh), tokenizer, eos_ids, file)


def _load_orbax(name: str, folder: Path, dtype: str | None, policy: NarrowPolicy, mesh: Mesh | None) -> Target:
    meta = read_meta(folder)
    _refuse_draft(folder, meta["kind"] != "target")
    config = read_config(folder)
    model = _model(config, str(folder / "config.json"), dtype or check_dtype(meta["dtype"]), meta["layout"])
    tokenizer, eos_ids = _read_text(folder, config, model.config)
    if (layers := model.config.num_layers) > MOST_LAYERS:
        raise Eagle3Error(f"{folder / 'config.json'}: {layers} layers are more than any model has")
    weights = model.config.weights
    narrow = [(path, format, "nk") for path, format in meta["narrow"].items()]
    stored = dataclasses.replace(
        weights, exceptions=(*narrow, *weights.exceptions), activations=tuple(meta["activations"].items())
    )
    params = read_params(folder, abstract_params(_with_weights(model, stored)), mesh)
    params = shard_weights(policy.applied(params, weights), mesh)
    return Target(name, _with_weights(model, formats_of(params, weights)), params, tokenizer, eos_ids, folder)


def _refuse_draft(folder: Path, draft: bool) -> None:
    if draft:
        raise Eagle3Error(f"{folder}: holds a draft, not a target; load it with load_draft")


def _model(config: Mapping[str, Any], where: str, dtype: str, layout: str | None = None) -> Decoder:
    """The module that a config.json describes; see `weight_formats`."""
    family = family_of(config, where)
    parsed = family.parse(config, where)
    return family.model(dataclasses.replace(parsed, dtype=dtype, weights=weight_formats(dtype, parsed.tied, layout)))


def _with_weights(model: Decoder, weights: WeightFormats) -> Decoder:
    """The same model with weights of other formats."""
    return type(model)(dataclasses.replace(model.config, weights=weights))


def _load_weights(
    model: Decoder, source: TensorSource, policy: NarrowPolicy, mesh: Mesh | None
) -> tuple[Decoder, Any]:
    """The weights of a model, and the model with the formats they are in."""
    # Before the model is described, layer by layer, for as many as a damaged config names.
    if (layers := model.config.num_layers) > len(source):
        raise Eagle3Error(f"{source.path}: {len(source)} tensors cannot be the {layers} layers that the config names")
    names = FAMILIES[model.config.family].key_map(model.config, source)
    head, embedding = names.file_name("head/weight"), names.file_name("embed/weight")
    ignored = ()
    if model.config.tied and head in source:
        if not np.array_equal(source.read(head), source.read(embedding)):
            raise Eagle3Error(
                f"{source.path}: {head} differs from {embedding}, but config.json ties them; "
                "set tie_word_embeddings to false"
            )
        ignored = (head,)
    params = load_params(abstract_params(model), source, names, ignored, policy=policy, mesh=mesh)
    return _with_weights(model, formats_of(params, model.config.weights)), params


def _read_text(
    folder: Path, config: Mapping[str, Any], parsed: DecoderConfig
) -> tuple[Tokenizer | None, tuple[int, ...]]:
    """The folder's tokenizer and stop ids."""
    tokenizer, vocab_size = None, parsed.vocab_size
    if any((folder / name).is_file() for name in _TOKENIZERS):
        tokenizer = Tokenizer.from_folder(folder)
    elif (file := folder / _GGUF_TOKENIZER_FILE).is_file():
        tokenizer = Tokenizer.from_gguf(read_json(file), str(file))
    eos_ids = read_eos_ids(folder, config, vocab_size, FAMILIES[parsed.family].joins_stop_ids)
    if eos_ids is None:
        eos_ids = check_eos_ids(tokenizer.eos_ids if tokenizer else [], vocab_size, str(folder))
    return tokenizer, eos_ids


def _llama3_scaling(factors: Sequence[float], config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The llama3 rule behind a GGUF file's frequency divisors, which are all that the file has of it."""
    scaling = {
        "rope_type": "llama3",
        "factor": max(factors),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    plain = RopeConfig(theta=config["rope_theta"])
    rope = RopeConfig(plain.theta, "llama3", scaling["factor"], 8192, 1.0, 4.0)
    base, scaled = (inverse_frequencies(r, config["head_dim"])[0] for r in (plain, rope))
    if not np.allclose(base / np.asarray(factors), scaled, rtol=1e-3, atol=0):
        raise Eagle3Error(
            f"{where}: rope_freqs.weight does not follow Llama 3's rule (8192 positions, factors 1 and 4); "
            "only that rule is supported"
        )
    return scaling


def save_target_orbax(target: Target, path: str | os.PathLike[str]) -> None:
    """Save a target as an Orbax folder that `load_target` restores bit for bit.

    The folder has config.json in Hugging Face's words, the tokenizer's files and the weights. It appears
    complete or not at all.

    Weights that are narrow are saved so: what takes long to read out of many safetensors files once is quick ever
    after.

    Args:
        target: a target as `load_target` gives it.
        path: the folder.

    Raises:
        Eagle3Error: float weights in another layout than the default, or the folder cannot be written.

    Example:
        >>> save_target_orbax(target, "smollm2-orbax")  # doctest: +SKIP
    """
    check_target(target)
    config, named = target.model.config, named_weights(target.params)
    layout = config.weights.layout
    default = abstract_params(_with_weights(target.model, weight_formats(config.dtype, config.tied, layout)))
    for place, weight in named_weights(default).items():
        found = named[place]
        if found.scale is None and (found.format, found.layout) != (weight.format, weight.layout):
            raise Eagle3Error(
                f"{path}: weight {place} is {found.format} {found.layout}; only float weights in their default "
                "layout, and narrow ones, can be saved with Orbax"
            )
    with atomic_folder(path, TEXT_FILES) as folder:
        write_params(folder, target.params, "target", config.dtype, layout)
        fields = config_fields(config)
        if target.eos_ids:
            fields["eos_token_id"] = list(target.eos_ids)
        write_json_atomic(folder / "config.json", fields)
        if target.tokenizer is not None and target.source is not None:
            copy_tokenizer(target.source, folder)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the tokenizer of a checkpoint, a folder or a GGUF file, into another folder."""
    if source.is_dir():
        for name in (*_TOKENIZER_FILES, _GGUF_TOKENIZER_FILE):
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        return
    metadata = GGUFSource(source).metadata
    kept = {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}
    kept.pop("tokenizer.ggml.scores", None)  # unused, and may hold what JSON cannot say
    write_json_atomic(folder / _GGUF_TOKENIZER_FILE, kept)
