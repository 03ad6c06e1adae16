"""Odd sizes of batch, prompt, block, chunk, page and draft, against greedy decoding without a cache."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from eagle3_jax.decoding.drafters import Oracle
from eagle3_jax.decoding.loop import LENGTH, speculative_generate
from eagle3_jax.decoding.request import Chain, GenerationConfig
from eagle3_jax.decoding.sampling import Sampling, row_keys

FULL = 16
"""A context that the rows of some cases fill to the last slot."""


@dataclasses.dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...]
    new: int
    block: int
    chunk: int
    drafts: int
    context: int = 128
    oracle: bool = False
    pages: tuple[int | None, int | None] = (None, None)

    @property
    def ids(self) -> np.ndarray:
        rng = np.random.default_rng(len(self.lengths))
        return rng.integers(0, tiny.VOCAB, (len(self.lengths), max(self.lengths))).astype(np.int32)


CASES = {
    "one of everything": Case((1,), 1, block=1, chunk=1, drafts=1, oracle=True),
    "one prompt token, 64 drafts": Case((1,), 30, block=1, chunk=1, drafts=64, oracle=True),
    "blocks and chunks longer than any row": Case((1, 1, 12, 5, 3), 9, 128, 4096, drafts=3, pages=(1, 64)),
    "a full context in blocks of one": Case((1, 15, 10, 14, 5), 40, block=1, chunk=4, drafts=5, context=FULL),
}


def greedy(row: list[int], most: int, context: int) -> list[int]:
    """The target's greedy continuation, each token from a pass over the whole row."""
    row, first = list(row), len(row)
    while len(row) < min(first + most, context):
        row.append(int(np.argmax(tiny.causal_logits(np.asarray(row, np.int32))[-1])))
    return row[first:]


@pytest.mark.parametrize("name", CASES)
def test_a_run_of_odd_sizes_is_greedy_decoding(name: str) -> None:
    case = CASES[name]
    ids, batch = case.ids, len(case.lengths)
    expected = [greedy(ids[b, :n].tolist(), case.new, case.context) for b, n in enumerate(case.lengths)]
    model, params = tiny.target(max_position=case.context)
    draft_model, draft_params = tiny.draft()
    if case.oracle:
        rows = np.zeros((batch, ids.shape[1] + case.new), np.int32)
        for b, n in enumerate(case.lengths):
            rows[b, : n + len(expected[b])] = [*ids[b, :n], *expected[b]]
        draft_model, draft_params = Oracle(), jnp.asarray(tiny.corrupted(rows, 0.2))
    config = GenerationConfig(
        max_new_tokens=case.new,
        speculation=Chain(case.drafts),
        transforms=(),
        prefill_chunk=case.chunk,
        block_size=case.block,
        pad_id=-1,
        page_size=case.pages[0],
        draft_page_size=case.pages[1],
    )
    run = jax.jit(partial(speculative_generate, target_model=model, draft_model=draft_model, config=config))
    lengths = jnp.asarray(case.lengths, jnp.int32)
    out = run(params, draft_params, jnp.asarray(ids), lengths, row_keys(0, batch), Sampling.make(batch))
    assert out.lengths.tolist() == [len(tokens) for tokens in expected]
    assert out.finish_reason.tolist() == [LENGTH] * batch
    assert out.tokens.tolist() == [tokens + [-1] * (case.new - len(tokens)) for tokens in expected]
