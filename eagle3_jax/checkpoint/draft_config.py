"""What a draft is: from the shapes of its weights and its config.json, checked against its target."""

import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Any

from eagle3_jax.checkpoint.dialects import LayerNames, find_layers, flatten, is_speculators
from eagle3_jax.checkpoint.draft_kind import LLAMA_DRAFTS, check_kind, is_latent
from eagle3_jax.checkpoint.files import quote
from eagle3_jax.checkpoint.names import check_dtype, weight_formats
from eagle3_jax.checkpoint.narrow import find_matrix
from eagle3_jax.checkpoint.taps import IDS_FIELD, Taps, eagle_config, resolve_taps
from eagle3_jax.checkpoint.tensors import TensorSource
from eagle3_jax.config import (
    DecoderConfig,
    Eagle3Config,
    Eagle3LatentConfig,
    Fields,
    RopeConfig,
    check_unknown_fields,
    parse_latent,
    parse_rope,
)
from eagle3_jax.errors import Eagle3Error

_OF_EXPERTS = """first_k_dense_replace moe_layer_freq moe_intermediate_size n_routed_experts n_shared_experts
    num_experts_per_tok n_group topk_group topk_method scoring_func norm_topk_prob routed_scaling_factor
    num_nextn_predict_layers ep_size aux_loss_alpha seq_aux head_dim""".split()
"""Fields that MLA drafts copy from their targets' config.json and do not use: their MLP has no experts."""

_BEARS_ON_DRAFTS = re.compile(r"eagle|aux|hidden|feature|vocab|draft")

_BUILD_SWITCHES: dict[str, tuple[Any, ...]] = {
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
    "next_layer_regular": (True,),
    "eh_proj_before_attn": (False,),
    "eh_proj_bias": (False,),
    "parallel_draft_step": (1,),
}
"""Fields of `eagle_config` and the values under which the draft is a plain EAGLE-3 stack of layers."""

_BUILD_READ = (
    IDS_FIELD,
    "use_aux_hidden_state",
    "norm_before_fc",
    "return_hidden_post_norm",
    "parallel_draft_heads_num_layers",  # says nothing about a draft of one head
)


@dataclasses.dataclass(frozen=True)
class Overrides:
    """What the caller sets against the file; None leaves it to the file. See `load_draft`."""

    tap_convention: str | None = None
    taps: tuple[int, ...] | None = None
    norm_output: bool | None = None
    norm_before_residual: bool | None = None
    rope_theta: float | None = None
    embedding: str | None = None
    dtype: str | None = None

    @classmethod
    def read(cls, overrides: Mapping[str, Any] | None) -> "Overrides":
        """Check a mapping of overrides; None has none.

        Raises:
            Eagle3Error: an unknown name, or a value of the wrong kind.
        """
        overrides = overrides or {}
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
        for name in {"norm_output", "norm_before_residual"}.intersection(values):
            fields.flag(name)
        if "rope_theta" in values:
            values["rope_theta"] = fields.number("rope_theta", above=1.0)
        if "dtype" in values:
            check_dtype(values["dtype"])
        return cls(**values)


@dataclasses.dataclass(frozen=True)
class TargetFacts:
    """What a draft has to fit.

    Attributes:
        vocab_size, hidden_size: the target's V and Ht.
        num_layers: N; None where the target is not known.
        rms_norm_eps: of its final norm. dtype: of its matrices and activations.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int | None
    rms_norm_eps: float = 1e-5
    dtype: str = "float32"

    @classmethod
    def of(cls, config: DecoderConfig) -> "TargetFacts":
        """Those of a target's config."""
        return cls(config.vocab_size, config.hidden_size, config.num_layers, config.rms_norm_eps, config.dtype)


@dataclasses.dataclass(frozen=True)
class ParsedDraft:
    """A draft's config, how its layers are named and its taps were found, and what looked odd."""

    config: Eagle3Config
    layers: LayerNames
    dialect: str
    taps: Taps
    warnings: tuple[str, ...]


def dialect_of(config: Mapping[str, Any], layers: LayerNames) -> str:
    """Which of `eagle3_jax.checkpoint.dialects.DIALECTS` a draft is written in."""
    if is_speculators(config):
        return "speculators"
    return "safeailab" if layers.first.startswith("midlayer.") else "vllm"


