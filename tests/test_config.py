"""Reading Hugging Face config.json files: what is understood, and what is refused by name."""

import json
import logging
from typing import Any

import numpy as np
import pytest

from eagle3_jax.config import LlamaConfig, RopeConfig, check_unknown_fields, parse_llama
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.models.rope import inverse_frequencies

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-05,
    "rope_theta": 20000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}


def parse(**changes: Any) -> LlamaConfig:
    """The base config with changes; a value of `...` removes the field."""
    fields = {name: value for name, value in {**BASE, **changes}.items() if value is not ...}
    return parse_llama(fields, "model/config.json")


def refusal(**changes: Any) -> str:
    with pytest.raises(Eagle3Error) as caught:
        parse(**changes)
    message = str(caught.value)
    assert message.startswith("model/config.json") and "\n" not in message
    return message


def test_every_field_arrives() -> None:
    assert parse(head_dim=10, attention_bias=True, mlp_bias=True) == LlamaConfig(
        vocab_size=100,
        hidden_size=48,
        intermediate_size=64,
        num_layers=3,
        num_heads=6,
        num_kv_heads=2,
        head_dim=10,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=20000.0),
        max_position=512,
        tied=True,
        attention_bias=True,
        output_bias=True,
        mlp_bias=True,
    )


def test_absent_and_null_fields_take_the_defaults_of_transformers() -> None:
    optional = (
        "num_key_value_heads max_position_embeddings rms_norm_eps rope_theta hidden_act tie_word_embeddings "
        "head_dim rope_scaling attention_bias mlp_bias sliding_window architectures"
    ).split()
    expected = LlamaConfig(
        vocab_size=100,
        hidden_size=48,
        intermediate_size=64,
        num_layers=3,
        num_heads=6,
        num_kv_heads=6,
        head_dim=8,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=10000.0),
        max_position=2048,
    )
    assert parse(**dict.fromkeys(optional, ...)) == expected
    assert parse(**dict.fromkeys(optional, None)) == expected


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.5, "high_freq_factor": 6.0, "original_max_position_embeddings": 256}


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"rope_type": "default"}, RopeConfig(20000.0)),
        ({"rope_type": "linear", "factor": 2}, RopeConfig(20000.0, "linear", 2.0)),
        ({"rope_type": "llama3", **LLAMA3}, RopeConfig(20000.0, "llama3", 8.0, 256, 1.5, 6.0)),
        ({"rope_type": "yarn", "factor": 4.0}, RopeConfig(20000.0, "yarn", 4.0, 512)),
        (
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "beta_fast": 16,
                "beta_slow": 2,
                "attention_factor": 0.5,
                "mscale": 0.707,
                "mscale_all_dim": 1,
                "truncate": False,
            },
            RopeConfig(
                20000.0,
                "yarn",
                4.0,
                128,
                beta_fast=16.0,
                beta_slow=2.0,
                attention_factor=0.5,
                mscale=0.707,
                mscale_all_dim=1.0,
                truncate=False,
            ),
        ),
    ],
    ids=["default", "linear", "llama3", "yarn", "yarn with all fields"],
)
def test_both_spellings_of_rope_are_read_alike(scaling: dict[str, Any], expected: RopeConfig) -> None:
    """`rope_theta` beside `rope_scaling` (with `rope_type` or the older `type`), and `rope_parameters`."""
    assert parse(rope_scaling=scaling).rope == expected
    older = {"type" if name == "rope_type" else name: value for name, value in scaling.items()}
    assert parse(rope_scaling=older).rope == expected
    newer = {**scaling, "rope_theta": 20000.0}
    assert parse(rope_theta=..., rope_parameters=newer).rope == expected
    assert parse(rope_theta=..., rope_scaling=newer).rope == expected


def test_the_two_spellings_of_the_reference_fixtures_are_one_model(fixtures_dir: Any) -> None:
    """config.public.json is the same checkpoint as public files spell it; transformers reads both alike."""
    for name in ("llama_gqa_rope3", "llama_tied"):
        folder = fixtures_dir / "targets" / name
        new, public = (
            parse_llama(json.loads((folder / file).read_text()), file)
            for file in ("config.json", "config.public.json")
        )
        assert new == public
        assert new.rope.kind == ("llama3" if name == "llama_gqa_rope3" else "default")


