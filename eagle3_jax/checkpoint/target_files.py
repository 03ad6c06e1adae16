"""A target's config without its weights, and Hugging Face folders of targets."""

import os
from pathlib import Path

import numpy as np

from eagle3_jax.checkpoint.families import FAMILIES, config_fields, family_of
from eagle3_jax.checkpoint.files import refusing_io, write_json_atomic
from eagle3_jax.checkpoint.folders import atomic_folder, is_draft, read_config
from eagle3_jax.checkpoint.gguf import GGUFSource
from eagle3_jax.checkpoint.names import FORMATS, check_dtype, check_finite, lay
from eagle3_jax.checkpoint.orbax import META_FILE, is_orbax_folder
from eagle3_jax.checkpoint.registry import entries, locate
from eagle3_jax.checkpoint.targets import TEXT_FILES, Target, check_target, copy_tokenizer
from eagle3_jax.checkpoint.tensors import SINGLE_FILE, open_checkpoint_folder, write_safetensors
from eagle3_jax.config import DecoderConfig
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.quant.formats import FLOAT_FORMATS
from eagle3_jax.quant.weight import Weight, named_weights


def read_target_config(path: str | os.PathLike[str]) -> DecoderConfig:
    """What a target is, from its config alone.

    Args:
        path: as `eagle3_jax.load_target` takes it.

    Raises:
        Eagle3Error: no such checkpoint, a family that is not supported, or a draft.
    """
    entry = entries("target").get(path) if isinstance(path, str) else None
    if entry is not None and "config" in entry.fields:
        config, where = entry.config(), f"{entry.name}'s config.json"
        return family_of(config, where).parse(config, where)
    _, place = locate(path, "target")
    with refusing_io(place):
        if place.is_dir():
            config, where = read_config(place), str(place / "config.json")
            if is_draft(config):
                raise Eagle3Error(f"{place}: holds a draft; the folder of its target is needed")
        else:
            config, where = GGUFSource(place).config(), str(place)
            config.pop("rope_freq_factors", None)
        return family_of(config, where).parse(config, where)


def read_target_embedding(path: str | os.PathLike[str]) -> np.ndarray:
    """A target's embedding [V, Ht] as its file holds it.

    Args:
        path: a Hugging Face folder or a GGUF file, or a known name of one.

    Raises:
        Eagle3Error: another kind of checkpoint, or damaged files.
    """
    _, place = locate(path, "target")
    with refusing_io(place):
        if is_orbax_folder(place):
            raise Eagle3Error(f"{place}: give the target as a Hugging Face folder (eagle3-jax convert writes one)")
        source = open_checkpoint_folder(place) if place.is_dir() else GGUFSource(place)
        config = read_target_config(path)
        name = FAMILIES[config.family].key_map(config, source).file_name("embed/weight")
        tensor = source.read(name)
        check_finite(tensor, f"{place}: tensor {name}")
        return tensor


def save_target_folder(target: Target, path: str | os.PathLike[str], dtype: str | None = None) -> None:
    """Save a target as a Hugging Face folder: config.json, model.safetensors and its tokenizer's files.

    The folder appears complete or not at all; other files in an old folder of that name stay.

    Args:
        target: a target as `load_target` gives it, e.g. from an Orbax folder or a GGUF file.
        path: the folder.
        dtype: "float32", "bfloat16" or "float16" of all weights; None keeps each as it is held.

    Raises:
        Eagle3Error: weights in a narrow format, or not finite in `dtype`; or the folder cannot be written.

    Example:
        >>> save_target_folder(load_target("smollm2-orbax"), "smollm2-hf")  # doctest: +SKIP
    """
    check_target(target)
    if dtype is not None:
        check_dtype(dtype)
    config, tensors = target.model.config, dict[str, np.ndarray]()
    names = FAMILIES[config.family].key_map(config, ())
    for place, weight in named_weights(target.params).items():
        lay(tensors, names.place(place), _in_file_order(weight, f"{path}: weight {place}"))
    if dtype is not None:
        with np.errstate(over="ignore"):  # refused below, by name
            tensors = {name: tensor.astype(FLOAT_FORMATS[FORMATS[dtype]]) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        check_finite(tensor, f"{path}: tensor {name}")
    fields = config_fields(config) | ({} if dtype is None else {"torch_dtype": dtype})
    if target.eos_ids:
        fields["eos_token_id"] = list(target.eos_ids)
    with atomic_folder(path, (META_FILE, *TEXT_FILES)) as folder:
        write_safetensors(folder / SINGLE_FILE, tensors, {"format": "pt"})
        write_json_atomic(folder / "config.json", fields)
        if target.tokenizer is not None and target.source is not None:
            copy_tokenizer(Path(target.source), folder)


def _in_file_order(weight: Weight, what: str) -> np.ndarray:
    """[..., out, in] or [..., n]."""
    if weight.scale is not None:
        raise Eagle3Error(f"{what} is in the narrow format {weight.format}; load the target with widen=True")
    value = np.asarray(weight.value)
    return value.swapaxes(-1, -2) if weight.layout == "kn" else value
