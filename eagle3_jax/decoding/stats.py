"""What the loop counts, and acceptance as it is reported."""

from typing import Any

import numpy as np
from flax import struct
from jax import Array


@struct.dataclass
class Stats:
    """Counts of each row; the token from prefill belongs to no round.

    Attributes:
        rounds: int32 [B], verify passes. drafted: int32 [B]. accepted: int32 [B], drafts emitted.
        drafted_per_position, accepted_per_position: int32 [B, K], rounds that drafted / accepted the j-th draft.
    """

    rounds: Array
    drafted: Array
    accepted: Array
    drafted_per_position: Array
    accepted_per_position: Array


def acceptance(stats: Any) -> dict[str, Any]:
    """Counts over all rows as vLLM defines them; None where nothing was drafted.

    Args:
        stats: `Stats`, or the sum of several.

    Returns:
        rounds; mean_acceptance_length = 1 + accepted / rounds; acceptance_rate = accepted / drafted; and
        acceptance_per_position: of the rounds that drafted a j-th token, the share that accepted it.
    """
    rounds, drafted, accepted = (int(np.sum(x)) for x in (stats.rounds, stats.drafted, stats.accepted))
    reached = np.sum(stats.drafted_per_position, axis=0).tolist()
    kept = np.sum(stats.accepted_per_position, axis=0).tolist()
    return {
        "rounds": rounds,
        "mean_acceptance_length": 1 + accepted / rounds if drafted else None,
        "acceptance_rate": accepted / drafted if drafted else None,
        "acceptance_per_position": [a / d for a, d in zip(kept, reached, strict=True) if d],
    }