@pytest.mark.parametrize(
    "name",
    [
        "final_logit_softcapping",
        "qk_norm",
        "rope_local_base_freq",
        "partial_rotary_factor",
        "logits_scaling",
        "layer_types",
        "attention_window",
        "lm_head_bias",
        "activation_clip",
        "num_head_groups",
        "residual_multiplier",
        "quantization_method",
    ],
)
def test_an_unknown_field_that_bears_on_the_maths_is_refused_by_name(name: str) -> None:
    assert name in refusal(**{name: 2})


def test_all_grave_fields_are_named_at_once() -> None:
    message = refusal(qk_norm=True, layer_types=["full"], some_tag="x")
    assert "layer_types" in message and "qk_norm" in message and "some_tag" not in message


def test_a_null_field_bears_on_nothing() -> None:
    assert parse(qk_norm=None, layer_types=None) == parse()


def test_inert_fields_pass_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    inert: dict[str, Any] = {
        "torch_dtype": "bfloat16",
        "dtype": "float16",
        "bos_token_id": 1,
        "eos_token_id": [2, 3],
        "pad_token_id": 0,
        "use_cache": False,
        "model_type": "llama",
        "initializer_range": 0.5,
        "attention_dropout": 0.1,
        "pretraining_tp": 2,
        "transformers_version": "9",
        "_name_or_path": "x",
    }
    with caplog.at_level(logging.DEBUG):
        assert parse(**inert) == parse()
    assert not caplog.records


def test_a_harmless_unknown_field_is_warned_of_by_name(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert parse(favourite_colour="green", author="me", nothing=None) == parse()
    (record,) = caplog.records
    assert record.name == "eagle3_jax" and record.levelno == logging.WARNING
    assert "author, favourite_colour" in record.getMessage() and "nothing" not in record.getMessage()


def test_check_unknown_fields_knows_what_its_caller_has_read(caplog: pytest.LogCaptureFixture) -> None:
    check_unknown_fields({"qk_norm": 1, "use_cache": True}, {"qk_norm"}, "f")
    assert not caplog.records
    with pytest.raises(Eagle3Error, match=r"f: .*qk_norm"):
        check_unknown_fields({"qk_norm": 1, "use_cache": True}, (), "f")


SIZES = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "max_position_embeddings"
).split()


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [0, -1, 2**31, 10**400, 2.0, "4", True, [4], {}], ids=lambda v: str(v)[:8])
def test_a_size_that_is_no_positive_32_bit_integer_is_refused_by_its_field_name(name: str, value: Any) -> None:
    assert name in refusal(**{name: value})


@pytest.mark.parametrize("name", SIZES[:5])
def test_a_missing_size_is_refused_by_its_field_name(name: str) -> None:
    assert f"{name} is missing" in refusal(**{name: ...})


@pytest.mark.parametrize("name", ["rms_norm_eps", "rope_theta"])
@pytest.mark.parametrize(
    "value",
    [0, -1e-5, float("nan"), float("inf"), 10**400, "1e-5", True, [1.0]],
    ids=lambda v: str(v)[:8],
)
def test_a_number_of_a_wrong_kind_or_range_is_refused_by_its_field_name(name: str, value: Any) -> None:
    assert name in refusal(**{name: value})


@pytest.mark.parametrize("name", ["tie_word_embeddings", "attention_bias", "mlp_bias"])
@pytest.mark.parametrize("value", [0, 1, "true", []])
def test_a_flag_that_is_no_boolean_is_refused_by_its_field_name(name: str, value: Any) -> None:
    assert name in refusal(**{name: value})


@pytest.mark.parametrize(
    "value", [["Qwen3ForCausalLM"], ["LlamaForCausalLM", "X"], "Llama", 5, True, [[1]], {"a": 1}], ids=str
)
def test_another_architecture_is_refused(value: Any) -> None:
    assert "LlamaForCausalLM" in refusal(architectures=value)


def test_one_architecture_without_its_list_is_read_or_refused_with_the_reason() -> None:
    """Saying "LlamaForCausalLM is not supported; use LlamaForCausalLM" helps nobody."""
    try:
        assert parse(architectures="LlamaForCausalLM") == parse()
    except Eagle3Error as error:
        assert "list" in str(error) or "[" in str(error)


@pytest.mark.parametrize("value", ["gelu", "relu", 3, ["silu"], False])
def test_another_activation_is_refused(value: Any) -> None:
    assert "hidden_act" in refusal(hidden_act=value)


def test_a_sliding_window_is_refused_with_what_would_be_right() -> None:
    message = refusal(sliding_window=128)
    assert "sliding_window" in message and "only  is" not in message


def test_an_odd_head_dim_is_refused() -> None:
    assert "head_dim 7 is odd" in refusal(head_dim=7)
    assert "head_dim 3 is odd" in refusal(hidden_size=18)


