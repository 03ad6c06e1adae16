"""FP8 caches: their numbers against ml_dtypes, the text with and without speculation, and what they cost."""

import dataclasses
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny
from jax import Array
from loading import target
from xla import SHIPPED

from eagle3_jax.cache.paged import Fp8Pool, as_kept, chain_step, make_pools, read_chunk, write
from eagle3_jax.decoding.loop import generate, speculative_generate
from eagle3_jax.decoding.request import Chain, GenerationConfig
from eagle3_jax.decoding.sampling import Sampling, row_keys
from eagle3_jax.decoding.verify import decision_margin, tolerance_of
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.models.attention import causal_attention, paged_attention
from eagle3_jax.models.layers import apply
from eagle3_jax.training.calibrate import cache_scales

BATCH, NEW = 64, 16
CONFIG = GenerationConfig(
    max_new_tokens=NEW, speculation=Chain(3), transforms=(), prefill_chunk=24, block_size=8, cache_format="fp8"
)
E4M3 = ml_dtypes.float8_e4m3fn

plain_run = jax.jit(generate, static_argnames=("model", "config"))
draft_run = jax.jit(speculative_generate, static_argnames=("target_model", "draft_model", "config"))


@pytest.mark.parametrize("scale", [1.0, 0.37])
def test_numbers_are_those_of_another_codec(scale: float) -> None:
    """All 256 codes come back, and what lies between, beyond and nowhere is rounded as ml_dtypes does."""
    pool = Fp8Pool(jnp.zeros((4, 1, 1), jnp.uint8), scale)
    codes = np.arange(256, dtype=np.uint8)
    numbers = codes.view(E4M3).astype(np.float32) * np.float32(scale)
    np.testing.assert_array_equal(np.asarray(pool.decode(jnp.asarray(codes))), numbers)
    rng = np.random.default_rng(0)
    values = rng.standard_normal(4000).astype(np.float32) * 10.0 ** rng.integers(-4, 4, 4000).astype(np.float32)
    values = np.concatenate([values, np.float32([0, -0.0, np.nan, np.inf, -np.inf, 464, 1e9, 2**-10, 2**-9])])
    wanted = np.clip(values / np.float32(scale), -448, 448).astype(E4M3).astype(np.float32) * np.float32(scale)
    got = np.asarray(as_kept(pool, jnp.asarray(values)))
    np.testing.assert_array_equal(got, wanted)
    np.testing.assert_array_equal(np.asarray(as_kept(pool, jnp.asarray(got))), got)
    assert np.abs(got[~np.isnan(got)]).max() == np.float32(448 * np.float32(scale))


def test_written_slots_are_read_back_and_no_others() -> None:
    pool = write(
        Fp8Pool(jnp.full((8, 1, 2), 0x7F, jnp.uint8), 2.0),
        jnp.asarray([[1, 6, 99]]),
        jnp.asarray([[[[3.0, -900.0]]] * 3])[0][None],
    )
    values = np.asarray(pool.bits).view(E4M3).astype(np.float32) * 2
    np.testing.assert_array_equal(values[[1, 6], 0], [[3, -896]] * 2)
    assert np.isnan(np.delete(values, [1, 6], axis=0)).all()


