"""The shared layers against numpy, at weights that are set by hand."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from eagle3_jax.models.layers import Attention, Linear, RMSNorm, SwiGLU, VocabularyMatrix
from eagle3_jax.quant.weight import WeightFormats

KN, NK = WeightFormats(layout="kn"), WeightFormats(layout="nk")
RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 3, 6)).astype(np.float32)


def with_random_weights(module: nn.Module, *inputs: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The parameter tree with every value random, and the same as logical [K, N] or [N] arrays by path."""
    params = module.init(jax.random.key(0), *inputs)["params"]
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), params)
    by_path = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = "/".join(key.key for key in path if isinstance(key, jax.tree_util.DictKey))
        by_path[name] = np.asarray(leaf, np.float64)
    return params, by_path


def logical(weight: np.ndarray, formats: WeightFormats) -> np.ndarray:
    return weight.T if formats.layout == "nk" and weight.ndim == 2 else weight


@pytest.mark.parametrize("formats", [KN, NK], ids=["kn", "nk"])
@pytest.mark.parametrize("use_bias", [False, True])
def test_linear_is_x_times_w_plus_b(formats: WeightFormats, use_bias: bool) -> None:
    module = Linear(5, formats, ("embed", "mlp"), use_bias)
    params, w = with_random_weights(module, jnp.asarray(X))
    assert set(w) == ({"weight", "bias"} if use_bias else {"weight"})
    expected = X @ logical(w["weight"], formats) + w.get("bias", 0.0)
    np.testing.assert_allclose(module.apply({"params": params}, jnp.asarray(X)), expected, atol=1e-5)


def test_rms_norm_divides_by_the_root_mean_square() -> None:
    module = RMSNorm(0.1, KN)
    params, w = with_random_weights(module, jnp.asarray(X))
    expected = X / np.sqrt((X.astype(np.float64) ** 2).mean(-1, keepdims=True) + 0.1) * w["weight"]
    np.testing.assert_allclose(module.apply({"params": params}, jnp.asarray(X)), expected, atol=1e-6)


def test_rms_norm_of_bfloat16_rounds_once_at_the_end() -> None:
    x = jnp.asarray(RNG.standard_normal((20, 6)), jnp.bfloat16)
    module = RMSNorm(1e-6, KN)
    params, w = with_random_weights(module, x)
    wide = np.asarray(x, np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * w["weight"]
    got = module.apply({"params": params}, x)
    assert got.dtype == jnp.bfloat16 and np.array_equal(got, expected.astype(jnp.bfloat16))


@pytest.mark.parametrize("use_bias", [False, True])
def test_swiglu_is_down_of_silu_gate_times_up(use_bias: bool) -> None:
    module = SwiGLU(6, 7, KN, use_bias)
    params, w = with_random_weights(module, jnp.asarray(X))

    def linear(name: str, x: np.ndarray) -> np.ndarray:
        return x @ w[f"{name}/weight"] + (w[f"{name}/bias"] if use_bias else 0.0)

    gate = linear("gate", X)
    expected = linear("down", gate / (1 + np.exp(-gate)) * linear("up", X))
    np.testing.assert_allclose(module.apply({"params": params}, jnp.asarray(X)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("input_bias", "output_bias"), [(False, False), (True, False), (True, True)])
def test_attention_rotates_queries_and_keys_but_not_values(input_bias: bool, output_bias: bool) -> None:
    """Three heads of width 2 over one key-value head, a quarter turn for every token, whatever it mixes with."""
    module = Attention(6, 3, 1, 2, KN, input_bias, output_bias)
    quarter = (jnp.zeros((1, 1, 1, 1)), jnp.ones((1, 1, 1, 1)))
    seen: dict[str, Array] = {}

    def attend(q: Array, k: Array, v: Array, cache: int, **_: Any) -> tuple[Array, int]:
        seen.update(q=q, k=k, v=v)
        return q.reshape(*q.shape[:2], -1), cache + 1

    arguments = (jnp.asarray(X), quarter, attend, 41)
    params, w = with_random_weights(module, *arguments)
    out, cache = module.apply({"params": params}, *arguments)

    def project(name: str, heads: int) -> np.ndarray:
        bias = w[f"{name}/bias"] if input_bias else 0.0
        return (X @ w[f"{name}/weight"] + bias).reshape(2, 3, heads, 2)

    def turned(x: np.ndarray) -> np.ndarray:  # (a, b) -> (-b, a)
        return np.stack([-x[..., 1], x[..., 0]], axis=-1)

    np.testing.assert_allclose(seen["q"], turned(project("q", 3)), atol=1e-5)
    np.testing.assert_allclose(seen["k"], turned(project("k", 1)), atol=1e-5)
    np.testing.assert_allclose(seen["v"], project("v", 1), atol=1e-5)
    expected = turned(project("q", 3)).reshape(2, 3, 6) @ w["o/weight"] + (w["o/bias"] if output_bias else 0.0)
    np.testing.assert_allclose(out, expected, atol=2e-5)
    assert cache == 42


def test_the_formats_of_a_layer_are_looked_up_by_its_path() -> None:
    formats = WeightFormats(exceptions=(("gate/weight", "bf16", "nk"),))
    module = SwiGLU(6, 7, formats)
    params = jax.eval_shape(lambda: module.init(jax.random.key(0), jnp.asarray(X)))["params"]
    gate, up = params["gate"]["weight"], params["up"]["weight"]
    assert (gate.value.shape, gate.value.dtype) == ((7, 6), jnp.bfloat16)
    assert (up.value.shape, up.value.dtype) == ((6, 7), jnp.float32)


def test_a_vocabulary_matrix_is_both_embedding_and_head() -> None:
    module = VocabularyMatrix(6, 9, NK)
    params, w = with_random_weights(module)
    weight = module.apply({"params": params})
    assert weight.shape == (6, 9) and w["weight"].shape == (9, 6)
    ids = np.array([[8, 0, 3]])
    np.testing.assert_allclose(weight.outputs(jnp.asarray(ids, jnp.int32)), w["weight"][ids], rtol=1e-6)
    np.testing.assert_allclose(weight.matmul(jnp.asarray(X)), X @ w["weight"].T, atol=1e-5)
