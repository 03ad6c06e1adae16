"""What a draft is: from the shapes of its weights and its config.json, checked against its target."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from eagle3_jax.checkpoint.files import quote
from eagle3_jax.checkpoint.names import FORMATS, check_dtype
from eagle3_jax.checkpoint.taps import IDS_FIELD, Taps, eagle_config, resolve_taps
from eagle3_jax.checkpoint.tensors import TensorSource
from eagle3_jax.config import Eagle3Config, Fields, LlamaConfig, check_unknown_fields, parse_rope
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.quant.weight import WeightFormats

_ARCHITECTURES = (
    "LlamaForCausalLM",
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "EAGLE3LlamaForCausalLM",
)
_MLA_FIELDS = ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
_DIALECTS = "only the midlayer.* dialect of SafeAILab, SGLang and SpecForge can be loaded yet"

_BUILD_SWITCHES: dict[str, tuple[Any, ...]] = {
    "use_aux_hidden_state": (True,),
    "norm_before_fc": (False,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
    "eh_proj_before_attn": (False,),
    "eh_proj_bias": (False,),
    "parallel_draft_step": (1,),
}
"""Fields of `eagle_config` and the values under which the draft is a plain EAGLE-3 layer."""

_BUILD_INERT = ("next_layer_regular", "parallel_draft_heads_num_layers")
"""Fields of `eagle_config` that say nothing about a draft of one layer and one head."""


@dataclasses.dataclass(frozen=True)
class Overrides:
    """What the caller sets against the file; None leaves it to the file. See `load_draft`."""

    tap_convention: str | None = None
    taps: tuple[int, ...] | None = None
    norm_output: bool | None = None
    rope_theta: float | None = None
    embedding: str | None = None
    dtype: str | None = None

    @classmethod
    def read(cls, overrides: Mapping[str, Any]) -> "Overrides":
        """Check a mapping of overrides.

        Raises:
            Eagle3Error: an unknown name, or a value of the wrong kind.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        if unknown := [name for name in overrides if name not in names]:
            raise Eagle3Error(f"override {quote(unknown[0])} is not known; the overrides are {', '.join(names)}")
        fields = Fields(overrides, "overrides")
        fields.expect("tap_convention", ["hs", "output"])
        fields.expect("embedding", ["own", "target"])
        values = {name: value for name, value in overrides.items() if value is not None}
        if "taps" in values:
            taps = values["taps"]
            if not isinstance(taps, list | tuple) or not taps or not all(type(k) is int for k in taps):
                raise Eagle3Error(
                    f"overrides: taps is {quote(taps)}; a list of hs indices is needed, e.g. [2, 15, 27]"
                )
            values["taps"] = tuple(taps)
        if "norm_output" in values:
            fields.flag("norm_output")
        if "rope_theta" in values:
            values["rope_theta"] = fields.number("rope_theta", above=1.0)
        if "dtype" in values:
            check_dtype(values["dtype"])
        return cls(**values)


NO_OVERRIDES = Overrides()


@dataclasses.dataclass(frozen=True)
class ParsedDraft:
    """A draft's config, how its taps were found, and what looked odd."""

    config: Eagle3Config
    taps: Taps
    warnings: tuple[str, ...]


