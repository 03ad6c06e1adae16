"""DeepSeek-V3's decoder against reference outputs, its two forms against each other, and its cache."""

import dataclasses
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import latent
import numpy as np
import pytest
import tiny
from jax import Array
from loading import TARGETS, expected, target
from xla import SHIPPED

from eagle3_jax.api import score
from eagle3_jax.cache.paged import chain_step, make_pools
from eagle3_jax.config import RopeConfig
from eagle3_jax.decoding.drafters import Oracle
from eagle3_jax.decoding.loop import Generation, generate, speculative_generate
from eagle3_jax.decoding.request import Chain, GenerationConfig
from eagle3_jax.decoding.sampling import Sampling, row_keys
from eagle3_jax.decoding.verify import compare, decision_margin
from eagle3_jax.models.attention import causal_attention, paged_attention
from eagle3_jax.models.deepseek import Deepseek, expands, score_scale
from eagle3_jax.models.eagle3 import Eagle3
from eagle3_jax.models.layers import apply

FIXTURES = ("deepseek_v3_grouped", "deepseek_v3_kimi")
ABSORBED, DIRECT = 10_000, 1
TINY = latent.TARGET


def in_form(model: Deepseek, expand_from: int | None) -> Deepseek:
    return model.clone(config=dataclasses.replace(model.config, expand_from=expand_from))


@pytest.fixture(scope="module")
def model() -> tuple[Deepseek, Any]:
    return latent.target()


@pytest.mark.parametrize("expand_from", [ABSORBED, DIRECT], ids=["absorbed", "direct"])
@pytest.mark.parametrize("name", FIXTURES)
def test_logits_and_hidden_states_match_the_reference(name: str, expand_from: int) -> None:
    loaded, arrays = target(name), expected(TARGETS / name)
    loaded = dataclasses.replace(loaded, model=in_form(loaded.model, expand_from))
    got = score(loaded, arrays["input_ids"])
    assert np.abs(got.logits - arrays["logits"]).max() <= 2e-4
    assert np.abs(got.hidden_states - arrays["hs"]).max() <= 2e-4


@pytest.mark.parametrize("name", FIXTURES)
def test_greedy_ids_match_the_reference(name: str) -> None:
    """A prompt in two chunks, in the direct form, and absorbed decoding."""
    loaded, arrays = target(name), expected(TARGETS / name)
    prompts, ids = arrays["greedy_prompt_ids"], arrays["greedy_ids"]
    module = in_form(loaded.model, 5)
    config = GenerationConfig(max_new_tokens=ids.shape[1], transforms=(), prefill_chunk=6, block_size=8)
    run = jax.jit(generate, static_argnames=("model", "config"))
    lengths = jnp.full((len(prompts),), prompts.shape[1], jnp.int32)
    sampling = Sampling.make(len(prompts))
    out = run(
        loaded.params, jnp.asarray(prompts), lengths, row_keys(0, len(prompts)), sampling, model=module, config=config
    )
    np.testing.assert_array_equal(out.tokens, ids)


IDS = np.random.default_rng(1).integers(0, tiny.VOCAB, (2, 40)).astype(np.int32)
PASSES = (26, 4, 10)
BLOCK = 8


@partial(jax.jit, static_argnums=(0, 1, 2))
def in_passes(
    module: Deepseek, chunk_size: int, page_size: int, params: Any, pools: tuple, table: Array
) -> tuple[Array, tuple]:
    """Logits of IDS, fed pass by pass through a paged cache."""
    start, logits = jnp.zeros((2,), jnp.int32), []
    for length in PASSES:
        fed = next_ids(start, length)
        step = chain_step(table, start, jnp.full((2,), length), length, BLOCK, pools[0].shape[0]).replace(
            page_size=page_size
        )
        out = apply(module, params, fed, step.positions, paged_attention(step, chunk_size), pools)
        logits.append(apply(module, params, out.hidden, method="logits"))
        pools, start = out.caches, start + length
    return jnp.concatenate(logits, axis=1), pools


