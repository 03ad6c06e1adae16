"""Measurements of one target and draft on this machine.

Every time is the median over turns in which the compared programs run one after the other, so that a machine
that slows down slows all of them; of a turn's few tries of a loop the fastest counts.
"""

import dataclasses
import datetime
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from tqdm import tqdm

from eagle3_jax.checkpoint.drafts import Draft
from eagle3_jax.checkpoint.targets import Target
from eagle3_jax.decoding.batches import bucket
from eagle3_jax.decoding.drafters import Drafter, Eagle3Drafter, NoDrafter, Verified
from eagle3_jax.decoding.loop import (
    ERROR,
    Generation,
    Params,
    Setup,
    State,
    generate,
    jitted_prefill,
    make_drafter,
    run_rounds,
    speculative_generate,
    target_pass,
)
from eagle3_jax.decoding.request import Chain, GenerationConfig, parse_speculation
from eagle3_jax.decoding.sampling import TRANSFORMS, Sampling, row_keys, used_transforms
from eagle3_jax.decoding.stats import acceptance
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.models.eagle3 import shared_weights
from eagle3_jax.models.layers import apply
from eagle3_jax.quant import few_rows
from eagle3_jax.quant.weight import weight_bytes

VERIFY_ROWS = (2, 3, 5, 6, 9)
"""Rows of the verify passes that are always timed: chains of 1, 2, 4, 5 and 8."""
CONTEXT = 136
"""Tokens in the cache when stages are timed: past one chunk of attention, early in the next."""
SHORT, LONG = 2, 12
"""Loop lengths: the difference in time is that of LONG - SHORT iterations, without what a call costs once."""
CACHE_PROOF_BYTES = 2**28
"""Least size of the array whose reading gives the memory bandwidth; smaller ones would stay in a cache."""
_READ_ROWS = 1024
"""Rows of that array; a product with a vector reads it row by row."""
TRIES = 3
"""Times a loop is timed within a turn; the least counts, since a disturbance only ever adds."""
_HUGE = 1e30


def run_bench(
    target: Target,
    draft: Draft,
    prompts: tuple[Array, Array],
    *,
    prompts_name: str,
    speculations: Sequence[str],
    max_new_tokens: int,
    temperature: float,
    seed: int,
    repeats: int,
    concurrencies: Sequence[int],
    config: GenerationConfig = GenerationConfig(),
) -> dict[str, Any]:
    """Measure the floor, the stages, and each speculation against plain decoding.

    Args:
        target: the model. draft: its drafter.
        prompts: token ids int32 [N, P] and lengths int32 [N]. prompts_name: what to call them.
        speculations: settings such as "chain:4"; stages are measured for the first.
        max_new_tokens, temperature, seed: of the cells.
        repeats: turns of each measurement.
        concurrencies: prompts of one batch; every size is measured.
        config: formats and pages of the caches; its other fields are set here.

    Returns:
        The report, ready for JSON; its keys are part of the command line's contract.

    Raises:
        Eagle3Error: a context too short to measure in, or logits without a finite maximum.
    """
    chains = {text: parse_speculation(text) for text in speculations}
    batches = {size: _batches(*prompts, size) for size in concurrencies}
    formats = {name: getattr(config, name) for name in ("cache_format", "draft_cache_format")}
    calls = repeats * (1 + len(chains)) * sum(len(part) for part in batches.values())
    # disable=None: a bar on a terminal, nothing elsewhere.
    with tqdm(desc="bench", total=2 + calls, disable=None, leave=False) as bar:
        before = measure_floor(target.params)
        bar.update()
        stages = measure_stages(target, draft, prompts, next(iter(chains.values())), repeats, config)
        bar.update()
        cells = []
        for size, part in batches.items():
            sampling = Sampling.make(size, temperature=temperature, eos_ids=target.eos_ids, max_tokens=max_new_tokens)
            settings = (max_new_tokens, sampling, seed, repeats, config)
            found = _measure_cells(target, draft, part, chains, *settings, bar.update)
            for text, cell in zip(chains, found, strict=True):
                cells.append({"prompts": prompts_name, "speculation": text, "concurrency": size, **cell, **formats})
    # A shared machine's bandwidth drifts: the floor is the best it showed, before or after the rest.
    floor = max(before, measure_floor(target.params), key=lambda floor: floor["bytes_per_second"])
    return {
        "machine": machine(),
        "target": target.name,
        "draft": draft.name,
        "floor": floor,
        "stages": stages,
        "cells": cells,
    }


