"""Quantising loaded models: what is told to their configs, and that speculation stays lossless with them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from loading import FIXTURES, TARGETS, expected, target

import eagle3_jax as e3
from eagle3_jax import cli
from eagle3_jax.commands.options import load_draft_pair
from eagle3_jax.quant.weight import Weight, formats_of, named_weights

CONFIG = e3.GenerationConfig(max_new_tokens=12, speculation=e3.Chain(3), transforms=())


def test_a_quantised_target_computes_what_its_dequantised_self_does() -> None:
    # Rolled, as no activation of theirs then lies at the edge between two numbers of FP8.
    ids = np.roll(expected(TARGETS / "llama_tied")["input_ids"], 3, axis=1)
    narrow = e3.quantize(target("llama_tied"), "ptpc_fp8")
    wide = e3.dequantize(narrow)
    assert named_weights(narrow.params)["layers_2/mlp/down/weight"].format == "fp8_channel"
    assert dict(narrow.model.config.weights.activations) == dict(wide.model.config.weights.activations)
    assert wide.model.config.weights.exceptions == target("llama_tied").model.config.weights.exceptions
    got, same = e3.score(narrow, ids).logits, e3.score(wide, ids).logits
    np.testing.assert_allclose(got, same, atol=2e-4, rtol=0)
    assert 1e-3 < np.abs(got - e3.score(target("llama_tied"), ids).logits).max() < 5


def test_one_weight_is_enough() -> None:
    weight = Weight(jnp.ones((64, 8)), axes=("a", "b"))
    narrow = e3.quantize(weight, "mxfp4")
    assert (narrow.value.shape, narrow.scale.shape, narrow.shape) == ((8, 32), (8, 2), (64, 8))
    np.testing.assert_array_equal(e3.dequantize(narrow, "bfloat16").value, np.ones((64, 8)))
    with pytest.raises(e3.Eagle3Error, match="dtype 'int8' is not supported"):
        e3.dequantize(narrow, "int8")


def test_narrow_drafts_of_narrow_targets_change_no_token() -> None:
    """Draft and target each have their own formats; activations of the target stay wide, as rounding has no margin."""
    (target_model, target_params), (draft_model, draft_params) = tiny.target(), tiny.draft()
    target_params = e3.quantize(target_params, "fp8_block", activations="wide")
    draft_params = e3.quantize(draft_params, "ptpc_fp8")
    target_model, draft_model = (
        type(model)(dataclasses.replace(model.config, weights=formats_of(params, model.config.weights)))
        for model, params in ((target_model, target_params), (draft_model, draft_params))
    )
    ids, lengths = tiny.prompts(8)
    arguments = (ids, lengths, e3.row_keys(0, 8), e3.Sampling.make(8, temperature=1.3))
    run = jax.jit(e3.speculative_generate, static_argnames=("target_model", "draft_model", "config"))
    models = {"target_model": target_model, "draft_model": draft_model}
    out = run(target_params, draft_params, *arguments, **models, config=CONFIG)
    want = jax.jit(e3.generate, static_argnames=("model", "config"))(
        target_params, *arguments, model=target_model, config=CONFIG
    )
    np.testing.assert_array_equal(out.tokens, want.tokens)
    assert out.stats.accepted.sum() > 0


def test_the_command_line_rounds_activations_as_asked() -> None:
    def pair(*flags: str) -> tuple[e3.Target, e3.Draft]:
        both = ["--target", str(TARGETS / "llama_tied"), "--draft", str(FIXTURES / "quant/quark_ptpc_fp8_draft_a")]
        return load_draft_pair(cli.make_parser().parse_args(["verify", *both, "--prompt", "x", *flags]))

    _, plain = pair()
    _, fake = pair("--draft-set", "activations=fake_quant")
    _, narrow = pair("--draft-set", "widen=false", "--no-widen", "--activations", "wide")
    modes = [dict(x.model.config.weights.activations).get("mlp/up/weight") for x in (plain, fake, narrow)]
    assert modes == [None, "fp8_token", "fp8_token"]
    formats = [named_weights(x.params)["mlp/up/weight"].format for x in (plain, fake, narrow)]
    assert formats == ["f32", "f32", "fp8_channel"]
    for wrong, match in (("activations=fp8", "activations 'fp8' are not known"), ("widen=3", "widen is 3")):
        with pytest.raises(e3.Eagle3Error, match=match):
            pair("--draft-set", wrong)


def test_what_cannot_be_quantised_is_refused() -> None:
    """A path, an array or a lone string of excludes would come back as if quantised."""
    weight = Weight(jnp.ones((64, 8)), axes=("a", "b"))
    for model, scheme, exclude, message in [
        ("my-draft", "mxfp4", (), "a str without weights cannot be quantised"),
        (np.ones((64, 8)), "mxfp4", (), "a ndarray without weights"),
        (weight, ["mxfp4"], (), r"scheme \['mxfp4'\] is not known"),
        (weight, "mxfp4", "embed", "exclude is 'embed'; a list of regular expressions"),
        (weight, "mxfp4", [5], r"exclude is \[5\]; a list"),
        (weight, "mxfp4", None, "exclude is None; a list"),
        (weight, "mxfp4", ["["], r"exclude '\[' is no regular expression"),
    ]:
        with pytest.raises(e3.Eagle3Error, match=message):
            e3.quantize(model, scheme, exclude)
