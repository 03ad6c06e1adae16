"""Trees of weights: what is quantised, what is refused, and what both ways compute."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle3_jax.errors import Eagle3Error
from eagle3_jax.quant.formats import NARROW_FORMATS
from eagle3_jax.quant.products import chosen_mode
from eagle3_jax.quant.quantize import SCHEMES, convert_fp8, dequantize_tree, quantize_tree
from eagle3_jax.quant.weight import Weight, named_weights, weight_bytes

RNG = np.random.default_rng(0)


def matrix(*shape: int, layout: str = "kn") -> Weight:
    return Weight(
        jnp.asarray(RNG.standard_normal(shape), jnp.float32), None, "f32", layout, ("a", "b", "c")[: len(shape)]
    )


def tree() -> dict[str, Any]:
    return {
        "embed": {"weight": matrix(64, 96)},
        "head": {"weight": matrix(64, 96)},
        "norm": {"weight": Weight(jnp.ones(64), layout="n", axes=("a",))},
        "layers_0": {
            "mlp": {"router": {"weight": matrix(64, 4)}, "experts": {"up": {"weight": matrix(4, 64, 32)}}},
            "attention": {"q": {"weight": matrix(48, 64, layout="nk"), "bias": Weight(jnp.ones(48), layout="n")}},
        },
        "target_ids": jnp.arange(3),
    }


@pytest.mark.parametrize("scheme", SCHEMES)
def test_matrices_become_narrow_and_the_kept_ones_stay(scheme: str) -> None:
    params = tree()
    narrow = quantize_tree(params, scheme)
    formats = {path: weight.format for path, weight in named_weights(narrow).items()}
    changed = {path for path, format in formats.items() if format != "f32"}
    assert changed == {"layers_0/mlp/experts/up/weight", "layers_0/attention/q/weight"}
    assert {formats[path] for path in changed} == {SCHEMES[scheme]}
    assert narrow["target_ids"] is params["target_ids"] and narrow["embed"]["weight"] is params["embed"]["weight"]
    for path, weight in named_weights(params).items():
        other = named_weights(narrow)[path]
        assert (other.shape, other.axes) == (weight.shape, weight.axes)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_dequantised_trees_hold_the_decoded_numbers_in_either_layout(scheme: str) -> None:
    params = tree()
    narrow = quantize_tree(params, scheme)
    format = NARROW_FORMATS[SCHEMES[scheme]]
    for layout in ("kn", "nk"):
        wide = dequantize_tree(narrow, layout=layout)
        assert {weight.format for weight in named_weights(wide).values()} == {"f32"}
        q = wide["layers_0"]["attention"]["q"]["weight"]
        want = format.decode(*format.encode(np.asarray(params["layers_0"]["attention"]["q"]["weight"].value)))
        np.testing.assert_array_equal(q.value, want.T if layout == "kn" else want)
        stack = wide["layers_0"]["mlp"]["experts"]["up"]["weight"]
        kept = np.asarray(params["layers_0"]["mlp"]["experts"]["up"]["weight"].value)
        want = format.decode(*format.encode(kept.swapaxes(1, 2)))
        np.testing.assert_array_equal(stack.value, want.swapaxes(1, 2) if layout == "kn" else want)


def test_a_dequantised_weight_rounds_activations_as_the_narrow_one() -> None:
    x = jnp.asarray(RNG.standard_normal((3, 64)), jnp.float32)
    narrow = quantize_tree(matrix(64, 32), "ptpc_fp8")
    wide = dequantize_tree(narrow)
    assert narrow.activations == wide.activations == "fp8_token"
    np.testing.assert_allclose(narrow.matmul(x), wide.matmul(x), atol=1e-5)
    alone = quantize_tree(matrix(64, 32), "ptpc_fp8", activations="wide")
    assert alone.activations == "wide"


def test_excludes_are_patterns_for_whole_paths() -> None:
    formats = {
        path: weight.format
        for path, weight in named_weights(
            quantize_tree(tree(), "fp8", exclude=[r"layers_\d+/attention/.*", "he"])
        ).items()
    }
    assert formats["layers_0/attention/q/weight"] == "f32"
    assert formats["head/weight"] == formats["layers_0/mlp/router/weight"] == "fp8_tensor"


def test_bytes_of_a_quantised_matrix() -> None:
    weight = matrix(4096, 64)
    plain = weight_bytes(weight)
    assert weight_bytes(quantize_tree(weight, "ptpc_fp8")) == plain // 4 + 64 * 4
    assert weight_bytes(quantize_tree(weight, "mxfp4")) == plain // 8 + plain // 4 // 32


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_refused_by_name(bad: float) -> None:
    params = tree()
    q = params["layers_0"]["attention"]["q"]
    q["weight"] = dataclasses.replace(q["weight"], value=q["weight"].value.at[3, 3].set(bad))
    with pytest.raises(Eagle3Error, match="layers_0/attention/q/weight holds NaN or infinity"):
        quantize_tree(params, "ptpc_fp8")


def test_what_cannot_be_meant_is_refused() -> None:
    with pytest.raises(Eagle3Error, match="scheme 'fp4' is not known; use ptpc_fp8"):
        quantize_tree(tree(), "fp4")
    with pytest.raises(Eagle3Error, match="no regular expression"):
        quantize_tree(tree(), "fp8", exclude=["("])
    with pytest.raises(Eagle3Error, match="already"):
        quantize_tree(quantize_tree(tree(), "fp8"), "mxfp4")
    with pytest.raises(Eagle3Error, match="48 inputs, no multiple of 32"):
        quantize_tree(matrix(48, 8), "mxfp4")
    with pytest.raises(Eagle3Error, match="'mxfp4' is narrow"):
        dequantize_tree(tree(), "mxfp4")
    with pytest.raises(Eagle3Error, match="activations 'fp16' are not known"):
        quantize_tree(tree(), "fp8", activations="fp16")


@pytest.mark.parametrize(
    ("format", "wish", "narrow", "static", "mode"),
    [
        ("fp8_channel", None, True, False, "fp8_token"),
        ("fp8_channel", None, False, False, "wide"),
        ("fp8_channel", "wide", True, False, "wide"),
        ("fp8_channel", "fake_quant", False, False, "fp8_token"),
        ("fnuz_block", None, True, False, "fp8_group"),
        ("fp8_tensor", None, True, True, "fp8_static"),
        ("fp8_tensor", "mxfp8", True, False, "fp8_token"),
        ("mxfp4", None, True, False, "wide"),
        ("mxfp4", "fake_quant", False, False, "mxfp4"),
        ("mxfp4", "mxfp8", True, False, "mxfp8"),
        ("int4", "fake_quant", True, False, "wide"),
    ],
)
def test_the_mode_follows_the_wish(format: str, wish: str | None, narrow: bool, static: bool, mode: str) -> None:
    assert chosen_mode(format, wish, narrow, static) == mode


def test_a_narrow_tree_passes_through_jit() -> None:
    narrow = quantize_tree(matrix(64, 32), "mxfp4")
    x = jnp.ones((2, 64))
    np.testing.assert_allclose(jax.jit(Weight.matmul)(narrow, x), dequantize_tree(narrow).matmul(x), atol=1e-5)


@pytest.mark.parametrize("scheme", ["ptpc_fp8", "fp8", "fp8_block"])
def test_the_other_flavour_of_fp8_holds_the_same_numbers_and_rounds_alike(scheme: str) -> None:
    params = quantize_tree(tree(), scheme)
    there = convert_fp8(params, "fnuz")
    formats = {weight.format for weight in named_weights(there).values()}
    assert formats == {"f32", SCHEMES[scheme].replace("fp8_", "fnuz_")}
    ours, theirs = (named_weights(dequantize_tree(x)) for x in (params, there))
    for path, weight in ours.items():
        np.testing.assert_array_equal(weight.value, theirs[path].value, err_msg=path)
    x = jnp.asarray(RNG.standard_normal((3, 64)), jnp.float32)
    q, other = (p["layers_0"]["attention"]["q"]["weight"] for p in (params, there))
    np.testing.assert_allclose(jax.jit(Weight.matmul)(other, x), jax.jit(Weight.matmul)(q, x), rtol=1e-6, atol=1e-6)
    back = convert_fp8(there, "fp8")
    assert jax.tree.structure(back) == jax.tree.structure(params)
    with pytest.raises(Eagle3Error, match="'e5m2' is not known; use fp8 or fnuz"):
        convert_fp8(params, "e5m2")
