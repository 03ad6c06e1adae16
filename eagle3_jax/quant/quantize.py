"""Quantising weights and trees of them, and back; on the host, exactly.

Source: Quark's schemes ptpc_fp8, fp8 and mxfp4; DeepSeek-V3 (arXiv 2412.19437), section 3.3, for blocks;
compressed-tensors' symmetric groups for int4.
"""

import dataclasses
import re
from collections.abc import Collection
from typing import Any

import jax
import numpy as np

from eagle3_jax.errors import Eagle3Error
from eagle3_jax.quant import fp8
from eagle3_jax.quant.formats import FLOAT_FORMATS, NARROW_FORMATS, check_format
from eagle3_jax.quant.products import chosen_mode
from eagle3_jax.quant.weight import Weight, is_weight, tree_path

SCHEMES = {
    "ptpc_fp8": "fp8_channel",
    "fp8": "fp8_tensor",
    "fp8_block": "fp8_block",
    "mxfp4": "mxfp4",
    "int4": "int4",
}
"""Names of schemes and the format of each one's matrices."""

KEPT = (r"embed", r"head", r"fc", r"(.*/)?(router|k_b|v_b)")
"""Modules that stay as they are by default: what maps to and from the vocabulary, a draft's fc, routers, and what
latent attention multiplies head by head."""


def quantize_tree(params: Any, scheme: str, exclude: Collection[str] = KEPT, activations: str | None = None) -> Any:
    """Quantise a weight, or every matrix of a parameter tree.

    The model that uses the tree must be told: its config's `weights` are then
    `eagle3_jax.quant.weight.formats_of(params, config.weights)`.

    Args:
        params: a `Weight` or a tree of them, wide.
        scheme: a key of `SCHEMES`.
        exclude: regular expressions; a module whose whole path in the tree, e.g. "layers_3/mlp/down", matches one
            stays as it is.
        activations: how those of the narrow weights are rounded, see `eagle3_jax.quant.products.chosen_mode`.

    Returns:
        The same tree with narrow weights.

    Raises:
        Eagle3Error: no weights, an unknown scheme or wish, a malformed pattern, a weight that is narrow already,
            holds NaN or infinity, or has a width that the format cannot group.

    Example:
        >>> narrow = quantize_tree(Weight(jnp.ones((64, 8))), "mxfp4")  # doctest: +SKIP
        >>> narrow.value.shape, narrow.scale.shape  # doctest: +SKIP
        ((8, 32), (8, 2))
    """
    if not isinstance(scheme, str) or scheme not in SCHEMES:
        raise Eagle3Error(f"scheme {scheme!r} is not known; use {', '.join(SCHEMES)}")
    format = SCHEMES[scheme]
    mode = chosen_mode(format, activations, narrow=True)
    patterns = read_patterns(exclude, "exclude")
    if not any(map(is_weight, jax.tree.leaves(params, is_leaf=is_weight))):
        raise Eagle3Error(f"a {type(params).__name__} without weights cannot be quantised; give a loaded model")

    def narrowed(keys: tuple[Any, ...], leaf: Any) -> Any:
        path = tree_path(keys)
        if not is_weight(leaf) or stays(path, leaf, patterns):
            return leaf
        return _quantized(leaf, format, mode, path or "the weight")

    return jax.tree_util.tree_map_with_path(narrowed, params, is_leaf=is_weight)


def read_patterns(patterns: Collection[str], what: str) -> list[re.Pattern[str]]:
    """Regular expressions, compiled.

    Args:
        patterns: a list of them; one string alone would be taken for a list of letters. what: their name for messages.

    Raises:
        Eagle3Error: no list of strings, or a malformed one.
    """
    strings = isinstance(patterns, Collection) and all(isinstance(pattern, str) for pattern in patterns)
    if isinstance(patterns, str) or not strings:
        raise Eagle3Error(f"{what} is {patterns!r:.80}; a list of regular expressions is needed")
    try:
        return [re.compile(pattern) for pattern in patterns]
    except re.error as error:
        raise Eagle3Error(f"{what} {error.pattern!r} is no regular expression: {error}") from error


def stays(path: str, weight: Weight, kept: Collection[re.Pattern[str]]) -> bool:
    """Whether quantising leaves a weight as it is: a vector, or of a module whose whole path matches a pattern.

    Args:
        path: of the weight in the tree, e.g. "layers_3/mlp/down/weight".
        weight: the weight, with or without values.
        kept: the patterns, as `read_patterns` gives them.
    """
    module = path.removesuffix("/weight")
    return weight.layout == "n" or any(pattern.fullmatch(module) for pattern in kept)