def parse_draft(
    config: Mapping[str, Any],
    source: TensorSource,
    target: TargetFacts,
    where: str,
    overrides: Overrides,
) -> ParsedDraft:
    """Find out what a draft is.

    Args:
        config: its config.json. source: its weights, as `DraftTensors` names them.
        target: the target.
        where: the config's name for messages.
        overrides: what the caller sets against the file.

    Raises:
        Eagle3Error: another kind of model, another target's draft, a setting that is not supported, or
            weights and config that contradict each other.
    """
    check_kind(config, source, where)
    layers, warnings = find_layers(source), list[str]()
    dialect = dialect_of(config, layers)
    if dialect == "speculators":
        config, warnings = flatten(config, where)
    fields, shapes, layer = Fields(config, where), _Shapes(source), layers.first
    hidden, fuses = shapes.matrix(f"{layer}self_attn.o_proj.weight")[0], _fuses(fields, source)
    fc_in = shapes.matrix("fc.weight")[1] if fuses else target.hidden_size
    if fc_in % target.hidden_size or (not fuses and hidden != target.hidden_size):
        raise Eagle3Error(
            f"{source.path}: it takes {fc_in if fuses else hidden} features, no multiple of the target's hidden size "
            f"{target.hidden_size}; this is the draft of another target"
        )
    fields_agree(fields, "hidden_size", hidden, "the rows of o_proj")
    fields_agree(fields, "target_hidden_size", target.hidden_size, "the target's hidden size")
    fields_agree(fields, "vocab_size", target.vocab_size, "the target's vocabulary")
    fields_agree(fields, "num_hidden_layers", layers.count, "the layers in the file")
    taps = _taps(config, target, where, fuses, dialect, overrides)
    fields.read |= {IDS_FIELD, "eagle_config"}
    count = fc_in // target.hidden_size
    if len(taps.indices) != count:
        raise Eagle3Error(
            f"{where}: {len(taps.indices)} taps ({taps.reason}), but fc takes {count} hidden states of "
            f"{target.hidden_size}; another target's draft, or set overrides={{'taps': ...}}"
        )
    for name in ("num_aux_hidden_states", "num_aux_layers"):
        fields_agree(fields, name, count, "the hidden states fc takes")
    if taps.warning:
        warnings.append(taps.warning)
    kind = Eagle3LatentConfig if is_latent(source) else Eagle3Config
    if kind is Eagle3LatentConfig:
        attention = parse_latent(fields)
        layers = dataclasses.replace(layers, latent=(attention["nope_dim"], attention["head_dim"]))
        fields.expect("pruned_heads", [{}])
        fields.read |= set(_OF_EXPERTS)
    else:
        attention = _attention_sizes(fields, shapes, layer, warnings)
    intermediate = shapes.matrix(f"{layer}mlp.gate_proj.weight")[0]
    fields_agree(fields, "intermediate_size", intermediate, "the rows of gate_proj")
    shares_embedding = _shares_embedding(source, hidden, target, overrides.embedding)
    shares_head, draft_vocab = _head(fields, source, shapes, hidden, target, warnings)
    residual = overrides.norm_before_residual
    norm_output, fc_norm = _norm_output(fields, overrides.norm_output), _fc_norm(fields, source)
    if norm_output and not fc_norm and overrides.norm_output is None:
        warnings.append(
            "norm_output is set without EAGLE-3.1's fc_norm, as SpecForge once did for drafts that feed back what is "
            "not normed; if acceptance is poor, compare with overrides={'norm_output': False}"
        )
    dtype = overrides.dtype or target.dtype
    parsed = kind(
        **attention,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab,
        hidden_size=hidden,
        target_hidden_size=target.hidden_size,
        intermediate_size=intermediate,
        taps=taps.indices,
        num_layers=layers.count,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        # Read only where nothing is fused: models that compute the same should compare equal.
        target_norm_eps=Eagle3Config.target_norm_eps if fuses else target.rms_norm_eps,
        rope=_rope(fields, overrides.rope_theta, warnings),
        fuses=fuses,
        norm_before_residual=fields.flag("norm_before_residual") if residual is None else residual,
        norm_before_fc=_either(fields, "norm_before_fc", "norm_before_fc", "input_norm.weight" in source),
        fc_norm=fc_norm,
        norm_output=norm_output,
        qk_norm=_qk_norm(config, source, layer, where),
        fc_bias=_toggle(fields, "bias", source, "fc.bias"),
        attention_bias=_toggle(fields, "attention_bias", source, f"{layer}self_attn.q_proj.bias"),
        mlp_bias=_toggle(fields, "mlp_bias", source, f"{layer}mlp.gate_proj.bias"),
        shares_embedding=shares_embedding,
        shares_head=shares_head,
        dtype=dtype,
        weights=weight_formats(dtype),
    )
    if (parsed.norm_before_fc or parsed.fc_norm) and (not fuses or parsed.norm_before_fc == parsed.fc_norm):
        raise Eagle3Error(f"{where}: norm_before_fc and fc_norm exclude each other, and both need fc")
    _check_other_fields(fields)
    return ParsedDraft(parsed, layers, dialect, taps, tuple(warnings))