def next_ids(start: Array, length: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(jnp.asarray(IDS), start[0], length, axis=1)


@partial(jax.jit, static_argnums=0)
def at_once(module: Deepseek, params: Any) -> Array:
    """Logits of IDS without a cache."""
    positions = jnp.broadcast_to(jnp.arange(IDS.shape[1], dtype=jnp.int32), IDS.shape)
    out = apply(module, params, jnp.asarray(IDS), positions, causal_attention, (None,) * TINY.num_layers)
    return apply(module, params, out.hidden, method="logits")


def scattered() -> tuple[tuple, Array]:
    """Pools of twice the size that is needed, and a table of blocks all over them."""
    blocks = 2 * IDS.shape[1] // BLOCK
    table = np.random.default_rng(2).permutation(2 * blocks)[:blocks].reshape(2, -1)
    pools = make_pools(TINY.num_layers, 2 * blocks * BLOCK, *TINY.cache_row, TINY.dtype)
    return pools, jnp.asarray(table, jnp.int32)


@pytest.mark.parametrize(
    ("expand_from", "chunk_size", "page_size"), [(ABSORBED, 64, 1), (DIRECT, 8, 8)], ids=["absorbed", "direct"]
)
def test_a_paged_cache_of_latents_changes_nothing(
    model: tuple, expand_from: int, chunk_size: int, page_size: int
) -> None:
    module, params = in_form(model[0], expand_from), model[1]
    whole = at_once(in_form(model[0], ABSORBED), params)
    pools, table = scattered()
    got, written = in_passes(module, chunk_size, page_size, params, pools, table)
    assert np.abs(got - whole).max() < 1e-4
    # One row of the latent and the turned key a token, for all heads.
    assert written[0].shape[1:] == (1, 14)
    poisoned, _ = in_passes(
        module, chunk_size, page_size, params, tuple(jnp.full_like(p, jnp.nan) for p in pools), table
    )
    np.testing.assert_array_equal(poisoned, got)


def test_the_form_is_chosen_by_the_number_of_new_tokens() -> None:
    kimi = dataclasses.replace(TINY, kv_rank=512, nope_dim=128, head_dim=128, rope_dim=64)
    assert [expands(kimi, n) for n in (1, 8, 170, 171, 4096)] == [False, False, False, True, True]
    wide = dataclasses.replace(TINY, kv_rank=7)  # expanding is no saving at any length
    assert not expands(wide, 10**9)


def test_scale_of_kimi_k25() -> None:
    """192 ** -0.5 times the square of 0.1 ln 64 + 1; cos and sin keep their size."""
    rope = RopeConfig(kind="yarn", factor=64.0, original_max_position=4096, mscale=1.0, mscale_all_dim=1.0)
    kimi = dataclasses.replace(TINY, nope_dim=128, rope_dim=64, rope=rope)
    assert score_scale(kimi) == pytest.approx(0.1446796, abs=1e-7)
    assert score_scale(dataclasses.replace(kimi, rope=RopeConfig())) == pytest.approx(192**-0.5)


BATCH = 8
drafted_run = jax.jit(speculative_generate, static_argnames=("target_model", "draft_model", "config"))
CONFIG = GenerationConfig(max_new_tokens=20, transforms=(), prefill_chunk=24, block_size=8)


@pytest.fixture(scope="module")
def plain(model: tuple) -> tuple[Array, Array, Sampling, Generation]:
    """Rows that are greedy and rows that are drawn; the prompts' pass is direct, those of decoding absorbed."""
    assert expands(TINY, 24) and not expands(TINY, 8)
    ids, lengths = tiny.prompts(BATCH)
    sampling = Sampling.make(BATCH, temperature=[0.0, 0.7] * (BATCH // 2))
    run = jax.jit(generate, static_argnames=("model", "config"))
    return (
        ids,
        lengths,
        sampling,
        run(model[1], ids, lengths, row_keys(0, BATCH), sampling, model=model[0], config=CONFIG),
    )


def own_draft() -> tuple[Eagle3, Any]:
    """A random EAGLE-3 draft with a cache of keys and values, as public drafts of latent targets have it."""
    return tiny.draft(dataclasses.replace(tiny.DRAFT, taps=(0, 1, 2)))


@pytest.mark.parametrize(("kind", "drafts"), [("oracle", 1), ("oracle", 7), ("eagle3", 3), ("latent", 3)])
def test_speculation_changes_nothing(model: tuple, plain: tuple, kind: str, drafts: int) -> None:
    ids, lengths, sampling, alone = plain
    drafter: Any = Oracle()
    config = dataclasses.replace(CONFIG, speculation=Chain(drafts), page_size=1)
    draft_params: Any = jnp.asarray(tiny.corrupted(tiny.whole_rows(ids, lengths, np.asarray(alone.tokens)), 0.3))
    if kind != "oracle":
        drafter, draft_params = own_draft() if kind == "eagle3" else latent.draft()
        config = dataclasses.replace(config, draft_page_size=4)
    out = drafted_run(
        model[1],
        draft_params,
        ids,
        lengths,
        row_keys(0, BATCH),
        sampling,
        target_model=model[0],
        draft_model=drafter,
        config=config,
    )
    margin = partial(decision_margin, *model, CONFIG, 1e-3)
    report = compare(alone, out, margin, ids, lengths, row_keys(0, BATCH), sampling, 1e-3)
    assert report.ok and sum(not row.equal for row in report.rows) <= 1, report.rows
    assert np.sum(out.stats.accepted) > 0
    assert np.sum(out.stats.accepted) < np.sum(out.stats.drafted)


def test_no_loop_copies_a_pool_or_a_matrix_of_the_latent(model: tuple) -> None:
    ids, lengths = tiny.prompts(BATCH)
    drafter, draft_params = own_draft()
    models = {"target_model": model[0], "draft_model": drafter}
    config = dataclasses.replace(CONFIG, speculation=Chain(3))
    arguments = (model[1], draft_params, ids, lengths, row_keys(0, BATCH), Sampling.make(BATCH))
    hlo = drafted_run.lower(*arguments, **models, config=config).compile(compiler_options=SHIPPED).as_text()
    loops = hlo[: hlo.index("\nENTRY ")]
    slots = BATCH * 48
    assert f"f32[{slots},1,14]" in loops and f"f32[{slots},1,24]" in loops  # the target's pool and the draft's
    assert not re.findall(rf"= f32\[{slots},[0-9,]+\]\S* copy\(.*", loops)
    made = set(re.findall(r"= f32\[(?:16,10|12,10|2,8,10|2,6,10)\]\S* ([a-z-]+)\(", loops))
    assert "parameter" in made and made <= {"parameter", "get-tuple-element", "bitcast"}