@pytest.mark.parametrize("kv_heads", [4, 5, 12])
def test_heads_that_do_not_share_evenly_are_refused(kv_heads: int) -> None:
    assert f"6 heads cannot share {kv_heads}" in refusal(num_key_value_heads=kv_heads)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", "mrope", "Yarn", "", 3, ["yarn"], {}])
def test_an_unknown_kind_of_rope_is_refused(kind: Any) -> None:
    assert "default, linear, llama3 or yarn" in refusal(rope_scaling={"rope_type": kind, "factor": 2.0})


@pytest.mark.parametrize("name", ["short_factor", "long_factor", "mrope_section", "beta", "full_attention"])
def test_an_unknown_rope_field_is_refused_by_name(name: str) -> None:
    scaling = {"rope_type": "yarn", "factor": 2.0, name: 1}
    for place in ("rope_scaling", "rope_parameters"):
        assert name in refusal(**{place: scaling})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"factor": ...}, "factor"),
        ({"factor": 0}, "factor"),
        ({"factor": "8"}, "factor"),
        ({"factor": float("nan")}, "factor"),
        ({"factor": True}, "factor"),
        ({"factor": 10**400}, "factor"),
        ({"low_freq_factor": 6.0}, "low_freq_factor"),
        ({"low_freq_factor": -1.0}, "low_freq_factor"),
        ({"high_freq_factor": None, "low_freq_factor": 4.0}, "high_freq_factor"),
        ({"original_max_position_embeddings": 0}, "original_max_position_embeddings"),
        ({"original_max_position_embeddings": 8192.5}, "original_max_position_embeddings"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_type": "yarn", "attention_factor": -1.0}, "attention_factor"),
        ({"rope_type": "yarn", "attention_factor": "x"}, "attention_factor"),
        ({"rope_type": "yarn", "beta_fast": 0}, "beta_fast"),
        ({"rope_type": "yarn", "mscale": "x"}, "mscale"),
        ({"rope_type": "yarn", "truncate": 1}, "truncate"),
    ],
    ids=lambda x: str(x)[:60],
)
def test_a_rope_value_out_of_range_is_refused_by_its_field_name(change: dict[str, Any], named: str) -> None:
    scaling = {"rope_type": "llama3", **LLAMA3, **change}
    assert named in refusal(rope_scaling={k: v for k, v in scaling.items() if v is not ...})


def test_yarn_limits_may_be_equal_as_in_kimi_k2_but_not_reversed() -> None:
    kimi = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0}
    rope = parse(rope_scaling=kimi).rope
    assert (rope.beta_fast, rope.beta_slow) == (1.0, 1.0)
    assert "beta_fast" in refusal(rope_scaling={**kimi, "beta_slow": 1.5})


def test_interleaved_rotation_is_refused_and_its_absence_passes() -> None:
    assert "rope_interleaved" in refusal(rope_interleaved=True)
    assert parse(rope_interleaved=False) == parse()


@pytest.mark.parametrize("value", ["yarn", 3, ["yarn"], True, [], 0, False, ""], ids=repr)
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_rope_settings_that_are_no_object_are_refused(place: str, value: Any) -> None:
    assert "an object is needed" in refusal(**{place: value})


def test_an_original_length_beside_the_rope_settings_is_never_passed_over() -> None:
    """Phi-3's spelling; transformers lets it win over the inner field for llama3 and YaRN."""
    yarn = {"rope_type": "yarn", "factor": 4.0}
    try:
        parsed = parse(rope_scaling=yarn, original_max_position_embeddings=128)
    except Eagle3Error as error:
        assert "original_max_position_embeddings" in str(error)
    else:
        assert parsed.rope.original_max_position == 128


@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn"])
@pytest.mark.parametrize("theta", [0.5, 1.0, 1.5, 1e6])
def test_any_base_that_is_accepted_has_finite_frequencies(kind: str, theta: float) -> None:
    try:
        rope = parse(rope_theta=theta, rope_scaling={"rope_type": kind, **LLAMA3}).rope
    except Eagle3Error as error:
        assert theta <= 1 and "rope_theta" in str(error)
    else:
        inverse, factor = inverse_frequencies(rope, 8)
        assert np.all(np.isfinite(inverse)) and np.isfinite(factor)


def test_configs_are_hashable_and_equal_by_value() -> None:
    one, other = parse(), parse()
    assert one is not other and hash(one) == hash(other) and len({one, other, parse(head_dim=4)}) == 2