def fields_agree(fields: Fields, name: str, actual: int, what: str) -> None:
    """Refuse a config whose field differs from what the weights or the target say; absent is fine.

    Raises:
        Eagle3Error: it differs, or is no positive integer.
    """
    if fields.get(name) is not None and fields.size(name) != actual:
        raise Eagle3Error(f"{fields.where}: {name} is {fields.size(name)}, but {what}: {actual}; they must agree")


def refuse_draft_fields(unread: Collection[str], where: str) -> None:
    """Refuse unread fields that by their names say how features or vocabularies meet: a typing error, or news.

    Raises:
        Eagle3Error: there is one.
    """
    if found := sorted(name for name in unread if _BEARS_ON_DRAFTS.search(name)):
        raise Eagle3Error(f"{where}: field {quote(found[0])} is not known and may change what the draft reads")


class _Shapes:
    """Shapes of tensors that have to be there."""

    def __init__(self, source: TensorSource) -> None:
        self.source = source

    def matrix(self, name: str) -> tuple[int, int]:
        if (found := find_matrix(self.source, name)) is None:
            raise Eagle3Error(f"{self.source.path}: tensor {name} is missing; every EAGLE-3 draft has it")
        shape = found.shape
        if len(shape) != 2 or 0 in shape:
            raise Eagle3Error(f"{self.source.path}: tensor {name} has shape {shape}; a matrix [out, in] is needed")
        return shape[0], shape[1]


def _attention_sizes(fields: Fields, shapes: _Shapes, layer: str, warnings: list[str]) -> dict[str, Any]:
    """Heads, key-value heads and head width; the weights' widths win over the config's head_dim."""
    heads = fields.size("num_attention_heads")
    kv_heads = fields.size("num_key_value_heads", heads)
    q_rows = shapes.matrix(f"{layer}self_attn.q_proj.weight")[0]
    k_rows = shapes.matrix(f"{layer}self_attn.k_proj.weight")[0]
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
    return {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim}


def _shares_embedding(source: TensorSource, hidden: int, target: TargetFacts, wanted: str | None) -> bool:
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
    target: TargetFacts,
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


def _either(fields: Fields, name: str, nested_name: str, default: bool) -> bool:
    """A flag under its own name, or under the one it has in `eagle_config` (TensorRT-LLM, ModelOpt)."""
    nested = _eagle_config(fields)
    inner = nested.flag(nested_name) if nested.get(nested_name) is not None else None
    own = fields.flag(name, default if inner is None else inner)
    if inner is not None and inner != own:
        raise Eagle3Error(
            f"{fields.where}: {name} is {own}, but eagle_config.{nested_name} is {inner}; they must agree"
        )
    return own


def _norm_output(fields: Fields, wanted: bool | None) -> bool:
    """EAGLE-3.1's flag, also under TensorRT-LLM's name."""
    return _either(fields, "norm_output", "return_hidden_post_norm", False) if wanted is None else wanted


def _fc_norm(fields: Fields, source: TensorSource) -> bool:
    """EAGLE-3.1's flag, also under SGLang's old name."""
    old = fields.flag("use_aux_norm", fields.flag("fc_norm", "fc_norm.0.weight" in source))
    if fields.get("fc_norm") is not None and fields.flag("fc_norm") != old:
        raise Eagle3Error(f"{fields.where}: fc_norm is {not old}, but use_aux_norm is {old}; they must agree")
    return old


