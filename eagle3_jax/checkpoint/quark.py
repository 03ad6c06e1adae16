"""Drafts in AMD Quark's file layout: file to file, without a model in between.

Quark's `file2file_quantization` reads tensors, replaces the matrices of linear layers by codes and scales, and says
so in config.json under `quantization_config`. So does this; Quark itself is not needed.

| scheme | weight | weight_scale | input_scale |
|---|---|---|---|
| ptpc_fp8 | F8_E4M3 [out, in] | F32 [out] | |
| fp8 | F8_E4M3 [out, in] | F32 [] | F32 [] |
| mxfp4 | U8 [out, in/2] | U8 [out, in/32] | |
"""

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_jax.checkpoint.dialects import find_layers
from eagle3_jax.checkpoint.drafts import open_draft_folder
from eagle3_jax.checkpoint.files import quote, refusing_io, write_json_atomic
from eagle3_jax.checkpoint.folders import atomic_folder, read_config
from eagle3_jax.checkpoint.narrow import find_matrix
from eagle3_jax.checkpoint.quant_config import FIELD
from eagle3_jax.checkpoint.tensors import SINGLE_FILE, TensorSource, write_safetensors
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.quant.formats import NARROW_FORMATS
from eagle3_jax.quant.fp8 import E4M3FN, largest
from eagle3_jax.quant.quantize import SCHEMES, encode_matrix

QUARK_SCHEMES = ("ptpc_fp8", "mxfp4", "fp8")
KEPT = "fc|lm_head"
"""Modules that published FP8 drafts keep as they are."""

_VERSION = "0.13"
_NOT_LINEAR = ("embed_tokens",)
_PLAIN = ("BF16", "F16", "F32")


@dataclasses.dataclass(frozen=True)
class QuantizedLayer:
    """What became of one matrix.

    Attributes:
        module: its name. shape: [out, in].
        error: Frobenius norm of the difference to the wide matrix, relative to the matrix's.
        largest_error: largest difference of an element.
        before, after: bytes.
    """

    module: str
    shape: tuple[int, int]
    error: float
    largest_error: float
    before: int
    after: int


def quantized_modules(shapes: Mapping[str, tuple[int, ...]], exclude: str) -> list[str]:
    """Modules of a draft whose matrices are quantised: all linear layers but the excluded ones.

    Args:
        shapes: shape of each tensor by its name.
        exclude: a regular expression for names of modules, whole or from a dot on.

    Raises:
        Eagle3Error: no regular expression.
    """
    pattern = _pattern(exclude)
    return [module for module in _linear_modules(shapes) if not pattern.fullmatch(module)]


def quantized_layout(module: str, shape: tuple[int, ...], scheme: str) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    """Names, dtypes and shapes of the tensors that a matrix [out, in] becomes.

    Example:
        >>> quantized_layout("fc", (32, 96), "ptpc_fp8")["fc.weight_scale"]
        (dtype('float32'), (32,))
    """
    narrow, dtype = NARROW_FORMATS[SCHEMES[scheme]], np.dtype(np.float32)
    scale_shape, name = narrow.scale_shape(shape), f"{module}.weight"
    layout = {name: (narrow.dtype, narrow.code_shape(shape))}
    if scheme == "mxfp4":
        return {**layout, f"{name}_scale": (np.dtype(np.uint8), scale_shape)}
    if scheme == "ptpc_fp8":
        return {**layout, f"{name}_scale": (dtype, scale_shape[:1])}
    return {**layout, f"{name}_scale": (dtype, ()), f"{module}.input_scale": (dtype, ())}


