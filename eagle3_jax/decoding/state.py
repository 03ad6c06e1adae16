"""What the generation loop carries from round to round, and what of it is the result.

Dimension letters: B rows, M blocks of a row.
"""

import dataclasses
from dataclasses import replace
from typing import Any

import jax
from flax import struct
from jax import Array

from eagle3_jax.decoding.drafters import Drafter, NoDrafter, Verified
from eagle3_jax.decoding.request import GenerationConfig
from eagle3_jax.decoding.sampling import History
from eagle3_jax.decoding.stats import Stats
from eagle3_jax.models.decoder import Decoder
from eagle3_jax.sharding import AnyMesh, keep, mesh_of, pool_shardings, row_axis, row_shardings

RUNNING, STOP, LENGTH, ERROR = 0, 1, 2, 3
"""Values of `finish_reason`; ERROR is a row whose logits had no finite maximum."""


@struct.dataclass
class Generation:
    """The result of a run.

    Attributes:
        tokens: int32 [B, max_new_tokens]; pad_id after the end. The stop token is included.
        lengths: int32 [B], emitted tokens.
        finish_reason: int8 [B]: 0 running, 1 stop, 2 length, 3 error (logits without a finite maximum).
        logprobs: float32 [B, max_new_tokens] under the untransformed logits of each token's own row, or None.
        stats: counts of each row.
    """

    tokens: Array
    lengths: Array
    finish_reason: Array
    logprobs: Array | None
    stats: Stats


@struct.dataclass
class State:
    """What one round hands to the next.

    Attributes:
        tokens, emitted, finish, logprobs, stats: the result so far, as in `Generation`.
        last: int32 [B], the newest token, drawn but not yet fed to the target.
        length: int32 [B], tokens whose keys and values are in the target's cache: the position of `last`.
        limit: int32 [B], most tokens the row may emit.
        keys: [B] random keys.
        table: int32 [B, M] block table shared by both caches. On a mesh, block ids count within the part of the pools
            that lies with the row.
        pools: the target's cache, one pool a layer. draft_cache: the drafter's.
        pending: verified rows that the drafter takes in next.
        history: for penalties, or None where they are not compiled in.
    """

    tokens: Array
    emitted: Array
    finish: Array
    logprobs: Array | None
    stats: Stats
    last: Array
    length: Array
    limit: Array
    keys: Array
    table: Array
    pools: tuple
    draft_cache: Any
    pending: Verified
    history: History | None


@dataclasses.dataclass(frozen=True)
class Setup:
    """The static side of a run: what is compiled."""

    target: Decoder
    drafter: Drafter
    config: GenerationConfig

    @property
    def drafts(self) -> int:
        """K, drafts of a round; 0 without a drafter."""
        return 0 if isinstance(self.drafter, NoDrafter) else self.config.speculation.length


Params = tuple[Any, Any]
"""(target params, draft params)."""


def result(state: State) -> Generation:
    """The part of a state that is the run's result."""
    return Generation(state.tokens, state.emitted, state.finish, state.logprobs, state.stats)


def state_shardings(state: State, mesh: AnyMesh) -> State:
    """Where a state's arrays lie on a mesh between two rounds: rows over "data", pools also over "model".

    Args:
        state: with arrays, abstract or traced ones too. mesh: the weights'.
    """
    rows = row_axis(state.tokens.shape[0], mesh)
    places = row_shardings(state, mesh, rows)
    pools, draft_cache = (pool_shardings(pools, mesh, rows) for pools in (state.pools, state.draft_cache))
    return replace(places, pools=pools, draft_cache=draft_cache)


def settled(state: State, params: Params) -> State:
    """The state with its arrays where `state_shardings` says, so that one program serves all calls."""
    mesh = mesh_of(params)
    return state if mesh is None else keep(state, state_shardings(state, mesh))


def abstract_state(shapes: State, params: Params) -> State:
    """A state's shapes, with where `settled` puts its arrays: what programs of the next rounds are compiled for."""
    if (mesh := mesh_of(params)) is None:
        return shapes
    places = state_shardings(shapes, mesh)
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, places)
