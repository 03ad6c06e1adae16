"""Products of narrow weights against float64 products of plainly rounded numbers."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import Array
from xla import SHIPPED

from eagle3_jax.quant import products
from eagle3_jax.quant.activations import MODES, fake_quantize
from eagle3_jax.quant.formats import NARROW_FORMATS
from eagle3_jax.quant.products import modes_of, narrow_product, take_rows

RNG = np.random.default_rng(0)
MATRIX = RNG.standard_normal((264, 288)).astype(np.float32)  # [N, K]; blocks of 128 are ragged on both sides
X = RNG.standard_normal((3, 288)).astype(np.float32) * np.float32([[1.0], [300.0], [1e-4]])
STATIC = np.float32(0.7)
FAKE = jax.jit(fake_quantize, static_argnums=1, compiler_options=SHIPPED)
ROWS = jax.jit(take_rows, static_argnums=2)
PAIRS = [(format, mode) for format in NARROW_FORMATS for mode in modes_of(format)]


def rounded(x: np.ndarray, mode: str, least: float = 1 / (448 * 512)) -> np.ndarray:
    """Activations [M, K] in the numbers of a mode, element by element and group by group."""
    out = np.zeros(x.shape)
    size = {"fp8_group": 128, "mxfp4": 32, "mxfp8": 32}.get(mode, x.shape[1])
    for row in range(len(x)):
        for start in range(0, x.shape[1], size):
            group = x[row, start : start + size].astype(np.float32)
            amax = np.float32(np.abs(group).max())
            if mode.startswith("mx"):
                mantissa, exponent = np.frexp(amax)  # amax = mantissa 2^exponent, mantissa in [0.5, 1)
                bump = mode == "mxfp4" and mantissa >= 0.875
                scale = 2.0 ** (int(exponent) - 1 + bump - (2 if mode == "mxfp4" else 8))
                if mode == "mxfp4":
                    values = np.clip(group / scale, -6, 6).astype(ml_dtypes.float4_e2m1fn)
                else:
                    values = np.clip(group / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn)
            else:
                scale = STATIC if mode == "fp8_static" else max(amax / np.float32(448), np.float32(least))
                values = np.clip(group / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn)
            out[row, start : start + size] = values.astype(np.float64) * float(scale)
    return out


def expected(format: str, mode: str, x: np.ndarray = X) -> np.ndarray:
    fmt = NARROW_FORMATS[format]
    activations = x.astype(np.float64) if mode == "wide" else rounded(x, mode)
    return activations @ fmt.decode(*fmt.encode(MATRIX)).astype(np.float64).T


def product(format: str, mode: str, x: Array) -> Array:
    codes, scale = map(jnp.asarray, NARROW_FORMATS[format].encode(MATRIX))
    return narrow_product(x, codes, scale, format, mode, jnp.asarray(STATIC))


PRODUCT = jax.jit(product, static_argnums=(0, 1), compiler_options=SHIPPED)


def close(got: Array, want: np.ndarray) -> None:
    """Equal but for float32 sums of 288 terms, row by row."""
    assert got.dtype == jnp.float32 and got.shape == want.shape
    error = np.abs(np.asarray(got) - want) / np.maximum(np.abs(want).max(axis=-1, keepdims=True), 1e-30)
    assert error.max() < 3e-6, error.max()


@pytest.mark.parametrize(("format", "mode"), PAIRS)
def test_narrow_products_are_those_of_the_rounded_numbers(format: str, mode: str) -> None:
    got = PRODUCT(format, mode, jnp.asarray(X))
    close(got, expected(format, mode))


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(
    ("format", "mode"), [("fp8_block", "fp8_group"), ("fp8_channel", "fp8_token"), ("mxfp4", "wide")]
)
def test_few_rows_of_whole_blocks(format: str, mode: str, apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not cut into blocks, and with the branch that other platforms take: row by row."""
    if apart:
        monkeypatch.setattr(products.lax, "platform_dependent", lambda *arrays, cpu, default: default(*arrays))
    fmt, x = NARROW_FORMATS[format], X[:, :256]
    codes, scale = map(jnp.asarray, fmt.encode(MATRIX[:, :256]))
    got = narrow_product(jnp.asarray(x), codes, scale, format, mode)
    activations = x.astype(np.float64) if mode == "wide" else rounded(x, mode)
    close(got, activations @ fmt.decode(*fmt.encode(MATRIX[:, :256])).astype(np.float64).T)


