"""Rotary position embedding (arXiv 2104.09864) with the linear, llama3 and YaRN (arXiv 2309.00071) rules."""

import math

import jax.numpy as jnp
import numpy as np
from jax import Array

from eagle3_jax.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Rotation per token of each pair of dimensions.

    Returns:
        float32 [head_dim / 2] in radians per token, and the factor that multiplies cos and sin.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    inverse = rope.theta**-exponent
    if rope.kind == "linear":
        return (inverse / rope.factor).astype(np.float32), 1.0
    if rope.kind == "llama3":
        return _llama3(rope, inverse).astype(np.float32), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, inverse, head_dim).astype(np.float32), _yarn_factor(rope)
    return inverse.astype(np.float32), 1.0


def _llama3(rope: RopeConfig, inverse: np.ndarray) -> np.ndarray:
    wavelength = 2 * math.pi / inverse
    smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    smooth = np.clip(smooth, 0.0, 1.0)
    return (1 - smooth) * inverse / rope.factor + smooth * inverse


def _yarn(rope: RopeConfig, inverse: np.ndarray, head_dim: int) -> np.ndarray:
    def dimension(rotations: float) -> float:
        span = rope.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(span) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (np.arange(head_dim // 2) - low) / max(high - low, 1e-3)
    interpolated = np.clip(ramp, 0.0, 1.0)
    return inverse / rope.factor * interpolated + inverse * (1 - interpolated)


def yarn_temperature(factor: float, mscale: float) -> float:
    """What YaRN multiplies queries and keys by when the context grows by `factor` (section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return yarn_temperature(rope.factor, rope.mscale) / yarn_temperature(rope.factor, rope.mscale_all_dim)
    return yarn_temperature(rope.factor, 1.0)


def rope_angles(rope: RopeConfig, rotary_dim: int, positions: Array) -> tuple[Array, Array]:
    """Cos and sin of each position's rotation: int32 [B, T] -> two float32 [B, T, 1, rotary_dim / 2]."""
    inverse, factor = inverse_frequencies(rope, rotary_dim)
    angles = positions.astype(jnp.float32)[..., None, None] * inverse
    return jnp.cos(angles) * np.float32(factor), jnp.sin(angles) * np.float32(factor)


def rotate(x: Array, angles: tuple[Array, Array]) -> Array:
    """Rotate the first dimensions of x [B, T, N, D], as many as `angles` are for; dtype kept.

    Pairs are (i, i + R/2) of the R = 2 * angles.shape[-1] dimensions that turn; the others pass through.
    """
    cos, sin = angles
    half = cos.shape[-1]
    wide = x.astype(jnp.float32)
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    turned = [first * cos - second * sin, second * cos + first * sin, rest]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