def machine() -> str:
    """The machine in words: processor, cores, JAX's version and device, whether the native kernel is in use, date."""
    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        named = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        processor = named[0].partition(":")[2].strip() if named else processor
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    device = jax.devices()[0]
    kind = "" if device.platform == "cpu" else f" {jax.device_count()} x {device.device_kind}"
    date = datetime.date.today().isoformat()
    kernel = ", native kernels" if few_rows.in_use() else ""
    return f"{processor}, {cores} cores, jax {jax.__version__}, {device.platform}{kind}{kernel}, {date}"


def measure_floor(params: Any, tries: int = 20) -> dict[str, Any]:
    """The time to read all weights once at the best rate that a jitted streaming read reaches here.

    Two kinds of read are tried, a maximum and a product with a vector, since neither is always the faster.
    """
    size = weight_bytes(params)
    array = jnp.ones((_READ_ROWS, max(size, CACHE_PROOF_BYTES) // 4 // _READ_ROWS), jnp.float32)
    vector = jnp.ones((1, _READ_ROWS), jnp.float32)
    reads = [partial(jax.jit(jnp.max), array), partial(jax.jit(jnp.matmul), vector, array)]
    for read in reads:
        jax.block_until_ready(read())
    rate = array.nbytes / min(_seconds(read) for _ in range(tries) for read in reads)
    return {"weight_bytes": size, "bytes_per_second": rate, "step_seconds": size / rate}


def measure_stages(
    target: Target,
    draft: Draft,
    prompts: tuple[Array, Array],
    chain: Chain,
    repeats: int,
    config: GenerationConfig = GenerationConfig(),
) -> dict[str, Any]:
    """Seconds of a plain step, of verify passes, of a draft step, and what a round adds to its passes.

    The passes are bare applications of the models with their heads, in a loop like the round's, without
    sampling, acceptance and bookkeeping.
    """
    params: Params = (target.params, draft.params)
    config = dataclasses.replace(config, speculation=chain, transforms=())
    plain, plain_state = _prefilled(target, NoDrafter(), params, prompts, config)
    spec, state = _prefilled(target, make_drafter(draft.model, target.model, config), params, prompts, config)
    rounds = jax.jit(run_rounds, static_argnums=0)
    greedy, sampled = Sampling.make(1, ignore_eos=True), Sampling.make(1, temperature=1.0, ignore_eos=True)
    width = chain.length + 1
    timed: dict[str, Callable[[int], Any]] = {
        "plain": lambda n: rounds(plain, params, greedy, plain_state, n),
        "greedy": lambda n: rounds(spec, params, greedy, state, n),
        "sampled": lambda n: rounds(spec, params, sampled, state, n),
        "draft": lambda n: _draft_steps(spec, params, state, n),
        "chain": lambda n: _draft_chains(spec, params, state, n),
        **{
            f"verify {rows}": partial(_verify_passes, spec, rows, params, state)
            for rows in sorted({*VERIFY_ROWS, width})
        },
    }
    for run in timed.values():
        run(jnp.int32(1))
    turns = [{name: _seconds_per_iteration(run) for name, run in timed.items()} for _ in range(repeats)]

    def overhead(kind: str) -> float:
        shares = [1 - (turn[f"verify {width}"] + turn["chain"]) / turn[kind] for turn in turns]
        return statistics.median(shares)

    median = {name: statistics.median(turn[name] for turn in turns) for name in timed}
    return {
        "plain_step_seconds": median["plain"],
        "verify_seconds": {
            name.removeprefix("verify "): seconds for name, seconds in median.items() if name.startswith("verify ")
        },
        "draft_step_seconds": median["draft"],
        "round_overhead": {"greedy": overhead("greedy"), "sampled": overhead("sampled")},
    }


def _prefilled(
    target: Target, drafter: Drafter, params: Params, prompts: tuple[Array, Array], config: GenerationConfig
) -> tuple[Setup, State]:
    """One row with CONTEXT tokens in its caches (the first prompt, repeated) and room for LONG rounds."""
    drafts = config.speculation.length
    room = LONG * (max(drafts + 1, *VERIFY_ROWS)) + 1
    if CONTEXT + room > target.model.config.max_position:
        raise Eagle3Error(
            f"{target.name} has a context of {target.model.config.max_position}; "
            f"measuring {drafts} drafts a round needs {CONTEXT + room}"
        )
    first = np.asarray(prompts[0])[0, : int(prompts[1][0])]
    ids = jnp.asarray(np.resize(first, (1, CONTEXT)), jnp.int32)
    setup = Setup(target.model, drafter, dataclasses.replace(config, max_new_tokens=room))
    sampling = Sampling.make(1, ignore_eos=True)
    lengths = jnp.full((1,), CONTEXT, jnp.int32)
    state = jitted_prefill(setup, params, ids, lengths, row_keys(0, 1), sampling)
    _refuse_errors(state.finish)
    return setup, state


@partial(jax.jit, static_argnums=(0, 1))
def _verify_passes(setup: Setup, rows: int, params: Params, state: State, iterations: Array) -> Array:
    """`iterations` target passes of `rows` tokens after the context, head included."""
    count = jnp.full_like(state.length, rows)

    def body(_: Array, carry: tuple) -> tuple:
        ids, pools = carry
        hidden, _, pools = target_pass(setup, params[0], ids, state.length, count, state.table, pools)
        return _next_ids(apply(setup.target, params[0], hidden, method="logits")), pools

    start = jnp.zeros((1, rows), jnp.int32)
    return lax.fori_loop(0, iterations, body, (start, state.pools))[0]


@partial(jax.jit, static_argnums=0)
def _draft_chains(setup: Setup, params: Params, state: State, iterations: Array) -> Array:
    """`iterations` times what a round drafts: an extend pass over K+1 rows and K-1 steps, heads included."""
    drafts = setup.drafts
    count = jnp.full_like(state.length, drafts + 1)

    def body(_: Array, carry: tuple) -> tuple:
        ids, cache = carry
        pending = state.pending
        rows = Verified(pending.features, ids, state.length, count, state.table)
        ids, cache = setup.drafter.propose(
            (params[1], params[0]),
            cache,
            rows,
            drafts,
            lambda *given: _next_ids(given[1]),
            setup.config.block_size,
        )
        return jnp.pad(ids, ((0, 0), (0, 1))), cache

    start = jnp.zeros((1, drafts + 1), jnp.int32)
    return lax.fori_loop(0, iterations, body, (start, state.draft_cache))[0]


@partial(jax.jit, static_argnums=0)
def _draft_steps(setup: Setup, params: Params, state: State, iterations: Array) -> Array:
    """`iterations` draft passes of one token, head included."""
    drafter = setup.drafter
    assert isinstance(drafter, Eagle3Drafter)
    model, weights = drafter.model, (params[1], params[0])

    def body(_: Array, carry: tuple) -> tuple:
        ids, y, cache = carry
        y, cache = drafter.step(weights, cache, y, ids, state.length, state.table, setup.config.block_size)
        return _next_ids(apply(model, params[1], y[:, 0], shared_weights(params[0]), method="logits")), y, cache

    y = jnp.zeros((1, 1, model.config.hidden_size), model.config.dtype)
    return lax.fori_loop(0, iterations, body, (jnp.zeros((1,), jnp.int32), y, state.draft_cache))[0]


def _next_ids(logits: Array) -> Array:
    """Ids that need all logits [..., V] but almost no work: the loop can neither skip nor hoist a pass."""
    return (jnp.max(logits, axis=-1) > _HUGE).astype(jnp.int32)


def _batches(token_ids: Array, lengths: Array, concurrency: int) -> list[tuple[Array, Array]]:
    """The prompts in batches of one size, each padded as it would be alone.

    The last is filled up from the first prompts.
    """
    ids, counts = np.asarray(token_ids), np.asarray(lengths)
    total = -(-len(counts) // concurrency) * concurrency
    rows = (np.arange(total) % len(counts)).reshape(-1, concurrency)
    widths = [bucket(int(counts[part].max()), ids.shape[1]) for part in rows]
    return [(jnp.asarray(ids[part, :n]), jnp.asarray(counts[part])) for part, n in zip(rows, widths, strict=True)]


def _measure_cells(
    target: Target,
    draft: Draft,
    batches: list[tuple[Array, Array]],
    chains: dict[str, Chain],
    max_new_tokens: int,
    sampling: Sampling,
    seed: int,
    repeats: int,
    config: GenerationConfig,
    done: Callable[[], Any],
) -> list[dict[str, Any]]:
    """Plain and every speculation over all batches, in turns: one cell for each speculation."""
    used = used_transforms(sampling)
    transforms = tuple(name for name in TRANSFORMS if name in used)
    # No longer than the context: the result is as wide as what is asked for.
    capacity = min(max_new_tokens, target.model.config.max_position)
    plain_config = dataclasses.replace(config, max_new_tokens=capacity, transforms=transforms)
    request = (row_keys(seed, len(batches[0][1])), sampling)
    run_plain = jax.jit(generate, static_argnames=("model", "config"))
    run_speculative = jax.jit(speculative_generate, static_argnames=("target_model", "draft_model", "config"))

    def plain(*prompts: Array) -> Generation:
        return run_plain(target.params, *prompts, *request, model=target.model, config=plain_config)

    def speculative(chain: Chain, *prompts: Array) -> Generation:
        models = {"target_model": target.model, "draft_model": draft.model}
        config = dataclasses.replace(plain_config, speculation=chain)
        return run_speculative(target.params, draft.params, *prompts, *request, **models, config=config)

    programs = [plain, *(partial(speculative, chain) for chain in chains.values())]
    # One batch of every padded length: each is compiled before the clock starts.
    for batch in {batch[0].shape: batch for batch in batches}.values():
        for program in programs:
            jax.block_until_ready(program(*batch))
    turns = [_one_turn(programs, batches, done) for _ in range(repeats)]
    return [_cell(batches, [(turn[0], turn[i]) for turn in turns]) for i in range(1, len(programs))]


@dataclasses.dataclass
class _Total:
    """What one program did over all batches: wall time, emitted tokens, summed statistics."""

    seconds: float = 0.0
    tokens: int = 0
    stats: Any = None

    @property
    def rate(self) -> float:
        """Output tokens per second."""
        return self.tokens / self.seconds


def _one_turn(programs: Sequence[Callable], batches: Sequence[tuple[Array, Array]], done: Callable) -> list[_Total]:
    """Every program over every batch, the programs in turns batch by batch."""
    totals = [_Total() for _ in programs]
    for batch in batches:
        for program, total in zip(programs, totals, strict=True):
            begin = time.perf_counter()
            out = jax.block_until_ready(program(*batch))
            total.seconds += time.perf_counter() - begin
            _refuse_errors(out.finish_reason)
            total.tokens += int(out.lengths.sum())
            stats = jax.device_get(out.stats)
            total.stats = stats if total.stats is None else jax.tree.map(np.add, total.stats, stats)
            done()
    return totals


def _cell(batches: Sequence[tuple[Array, Array]], turns: Sequence[tuple[_Total, _Total]]) -> dict[str, Any]:
    """One cell from its turns of (plain, speculative)."""
    ratios = [own.rate / plain.rate for plain, own in turns]
    last = turns[-1][1]
    found = acceptance(last.stats)
    rate = statistics.median(own.rate for _, own in turns)
    return {
        "output_tokens_per_second": rate,
        "ratio_to_plain": {"min": min(ratios), "median": statistics.median(ratios), "max": max(ratios)},
        "mean_acceptance_length": found["mean_acceptance_length"],
        "acceptance_per_position": found["acceptance_per_position"],
        "runs": [
            {"plain_tokens_per_second": plain.rate, "tokens_per_second": own.rate, "ratio": ratio}
            for (plain, own), ratio in zip(turns, ratios, strict=True)
        ],
        **_as_vllm_names_it(batches, last, statistics.median(own.seconds for _, own in turns)),
    }


def _as_vllm_names_it(batches: Sequence[tuple[Array, Array]], total: _Total, seconds: float) -> dict[str, Any]:
    """The same numbers under the keys of vLLM's and InferenceX's result files, by their definitions.

    `seconds` is the time of a turn. Acceptance per position is over all rounds, also those at a row's end that
    drafted fewer tokens.
    """
    completed = sum(len(lengths) for _, lengths in batches)
    given = sum(int(lengths.sum()) for _, lengths in batches)
    rounds, drafted, accepted = (
        int(np.sum(x)) for x in (total.stats.rounds, total.stats.drafted, total.stats.accepted)
    )
    kept = np.sum(total.stats.accepted_per_position, axis=0)
    return {
        "max_concurrency": len(batches[0][1]),
        "completed": completed,
        "duration": seconds,
        "total_input_tokens": given,
        "total_output_tokens": total.tokens,
        "request_throughput": completed / seconds,
        "output_throughput": total.tokens / seconds,
        "total_token_throughput": (given + total.tokens) / seconds,
        "spec_decode_num_drafts": rounds,
        "spec_decode_draft_tokens": drafted,
        "spec_decode_accepted_tokens": accepted,
        "spec_decode_acceptance_rate": 100 * accepted / drafted if drafted else None,
        "spec_decode_acceptance_length": 1 + accepted / rounds if rounds else None,
        "spec_decode_per_position_acceptance_rates": (kept / max(rounds, 1)).tolist(),
    }


def _refuse_errors(finish: Array) -> None:
    if np.any(np.asarray(finish) == ERROR):
        raise Eagle3Error("the logits have no finite maximum; the weights or the activations' dtype are at fault")


def _seconds(run: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - begin


def _seconds_per_iteration(run: Callable[[Any], Any]) -> float:
    short, long = (min(_seconds(partial(run, jnp.int32(n))) for _ in range(TRIES)) for n in (SHORT, LONG))
    # Never 0 or less, which rounding makes of a model that takes no time.
    return max(long - short, 1e-9) / (LONG - SHORT)