def quantize_folder(
    folder: Path,
    out: str | os.PathLike[str],
    scheme: str,
    exclude: str = KEPT,
    maxima: Mapping[str, float] | None = None,
) -> list[QuantizedLayer]:
    """Quantise a draft's folder into another one, in Quark's layout.

    The folder appears complete or not at all: config.json, model.safetensors, and a card, README.md.

    Args:
        folder: the draft, with plain weights.
        out: the new folder.
        scheme: of `QUARK_SCHEMES`.
        exclude: as in `quantized_modules`.
        maxima: largest activation of each quantised module's input, for scheme "fp8".

    Raises:
        Eagle3Error: no draft, its own folder to write, an unknown scheme, nothing to quantise, weights that are
            narrow already, not finite or of a width that the scheme cannot group, maxima that are missing, or a
            folder that cannot be written.
    """
    if scheme not in QUARK_SCHEMES:
        raise Eagle3Error(f"scheme {scheme!r} is not known; use {', '.join(QUARK_SCHEMES)}")
    with refusing_io(folder):
        config, source = read_config(folder), open_draft_folder(folder)
    find_layers(source)  # a draft, and no target
    if os.path.realpath(out) == os.path.realpath(folder):
        raise Eagle3Error(f"{out}: is the draft's own folder, whose weights would be lost; give a new folder")
    if config.get(FIELD) is not None:
        raise Eagle3Error(f"{folder / 'config.json'}: has a {FIELD} already; give the draft it was made of")
    shapes = {name: source.shape(name) for name in source}
    modules = quantized_modules(shapes, exclude)
    if not modules:
        raise Eagle3Error(f"{folder}: {quote(exclude)} excludes every linear layer; leave one to quantise")
    if missing := [module for module in modules if scheme == "fp8" and module not in (maxima or {})]:
        raise Eagle3Error(f"scheme fp8 needs the largest activation of {missing[0]}; calibrate over some prompts")
    tensors: dict[str, np.ndarray] = {}
    layers: list[QuantizedLayer] = []
    for name in source:
        module = name.removesuffix(".weight")
        if module == name or module not in modules:
            tensors[name] = source.read(name)
            continue
        wide = _read_wide(source, name)
        made = _quantized(wide, module, scheme, (maxima or {}).get(module), f"{source.path}: tensor {name}")
        tensors |= made
        layers.append(_measured(module, wide, made, scheme))
    excluded = sorted(set(_linear_modules(shapes)) - set(modules))
    fields = {**config, FIELD: quark_config(scheme, [*excluded, f"re:{_pattern(exclude).pattern}$"])}
    with atomic_folder(out) as new:
        write_safetensors(new / SINGLE_FILE, tensors, {"format": "pt"})
        write_json_atomic(new / "config.json", fields)
        card = _card(folder.resolve().name, Path(os.path.realpath(out)).name, scheme, excluded, layers)
        (new / "README.md").write_text(card, encoding="utf-8")
    return layers


def quark_config(scheme: str, exclude: list[str]) -> dict[str, Any]:
    """The `quantization_config` that Quark writes for a scheme.

    Args:
        scheme: of `QUARK_SCHEMES`.
        exclude: names of modules and, after "re:", patterns.
    """
    return {
        "global_quant_config": {
            "input_tensors": _tensor_spec(scheme, weight=False),
            "output_tensors": None,
            "weight": _tensor_spec(scheme, weight=True),
            "bias": None,
            "target_device": None,
        },
        "exclude": exclude,
        "algo_config": None,
        "softmax_quant_spec": None,
        "quant_method": "quark",
        "layer_type_quant_config": {},
        "layer_quant_config": {},
        "kv_cache_quant_config": {},
        "kv_cache_post_rope": False,
        "quant_mode": "eager_mode",
        "version": _VERSION,
        "export": {
            "kv_cache_group": [],
            "min_kv_scale": 0.0,
            "pack_method": "reorder",
            "weight_format": "real_quantized",
            "weight_merge_groups": None,
        },
    }


def _tensor_spec(scheme: str, weight: bool) -> dict[str, Any]:
    """One of Quark's tensor specifications: of weights, or of the activations they meet."""
    mx = scheme == "mxfp4"
    # (granularity, its axis, observer)
    granularity, axis, observer = {
        "ptpc_fp8": ("per_channel", 0 if weight else 1, "PerChannelMinMaxObserver"),
        "fp8": ("per_tensor", None, "PerTensorMinMaxObserver"),
        "mxfp4": ("per_group", -1, "PerBlockMXObserver"),
    }[scheme]
    return {
        "dtype": "fp4" if mx else "fp8_e4m3",
        "is_dynamic": not weight and scheme != "fp8",
        "qscheme": granularity,
        "ch_axis": axis,
        "group_size": 32 if mx else None,
        "block_size": None,
        "symmetric": None if mx else True,
        "round_method": "half_even",
        "scale_type": "float",
        "zero_point_type": "int32",
        "scale_format": "e8m0" if mx else None,
        "scale_calculation_mode": "even" if mx else None,
        "mx_element_dtype": None,
        "observer_cls": observer,
        "is_scale_quant": False,
        "enable_buffer_reuse": False,
        "max_input_numel": 4194304,
    }