@pytest.mark.parametrize(("format", "mode"), [("fp8_block", "fp8_group"), ("mxfp4", "wide"), ("fp8_tensor", "wide")])
def test_many_rows_take_slices_of_even_parts(format: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps of two blocks each; two tiles of sixteen rows from each of eight parts, and a rest of eight."""
    monkeypatch.setattr(products, "TILE", 8 * 16 * 768)
    matrix = np.tile(MATRIX[:160, :256], (2, 3)) * np.linspace(0.5, 2, 768, dtype=np.float32)
    x = np.tile(X[:, :256], (14, 3))[:40]
    fmt = NARROW_FORMATS[format]
    codes, scale = fmt.encode(matrix)
    got = narrow_product(jnp.asarray(x), jnp.asarray(codes), jnp.asarray(scale), format, mode)
    activations = x.astype(np.float64) if mode == "wide" else rounded(x, mode)
    close(got, activations @ fmt.decode(codes, scale).astype(np.float64).T)


@pytest.mark.parametrize("mode", MODES)
def test_fake_quantised_activations_are_the_rounded_numbers(mode: str) -> None:
    got = FAKE(jnp.asarray(X), mode, jnp.asarray(STATIC))
    want = X if mode == "wide" else rounded(X, mode).astype(np.float32)
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("format", NARROW_FORMATS)
def test_tiles_and_a_rest_give_what_one_piece_gives(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "TILE", 128 * 288)
    close(jax.jit(lambda x: product(format, "wide", x))(jnp.asarray(X)), expected(format, "wide"))


def test_leading_dimensions_are_kept() -> None:
    got = PRODUCT("fp8_channel", "fp8_token", jnp.asarray(X).reshape(3, 1, 288))
    close(got.reshape(3, 264), expected("fp8_channel", "fp8_token"))
    assert jax.eval_shape(lambda x: product("fp8_channel", "fp8_token", x), X[0]).shape == (264,)


def test_bfloat16_activations_are_rounded_from_what_they_are() -> None:
    x = X.astype(ml_dtypes.bfloat16)
    close(
        product("fp8_channel", "fp8_token", jnp.asarray(x)), expected("fp8_channel", "fp8_token", x.astype(np.float32))
    )


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "wide"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_token_that_is_not_finite_spoils_itself_alone(mode: str, bad: float) -> None:
    x = X.copy()
    x[1, 7] = bad
    got = np.asarray(FAKE(jnp.asarray(x), mode, jnp.asarray(STATIC)))
    clean = np.asarray(FAKE(jnp.asarray(X), mode, jnp.asarray(STATIC)))
    np.testing.assert_array_equal(got[[0, 2]], clean[[0, 2]])
    # A calibrated scale clips infinity as it clips any large number.
    assert np.isnan(got[1]).any() == (mode != "fp8_static" or np.isnan(bad))


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "wide"])
def test_a_token_of_zeros_and_one_of_denormals_stay_near_zero(mode: str) -> None:
    x = np.zeros((3, 288), np.float32)
    x[1] = 1e-41
    got = np.asarray(FAKE(jnp.asarray(x), mode, jnp.asarray(STATIC)))
    assert np.isfinite(got).all() and np.abs(got).max() < 1e-37


@pytest.mark.parametrize("format", NARROW_FORMATS)
def test_rows_are_those_of_the_wide_matrix(format: str) -> None:
    fmt = NARROW_FORMATS[format]
    codes, scale = fmt.encode(MATRIX)
    ids = np.int32([[0, 263, 127], [128, 1, -5]])
    got = ROWS(jnp.asarray(codes), jnp.asarray(scale), format, jnp.asarray(ids))
    np.testing.assert_array_equal(got, fmt.decode(codes, scale)[ids.clip(0)])


@pytest.mark.parametrize("format", ["fp8_tensor", "fp8_channel", "fp8_block"])
def test_fp8_operands_enter_the_product_narrow(format: str) -> None:
    """What a back end makes of it is its own business; the program has no wide weight."""
    program = jax.make_jaxpr(lambda x: product(format, modes_of(format)[0], x))(jnp.tile(X, (2, 1)))
    text = str(program)
    assert "f32[264,288]" not in text and "bf16[264,288]" not in text
    assert "dot_general" in text and "preferred_element_type=float32" in text
    dots = [line for line in text.splitlines() if "= dot_general" in line]
    assert dots
