"""Activations in the numbers a card multiplies narrow weights with, scaled as they come.

A mode says how the activations of a matrix product are rounded:

wide        not at all: weight-only quantisation.
fp8_token   e4m3 with one scale a token, amax / 448: ptpc_fp8.
fp8_group   e4m3 with one scale for 128 elements of a token: blocks of DeepSeek's kind.
fp8_static  e4m3 with one calibrated scale, stored with the weight: Quark's fp8.
mxfp4       E2M1 with a power of two for 32 elements of a token, Quark's "even" rule.
mxfp8       e4m3 with a power of two for 32 elements of a token (OCP MX 1.0, section 6.3).

Dimension letters: K contracting width, G groups of a token.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from eagle3_jax.errors import Eagle3Error
from eagle3_jax.quant import fp8, mxfp4

MODES = ("wide", "fp8_token", "fp8_group", "fp8_static", "mxfp4", "mxfp8")

LEAST_TOKEN_SCALE = 1 / (448 * 512)
"""Of the modes with float scales, so that a token of zeros divides by something (vLLM's choice)."""

_GROUPS = {"fp8_group": fp8.BLOCK, "mxfp4": mxfp4.GROUP, "mxfp8": mxfp4.GROUP}
_FNUZ_RANGE = 224.0  # half of e4m3fn's, not fnuz's own 240: the codes then are the same on either kind of card
_E4M3_LARGEST_EXPONENT = 8


def check_mode(mode: str) -> None:
    """Refuse a mode that is not known.

    Raises:
        Eagle3Error: not in `MODES`.
    """
    if mode not in MODES:
        raise Eagle3Error(f"activations {mode!r} are not known; use {', '.join(MODES)}")


def quantize_activations(
    x: Array, mode: str, static: Array | None = None, dtype: np.dtype = fp8.E4M3FN
) -> tuple[Array, Array]:
    """Round activations to the numbers of a mode.

    Args:
        x: [..., K]. A token that is not finite becomes NaN, and no other.
        mode: of `MODES`, not "wide".
        static: the scale of "fp8_static", float32 of one element.
        dtype: of FP8 codes, `fp8.E4M3FN` or `fp8.E4M3FNUZ`.

    Returns:
        Codes [..., K], e4m3 or E2M1, and scales [..., G], float32 or E8M0; their product is x, rounded. G is 1
        where the whole token has one scale.
    """
    x = x.astype(jnp.float32)
    limit = _FNUZ_RANGE if dtype == fp8.E4M3FNUZ else fp8.largest(dtype)
    if mode == "fp8_static":
        assert static is not None
        # Calibrated for e4m3fn.
        scale = static.astype(jnp.float32).reshape(()) * (fp8.largest(fp8.E4M3FN) / limit)
        scale = jnp.broadcast_to(scale, (*x.shape[:-1], 1))
        return fp8.saturating_cast((x / scale).clip(-limit, limit), dtype), scale
    groups = _grouped(x, _GROUPS.get(mode, x.shape[-1]))
    maxima = jnp.max(jnp.abs(groups), axis=-1)
    if mode in ("fp8_token", "fp8_group"):
        scale = jnp.maximum(maxima / limit, LEAST_TOKEN_SCALE)
        codes = fp8.saturating_cast(groups / scale[..., None], dtype)
    else:
        if mode == "mxfp4":
            scale = mxfp4.even_scales(maxima)
        else:
            exponent = (lax.bitcast_convert_type(maxima, jnp.int32) >> 23) - _E4M3_LARGEST_EXPONENT
            scale = lax.bitcast_convert_type(exponent.clip(1, 254).astype(jnp.uint8), mxfp4.E8M0)
        scale = jnp.where(jnp.isfinite(maxima), scale, jnp.asarray(jnp.nan, scale.dtype))
        scaled = groups / scale.astype(jnp.float32)[..., None]
        if mode == "mxfp4":
            # Neither infinity nor NaN has a number in E2M1; the scale carries them.
            codes = jnp.where(jnp.isnan(scaled), 0, scaled).clip(-6, 6).astype(mxfp4.E2M1)
        else:
            codes = fp8.saturating_cast(scaled)
    return codes.reshape(*x.shape[:-1], -1)[..., : x.shape[-1]], scale


def fake_quantize(x: Array, mode: str, static: Array | None = None) -> Array:
    """Activations rounded to the numbers of a mode and scaled back: [..., K], in x's dtype.

    With the wide values of a narrow weight this gives the card's products on any back end.
    """
    if mode == "wide":
        return x
    codes, scale = quantize_activations(x, mode, static)
    groups = _grouped(codes.astype(jnp.float32), _GROUPS.get(mode, x.shape[-1]))
    wide = groups * scale.astype(jnp.float32)[..., None]
    return wide.reshape(*x.shape[:-1], -1)[..., : x.shape[-1]].astype(x.dtype)


def _grouped(x: Array, size: int) -> Array:
    """[..., K] -> [..., G, size], the last group filled with zeros."""
    missing = -x.shape[-1] % size
    if missing:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
    return x.reshape(*x.shape[:-1], -1, size)