def _linear_modules(shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    matrices = [name for name, shape in shapes.items() if name.endswith(".weight") and len(shape) == 2]
    modules = [name.removesuffix(".weight") for name in matrices]
    return [module for module in modules if module.rpartition(".")[2] not in _NOT_LINEAR]


def _pattern(exclude: str) -> re.Pattern[str]:
    """A pattern for whole names of modules under any prefix, since engines add their own."""
    try:
        return re.compile(rf"(.*\.)?({exclude})")
    except re.error as error:
        raise Eagle3Error(f"exclude {quote(exclude)} is no regular expression: {error}") from error


def _read_wide(source: TensorSource, name: str) -> np.ndarray:
    stored = find_matrix(source, name)
    if stored is None or stored.format is not None or source.format(name) not in _PLAIN:
        raise Eagle3Error(f"{source.path}: tensor {name} is stored as {source.format(name)}; a wide one is needed")
    return source.read(name)


def _quantized(wide: np.ndarray, module: str, scheme: str, maximum: float | None, what: str) -> dict[str, np.ndarray]:
    name = f"{module}.weight"
    codes, scale = encode_matrix(wide.astype(np.float32), SCHEMES[scheme], what)
    values = {name: codes, f"{name}_scale": scale}
    if maximum is not None:
        values[f"{module}.input_scale"] = np.array(maximum / largest(E4M3FN), np.float32)
    layout = quantized_layout(module, wide.shape, scheme)
    return {part: values[part].view(dtype).reshape(shape) for part, (dtype, shape) in layout.items()}


def _measured(module: str, wide: np.ndarray, made: Mapping[str, np.ndarray], scheme: str) -> QuantizedLayer:
    narrow, name = NARROW_FORMATS[SCHEMES[scheme]], f"{module}.weight"
    scale = made[f"{name}_scale"].view(narrow.scale_dtype).reshape(narrow.scale_shape(wide.shape))
    exact = wide.astype(np.float64)
    difference = narrow.decode(made[name], scale) - exact
    norm = float(np.linalg.norm(exact))
    return QuantizedLayer(
        module,
        (wide.shape[0], wide.shape[1]),
        float(np.linalg.norm(difference)) / norm if norm else 0.0,
        float(np.abs(difference).max()),
        wide.nbytes,
        sum(array.nbytes for array in made.values()),
    )


def _card(name: str, own: str, scheme: str, excluded: list[str], layers: list[QuantizedLayer]) -> str:
    before, after = (sum(sizes) for sizes in zip(*((layer.before, layer.after) for layer in layers), strict=True))
    rows = [
        f"| {layer.module} | {layer.shape[0]} x {layer.shape[1]} | {layer.error:.3%} | {layer.largest_error:.3g} | "
        f"{layer.after / layer.before:.3f} |"
        for layer in layers
    ]
    return "\n".join(
        [
            f"# {name}, quantised ({scheme})",
            "",
            f"An EAGLE-3 draft in AMD Quark's file layout, made of {name} by `eagle3-jax quantize --scheme {scheme}`.",
            f"Kept as they were: {', '.join(excluded) or 'no linear layer'}. The quantised layers take {after} bytes, "
            f"{after / before:.3f} of the {before} they took. Everything else is {name}'s: see its card.",
            "",
            "Widened, as by default on CPU, only the weights are rounded; with `--draft-set activations=fake_quant` "
            "activations are too, as on a card. What that costs in acceptance, beside the bytes:",
            "",
            "```",
            f"eagle3-jax evaluate --target TARGET --draft {name} --compare {own} --prompts mt-bench,humaneval",
            "```",
            "",
            "Error: Frobenius norm of the difference relative to the weight's; the largest difference of an element.",
            "",
            "| layer | out x in | error | largest | bytes |",
            "|---|---|---|---|---|",
            *rows,
            "",
        ]
    )