def _fuses(fields: Fields, source: TensorSource) -> bool:
    """Whether `fc` joins several hidden states; both the flag and the tensor must say so.

    An engine that looks at widths alone skips `fc` now and then, and accepts nothing.
    """
    flag, there = _eagle_config(fields).flag("use_aux_hidden_state", True), "fc.weight" in source
    if flag and not there:
        raise Eagle3Error(
            f"{source.path}: tensor fc.weight is missing; only a draft whose eagle_config.use_aux_hidden_state is "
            "false has none"
        )
    if there and not flag:
        raise Eagle3Error(
            f"{fields.where}: eagle_config.use_aux_hidden_state is false, but the file has fc.weight; one is wrong"
        )
    return flag


def _taps(
    config: Mapping[str, Any], target: TargetFacts, where: str, fuses: bool, dialect: str, overrides: Overrides
) -> Taps:
    if fuses:
        convention, given = overrides.tap_convention, overrides.taps
        return resolve_taps(config, target.num_layers, where, convention, given, dialect == "speculators")
    if overrides.taps is not None or overrides.tap_convention is not None:
        raise Eagle3Error(
            f"{where}: this draft reads only the target's last hidden state; overrides of taps do not fit"
        )
    if target.num_layers is None:
        raise Eagle3Error(f"{where}: the tap is the target's last hidden state; name the target to know its index")
    return Taps((target.num_layers,), "last", "use_aux_hidden_state is false: the target's last hidden state, normed")


def _qk_norm(config: Mapping[str, Any], source: TensorSource, layer: str, where: str) -> bool:
    """Whether heads are normed, as the tensors say; a config that says Qwen3 must have them."""
    there = any(f"{layer}self_attn.{x}_norm.weight" in source for x in "qk")
    architectures = config.get("architectures") or []
    qwen3 = config.get("model_type") == "qwen3" and not set(architectures) & set(LLAMA_DRAFTS)
    if qwen3 and not there:
        raise Eagle3Error(
            f"{where}: says Qwen3, but {layer}self_attn.q_norm.weight is missing; one of the two is wrong"
        )
    return there


def _rope(fields: Fields, theta: float | None, warnings: list[str]) -> RopeConfig:
    """RoPE from `rope_parameters`, else `rope_theta` and `rope_scaling`, else base 10000; never the target's."""
    new, old = fields.get("rope_parameters"), fields.get("rope_scaling")
    if isinstance(new, Mapping) and isinstance(old, Mapping) and new and old:
        kinds = [scaling.get("rope_type", scaling.get("type", "default")) for scaling in (new, old)]
        shared = set(new) & set(old) - {"type", "rope_type"}
        if kinds[0] != kinds[1] or any(new[name] != old[name] for name in shared):
            raise Eagle3Error(f"{fields.where}: rope_parameters and rope_scaling contradict each other; one is needed")
    inner, outer = new.get("rope_theta") if isinstance(new, Mapping) else None, fields.get("rope_theta")
    if inner is not None and outer is not None and inner != outer:
        warnings.append(f"rope_theta is {quote(outer)}, but {quote(inner)} in rope_parameters; the latter is used")
    rope = parse_rope(fields, fields.size("max_position_embeddings", 2048))
    return rope if theta is None else dataclasses.replace(rope, theta=theta)


def _eagle_config(fields: Fields) -> Fields:
    return Fields(eagle_config(fields.config, fields.where), f"{fields.where}: eagle_config")


def _check_other_fields(fields: Fields) -> None:
    """Every field that was not needed must have a value under which it changes nothing."""
    fields.expect("hidden_act", ["silu", "swish"])
    fields.expect("logit_scale", [1])
    layer_types = fields.get("layer_types", [])
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        raise Eagle3Error(f"{fields.where}: layer_types is {quote(layer_types)}; only full_attention is supported")
    fields.expect("use_sliding_window", [False])
    window = fields.get("sliding_window")
    if window is not None and fields.get("use_sliding_window") is not False:
        raise Eagle3Error(f"{fields.where}: sliding_window is {window}; only full attention is supported")
    # Read whether or not an override made them unnecessary.
    fields.read |= {
        "max_window_layers",
        "norm_before_residual",
        "norm_output",
        "truncated_vocab_size",
        "draft_vocab_size",
    }
    check_unknown_fields(fields.config, fields.read, fields.where)
    refuse_draft_fields(set(fields.config) - fields.read, fields.where)
    nested = _eagle_config(fields)
    for name, allowed in _BUILD_SWITCHES.items():
        nested.expect(name, allowed)
    nested.read |= set(_BUILD_READ)
    check_unknown_fields(nested.config, nested.read, nested.where)
