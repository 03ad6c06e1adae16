"""Frozen, hashable configurations and the strict reading of Hugging Face config.json files."""

import dataclasses
import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any

from eagle3_jax.errors import Eagle3Error
from eagle3_jax.quant.weight import WeightFormats

log = logging.getLogger("eagle3_jax")


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


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """A Llama-style decoder: grouped-query attention, SwiGLU, RMSNorm.

    Attributes:
        vocab_size, hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim: sizes.
        rms_norm_eps: epsilon inside the norms' square root.
        rope: rotary embedding.
        max_position: context length in tokens; a longer prompt is refused.
        tied: the head reads the embedding's weight.
        attention_bias: biases on q, k and v; `output_bias` on o; `mlp_bias` on the MLP's three matrices.
        dtype: dtype of activations ("float32", "bfloat16").
        weights: format and layout of every weight.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = RopeConfig()
    max_position: int = 2048
    tied: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    dtype: str = "float32"
    weights: WeightFormats = WeightFormats()


@dataclasses.dataclass(frozen=True)
class Eagle3Config:
    """An EAGLE-3 draft (arXiv 2503.01840) with the EAGLE-3.1 toggles.

    Attributes:
        hidden_size: width H of the draft's own layer; `target_hidden_size` is Ht, the width of one tap.
        vocab_size: the target's vocabulary V; `draft_vocab_size` is Vd <= V, the rows of the draft's head.
        taps: indices k of the target's hidden states hs[k] (residual stream after k layers), low to high.
        norm_before_residual: the residual is hidden_norm(g) instead of g.
        fc_norm: EAGLE-3.1: RMSNorm on each tap before `fc`.
        norm_output: EAGLE-3.1: feed norm(y) to the next draft step instead of y.
        fc_bias, attention_bias, mlp_bias: biases present in the checkpoint.
        shares_embedding, shares_head: read the target's weight instead of an own one.
        rope, rms_norm_eps, dtype, weights, the sizes: as in `LlamaConfig`.
    """

    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    taps: tuple[int, ...]
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = RopeConfig()
    norm_before_residual: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    fc_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    shares_embedding: bool = True
    shares_head: bool = False
    dtype: str = "float32"
    weights: WeightFormats = WeightFormats()


INERT_FIELDS = frozenset(
    """_name_or_path architectures attention_dropout auto_map bos_token_id dtype eos_token_id
    initializer_range is_llama_config model_type pad_token_id pretraining_tp
    torch_dtype transformers_version transformers.js_config unk_token_id use_cache
    resid_pdrop embd_pdrop mlp_dropout unsloth_fixed""".split()
)
"""Fields of a Hugging Face config.json that do not change what a Llama-style model computes."""

_BEARS_ON_MATHS = re.compile(r"norm|rope|rotary|scal|layer|window|bias|act|head|soft_?cap|multiplier|quant")


def check_unknown_fields(config: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    """Refuse unread fields whose names bear on the maths; warn of other unread ones by name.

    Raises:
        Eagle3Error: an unread field's name speaks of norms, RoPE, scales, layers, windows, biases,
            activations, heads or quantisation.
    """
    unread = set(config) - set(known) - INERT_FIELDS
    unread = {name for name in unread if config[name] is not None}
    grave = sorted(name for name in unread if _BEARS_ON_MATHS.search(name))
    if grave:
        raise Eagle3Error(
            f"{where}: field(s) {', '.join(grave)} may change the result and are not supported; "
            "remove them only if they have no effect on this model"
        )
    if unread:
        log.warning("%s: ignoring unknown field(s) %s", where, ", ".join(sorted(unread)))


class Fields:
    """Typed, range-checked access to a foreign config dict; remembers which fields were read."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config, self.where, self.read = config, where, set[str]()

    def get(self, name: str, default: Any = None) -> Any:
        """The raw value, or the default where the field is absent or null."""
        self.read.add(name)
        value = self.config.get(name)
        return default if value is None else value

    def size(self, name: str, default: int | None = None) -> int:
        """A positive integer.

        Raises:
            Eagle3Error: absent without a default, not an integer, or not in [1, 2**31).
        """
        value = self.get(name, default)
        if value is None:
            raise Eagle3Error(f"{self.where}: field {name} is missing; a positive integer is needed")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise Eagle3Error(f"{self.where}: field {name} is {value!r:.80}; a positive integer is needed")
        return value

    def number(self, name: str, default: float | None = None, above: float = 0.0) -> float:
        """A finite number greater than `above`.

        Raises:
            Eagle3Error: absent without a default, not a number, or out of range.
        """
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not above < value < 1e30:
            raise Eagle3Error(f"{self.where}: field {name} is {value!r:.80}; a number above {above:g} is needed")
        if 0 < abs(value) < 1e-30:
            raise Eagle3Error(f"{self.where}: field {name} is {value!r}, which float32 cannot hold")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """A boolean.

        Raises:
            Eagle3Error: the value is not true or false.
        """
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise Eagle3Error(f"{self.where}: field {name} is {value!r:.80}; true or false is needed")
        return value

    def expect(self, name: str, allowed: Iterable[Any]) -> None:
        """Read a field that must be absent or one of `allowed`.

        Raises:
            Eagle3Error: any other value.
        """
        value = self.get(name)
        allowed = list(allowed)
        if value is not None and value not in allowed:
            text = f"only {' or '.join(map(repr, allowed))} is supported" if allowed else "it is not supported"
            raise Eagle3Error(f"{self.where}: field {name} is {value!r:.80}; {text}")