def parse_draft(
    config: Mapping[str, Any],
    source: TensorSource,
    target: LlamaConfig,
    where: str,
    overrides: Overrides = NO_OVERRIDES,
) -> ParsedDraft:
    """Find out what a draft is.

    Args:
        config: its config.json. source: its weights. target: the target's config.
        where: the config's name for messages.
        overrides: what the caller sets against the file.

    Raises:
        Eagle3Error: another kind of model, another target's draft, a setting that is not supported, or
            weights and config that contradict each other.
    """
    _check_kind(config, source, where)
    fields = Fields(config, where)
    shapes = _Shapes(source)
    warnings: list[str] = []
    hidden, fc_in = shapes.matrix("fc.weight")
    if fc_in % target.hidden_size:
        raise Eagle3Error(
            f"{source.path}: fc takes {fc_in} features, no multiple of the target's hidden size "
            f"{target.hidden_size}; this is the draft of another target"
        )
    fields_agree(fields, "hidden_size", hidden, "the rows of fc")
    fields_agree(fields, "target_hidden_size", target.hidden_size, "the target's hidden size")
    fields_agree(fields, "vocab_size", target.vocab_size, "the target's vocabulary")
    taps = resolve_taps(config, target.num_layers, where, overrides.tap_convention, overrides.taps)
    fields.read |= {IDS_FIELD, "eagle_config"}
    count = fc_in // target.hidden_size
    if len(taps.indices) != count:
        raise Eagle3Error(
            f"{where}: {len(taps.indices)} taps ({taps.reason}), but fc takes {count} hidden states of "
            f"{target.hidden_size}; another target's draft, or set overrides={{'taps': ...}}"
        )
    for name in ("num_aux_hidden_states", "num_aux_layers"):
        fields_agree(fields, name, count, "the hidden states fc takes")
    if taps.ambiguous:
        warnings.append(f"{taps.reason}; if acceptance is poor, compare with overrides={{'tap_convention': 'output'}}")
    heads, kv_heads, head_dim = _attention_sizes(fields, shapes, warnings)
    intermediate = shapes.matrix("midlayer.mlp.gate_proj.weight")[0]
    fields_agree(fields, "intermediate_size", intermediate, "the rows of gate_proj")
    shares_embedding = _shares_embedding(source, hidden, target, overrides.embedding)
    shares_head, draft_vocab = _head(fields, source, shapes, hidden, target, warnings)
    rope = parse_rope(fields, fields.size("max_position_embeddings", 2048))
    if overrides.rope_theta is not None:
        rope = dataclasses.replace(rope, theta=overrides.rope_theta)
    norm_output = _norm_output(fields) if overrides.norm_output is None else overrides.norm_output
    dtype = overrides.dtype or target.dtype
    parsed = Eagle3Config(
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab,
        hidden_size=hidden,
        target_hidden_size=target.hidden_size,
        intermediate_size=intermediate,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        taps=taps.indices,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        norm_before_residual=fields.flag("norm_before_residual"),
        fc_norm=_toggle(fields, "fc_norm", source, "fc_norm.0.weight"),
        norm_output=norm_output,
        fc_bias=_toggle(fields, "bias", source, "fc.bias"),
        attention_bias=_toggle(fields, "attention_bias", source, "midlayer.self_attn.q_proj.bias"),
        mlp_bias=_toggle(fields, "mlp_bias", source, "midlayer.mlp.gate_proj.bias"),
        shares_embedding=shares_embedding,
        shares_head=shares_head,
        dtype=dtype,
        # Single rows are gathered from the embedding.
        weights=WeightFormats(FORMATS[dtype], exceptions=(("embed/weight", FORMATS[dtype], "nk"),)),
    )
    _check_other_fields(fields)
    return ParsedDraft(parsed, taps, tuple(warnings))


def fields_agree(fields: Fields, name: str, actual: int, what: str) -> None:
    """Refuse a config whose field differs from what the weights or the target say; absent is fine.

    Raises:
        Eagle3Error: it differs, or is no positive integer.
    """
    if fields.get(name) is not None and fields.size(name) != actual:
        raise Eagle3Error(f"{fields.where}: {name} is {fields.size(name)}, but {what}: {actual}; they must agree")


def _check_kind(config: Mapping[str, Any], source: TensorSource, where: str) -> None:
    """Refuse, by name, what is no EAGLE-3 draft of one Llama layer in the known dialect."""
    if config.get("speculators_model_type") is not None or config.get("transformer_layer_config") is not None:
        raise Eagle3Error(f"{where}: this is the speculators format; {_DIALECTS}")
    if found := [name for name in _MLA_FIELDS if config.get(name) is not None]:
        raise Eagle3Error(f"{where}: field {found[0]} means an MLA draft (DeepSeek, Kimi), which is not supported yet")
    architectures = config.get("architectures") or ["LlamaForCausalLMEagle3"]
    if len(architectures) != 1 or architectures[0] not in _ARCHITECTURES:
        raise Eagle3Error(
            f"{where}: architecture {quote(architectures)} is not supported; drafts of {', '.join(_ARCHITECTURES)} are"
        )
    if any(name.startswith(("layers.0.", "model.layers.0.hidden_norm")) for name in source):
        raise Eagle3Error(f"{source.path}: its layer is named layers.0.* (vLLM, speculators, ModelOpt); {_DIALECTS}")
    if not any(name.startswith("midlayer.") for name in source):
        if any(name.startswith("model.layers.") for name in source):
            raise Eagle3Error(f"{source.path}: holds a target, not a draft; load it with load_target")
        raise Eagle3Error(f"{source.path}: no midlayer.* tensors in it; this is no EAGLE-3 draft")
    if any(name.startswith("midlayer.0.") for name in source):
        raise Eagle3Error(f"{source.path}: holds several layers (midlayer.0.*); drafts of one layer are supported")


class _Shapes:
    """Shapes of tensors that have to be there."""

    def __init__(self, source: TensorSource) -> None:
        self.source = source

    def matrix(self, name: str) -> tuple[int, int]:
        if name not in self.source:
            raise Eagle3Error(f"{self.source.path}: tensor {name} is missing; every EAGLE-3 draft has it")
        shape = self.source.shape(name)
        if len(shape) != 2 or 0 in shape:
            raise Eagle3Error(f"{self.source.path}: tensor {name} has shape {shape}; a matrix [out, in] is needed")
        return shape[0], shape[1]


