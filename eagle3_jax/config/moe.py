"""Layers of routed experts: how tokens choose theirs and what an expert computes."""

import dataclasses
from typing import Any

from eagle3_jax.config.fields import Fields
from eagle3_jax.errors import Eagle3Error

MOST_EXPERTS = 10_000
"""More than any layer has; a damaged config that names more would keep a loader busy for hours."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """A layer of experts.

    Attributes:
        num_experts, top_k: how many there are, and how many a token uses.
        intermediate_size: width of one expert.
        scoring: "softmax" or "sigmoid" of the router's logits.
        normalize: divide the chosen experts' scores by their sum.
        scaling: multiplier of the chosen experts' scores, after `normalize`.
        correction_bias: add a bias [E] to the scores for the choice, and only for it.
        router_bias: add a bias [E] to the router's logits.
        groups: experts lie in this many groups, of which the best `top_groups` take part.
        expert_bias: biases on the experts' three matrices.
        gate_limit: None is SwiGLU; else gpt-oss' form of it, with gate and up clamped at this value.
        gate_slope: gpt-oss' multiplier of the gate inside the sigmoid.

    Raises:
        Eagle3Error: more experts chosen than there are, or groups that do not divide.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    scoring: str = "softmax"
    normalize: bool = True
    scaling: float = 1.0
    correction_bias: bool = False
    router_bias: bool = False
    groups: int = 1
    top_groups: int = 1
    expert_bias: bool = False
    gate_limit: float | None = None
    gate_slope: float = 1.702

    def __post_init__(self) -> None:
        """Refuse impossible choices."""
        if self.scoring not in ("softmax", "sigmoid"):
            raise Eagle3Error(f"experts are scored by {self.scoring!r:.80}; softmax and sigmoid are supported")
        if self.num_experts > MOST_EXPERTS:
            raise Eagle3Error(f"{self.num_experts} experts are more than any model has")
        if self.num_experts % self.groups or not 1 <= self.top_groups <= self.groups:
            raise Eagle3Error(
                f"{self.top_groups} of {self.groups} groups cannot be chosen from {self.num_experts} experts"
            )
        eligible = self.num_experts // self.groups * self.top_groups
        if not 1 <= self.top_k <= eligible:
            raise Eagle3Error(f"{self.top_k} experts cannot be chosen from {eligible}")


def parse_moe(fields: Fields, *count_names: str, **rules: Any) -> MoEConfig:
    """A layer of experts, with its two numbers under any of their names.

    Args:
        fields: the file.
        count_names: names of the number of experts, the one for messages first.
        rules: the other arguments of `MoEConfig`.

    Raises:
        Eagle3Error: a number is missing or malformed, two names of it disagree, or the choice is impossible.
    """
    num_experts, top_k = _agreed(fields, count_names), _agreed(fields, ("num_experts_per_tok", "experts_per_token"))
    try:
        return MoEConfig(num_experts=num_experts, top_k=top_k, **rules)
    except Eagle3Error as error:
        raise Eagle3Error(f"{fields.where}: {error}") from error


def _agreed(fields: Fields, names: tuple[str, ...]) -> int:
    given = {name: fields.size(name) for name in names if fields.get(name) is not None}
    if not given:
        fields.size(names[0])  # which says that it is missing
    if len(set(given.values())) > 1:
        raise Eagle3Error(f"{fields.where}: fields {given} disagree")
    return next(iter(given.values()))
