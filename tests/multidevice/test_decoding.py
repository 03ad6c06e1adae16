"""Plain and speculative decoding over a mesh give the tokens of one device, in every family."""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from shortened import short_draft, short_target

from eagle3_jax.cache.paged import make_pools
from eagle3_jax.decoding.loop import Generation, generate, speculative_generate
from eagle3_jax.decoding.request import Chain, GenerationConfig
from eagle3_jax.decoding.sampling import Sampling, row_keys
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.sharding import make_mesh, shard_weights

FAMILIES = ("llama_tied", "qwen3", "qwen3_moe", "minimax_m2", "gpt_oss", "deepseek_v3_kimi")
BATCH, PROMPT = 4, 12
CONFIG = GenerationConfig(max_new_tokens=12, speculation=Chain(2), transforms=(), prefill_chunk=8, block_size=8)
SLOTS = BATCH * 3 * CONFIG.block_size
plain = jax.jit(generate, static_argnames=("model", "config"))
drafted = jax.jit(speculative_generate, static_argnames=("target_model", "draft_model", "config"))


def request() -> tuple[Any, ...]:
    """Rows of two groups, greedy and drawn, whose prompts and answers differ in length.

    At a high temperature the shared noise decides, so that the draft is right now and then.
    """
    ids = np.random.default_rng(0).integers(0, 96, (BATCH, PROMPT)).astype(np.int32)
    lengths = jnp.asarray([3, 7, 12, 9], jnp.int32)
    sampling = Sampling.make(BATCH, temperature=[0.0, 0.7, 0.0, 5.0], max_tokens=[12, 5, 3, 9])
    return jnp.asarray(ids), lengths, row_keys(0, BATCH), sampling


def draft_run(name: str, params: Any, draft_params: Any) -> tuple[Generation, str]:
    """The generation and the program's text."""
    models = {"target_model": short_target(name)[0], "draft_model": short_draft(name)[0], "config": CONFIG}
    program = drafted.lower(params, draft_params, *request(), **models).compile()
    return drafted(params, draft_params, *request(), **models), program.as_text() or ""


def exchanges(program: str) -> set[tuple[str, tuple[int, ...], bool]]:
    """Kind and resulting shape of all exchanges between devices, and whether only drawing needs it."""
    kinds = "all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute"
    found = re.findall(rf" = (.*) ({kinds})(?:-start)?\((.*)", program)
    return {
        (kind, tuple(map(int, filter(None, shape.split(",")))), "/cond/branch" in rest)
        for result, kind, rest in found
        for shape in re.findall(r"\w+\[([\d,]*)\]", result)
    }


@pytest.mark.parametrize("name", FAMILIES)
def test_a_mesh_changes_no_token(name: str) -> None:
    params, draft_params = short_target(name)[1], short_draft(name)[1]
    alone, _ = draft_run(name, params, draft_params)
    assert sorted(alone.lengths.tolist()) == [3, 5, 9, 12] and int(alone.stats.accepted.sum()) > 0
    # Rows over two groups; heads, columns, vocabulary and experts over four devices each.
    mesh = make_mesh(2, 4)
    ours, program = draft_run(name, shard_weights(params, mesh), shard_weights(draft_params, mesh))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(alone), strict=True):
        np.testing.assert_array_equal(a, b)
    assert ours.tokens.sharding.is_fully_replicated
    _check_program(name, program)
    # All eight devices for one group, and no draft.
    tokens = plain(shard_weights(params, make_mesh(1, 8)), *request(), model=short_target(name)[0], config=CONFIG)
    np.testing.assert_array_equal(tokens.tokens, alone.tokens)


def _check_program(name: str, program: str) -> None:
    """No pool, no expert's matrix and, of greedy rows, no scores of the vocabulary go from device to device."""
    c, draft = short_target(name)[0].config, short_draft(name)[0].config
    slots = SLOTS // 2
    assert f"[{slots},1,16]" in program and f"[{slots},4,16]" not in program  # a head of the draft's four
    pools = [((slots,), (width,)) for _, width in (c.cache_row, draft.cache_row)]
    made = exchanges(program)
    assert {kind for kind, _, _ in made} >= {"all-reduce", "all-gather"}
    for kind, shape, drawing in made:
        assert (shape[0:1], shape[2:]) not in pools, (kind, shape)
        assert drawing or not {c.vocab_size, draft.draft_vocab_size}.intersection(shape), (kind, shape)
        assert c.moe is None or {c.hidden_size, c.moe.intermediate_size} != set(shape[-2:]), (kind, shape)


def test_the_bound_of_a_pool_holds_for_a_device_s_part() -> None:
    for mesh in (make_mesh(1, 8), make_mesh(2, 4)):
        pools = jax.eval_shape(partial(make_pools, 1, 2**20, 2**6, 2**5, "float32", mesh=mesh))
        assert pools[0].shape == (2**20, 2**6, 2**5)
        # Three heads lie whole on every device.
        with pytest.raises(Eagle3Error, match=r"1048576 x 3 x 1024 elements passes 2\*\*31"):
            make_pools(1, 2**20, 3, 2**10, "float32", mesh=mesh)
