"""The generation loop: prefill, then rounds of draft, verify, accept, commit.

One round function has three drivers: `speculative_generate` and `generate` run it in one traced program, and
`stream` calls it a few rounds at a time.

Dimension letters: B rows, P padded prompt length, T tokens of a pass, K drafts of a round, V vocabulary,
F joined feature width, M blocks of a row.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from eagle3_jax.cache.paged import (
    allocate,
    blocks_for,
    chain_step,
    empty_table,
    make_allocator,
    make_pools,
)
from eagle3_jax.decoding.drafters import Drafter, Eagle3Drafter, NoDrafter, Verified
from eagle3_jax.decoding.request import GenerationConfig, check_pair, check_request
from eagle3_jax.decoding.sampling import (
    History,
    Sampling,
    adjust,
    check_keys,
    draw,
    is_stop,
    log_probability,
    noise_if_sampled,
    noise_of,
    temper,
    truncate,
)
from eagle3_jax.decoding.state import (
    ERROR,
    LENGTH,
    RUNNING,
    STOP,
    Generation,
    Params,
    Setup,
    State,
    result,
    settled,
)
from eagle3_jax.decoding.stats import Stats
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.models.attention import paged_attention
from eagle3_jax.models.decoder import Decoder
from eagle3_jax.models.eagle3 import Eagle3
from eagle3_jax.models.layers import apply
from eagle3_jax.sharding import AnyMesh, in_step, keep_whole, mesh_of, on_host, over_rows


def decode_round(setup: Setup, params: Params, sampling: Sampling, state: State) -> State:
    """One round of EAGLE-3 decoding (arXiv 2503.01840, section 3.1): draft, verify, accept, commit.

    Verification samples and matches: the target draws its own token at every row, and a draft is accepted if
    it is that token. The noise of each drawn index is shared with the draft, so the two often agree.
    """
    return over_rows(partial(_round, setup), params, sampling, state)


def _round(setup: Setup, params: Params, sampling: Sampling, state: State) -> State:
    drafts, config = setup.drafts, setup.config
    indices = state.length[:, None] + 1 + jnp.arange(drafts + 1, dtype=jnp.int32)
    noise = noise_if_sampled(state.keys, indices, setup.target.config.vocab_size, sampling)

    with jax.named_scope("draft"):
        pick = partial(_pick, noise, sampling, config.transforms)
        draft_params = (params[1], params[0])
        # Its own table is the last round's, whose blocks may be other rows' by now.
        pending = replace(state.pending, table=state.table)
        proposed, draft_cache = setup.drafter.propose(
            draft_params, state.draft_cache, pending, drafts, pick, config.block_size
        )
    with jax.named_scope("verify"):
        fed = jnp.concatenate([state.last[:, None], proposed], axis=1)
        count = jnp.where(state.finish == RUNNING, drafts + 1, 0)
        hidden, features, pools = target_pass(setup, params[0], fed, state.length, count, state.table, state.pools)
        logits = apply(setup.target, params[0], hidden, method="logits")
        drawn, sound = _draw(setup, sampling, state, logits, proposed, noise)
    with jax.named_scope("accept"):
        matches = jnp.cumprod(drawn[:, :drafts] == proposed, axis=1, dtype=jnp.int32)
        accepted = jnp.sum(matches, axis=1, dtype=jnp.int32)
        emit, finish = _emittable(sampling, state, drawn, sound, accepted + 1)
    with jax.named_scope("commit"):
        pending = Verified(features, drawn, state.length, emit, state.table)
        state = replace(state, pools=pools, draft_cache=draft_cache, pending=pending, length=state.length + emit)
        stats = _count(state, drafts, jnp.minimum(accepted, emit))
        return _emit(replace(state, stats=stats), drawn, emit, finish, logits)


def _pick(
    noise: Array,
    sampling: Sampling,
    transforms: tuple[str, ...],
    j: int,
    logits: Array,
    target_ids: Array | None,
) -> Array:
    """The draft's own draw with the target's noise: logits [B, Vd] -> int32 [B] target ids."""
    shared = noise[:, j] if target_ids is None else noise_of(noise[:, j], target_ids, sampling)
    z = truncate(temper(logits[:, None], sampling), sampling, transforms)
    ids = draw(z, shared[:, None], sampling)[:, 0]
    ids = jnp.minimum(ids, logits.shape[-1] - 1)
    return ids if target_ids is None else target_ids[ids]


def target_pass(
    setup: Setup, params: Any, token_ids: Array, start: Array, count: Array, table: Array, pools: tuple
) -> tuple[Array, Array, tuple]:
    """The target over [B, T] new tokens: (hidden [B, T, H], features [B, T, F], pools)."""
    config, slots = setup.config, pools[0].shape[0]
    step = chain_step(table, start, count, token_ids.shape[1], config.block_size, slots, config.page_size)
    out = apply(setup.target, params, token_ids, step.positions, paged_attention(step), pools, setup.drafter.taps)
    return out.hidden, out.features, out.caches


def _draw(
    setup: Setup, sampling: Sampling, state: State, logits: Array, proposed: Array, noise: Array
) -> tuple[Array, Array]:
    """The target's own draw at every row [B, T], and whether that row's logits have a finite maximum."""
    transforms = setup.config.transforms
    sound = jnp.isfinite(jnp.max(logits, axis=-1))
    z = adjust(logits, sampling, transforms, state.history, proposed, state.emitted)
    z = truncate(temper(z, sampling), sampling, transforms)
    drawn = draw(z, noise, sampling)
    return jnp.minimum(drawn, logits.shape[-1] - 1), sound & (drawn < logits.shape[-1])


def _emittable(sampling: Sampling, state: State, drawn: Array, sound: Array, count: Array) -> tuple[Array, Array]:
    """How many of the `count` [B] drawn tokens to emit, and the finish reason after them.

    A row ends at its first stop token, at its limit, or before its first unsound row.
    """
    width = drawn.shape[1]
    index = jnp.arange(width, dtype=jnp.int32)

    def first(mask: Array) -> Array:
        return jnp.min(jnp.where(mask, index, width), axis=1)

    running = state.finish == RUNNING
    first_stop, first_unsound = first(is_stop(drawn, sampling)), first(~sound)
    room = state.limit - state.emitted
    most = jnp.minimum(count, room)
    emit = jnp.minimum(most, jnp.minimum(first_stop + 1, first_unsound))
    ends = [emit == first_stop + 1, emit < most, emit == room]
    finish = jnp.select(ends, [jnp.int8(STOP), jnp.int8(ERROR), jnp.int8(LENGTH)], jnp.int8(RUNNING))
    return jnp.where(running, emit, 0), jnp.where(running, finish, state.finish)


def _emit(state: State, drawn: Array, emit: Array, finish: Array, logits: Array) -> State:
    """Append the first `emit` [B] of the drawn tokens [B, T] to the result."""
    batch, width = drawn.shape
    offset = jnp.arange(width, dtype=jnp.int32)
    kept = offset < emit[:, None]
    row = jnp.arange(batch, dtype=jnp.int32)[:, None]
    place = jnp.where(kept, state.emitted[:, None] + offset, state.tokens.shape[1])
    tokens = state.tokens.at[row, place].set(drawn, mode="drop")
    newest = jnp.take_along_axis(drawn, jnp.maximum(emit - 1, 0)[:, None], axis=1)[:, 0]
    logprobs, history = state.logprobs, state.history
    if logprobs is not None:
        logprobs = logprobs.at[row, place].set(log_probability(logits, drawn), mode="drop")
    if history is not None:
        ids = jnp.where(kept, drawn, history.output_counts.shape[1])
        history = replace(history, output_counts=history.output_counts.at[row, ids].add(1, mode="drop"))
    return replace(
        state,
        tokens=tokens,
        emitted=state.emitted + emit,
        finish=finish,
        logprobs=logprobs,
        history=history,
        last=jnp.where(emit > 0, newest, state.last),
    )


def _count(state: State, drafts: int, accepted: Array) -> Stats:
    """The statistics after a round that emitted `accepted` [B] drafts; reads the state from before it."""
    running = state.finish == RUNNING
    drafted = jnp.where(running, jnp.minimum(drafts, state.limit - state.emitted), 0)
    position = jnp.arange(drafts, dtype=jnp.int32)
    stats = state.stats
    return Stats(
        rounds=stats.rounds + running.astype(jnp.int32),
        drafted=stats.drafted + drafted,
        accepted=stats.accepted + accepted,
        drafted_per_position=stats.drafted_per_position + (position < drafted[:, None]).astype(jnp.int32),
        accepted_per_position=stats.accepted_per_position + (position < accepted[:, None]).astype(jnp.int32),
    )


def prefill(setup: Setup, params: Params, token_ids: Array, lengths: Array, keys: Array, sampling: Sampling) -> State:
    """Run the prompts in chunks and draw each row's first token.

    Args:
        setup: what is compiled. params: (target params, draft params).
        token_ids: int32 [B, P], padded after each row's end. lengths: int32 [B].
        keys: [B] threefry keys. sampling: the rows' wishes.
    """
    return over_rows(partial(_prefill, setup), params, token_ids, lengths, keys, sampling)


def _prefill(setup: Setup, params: Params, token_ids: Array, lengths: Array, keys: Array, sampling: Sampling) -> State:
    state = _initial_state(setup, token_ids, lengths, keys, sampling, mesh_of(params))
    chunk = min(setup.config.prefill_chunk, token_ids.shape[1])
    padded = -(-token_ids.shape[1] // chunk) * chunk + 1
    ids = jnp.pad(token_ids, ((0, 0), (0, padded - token_ids.shape[1])))
    hidden = jnp.zeros((token_ids.shape[0], setup.target.config.hidden_size), setup.target.config.dtype)

    def body(carry: tuple) -> tuple:
        i, pools, draft_cache, hidden, feature = carry
        begin = jnp.full_like(lengths, i * chunk)
        fed = lax.dynamic_slice_in_dim(ids, i * chunk, chunk, axis=1)
        following = lax.dynamic_slice_in_dim(ids, i * chunk + 1, chunk, axis=1)
        count = jnp.clip(lengths - begin, 0, chunk)
        hiddens, features, pools = target_pass(setup, params[0], fed, begin, count, state.table, pools)
        # The last prompt token's successor is not drawn yet: its row stays pending for the first round.
        known = jnp.clip(lengths - 1 - begin, 0, chunk)
        rows = Verified(features, following, begin, known, state.table)
        draft_cache = setup.drafter.extend((params[1], params[0]), draft_cache, rows, setup.config.block_size)
        at = (lengths - 1 - begin)[:, None, None]
        here = ((at >= 0) & (at < chunk))[:, 0]
        at = jnp.clip(at, 0, chunk - 1)
        hidden = jnp.where(here, jnp.take_along_axis(hiddens, at, axis=1)[:, 0], hidden)
        feature = jnp.where(here, jnp.take_along_axis(features, at, axis=1)[:, 0], feature)
        return i + 1, pools, draft_cache, hidden, feature

    chunks = (in_step(jnp.max(lengths)) + chunk - 1) // chunk
    carry = (jnp.int32(0), state.pools, state.draft_cache, hidden, state.pending.features[:, 0])
    _, pools, draft_cache, hidden, feature = lax.while_loop(lambda c: c[0] < chunks, body, carry)

    logits = apply(setup.target, params[0], hidden[:, None], method="logits")
    nothing = jnp.zeros((token_ids.shape[0], 0), jnp.int32)
    noise = noise_if_sampled(keys, lengths[:, None], setup.target.config.vocab_size, sampling)
    first, sound = _draw(setup, sampling, state, logits, nothing, noise)
    emit, finish = _emittable(sampling, state, first, sound, jnp.ones_like(lengths))
    pending = state.pending
    pending = replace(
        pending, features=pending.features.at[:, 0].set(feature), next_ids=pending.next_ids.at[:, 0].set(first[:, 0])
    )
    state = replace(state, pools=pools, draft_cache=draft_cache, pending=pending)
    return _emit(state, first, emit, finish, logits)


def _initial_state(
    setup: Setup, token_ids: Array, lengths: Array, keys: Array, sampling: Sampling, mesh: AnyMesh | None
) -> State:
    batch, prompt = token_ids.shape
    config, model, drafts = setup.config, setup.target.config, setup.drafts
    capacity = min(prompt + config.max_new_tokens, model.max_position)
    blocks_per_row = int(blocks_for(capacity, config.block_size))
    num_blocks = batch * blocks_per_row
    slots = num_blocks * config.block_size
    limit = jnp.minimum(sampling.max_tokens, config.max_new_tokens)
    limit = jnp.clip(model.max_position - lengths, 0, limit)
    needed = blocks_for(lengths + limit, config.block_size)
    table = empty_table(batch, blocks_per_row, num_blocks)
    _, table, _ = allocate(make_allocator(num_blocks), table, jnp.asarray(needed))
    zeros = jnp.zeros((batch,), jnp.int32)
    history = None
    if "penalties" in config.transforms:
        row = jnp.arange(batch, dtype=jnp.int32)[:, None]
        real = jnp.arange(prompt, dtype=jnp.int32) < lengths[:, None]
        ids = jnp.where(real, token_ids, model.vocab_size)
        in_prompt = jnp.zeros((batch, model.vocab_size), bool).at[row, ids].set(True, mode="drop")
        history = History(in_prompt, jnp.zeros((batch, model.vocab_size), jnp.int32))
    width = len(setup.drafter.taps) * model.hidden_size
    pending = Verified(
        features=jnp.zeros((batch, drafts + 1, width), model.dtype),
        next_ids=jnp.zeros((batch, drafts + 1), jnp.int32),
        start=lengths - 1,
        count=jnp.ones_like(zeros),
        table=table,
    )
    return State(
        tokens=jnp.full((batch, config.max_new_tokens), config.pad_id, jnp.int32),
        emitted=zeros,
        finish=jnp.where(limit > 0, RUNNING, LENGTH).astype(jnp.int8),
        logprobs=jnp.zeros((batch, config.max_new_tokens), jnp.float32) if config.return_logprobs else None,
        stats=Stats(zeros, zeros, zeros, *(jnp.zeros((batch, drafts), jnp.int32),) * 2),
        last=zeros,
        length=lengths,
        limit=limit,
        keys=keys,
        table=table,
        pools=make_pools(
            model.num_layers, slots, *model.cache_row, model.dtype, config.cache_format, config.cache_scales, mesh
        ),
        draft_cache=setup.drafter.make_cache(slots, mesh),
        pending=pending,
        history=history,
    )


def run_rounds(setup: Setup, params: Params, sampling: Sampling, state: State, rounds: Array | int) -> State:
    """Decode until every row has finished or `rounds` rounds have run; all on the device."""

    def run(shared: tuple[Params, Array], sampling: Sampling, state: State) -> State:
        return _run_rounds(setup, shared[0], sampling, state, shared[1])

    return over_rows(run, (params, jnp.int32(rounds)), sampling, state)


def _run_rounds(setup: Setup, params: Params, sampling: Sampling, state: State, rounds: Array) -> State:
    def unfinished(carry: tuple[Array, State]) -> Array:
        return (carry[0] < rounds) & in_step(jnp.any(carry[1].finish == RUNNING))

    def body(carry: tuple[Array, State]) -> tuple[Array, State]:
        return carry[0] + 1, _round(setup, params, sampling, carry[1])

    return lax.while_loop(unfinished, body, (jnp.int32(0), state))[1]


def speculative_generate(
    target_params: Any,
    draft_params: Any,
    token_ids: Array,
    lengths: Array,
    keys: Array,
    sampling: Sampling,
    *,
    target_model: Decoder,
    draft_model: Eagle3 | Drafter,
    config: GenerationConfig,
) -> Generation:
    """Generate with a draft; the text is the target's own, whatever the draft proposes.

    One traced program: wrap it in `jax.jit(..., static_argnames=("target_model", "draft_model", "config"))`.
    New weights of the same shapes and new sampling values do not retrace.

    Args:
        target_params: the target's weights. draft_params: the draft's.
        token_ids: int32 [B, P], prompts padded at the end. lengths: int32 [B], at least 1.
        keys: [B] typed threefry keys, see `row_keys`; a scalar key is split by row.
        sampling: what each row asks for. config: what is compiled.
        target_model: the target's module. draft_model: an EAGLE-3 module or any `Drafter`.

    Raises:
        Eagle3Error: keys of another kind, a draft of another target, and, outside of `jax.jit`, prompts that do
            not fit.

    Example:
        >>> run = jax.jit(speculative_generate, static_argnames=("target_model", "draft_model", "config"))
    """
    check_request(token_ids, lengths, sampling, target_model.config, config)
    keys = check_keys(keys, token_ids.shape[0])
    setup = Setup(target_model, make_drafter(draft_model, target_model, config), config)
    params = (target_params, draft_params)
    state = prefill(setup, params, token_ids, lengths, keys, sampling)
    return keep_whole(result(run_rounds(setup, params, sampling, state, config.max_new_tokens)), mesh_of(params))


def generate(
    params: Any,
    token_ids: Array,
    lengths: Array,
    keys: Array,
    sampling: Sampling,
    *,
    model: Decoder,
    config: GenerationConfig,
) -> Generation:
    """Plain decoding: the same loop without a drafter; arguments as in `speculative_generate`."""
    return speculative_generate(
        params,
        (),
        token_ids,
        lengths,
        keys,
        sampling,
        target_model=model,
        draft_model=NoDrafter(),
        config=config,
    )


def make_drafter(draft_model: Eagle3 | Drafter | None, target_model: Decoder, config: GenerationConfig) -> Drafter:
    """The drafter of a draft model, with the cache that the configuration gives it; None drafts nothing.

    Raises:
        Eagle3Error: a draft of another target, or a draft's page size for a drafter that has its own.
    """
    if isinstance(draft_model, Eagle3):
        check_pair(draft_model.config, target_model.config)
        return Eagle3Drafter(draft_model, config.draft_page_size, config.draft_cache_format, config.draft_cache_scales)
    drafter = NoDrafter() if draft_model is None else draft_model
    if config.draft_page_size is not None and not isinstance(drafter, NoDrafter):
        raise Eagle3Error("draft_page_size is for an Eagle3 module; give other drafters their own page size")
    return drafter


@partial(jax.jit, static_argnums=0)
def jitted_prefill(
    setup: Setup, params: Params, token_ids: Array, lengths: Array, keys: Array, sampling: Sampling
) -> State:
    """`prefill` as a program, whose state lies where `jitted_rounds` takes it."""
    return settled(prefill(setup, params, token_ids, lengths, keys, sampling), params)


@partial(jax.jit, static_argnums=0, donate_argnums=3)
def jitted_rounds(setup: Setup, params: Params, sampling: Sampling, state: State, rounds: Array) -> State:
    """`run_rounds` as a program that updates the state in its place."""
    return settled(run_rounds(setup, params, sampling, state, rounds), params)


def stream(
    target_params: Any,
    draft_params: Any,
    token_ids: Array,
    lengths: Array,
    keys: Array,
    sampling: Sampling,
    *,
    target_model: Decoder,
    draft_model: Eagle3 | Drafter | None,
    config: GenerationConfig,
    rounds_per_call: int = 4,
) -> Iterator[Generation]:
    """Generate step by step: yields the result after prefill and after every few rounds.

    Arguments as in `speculative_generate`; `draft_model=None` is plain decoding. The text equals
    `speculative_generate`'s.

    Raises:
        Eagle3Error: keys of another kind, a draft of another target, or prompts that do not fit.
    """
    check_request(token_ids, lengths, sampling, target_model.config, config)
    keys = check_keys(keys, token_ids.shape[0])
    if rounds_per_call < 1:
        raise Eagle3Error(f"rounds_per_call is {rounds_per_call}; at least 1 is needed")
    setup = Setup(target_model, make_drafter(draft_model, target_model, config), config)
    params = (target_params, () if draft_model is None else draft_params)
    state = jitted_prefill(setup, params, token_ids, lengths, keys, sampling)
    yield (generation := on_host(result(state)))
    while np.any(generation.finish_reason == RUNNING):
        state = jitted_rounds(setup, params, sampling, state, jnp.int32(rounds_per_call))
        yield (generation := on_host(result(state)))
