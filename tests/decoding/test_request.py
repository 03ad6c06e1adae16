"""What a run compiles, and which requests are refused before it runs."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from eagle3_jax.config import LlamaConfig
from eagle3_jax.decoding.request import Chain, GenerationConfig, check_request, parse_speculation
from eagle3_jax.decoding.sampling import TRANSFORMS, Sampling
from eagle3_jax.errors import Eagle3Error

MODEL = LlamaConfig(
    vocab_size=10,
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=2,
    num_kv_heads=2,
    head_dim=4,
    max_position=8,
)


@pytest.mark.parametrize("length", [0, -1, 65, 2.0, "4", None, True])
def test_a_chain_of_an_impossible_length_is_refused(length: Any) -> None:
    with pytest.raises(Eagle3Error, match="chain"):
        Chain(length)


@pytest.mark.parametrize(("text", "length"), [("chain:1", 1), ("chain:4", 4), ("chain:64", 64)])
def test_a_speculation_setting_is_read(text: str, length: int) -> None:
    assert parse_speculation(text) == Chain(length)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "chain",
        "chain:",
        "chain:0",
        "chain:65",
        "chain:-1",
        "chain:4.0",
        "chain: 4",
        " chain:4",
        "chain:4 ",
        "chain:4\n",
        "chain:4:5",
        "chain=4",
        "Chain:4",
        "chain:four",
        "chain:²",
        "chain:٤",
        "tree:4",
        "4",
        "chain:" + "9" * 5000,
    ],
    ids=lambda text: repr(text[:12]),
)
def test_any_other_speculation_setting_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(Eagle3Error, match="chain:4") as caught:
        parse_speculation(text)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


@pytest.mark.parametrize("name", ["max_new_tokens", "prefill_chunk", "block_size"])
@pytest.mark.parametrize("value", [0, -1, 2.5, "5", None, True])
def test_an_impossible_size_is_refused_by_its_name(name: str, value: Any) -> None:
    with pytest.raises(Eagle3Error, match=name):
        GenerationConfig(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("transforms", ("top_k", "xtc"), "xtc"),
        ("transforms", ["top_k"], "transforms"),
        ("transforms", "top_k", "transforms"),
        ("speculation", 4, "speculation"),
        ("speculation", "chain:4", "speculation"),
        ("speculation", None, "speculation"),
        ("pad_id", 2**31, "pad_id is 2147483648"),
        ("pad_id", True, "pad_id"),
        ("return_logprobs", 1, "return_logprobs is 1"),
    ],
)
def test_an_impossible_setting_is_refused_by_its_name(name: str, value: Any, named: str) -> None:
    with pytest.raises(Eagle3Error, match=named):
        GenerationConfig(**{name: value})


def test_configs_are_static_arguments_equal_by_value() -> None:
    one, other = GenerationConfig(speculation=Chain(3)), GenerationConfig(speculation=Chain(3))
    assert one is not other and hash(one) == hash(other)
    assert len({one, other, GenerationConfig(speculation=Chain(2)), GenerationConfig(transforms=())}) == 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.pad_id = 3  # type: ignore[misc]


IDS = jnp.asarray([[1, 2, 3], [4, 9, 0]], jnp.int32)
LENGTHS = jnp.asarray([3, 1], jnp.int32)


def check(
    ids: Any = IDS, lengths: Any = LENGTHS, sampling: Sampling | None = None, config: GenerationConfig | None = None
) -> None:
    sampling = Sampling.make(2) if sampling is None else sampling
    check_request(ids, lengths, sampling, MODEL, GenerationConfig() if config is None else config)


def test_a_request_that_fits_passes() -> None:
    check()
    check(
        sampling=Sampling.make(2, top_k=3, min_tokens=1), config=GenerationConfig(transforms=("top_k", "min_tokens"))
    )


def integers(*rows: Any) -> jax.Array:
    return jnp.asarray(rows, jnp.int32)


@pytest.mark.parametrize(
    ("ids", "lengths"),
    [
        pytest.param(IDS[0], LENGTHS, id="one row without a batch"),
        pytest.param(IDS[None], LENGTHS, id="three dimensions"),
        pytest.param(IDS, LENGTHS[:1], id="a length too few"),
        pytest.param(IDS, LENGTHS[:, None], id="lengths in a column"),
        pytest.param(IDS, jnp.int32(3), id="one length"),
        pytest.param(IDS[:0], LENGTHS[:0], id="no rows"),
        pytest.param(IDS[:, :0], LENGTHS * 0, id="no columns"),
        pytest.param(IDS.astype(jnp.float32), LENGTHS, id="fractions"),
        pytest.param(IDS, LENGTHS.astype(jnp.float32), id="fractional lengths"),
    ],
)
def test_shapes_and_dtypes_that_do_not_fit_are_refused(ids: Any, lengths: Any) -> None:
    with pytest.raises(Eagle3Error, match=r"prompts|batch"):
        check_request(ids, lengths, Sampling.make(len(ids)), MODEL, GenerationConfig())


@pytest.mark.parametrize("batch", [1, 3])
def test_sampling_for_another_batch_is_refused(batch: int) -> None:
    with pytest.raises(Eagle3Error, match="2 rows"):
        check(sampling=Sampling.make(batch))


def test_sampling_without_rows_is_refused() -> None:
    with pytest.raises(Eagle3Error, match="sampling"):
        check(sampling=Sampling.make(2).replace(temperature=jnp.float32(1)))


@pytest.mark.parametrize("lengths", [[0, 1], [3, -1], [4, 1]])
def test_an_empty_prompt_or_one_longer_than_its_row_is_refused(lengths: list[int]) -> None:
    with pytest.raises(Eagle3Error, match=r"lengths.*\[1, 3\]"):
        check(lengths=integers(*lengths))


@pytest.mark.parametrize(("length", "fits"), [(6, True), (7, True), (8, False), (9, False)])
def test_a_prompt_that_fills_the_context_is_refused(length: int, fits: bool) -> None:
    """The context is 8 tokens: a prompt of 7 leaves room for one."""
    ids, lengths = jnp.ones((2, 12), jnp.int32), integers(length, 2)
    if fits:
        check(ids, lengths)
    else:
        with pytest.raises(Eagle3Error, match=f"{length} tokens.*context of 8"):
            check(ids, lengths)


@pytest.mark.parametrize("bad", [10, -1, 2**31 - 1])
def test_an_id_outside_the_vocabulary_is_refused_but_not_in_the_padding(bad: int) -> None:
    with pytest.raises(Eagle3Error, match=r"\[0, 10\)"):
        check(IDS.at[0, 2].set(bad))
    check(IDS.at[1, 2].set(bad))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min_tokens", {"min_tokens": [0, 2]}),
        ("logit_bias", {"logit_bias": [{}, {1: 1.0}]}),
        ("penalties", {"frequency_penalty": [0.5, 0.0]}),
        ("min_p", {"min_p": 0.1}),
        ("top_k", {"top_k": [0, 5]}),
        ("top_p", {"top_p": 0.9}),
    ],
)
def test_a_transform_that_is_not_compiled_in_is_refused_by_name(name: str, value: dict[str, Any]) -> None:
    config = GenerationConfig(transforms=tuple(t for t in TRANSFORMS if t != name))
    with pytest.raises(Eagle3Error, match=f"{name};"):
        check(sampling=Sampling.make(2, **value), config=config)


def test_under_jit_shapes_are_checked_and_values_cannot_be() -> None:
    passed = []

    @jax.jit
    def run(ids: jax.Array, lengths: jax.Array, sampling: Sampling) -> jax.Array:
        check(ids, lengths, sampling)
        passed.append(ids.shape)
        return ids

    run(IDS.at[0, 0].set(99), LENGTHS * 0, Sampling.make(2))
    assert passed == [(2, 3)]
    with pytest.raises(Eagle3Error, match=r"prompts|batch"):
        run(IDS, LENGTHS[:1], Sampling.make(2))
    with pytest.raises(Eagle3Error, match="2 rows"):
        run(IDS, LENGTHS, Sampling.make(1))


@pytest.mark.parametrize(
    ("wishes", "match"),
    [({"stop_ids": [10]}, "stop_ids"), ({"eos_ids": [10]}, "eos_ids"), ({"logit_bias": {10: 1.0}}, "bias_ids")],
)
def test_ids_outside_the_vocabulary_are_refused(wishes: dict, match: str) -> None:
    ids, lengths = jnp.ones((1, 4), jnp.int32), jnp.ones((1,), jnp.int32)
    with pytest.raises(Eagle3Error, match=match):
        check_request(ids, lengths, Sampling.make(1, **wishes), MODEL, GenerationConfig(max_new_tokens=4))


def test_what_is_no_request_at_all_is_refused() -> None:
    ids, lengths, sampling = jnp.ones((1, 4), jnp.int32), jnp.ones((1,), jnp.int32), Sampling.make(1)
    config = GenerationConfig(max_new_tokens=4)
    for given in (([[1]], lengths, sampling, config), (ids, [1], sampling, config), (ids, lengths, None, config)):
        with pytest.raises(Eagle3Error):
            check_request(*given[:3], MODEL, given[3])
    with pytest.raises(Eagle3Error, match="GenerationConfig"):
        check_request(ids, lengths, sampling, MODEL, None)
    with pytest.raises(Eagle3Error, match="max_new_tokens"):
        GenerationConfig(max_new_tokens=2**31 - 1)