def run(kind: str, config: GenerationConfig, seed: int = 0) -> tuple[np.ndarray, str]:
    """Tokens, and the compiled program."""
    model, params = tiny.target()
    draft_model, draft_params = tiny.draft()
    ids, lengths = tiny.prompts(BATCH, seed=seed)
    sampling = Sampling.make(BATCH, temperature=[0.0, 0.8] * (BATCH // 2), ignore_eos=True)
    rest = (ids, lengths, row_keys(seed, BATCH), sampling)
    if kind == "plain":
        config = dataclasses.replace(config, draft_cache_format=None, draft_cache_scales=())
        return np.asarray(plain_run(params, *rest, model=model, config=config).tokens), ""
    models = {"target_model": model, "draft_model": draft_model}
    program = draft_run.lower(params, draft_params, *rest, **models, config=config).compile(compiler_options=SHIPPED)
    out = program(params, draft_params, *rest)
    assert np.asarray(out.stats.accepted).sum() > 0
    return np.asarray(out.tokens), program.as_text()


def test_text_is_the_same_with_and_without_speculation() -> None:
    """Up to rounding: 1e-6 at the edge between two numbers decides which one it becomes."""
    wide, _ = run("plain", dataclasses.replace(CONFIG, cache_format=None))
    plain, _ = run("plain", CONFIG)
    # The cache matters to this model, or the test would mean nothing.
    assert (wide != plain).any(axis=1).sum() > BATCH // 8
    config = dataclasses.replace(CONFIG, draft_cache_format="fp8", draft_cache_scales=(0.5,))
    drafted, program = run("drafted", config)
    assert (drafted != plain).any(axis=1).sum() <= 1
    # No pool is ever there in another dtype, and none is copied in a loop.
    slots = BATCH * 5 * CONFIG.block_size  # 24 + 16 tokens
    assert set(re.findall(rf"(\w+)\[{slots},(?:2,16|1,24)\]", program)) == {"u8"}
    loops = program[: program.index("\nENTRY ")]
    assert not re.findall(rf"= u8\[{slots},\S* copy\(", loops)


def test_scales_are_those_of_the_largest_keys_and_values() -> None:
    subject = target("llama_tied")
    c, prompts = subject.model.config, [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]]
    wanted = np.zeros(c.num_layers)
    for prompt in prompts:
        pools = make_pools(c.num_layers, 8, *c.cache_row, "float32")
        start, count = jnp.zeros(1, jnp.int32), jnp.full((1,), len(prompt), jnp.int32)
        step = chain_step(jnp.asarray([[0]]), start, count, len(prompt), 8, 8)
        out = apply(subject.model, subject.params, jnp.asarray([prompt]), step.positions, paged_attention(step), pools)
        wanted = np.maximum(wanted, [np.abs(np.asarray(pool)).max() for pool in out.caches])
    np.testing.assert_allclose(cache_scales(subject, prompts), wanted / 448, rtol=1e-5)
    GenerationConfig(cache_format="fp8", cache_scales=cache_scales(subject, prompts))
    with pytest.raises(Eagle3Error, match="calibration needs prompts of 1 to"):
        cache_scales(subject, [[1], []])


IDS = np.random.default_rng(3).integers(0, tiny.VOCAB, (2, 24)).astype(np.int32)


@jax.jit
def logits(params: Any, pools: tuple) -> Array:
    """Logits [2, 4, V] of tokens 20 .. 23 over a prefix of 20 that a pass before wrote."""
    model, table, out = tiny.target()[0], jnp.asarray([[0, 1, 2], [4, 3, 5]], jnp.int32), None
    for begin, end in ((0, 20), (20, 24)):
        start, count = (jnp.full((2,), n, jnp.int32) for n in (begin, end - begin))
        step = chain_step(table, start, count, end - begin, 8, 64)
        out = apply(model, params, jnp.asarray(IDS[:, begin:end]), step.positions, paged_attention(step), pools)
        pools = out.caches
    assert out is not None
    return apply(model, params, out.hidden, method="logits")


def rounded_attention(q: Array, k: Array, v: Any, cache: Any, **options: Any) -> tuple[Array, Any]:
    """Causal attention over keys and values that ml_dtypes has rounded, without a cache."""
    k, v = (jnp.asarray(np.asarray(x).astype(E4M3).astype(np.float32)) for x in (k, v))
    return causal_attention(q, k, v, cache, **options)


def test_logits_are_those_of_rounded_keys_and_values_and_near_those_of_a_wide_cache() -> None:
    c, (model, params) = tiny.TARGET, tiny.target()
    wide, narrow = (make_pools(c.num_layers, 64, *c.cache_row, "float32", format) for format in (None, "fp8"))
    got = np.asarray(logits(params, narrow))
    positions = jnp.broadcast_to(jnp.arange(24, dtype=jnp.int32), IDS.shape)
    out = apply(model, params, jnp.asarray(IDS), positions, rounded_attention, (None,) * c.num_layers)
    wanted = np.asarray(apply(model, params, out.hidden[:, 20:], method="logits"))
    # One value at the edge between two numbers may have gone the other way.
    assert np.median(np.abs(got - wanted)) < 1e-4 and np.abs(got - wanted).max() < 0.1
    exact = np.asarray(logits(params, wide))
    # Four binary digits are off by 2 % in the mean; three peaked layers make this of it.
    assert 0.01 < np.sqrt(np.mean((got - exact) ** 2)) / np.std(exact) < 0.3
    # NaN in slots that nobody owns reaches nobody.
    dirty = jax.tree.map(lambda bits: jnp.full_like(bits, 0x7F), narrow)
    np.testing.assert_array_equal(logits(params, dirty), got)


def test_margins_are_those_of_the_cache_that_decoded() -> None:
    """A decision over an FP8 cache may be won by more or less than over a wide one, or by another token."""
    c, (model, params) = tiny.TARGET, tiny.target()
    row, key, sampling = IDS[0], row_keys(0, 1)[0], Sampling.make(1)
    positions = jnp.arange(24, dtype=jnp.int32)[None]
    for config, attend in (
        (CONFIG, rounded_attention),
        (dataclasses.replace(CONFIG, cache_format=None), causal_attention),
    ):
        out = apply(model, params, jnp.asarray(row)[None], positions, attend, (None,) * c.num_layers)
        second, best = np.sort(np.asarray(apply(model, params, out.hidden[:, -1:], method="logits"))[0, 0])[-2:]
        got = decision_margin(model, params, config, tolerance_of(c, config), row[:20], row[20:], key, sampling)
        assert got == pytest.approx(best - second, abs=1e-4)


def test_a_cache_in_fp8_has_a_tolerance_of_its_own() -> None:
    c, wide = tiny.TARGET, GenerationConfig()
    card = dataclasses.replace(c.weights, activations=(("layers_0/mlp/up/weight", "fp8_token"),))
    assert tolerance_of(c, wide) == tolerance_of(c, GenerationConfig(draft_cache_format="fp8")) == 1e-3
    assert tolerance_of(dataclasses.replace(c, dtype="bfloat16"), wide) == 0.25
    assert tolerance_of(c, CONFIG) == tolerance_of(dataclasses.replace(c, dtype="bfloat16"), CONFIG) == 0.75
    rounding = dataclasses.replace(c, weights=card)
    assert tolerance_of(rounding, wide) == tolerance_of(rounding, CONFIG) == 2


def test_a_pool_takes_a_quarter_of_float32() -> None:
    wide, narrow = (make_pools(1, 64, 4, 8, "float32", format)[0] for format in (None, "fp8"))
    assert [sum(x.nbytes for x in jax.tree.leaves(pool)) for pool in (wide, narrow)] == [
        8192,
        2048,
    ] and narrow.shape == wide.shape
    step = chain_step(jnp.asarray([[0]]), jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.int32), 1, 8, 64)
    assert read_chunk(narrow, step, 0, 8).dtype == jnp.float32


def test_formats_and_scales_that_cannot_be_are_refused() -> None:
    make = partial(GenerationConfig, cache_format="fp8")
    for bad in (partial(GenerationConfig, cache_format="int8"), partial(GenerationConfig, draft_cache_format="")):
        with pytest.raises(Eagle3Error, match="None or fp8 is needed"):
            bad()
    wrong: list[Any] = [(0.0,), (float("nan"),), [1.0], (1,)]
    for scales in wrong:
        with pytest.raises(Eagle3Error, match="cache_format is 'fp8' with scales"):
            make(cache_scales=scales)
    with pytest.raises(Eagle3Error, match="draft_cache_format is None with scales"):
        make(draft_cache_scales=(1.0,))
    with pytest.raises(Eagle3Error, match="2 cache scales; one for each of 3 layers"):
        make_pools(3, 8, 1, 1, "float32", "fp8", (1.0, 1.0))
