"""What is compiled: one program, no host in the loop, no copy of a cache pool."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import tiny
from xla import SHIPPED

from eagle3_jax.decoding.drafters import Eagle3Drafter
from eagle3_jax.decoding.loop import (
    Setup,
    jitted_prefill,
    jitted_rounds,
    prefill,
    speculative_generate,
)
from eagle3_jax.decoding.request import Chain, GenerationConfig
from eagle3_jax.decoding.sampling import Sampling, row_keys

BATCH = 2
CONFIG = GenerationConfig(max_new_tokens=30, speculation=Chain(3), block_size=16, prefill_chunk=16)
SLOTS = BATCH * 16 * 4  # 24 + 30 tokens in blocks of 16
HOST = ("infeed", "outfeed", "send", "recv", "custom-call", "host")


def arguments(batch: int = BATCH, **wishes: Any) -> tuple:
    ids, lengths = tiny.prompts(batch)
    sampling = Sampling.make(batch, **wishes)
    return tiny.target()[1], tiny.draft()[1], ids, lengths, row_keys(0, batch), sampling


def computations(hlo: str) -> dict[str, str]:
    """Text of each computation of an optimised HLO module by its name; the entry is "ENTRY"."""
    found = {}
    for head, body in re.findall(r"^(ENTRY )?(?:%?[\w.\-]+) \([^\n]*\{\n(.*?)^\}", hlo, re.M | re.S):
        found["ENTRY" if head else f"computation {len(found)}"] = body
    return found


def operations(text: str) -> set[str]:
    return set(re.findall(r"= \S+(?: /\S+)? ([a-z][a-z\-]*)\(", text)) | set(re.findall(r" ([a-z][a-z\-]*)\(", text))


def pool_copies(text: str) -> list[str]:
    """Copies of anything with a pool's leading dimension."""
    return [line.strip() for line in text.splitlines() if re.search(rf"= \w+\[{SLOTS},.* copy(-start)?\(", line)]


@pytest.fixture(scope="module")
def fused() -> str:
    run = jax.jit(speculative_generate, static_argnames=("target_model", "draft_model", "config"))
    models = {"target_model": tiny.target()[0], "draft_model": tiny.draft()[0], "config": CONFIG}
    return run.lower(*arguments(temperature=0.5, top_p=0.9), **models).compile(compiler_options=SHIPPED).as_text()


@pytest.fixture(scope="module")
def rounds() -> tuple[str, Any]:
    params, draft_params, ids, lengths, keys, sampling = arguments()
    setup = Setup(tiny.target()[0], Eagle3Drafter(tiny.draft()[0]), CONFIG)
    state = jax.eval_shape(lambda *given: prefill(setup, *given), (params, draft_params), ids, lengths, keys, sampling)
    lowered = jitted_rounds.lower(setup, (params, draft_params), sampling, state, jnp.int32(4))
    return lowered.compile(compiler_options=SHIPPED).as_text(), state


def test_the_whole_run_is_one_module_that_never_talks_to_the_host(fused: str) -> None:
    assert fused.count("\nENTRY ") == 1
    assert len(re.findall(r" while\(", fused)) > 4
    assert not [op for op in operations(fused) if any(word in op for word in HOST)]


def test_no_loop_copies_a_pool(fused: str) -> None:
    parts = computations(fused)
    entry = parts.pop("ENTRY")
    assert f"[{SLOTS}," in entry and sum(f"[{SLOTS}," in body for body in parts.values()) > 4
    assert not [copy for body in parts.values() for copy in pool_copies(body)]


def test_streamed_rounds_update_their_pools_in_place(rounds: tuple[str, Any]) -> None:
    hlo, state = rounds
    assert not pool_copies(hlo)
    aliases = re.search(r"input_output_alias=\{(.*?)\}, entry", hlo, re.S)
    assert aliases is not None
    assert aliases[1].count("may-alias") + aliases[1].count("must-alias") >= len(state.pools) + 1


def test_the_check_for_copies_sees_one() -> None:
    def keeps_the_old_pool(pool: jax.Array) -> tuple[jax.Array, jax.Array]:
        return pool, pool.at[3].set(1.0)

    pool = jnp.zeros((SLOTS, 4, 8))
    hlo = jax.jit(keeps_the_old_pool, donate_argnums=0).lower(pool).compile(compiler_options=SHIPPED).as_text()
    assert pool_copies(hlo)


def test_values_and_weights_do_not_retrace_but_another_shape_does() -> None:
    run = jax.jit(speculative_generate, static_argnames=("target_model", "draft_model", "config"))
    models = {"target_model": tiny.target()[0], "draft_model": tiny.draft()[0], "config": CONFIG}
    values = [
        {"temperature": [0.0, 0.7], "top_k": 3, "top_p": 0.5, "min_p": 0.1},
        {
            "repetition_penalty": 1.2,
            "presence_penalty": 1.0,
            "max_tokens": [1, 9],
            "min_tokens": 2,
            "ignore_eos": True,
        },
    ]
    run(*arguments(), **models)
    traced = run._cache_size()
    for wishes in values:
        run(*arguments(**wishes), **models)
    params, draft_params, *rest = arguments()
    doubled = jax.tree.map(lambda x: x * 2, params)
    run(doubled, draft_params, *rest, **models)
    assert run._cache_size() == traced
    run(*arguments(batch=3), **models)
    assert run._cache_size() == traced + 1


def test_the_streaming_programs_do_not_retrace_either() -> None:
    setup = Setup(tiny.target()[0], Eagle3Drafter(tiny.draft()[0]), CONFIG)
    sizes = []
    for wishes in ({}, {"temperature": 1.0, "top_p": 0.3}):
        params, draft_params, ids, lengths, keys, sampling = arguments(**wishes)
        jitted_prefill(setup, (params, draft_params), ids, lengths, keys, sampling)
        sizes.append(jitted_prefill._cache_size())
    assert sizes[0] == sizes[1] > 0
