"""Rotary embedding: the scaling rules restated from their papers, the rotation as complex multiplication."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from eagle3_jax.config import RopeConfig
from eagle3_jax.models.rope import inverse_frequencies, rope_angles, rotate


def plain(theta: float, width: int) -> np.ndarray:
    """RoFormer: pair i turns by theta^(-2i/d) a token."""
    return np.array([theta ** (-2 * i / width) for i in range(width // 2)])


@pytest.mark.parametrize(("theta", "width"), [(10000.0, 8), (500000.0, 64), (130000.0, 2)])
def test_default_frequencies_are_a_geometric_series(theta: float, width: int) -> None:
    inverse, factor = inverse_frequencies(RopeConfig(theta=theta), width)
    assert inverse.dtype == np.float32 and factor == 1.0
    np.testing.assert_allclose(inverse, plain(theta, width), rtol=1e-6)


def test_default_frequencies_of_base_10000_are_known_numbers() -> None:
    inverse, _ = inverse_frequencies(RopeConfig(), 8)
    np.testing.assert_allclose(inverse, [1.0, 0.1, 0.01, 0.001], rtol=1e-6)


def test_linear_scaling_turns_slower_by_its_factor() -> None:
    inverse, factor = inverse_frequencies(RopeConfig(kind="linear", factor=4.0), 16)
    np.testing.assert_allclose(inverse, plain(10000.0, 16) / 4, rtol=1e-6)
    assert factor == 1.0


def test_llama3_scaling_keeps_short_waves_stretches_long_ones_and_blends_between() -> None:
    """Llama 3.1's apply_scaling, wave by wave."""
    rope = RopeConfig(500000.0, "llama3", 8.0, original_max_position=8192, low_freq_factor=1.0, high_freq_factor=4.0)
    inverse, factor = inverse_frequencies(rope, 128)
    expected, branches = [], {"short": 0, "long": 0, "between": 0}
    for frequency in plain(500000.0, 128):
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4.0:
            expected.append(frequency)
            branches["short"] += 1
        elif wavelength > 8192 / 1.0:
            expected.append(frequency / 8.0)
            branches["long"] += 1
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            expected.append((1 - smooth) * frequency / 8.0 + smooth * frequency)
            branches["between"] += 1
    assert all(branches.values())
    np.testing.assert_allclose(inverse, expected, rtol=1e-6)
    assert factor == 1.0


def yarn(theta: float, width: int, rope: RopeConfig) -> np.ndarray:
    """YaRN (arXiv 2309.00071), section 3.2, with the linear ramp over dimensions of its reference code."""
    span = rope.original_max_position

    def dimension_of(rotations: float) -> float:  # the (fractional) pair that turns `rotations` times over `span`
        return width / 2 * math.log(span / (2 * math.pi * rotations)) / math.log(theta)

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    out = []
    for i, frequency in enumerate(plain(theta, width)):
        if i <= low:
            kept = 1.0
        elif i >= high:
            kept = 0.0
        else:
            kept = 1.0 - (i - low) / (high - low)
        out.append(kept * frequency + (1 - kept) * frequency / rope.factor)
    return np.array(out)


@pytest.mark.parametrize(
    ("rope", "width"),
    [
        pytest.param(RopeConfig(10000.0, "yarn", 4.0, original_max_position=4096), 128, id="paper"),
        pytest.param(RopeConfig(150000.0, "yarn", 32.0, 4096, truncate=False), 64, id="gpt-oss"),
        pytest.param(RopeConfig(50000.0, "yarn", 64.0, 4096, beta_fast=1.0, beta_slow=1.0), 64, id="kimi"),
        pytest.param(RopeConfig(10000.0, "yarn", 8.0, 256, beta_fast=64.0, beta_slow=0.01), 16, id="clamped"),
    ],
)
def test_yarn_keeps_fast_pairs_stretches_slow_ones_and_ramps_between(rope: RopeConfig, width: int) -> None:
    inverse, _ = inverse_frequencies(rope, width)
    expected = yarn(rope.theta, width, rope)
    np.testing.assert_allclose(inverse, expected, rtol=1e-6)
    ratio = expected / plain(rope.theta, width)
    assert ratio[0] == 1.0 and ratio[-1] < 1.0  # else the case says nothing


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({}, 1.2772588722239781),  # 0.1 ln 16 + 1
        ({"attention_factor": 0.75}, 0.75),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 2.0, "mscale_all_dim": 0.5}, 1.5545177444479562 / 1.138629436111989),
        ({"mscale": 2.0}, 1.2772588722239781),  # both or neither
    ],
)
def test_yarn_multiplies_cos_and_sin_by_its_attention_factor(extra: dict[str, float], expected: float) -> None:
    rope = RopeConfig(10000.0, "yarn", 16.0, original_max_position=4096, **extra)
    _, factor = inverse_frequencies(rope, 8)
    assert factor == pytest.approx(expected, rel=1e-12)
    cos, sin = rope_angles(rope, 8, jnp.asarray([[0, 3]], jnp.int32))
    np.testing.assert_allclose(np.hypot(cos, sin), expected, rtol=1e-6)


def test_yarn_without_an_extension_has_factor_one() -> None:
    assert inverse_frequencies(RopeConfig(kind="yarn", factor=1.0, original_max_position=64), 8)[1] == 1.0


def test_rotation_is_multiplication_of_the_two_halves_by_a_complex_unit() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 4, 3, 8)).astype(np.float32)
    positions = np.array([[0, 1, 2, 500], [7, 0, 1000, 3]])
    rope = RopeConfig(kind="linear", factor=2.0)
    got = np.asarray(rotate(jnp.asarray(x), rope_angles(rope, 8, jnp.asarray(positions, jnp.int32))))
    turn = np.exp(1j * positions[..., None, None] * plain(10000.0, 8) / 2)
    expected = (x[..., :4] + 1j * x[..., 4:]) * turn
    np.testing.assert_allclose(got, np.concatenate([expected.real, expected.imag], axis=-1), atol=2e-4)
    assert np.array_equal(got[0, 0], x[0, 0])  # position 0 is left alone


def test_scores_depend_on_the_distance_alone() -> None:
    rng = np.random.default_rng(1)
    q, k = (jnp.asarray(rng.standard_normal((1, 1, 1, 8)), jnp.float32) for _ in range(2))

    def score(m: int, n: int) -> float:
        turned = [rotate(x, rope_angles(RopeConfig(), 8, jnp.asarray([[p]], jnp.int32))) for x, p in ((q, m), (k, n))]
        return float(np.sum(np.asarray(turned[0]) * np.asarray(turned[1])))

    assert score(5, 2) == pytest.approx(score(105, 102), abs=1e-4)
    assert abs(score(5, 2) - score(5, 4)) > 1e-3


def test_narrow_activations_are_rotated_in_float32_and_keep_their_dtype() -> None:
    rng = np.random.default_rng(2)
    x = jnp.asarray(rng.standard_normal((1, 3, 1, 8)), jnp.bfloat16)
    angles = rope_angles(RopeConfig(), 8, jnp.asarray([[300, 301, 302]], jnp.int32))
    got = rotate(x, angles)
    assert got.dtype == jnp.bfloat16
    wide = np.asarray(rotate(x.astype(jnp.float32), angles))
    assert np.array_equal(got, wide.astype(jnp.bfloat16))