def _attention_sizes(fields: Fields, shapes: _Shapes, warnings: list[str]) -> tuple[int, int, int]:
    """Heads, key-value heads and head width; the weights' widths win over the config's head_dim."""
    heads = fields.size("num_attention_heads")
    kv_heads = fields.size("num_key_value_heads", heads)
    q_rows = shapes.matrix("midlayer.self_attn.q_proj.weight")[0]
    k_rows = shapes.matrix("midlayer.self_attn.k_proj.weight")[0]
    if heads % kv_heads:
        raise Eagle3Error(f"{fields.where}: {heads} heads cannot share {kv_heads} key-value heads evenly")
    head_dim = q_rows // heads
    if q_rows != heads * head_dim or k_rows != kv_heads * head_dim or head_dim % 2:
        raise Eagle3Error(
            f"{shapes.source.path}: q_proj and k_proj have {q_rows} and {k_rows} rows; {heads} and "
            f"{kv_heads} heads of one even width are needed (num_attention_heads, num_key_value_heads)"
        )
    named = fields.get("head_dim")
    if named is not None and fields.size("head_dim") != head_dim:
        warnings.append(f"config.json has head_dim {named}, the weights {head_dim}; the weights' is used")
    return heads, kv_heads, head_dim


def _shares_embedding(source: TensorSource, hidden: int, target: LlamaConfig, wanted: str | None) -> bool:
    """Whether the target's embedding is read; the file's own wins unless the caller says otherwise."""
    own = "embed_tokens.weight" in source
    if wanted == "own" and not own:
        raise Eagle3Error(f"{source.path}: has no embed_tokens.weight; override embedding=own needs one")
    shares = wanted == "target" or not own
    if shares and hidden != target.hidden_size:
        raise Eagle3Error(
            f"{source.path}: a draft of width {hidden} cannot read the target's embedding of width "
            f"{target.hidden_size}; its own embed_tokens.weight is needed"
        )
    return shares


def _head(
    fields: Fields,
    source: TensorSource,
    shapes: _Shapes,
    hidden: int,
    target: LlamaConfig,
    warnings: list[str],
) -> tuple[bool, int]:
    """Whether the target's head is read, and Vd."""
    tied = fields.flag("tie_word_embeddings")
    if "lm_head.weight" in source:
        rows = shapes.matrix("lm_head.weight")[0]
        for name in ("draft_vocab_size", "truncated_vocab_size"):
            fields_agree(fields, name, rows, "the rows of lm_head")
        if rows > target.vocab_size:
            raise Eagle3Error(
                f"{source.path}: lm_head has {rows} rows, the target's vocabulary {target.vocab_size}; "
                "this is the draft of another target"
            )
        if tied:
            warnings.append("config.json ties the head to the embedding, but the file has a head; the file's is used")
        return False, rows
    named = fields.get("draft_vocab_size", fields.get("truncated_vocab_size", target.vocab_size))
    if tied or named != target.vocab_size or hidden != target.hidden_size:
        raise Eagle3Error(
            f"{source.path}: tensor lm_head.weight is missing; only an untied draft with the target's "
            f"vocabulary ({target.vocab_size}) and width ({target.hidden_size}) can use the target's head"
        )
    return True, target.vocab_size


def _toggle(fields: Fields, name: str, source: TensorSource, tensor: str) -> bool:
    """A flag of the config, else whether its tensor is there; loading refuses a flag without its tensors."""
    return fields.flag(name, tensor in source)


def _norm_output(fields: Fields) -> bool:
    """EAGLE-3.1's flag, under its own name or as TensorRT-LLM has it."""
    nested = _eagle_config(fields)
    synonym = nested.flag("return_hidden_post_norm") if nested.get("return_hidden_post_norm") is not None else None
    own = fields.flag("norm_output", bool(synonym))
    if synonym is not None and synonym != own:
        raise Eagle3Error(
            f"{fields.where}: norm_output is {own}, but eagle_config.return_hidden_post_norm is {synonym}; "
            "they must agree"
        )
    return own


def _eagle_config(fields: Fields) -> Fields:
    return Fields(eagle_config(fields.config, fields.where), f"{fields.where}: eagle_config")


def _check_other_fields(fields: Fields) -> None:
    """Every field that was not needed must have a value under which it changes nothing."""
    fields.expect("num_hidden_layers", [1])
    fields.expect("hidden_act", ["silu", "swish"])
    fields.expect("norm_before_fc", [False])
    fields.expect("use_aux_norm", [False])
    fields.expect("logit_scale", [1])
    fields.expect("layer_types", [["full_attention"]])
    fields.expect("use_sliding_window", [False])
    window = fields.get("sliding_window")
    if window is not None and fields.get("use_sliding_window") is not False:
        raise Eagle3Error(f"{fields.where}: sliding_window is {window}; only full attention is supported")
    # Read whether or not an override made them unnecessary.
    fields.read |= {
        "max_window_layers",
        "norm_output",
        "truncated_vocab_size",
        "draft_vocab_size",
    }
    check_unknown_fields(fields.config, fields.read, fields.where)
    nested = _eagle_config(fields)
    for name, allowed in _BUILD_SWITCHES.items():
        nested.expect(name, allowed)
    nested.read |= {IDS_FIELD, "return_hidden_post_norm", *_BUILD_INERT}
    check_unknown_fields(nested.config, nested.read, nested.where)
