"""Rotary position embedding: its settings and how config.json files spell them."""

import dataclasses
from collections.abc import Mapping

from eagle3_jax.config.fields import Fields
from eagle3_jax.errors import Eagle3Error


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: base and scaling rule (see `eagle3_jax.models.rope`).

    Attributes:
        theta: base of the geometric frequency series.
        kind: "default", "linear", "llama3" or "yarn".
        factor: context extension factor of the scaled kinds.
        original_max_position: context length the unscaled model was trained at (llama3, yarn).
        low_freq_factor, high_freq_factor: llama3's blend limits.
        beta_fast, beta_slow: YaRN's ramp limits, in rotations.
        attention_factor: YaRN's multiplier of cos and sin; None derives it from the factor.
        mscale, mscale_all_dim: YaRN's temperature terms as DeepSeek uses them; 0 means absent.
        truncate: YaRN: round the ramp limits to whole dimensions.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True


_ROPE_FIELDS = frozenset(
    """rope_theta rope_type type factor original_max_position_embeddings low_freq_factor high_freq_factor
    beta_fast beta_slow attention_factor mscale mscale_all_dim truncate partial_rotary_factor""".split()
)


def parse_rope(fields: Fields, max_position: int, theta: float | None = 10000.0, partial: bool = False) -> RopeConfig:
    """Read RoPE settings: `rope_parameters`, else `rope_theta` and `rope_scaling`.

    Args:
        fields: the file.
        max_position: the context length.
        theta: base of a file without one; None demands it.
        partial: a part of the head may stay unturned, see `parse_rotary_dim`; else that is refused.

    Raises:
        Eagle3Error: unknown kind, unknown field inside, or a value out of range.
    """
    top_theta = fields.get("rope_theta", theta)
    if top_theta is not None:
        top_theta = fields.number("rope_theta", theta, above=1.0)
    fields.expect("rope_interleaved", [False])
    inner = _inner(fields)
    unknown = sorted(set(inner.config) - _ROPE_FIELDS)
    if unknown:
        raise Eagle3Error(f"{inner.where}: unknown field(s) {', '.join(unknown)}")
    kind = inner.get("rope_type", inner.get("type", "default"))
    theta = inner.number("rope_theta", top_theta, above=1.0)
    if not partial:
        inner.expect("partial_rotary_factor", [1, 1.0])
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind not in ("linear", "llama3", "yarn"):
        raise Eagle3Error(f"{inner.where}: kind {kind!r:.80} is not supported; use default, linear, llama3 or yarn")
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=inner.number("factor"))
    outer = fields.size("original_max_position_embeddings", max_position)
    original = inner.size("original_max_position_embeddings", outer)
    if kind == "llama3":
        low, high = inner.number("low_freq_factor", 1.0), inner.number("high_freq_factor", 4.0)
        if low >= high:
            raise Eagle3Error(f"{inner.where}: low_freq_factor {low} must be below high_freq_factor {high}")
        return RopeConfig(
            theta=theta,
            kind=kind,
            factor=inner.number("factor"),
            original_max_position=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    fast, slow = inner.number("beta_fast", 32.0), inner.number("beta_slow", 1.0)
    if fast < slow:
        raise Eagle3Error(f"{inner.where}: beta_fast {fast} must not be below beta_slow {slow}")
    given = inner.get("attention_factor")
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=inner.number("factor"),
        original_max_position=original,
        beta_fast=fast,
        beta_slow=slow,
        attention_factor=None if given is None else inner.number("attention_factor"),
        mscale=inner.number("mscale", 0.0, above=-1.0),
        mscale_all_dim=inner.number("mscale_all_dim", 0.0, above=-1.0),
        truncate=inner.flag("truncate", True),
    )


def parse_rotary_dim(fields: Fields, head_dim: int) -> int:
    """Dimensions of a head that turn: `rotary_dim`, or `partial_rotary_factor` beside or among the RoPE settings.

    Raises:
        Eagle3Error: none of them is there, they disagree, or they name no part of the head.
    """
    given = set[int]()
    if fields.get("rotary_dim") is not None:
        given.add(fields.size("rotary_dim"))
    for place in (fields, _inner(fields)):
        if place.get("partial_rotary_factor") is not None:
            given.add(round(place.number("partial_rotary_factor") * head_dim))
    if not given:
        raise Eagle3Error(f"{fields.where}: field rotary_dim is missing; how much of a head RoPE turns is needed")
    if len(given) > 1:
        raise Eagle3Error(f"{fields.where}: rotary_dim and partial_rotary_factor disagree: {sorted(given)} dimensions")
    return given.pop()


def _inner(fields: Fields) -> Fields:
    """The object of RoPE settings, under either of its names."""
    scaling = fields.get("rope_parameters", fields.get("rope_scaling", {}))
    if not isinstance(scaling, Mapping):
        raise Eagle3Error(f"{fields.where}: rope settings are {scaling!r:.80}; an object is needed")
    return Fields(scaling, f"{fields.where}: rope settings")