def dequantize_tree(params: Any, format: str = "f32", layout: str = "kn") -> Any:
    """Make every narrow weight of a tree, or the one given, wide again; wide ones stay as they are.

    Activations are rounded as before: a dequantised tree computes what the narrow one does.

    Args:
        params: a `Weight` or a tree of them.
        format: float format of the wide weights, a key of `FLOAT_FORMATS`.
        layout: theirs, "kn" or "nk".

    Raises:
        Eagle3Error: a format that is not wide.
    """
    check_format(format)
    if format not in FLOAT_FORMATS:
        raise Eagle3Error(f"format {format!r} is narrow; dequantise to {', '.join(FLOAT_FORMATS)}")

    def widened(leaf: Any) -> Any:
        if not is_weight(leaf) or leaf.scale is None:
            return leaf
        wide = wide_values(leaf)
        value = np.array(wide.swapaxes(-1, -2) if layout == "kn" else wide, FLOAT_FORMATS[format], order="C")
        return dataclasses.replace(leaf, value=jax.device_put(value), scale=None, format=format, layout=layout)

    return jax.tree.map(widened, params, is_leaf=is_weight)


def convert_fp8(params: Any, flavour: str) -> Any:
    """Put every FP8 weight of a tree, or the one given, into the flavour that a card multiplies; numbers stay.

    Args:
        params: a `Weight` or a tree of them; the model must be told, as by `quantize_tree`.
        flavour: "fp8" is e4m3fn (OCP: gfx950, NVIDIA), "fnuz" is e4m3fnuz (gfx942).

    Raises:
        Eagle3Error: another flavour, or codes that the other one lacks (NaN, or 240 in e4m3fnuz).

    Example:
        >>> convert_fp8(target.params, "fnuz")  # doctest: +SKIP
    """
    if flavour not in ("fp8", "fnuz"):
        raise Eagle3Error(f"FP8 flavour {flavour!r} is not known; use fp8 or fnuz")
    convert = fp8.fn_to_fnuz if flavour == "fnuz" else fp8.fnuz_to_fn

    def converted(leaf: Any) -> Any:
        family, _, granularity = leaf.format.partition("_") if is_weight(leaf) else ("", "", "")
        if family not in ("fp8", "fnuz") or family == flavour:
            return leaf
        codes, scale = convert(np.asarray(leaf.value), np.asarray(leaf.scale))
        arrays = {"value": jax.device_put(codes), "scale": jax.device_put(scale)}
        return dataclasses.replace(leaf, format=f"{flavour}_{granularity}", **arrays)

    return jax.tree.map(converted, params, is_leaf=is_weight)


def wide_values(weight: Weight) -> np.ndarray:
    """The values of a matrix, narrow or not: float32 [..., N, K], on the host."""
    value = np.asarray(weight.value)
    if weight.scale is not None:
        return NARROW_FORMATS[weight.format].decode(value, np.asarray(weight.scale))
    return np.asarray(value.swapaxes(-1, -2) if weight.layout == "kn" else value, np.float32)


def encode_matrix(matrix: np.ndarray, format: str, what: str) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of a matrix.

    Args:
        matrix: float32 [..., N, K].
        format: a key of `NARROW_FORMATS`.
        what: the matrix's name for messages.

    Raises:
        Eagle3Error: NaN or infinity in it, or a width that the format cannot group.
    """
    narrow = NARROW_FORMATS[format]
    if not np.isfinite(matrix).all():
        raise Eagle3Error(f"{what} holds NaN or infinity; only finite weights can be quantised")
    if not narrow.fits(matrix.shape):
        raise Eagle3Error(f"{what} takes {matrix.shape[-1]} inputs, no multiple of {narrow.columns}; exclude it")
    return narrow.encode(matrix)


def _quantized(weight: Weight, format: str, mode: str, what: str) -> Weight:
    if weight.scale is not None:
        raise Eagle3Error(f"{what} is stored as {weight.format} already; dequantise it first")
    codes, scale = encode_matrix(wide_values(weight), format, what)
    return Weight(jax.device_put(codes), jax.device_put(scale), format, "nk", weight.axes, None, mode)