_ROPE_FIELDS = frozenset(
    """rope_theta rope_type type factor original_max_position_embeddings low_freq_factor high_freq_factor
    beta_fast beta_slow attention_factor mscale mscale_all_dim truncate partial_rotary_factor""".split()
)


def parse_rope(fields: Fields, max_position: int) -> RopeConfig:
    """Read RoPE settings: `rope_parameters`, else `rope_theta` and `rope_scaling`, else base 10000.

    Raises:
        Eagle3Error: unknown kind, unknown field inside, or a value out of range.
    """
    top_theta = fields.number("rope_theta", 10000.0, above=1.0)
    fields.expect("rope_interleaved", [False])
    scaling = fields.get("rope_parameters", fields.get("rope_scaling", {}))
    if not isinstance(scaling, Mapping):
        raise Eagle3Error(f"{fields.where}: rope settings are {scaling!r:.80}; an object is needed")
    inner = Fields(scaling, f"{fields.where}: rope settings")
    unknown = sorted(set(scaling) - _ROPE_FIELDS)
    if unknown:
        raise Eagle3Error(f"{inner.where}: unknown field(s) {', '.join(unknown)}")
    kind = inner.get("rope_type", inner.get("type", "default"))
    theta = inner.number("rope_theta", top_theta, above=1.0)
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


def parse_llama(config: Mapping[str, Any], where: str) -> LlamaConfig:
    """Read the config.json of a Llama-architecture target.

    Args:
        config: the parsed file.
        where: its name for messages.

    Raises:
        Eagle3Error: another architecture, a missing or malformed field, or an unread field that may change
            the result.
    """
    fields = Fields(config, where)
    fields.expect("architectures", [["LlamaForCausalLM"]])
    fields.expect("hidden_act", ["silu", "swish"])
    fields.expect("sliding_window", [])
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    kv_heads = fields.size("num_key_value_heads", heads)
    max_position = fields.size("max_position_embeddings", 2048)
    parsed = LlamaConfig(
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.size("intermediate_size"),
        num_layers=fields.size("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=fields.size("head_dim", hidden // heads),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=parse_rope(fields, max_position),
        max_position=max_position,
        tied=fields.flag("tie_word_embeddings"),
        attention_bias=fields.flag("attention_bias"),
        output_bias=fields.flag("attention_bias"),
        mlp_bias=fields.flag("mlp_bias"),
    )
    if heads % kv_heads:
        raise Eagle3Error(f"{where}: {heads} heads cannot share {kv_heads} key-value heads evenly")
    if parsed.head_dim % 2:
        raise Eagle3Error(f"{where}: head_dim {parsed.head_dim} is odd; RoPE rotates pairs")
    check_unknown_fields(config, fields.read, where)
    return parsed
