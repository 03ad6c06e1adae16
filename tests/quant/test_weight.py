"""The weight leaf: both layouts are one matrix, and one declaration describes it everywhere."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle3_jax.errors import Eagle3Error
from eagle3_jax.quant.formats import FLOAT_FORMATS, NARROW_FORMATS
from eagle3_jax.quant.products import modes_of
from eagle3_jax.quant.weight import Weight, WeightFormats, WeightSpec, formats_of, is_weight, weight_bytes

RNG = np.random.default_rng(0)
MATRIX = RNG.standard_normal((5, 7)).astype(np.float32)
"""Logical [K, N]."""


def stored(layout: str, format: str = "f32") -> Weight:
    value = MATRIX.T if layout == "nk" else MATRIX
    return Weight(jnp.asarray(value, FLOAT_FORMATS[format]), None, format, layout, ("embed", "vocab"))


@pytest.mark.parametrize("layout", ["kn", "nk"])
@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5)])
def test_matmul_is_numpys_in_either_layout(layout: str, shape: tuple[int, ...]) -> None:
    x = RNG.standard_normal(shape).astype(np.float32)
    np.testing.assert_allclose(stored(layout).matmul(jnp.asarray(x)), x.astype(np.float64) @ MATRIX, atol=1e-5)


@pytest.mark.parametrize("layout", ["kn", "nk"])
def test_outputs_are_the_columns_of_the_matrix(layout: str) -> None:
    ids = np.array([[6, 0, 3], [3, 1, 5]])
    got = stored(layout).outputs(jnp.asarray(ids, jnp.int32))
    assert got.shape == (2, 3, 5)
    assert np.array_equal(got, MATRIX.T[ids])


@pytest.mark.parametrize("layout", ["kn", "nk"])
def test_outputs_outside_the_matrix_are_clipped_not_wrapped(layout: str) -> None:
    got = stored(layout).outputs(jnp.asarray([-1, 7, 2**31 - 1], jnp.int32))
    assert np.array_equal(got, MATRIX.T[[0, 6, 6]])


@pytest.mark.parametrize("layout", ["kn", "nk"])
def test_the_logical_shape_does_not_depend_on_the_layout(layout: str) -> None:
    assert stored(layout).shape == (5, 7)
    assert Weight(jnp.zeros(3), layout="n").shape == (3,)


@pytest.mark.parametrize("layout", ["kn", "nk"])
def test_one_expert_comes_out_of_a_stack(layout: str) -> None:
    stack = np.stack([MATRIX, 2 * MATRIX, -MATRIX])
    value = stack.swapaxes(1, 2) if layout == "nk" else stack
    weight = Weight(jnp.asarray(value), None, "f32", layout, ("experts", "embed", "mlp"))
    assert weight.shape == (3, 5, 7)
    one = weight.expert(jnp.int32(1))
    assert (one.shape, one.axes, one.layout) == ((5, 7), ("embed", "mlp"), layout)
    x = RNG.standard_normal((2, 5)).astype(np.float32)
    np.testing.assert_allclose(one.matmul(jnp.asarray(x)), 2 * x.astype(np.float64) @ MATRIX, atol=1e-5)


def test_a_stack_is_declared_like_its_members() -> None:
    formats = WeightFormats("bf16", "nk", "f32")
    matrix = formats.spec("experts/up/weight", (8, 400, 100), ("experts", "embed", "mlp"))
    bias = formats.spec("experts/up/bias", (8, 100), ("experts", "mlp"), fill=0.0)
    router = formats.spec("router/correction", (8,), ("experts",), fill=0.0)
    assert (matrix.format, matrix.layout, bias.format, bias.layout) == ("bf16", "nk", "f32", "n")
    assert (router.format, router.layout) == ("f32", "n")
    drawn = matrix.init(jax.random.key(0))
    assert drawn.value.shape == (8, 100, 400) and drawn.shape == (8, 400, 100)
    # Each member is scaled by its own contracting width, as it would be alone.
    assert abs(float(jnp.std(drawn.value.astype(jnp.float32))) - 400**-0.5) < 1e-3


@pytest.mark.parametrize("layout", ["kn", "nk"])
def test_narrow_weights_take_the_activations_dtype_and_sum_in_float32(layout: str) -> None:
    x = jnp.asarray(RNG.standard_normal((8, 5)), jnp.float32)
    narrow = np.asarray(MATRIX, jnp.bfloat16).astype(np.float64)
    got = stored(layout, "bf16").matmul(x)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, np.asarray(x, np.float64) @ narrow, atol=1e-5)
    # The CPU sums in float32 anyway; other back ends do what the program says.
    y = jax.make_jaxpr(stored(layout, "bf16").matmul)(x.astype(jnp.bfloat16))
    (dot,) = [equation for equation in y.eqns if equation.primitive.name == "dot_general"]
    assert (dot.outvars[0].aval.dtype, y.out_avals[0].dtype) == (jnp.float32, jnp.bfloat16)


@pytest.mark.parametrize("format", ["f32", "bf16", "f16"])
@pytest.mark.parametrize(("layout", "expected"), [("kn", (64, 48)), ("nk", (48, 64))])
def test_an_abstract_init_describes_the_concrete_one(format: str, layout: str, expected: tuple[int, ...]) -> None:
    spec = WeightSpec((64, 48), ("embed", "mlp"), format, layout)
    described = jax.eval_shape(spec.init, jax.random.key(0))
    assert described.value.shape == expected and described.value.dtype == FLOAT_FORMATS[format]
    assert (described.shape, described.axes, described.format, described.layout) == (
        (64, 48),
        ("embed", "mlp"),
        format,
        layout,
    )
    concrete = spec.init(jax.random.key(0))
    assert jax.tree.structure(concrete) == jax.tree.structure(described)
    assert (concrete.value.shape, concrete.value.dtype) == (expected, FLOAT_FORMATS[format])
    # Scaled by 1 / sqrt(K), whatever the layout; 3,072 draws know their deviation to a few per cent.
    assert np.std(np.asarray(concrete.value, np.float64)) == pytest.approx(64**-0.5, rel=0.1)


def test_a_filled_weight_is_constant() -> None:
    weight = WeightSpec((4,), ("embed",), "bf16", "n", fill=1.0).init(jax.random.key(0))
    assert weight.value.dtype == jnp.bfloat16 and np.array_equal(weight.value, np.ones(4))


@pytest.mark.parametrize("format", ["F32", "fp8", "", "float32"])
def test_an_unknown_format_is_refused_with_the_known_ones(format: str) -> None:
    with pytest.raises(Eagle3Error, match=f"{format!r}.*f32, bf16, f16"):
        WeightSpec((2, 2), ("a", "b"), format).init(jax.random.key(0))


def test_exceptions_go_by_the_whole_path_and_leave_the_rest_at_the_defaults() -> None:
    formats = WeightFormats(
        format="bf16",
        layout="nk",
        vector_format="f16",
        exceptions=(("layers_1/mlp/down/weight", "f32", "kn"), ("norm/weight", "f32", "n")),
    )

    def described(path: str, shape: tuple[int, ...]) -> tuple[str, str]:
        spec = formats.spec(path, shape, ("a", "b")[: len(shape)], fill=0.5)
        assert (spec.shape, spec.axes, spec.fill) == (shape, ("a", "b")[: len(shape)], 0.5)
        return spec.format, spec.layout

    assert described("layers_1/mlp/down/weight", (2, 3)) == ("f32", "kn")
    assert described("layers_11/mlp/down/weight", (2, 3)) == ("bf16", "nk")
    assert described("mlp/down/weight", (2, 3)) == ("bf16", "nk")
    assert described("norm/weight", (3,)) == ("f32", "n")
    assert described("layers_1/norm/weight", (3,)) == ("f16", "n")


def test_formats_are_hashable_and_equal_by_value() -> None:
    one = WeightFormats(exceptions=(("a", "f32", "kn"),))
    other = WeightFormats(exceptions=(("a", "f32", "kn"),))
    assert one is not other and one == other and hash(one) == hash(other)
    different = [dataclasses.replace(one, **change) for change in ({"layout": "nk"}, {"exceptions": ()})]
    assert len({one, other, *different}) == 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.layout = "nk"  # type: ignore[misc]


def test_format_and_layout_are_static_so_jit_sees_another_layout_as_another_type() -> None:
    kn, nk = stored("kn"), stored("nk")
    assert jax.tree.structure(kn) != jax.tree.structure(nk)
    assert len(jax.tree.leaves(kn)) == 1
    traces = []

    def multiply(weight: Weight, x: jax.Array) -> jax.Array:
        traces.append(weight.layout)
        return weight.matmul(x)

    run, x = jax.jit(multiply), jnp.ones((1, 5))
    for weight in (kn, nk, jax.tree.map(lambda value: 2 * value, kn)):
        run(weight, x)
    assert traces == ["kn", "nk"]


def test_is_weight_stops_a_tree_map_at_weights() -> None:
    tree = {"a": stored("kn"), "b": jnp.zeros(2)}
    found = jax.tree.map(is_weight, tree, is_leaf=is_weight)
    assert found == {"a": True, "b": False}


def test_weight_bytes_counts_elements_times_width_of_real_and_abstract_trees() -> None:
    tree = {"a": stored("kn", "bf16"), "b": {"c": jnp.zeros((3, 2), jnp.float32), "d": jnp.zeros(5, jnp.int8)}}
    assert weight_bytes(tree) == 5 * 7 * 2 + 3 * 2 * 4 + 5
    assert weight_bytes(jax.eval_shape(lambda: tree)) == weight_bytes(tree)


# Narrow weights

NARROW = RNG.standard_normal((2, 24, 64)).astype(np.float32)
"""[E, N, K]."""


def narrow(format: str, activations: str = "wide", stacked: bool = False) -> Weight:
    codes, scale = map(jnp.asarray, NARROW_FORMATS[format].encode(NARROW if stacked else NARROW[0]))
    return Weight(codes, scale, format, "nk", ("experts", "embed", "mlp")[not stacked :], None, activations)


@pytest.mark.parametrize("format", ["fp8_tensor", "fnuz_channel", "fp8_block", "mxfp4", "int4"])
def test_a_narrow_weight_multiplies_and_is_looked_up_as_its_wide_values(format: str) -> None:
    weight = narrow(format, stacked=True)
    assert weight.shape == (2, 64, 24)
    fmt = NARROW_FORMATS[format]
    wide = fmt.decode(*fmt.encode(NARROW)).astype(np.float64)
    one = jax.jit(lambda w, i: w.expert(i))(weight, 1)
    assert (one.shape, one.axes) == ((64, 24), ("embed", "mlp"))
    x = RNG.standard_normal((3, 64)).astype(np.float32)
    np.testing.assert_allclose(jax.jit(Weight.matmul)(one, x), x @ wide[1].T, atol=2e-5)
    assert jax.eval_shape(one.matmul, jnp.asarray(x, jnp.bfloat16)).dtype == jnp.bfloat16
    np.testing.assert_array_equal(one.outputs(jnp.asarray([23, 0], jnp.int32)), wide[1][[23, 0]])


@pytest.mark.parametrize("format", ["fp8_channel", "fp8_block", "mxfp4"])
def test_fake_quantised_activations_of_a_wide_weight_give_the_narrow_product(format: str) -> None:
    fmt, mode = NARROW_FORMATS[format], modes_of(format)[0]
    wide = Weight(jnp.asarray(fmt.decode(*fmt.encode(NARROW[0])).T), axes=("embed", "mlp"), activations=mode)
    x = jnp.asarray(RNG.standard_normal((3, 64)), jnp.float32)
    got, want = (jax.jit(Weight.matmul)(weight, x) for weight in (wide, narrow(format, mode)))
    np.testing.assert_allclose(got, want, atol=2e-5)
    plain = dataclasses.replace(wide, activations="wide").matmul(x)
    assert np.abs(np.asarray(got - plain)).max() > 1e-2


@pytest.mark.parametrize("format", NARROW_FORMATS)
@pytest.mark.parametrize("stack", [(), (3,)])
def test_a_narrow_declaration_describes_what_encoding_gives(format: str, stack: tuple[int, ...]) -> None:
    axes = ("experts", "embed", "mlp")[not stack :]
    spec = WeightSpec((*stack, 160, 130), axes, format, "nk", activations="wide")
    described = jax.eval_shape(spec.init, jax.random.key(0))
    codes, scale = NARROW_FORMATS[format].encode(np.zeros((*stack, 130, 160), np.float32))
    assert described.shape == spec.shape
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(described)] == [(x.shape, x.dtype) for x in (codes, scale)]


def test_formats_of_a_tree_describe_it_again() -> None:
    base = WeightFormats("bf16", "nk", exceptions=(("gone/weight", "f32", "kn"),))
    params = {
        "norm": {"weight": base.spec("norm/weight", (4,), ("embed",), 1.0).init(jax.random.key(0))},
        "plain": {"weight": base.spec("plain/weight", (4, 6), ("embed", "mlp")).init(jax.random.key(0))},
        "up": {"weight": narrow("fp8_channel", "fp8_token")},
        "down": {"weight": dataclasses.replace(stored("kn"), activations="fp8_static")},
    }
    formats = formats_of(params, base)
    assert dataclasses.replace(formats, exceptions=(), activations=()) == WeightFormats("bf16", "nk")
    assert dict((path, rest) for path, *rest in formats.exceptions) == {
        "up/weight": ["fp8_channel", "nk"],
        "down/weight": ["f32", "kn"],
    }
    spec = formats.spec("up/weight", (64, 24), ("embed", "mlp"))
    again = jax.eval_shape(spec.init, jax.random.key(0))
    assert jax.tree.structure(again) == jax.tree.structure(params["up"]["weight"])
    down = jax.eval_shape(formats.spec("down/weight", (5, 7), ("embed", "vocab")).init, jax.random.key(0))
    assert down.activations == "fp8_static" and down.input_scale is not None and down.input_scale.shape == (1,)
