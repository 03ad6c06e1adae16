"""The dialects of EAGLE-3 drafts: how their files name tensors, and speculators' nested config.json.

| dialect | layer | config.json | written by |
|---|---|---|---|
| safeailab | midlayer.* | flat | SafeAILab, SGLang, SpecForge, SpecJAX, TensorRT-LLM |
| vllm | layers.0.* | flat | vLLM, ModelOpt, DeepSpec |
| speculators | layers.0.* | nested | speculators |
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from eagle3_jax.checkpoint.deepseek import latent_names
from eagle3_jax.checkpoint.files import quote
from eagle3_jax.checkpoint.names import KeyMap, layer_names
from eagle3_jax.checkpoint.tensors import TensorSource
from eagle3_jax.config import Fields, check_unknown_fields
from eagle3_jax.errors import Eagle3Error

DIALECTS = ("safeailab", "vllm", "speculators")

_OLD_NAMES = {f"aux_norm_{level}.weight": f"fc_norm.{i}.weight" for i, level in enumerate(("low", "mid", "high"))}
"""SGLang's names from before EAGLE-3.1 had one."""

_SETTINGS = """draft_vocab_size eagle_aux_hidden_state_layer_ids eagle_config fc_norm norm_before_fc
    norm_before_residual norm_output quantization_config target_hidden_size""".split()
"""Fields beside speculators' `transformer_layer_config` that say what the draft computes."""

_OTHER = """embed_requires_grad has_no_defaults_at_init speculators_config speculators_model_type
    speculators_version tie_word_embeddings transformer_layer_config""".split()

_INNER_KINDS = ("llama", "qwen3")


class DraftTensors(TensorSource):
    """A draft's tensors without the prefix "model." that some exporters add, and under today's names.

    Attributes:
        metadata: of the file, if it can have any.

    Args:
        source: the file.

    Raises:
        Eagle3Error: two tensors would have the same name.
    """

    def __init__(self, source: TensorSource) -> None:
        self.path, self._source, self._stored = source.path, source, dict[str, str]()
        self.metadata: dict[str, str] = getattr(source, "metadata", {})
        for stored in source:
            plain = stored.removeprefix("model.")
            name = _OLD_NAMES.get(plain, plain)
            if name in self._stored:
                raise Eagle3Error(
                    f"{self.path}: tensors {quote(self._stored[name])} and {quote(stored)} are both {name}; "
                    "one of them is needed"
                )
            self._stored[name] = stored

    def stored(self, name: str) -> str:
        """The name in the file. Raises Eagle3Error for an unknown name."""
        if name not in self._stored:
            raise Eagle3Error(f"{self.path}: no tensor {quote(name)} in this file")
        return self._stored[name]

    def names(self) -> list[str]:
        """Every tensor's name, in the file's order."""
        return list(self._stored)

    def __contains__(self, name: object) -> bool:
        return name in self._stored

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape. Raises Eagle3Error for an unknown name."""
        return self._source.shape(self.stored(name))

    def dtype(self, name: str) -> np.dtype:
        """The tensor's dtype. Raises Eagle3Error for an unknown name."""
        return self._source.dtype(self.stored(name))

    def format(self, name: str) -> str:
        """The container's word for the tensor's dtype. Raises Eagle3Error for an unknown name."""
        return self._source.format(self.stored(name))

    def read(self, name: str) -> np.ndarray:
        """One tensor, as the file's own `read`."""
        return self._source.read(self.stored(name))


@dataclasses.dataclass(frozen=True)
class LayerNames:
    """How a file names its decoder layers.

    Attributes:
        first: prefix of the first. deeper: prefix of the others; "{i}" is their number.
        deeper_norm: the norm before the attention of the others.
        count: how many layers there are.
        latent: with latent attention, columns of a head's unturned keys and of its values.
    """

    first: str = "midlayer."
    deeper: str = "layers.{i}."
    deeper_norm: str = "input_layernorm"
    count: int = 1
    latent: tuple[int, int] | None = None

    def key_map(self) -> KeyMap:
        """Names of all weights of a draft."""
        heads = {f"attention/{x}_norm": f"self_attn.{x}_norm" for x in "qk"}
        mlp = {"mlp_norm": "post_attention_layernorm"}
        first = {"embed_norm": "input_layernorm", "hidden_norm": "hidden_norm"}
        return KeyMap(
            modules={
                "embed": "embed_tokens",
                "input_norm": "input_norm",
                "fc_norms_{i}": "fc_norm.{i}",
                "fc": "fc",
                **layer_names("", self.first, first | mlp | heads),
                **layer_names("layers_{i}/", self.deeper, {"attention_norm": self.deeper_norm} | mlp | heads),
                **(latent_names("", self.first, *self.latent) if self.latent else {}),
                **(latent_names("layers_{i}/", self.deeper, *self.latent) if self.latent else {}),
                "final_norm": "norm",
                "head": "lm_head",
            },
            ignored=(r"(.*\.)?rotary_emb\.inv_freq",),
        )


def find_layers(source: TensorSource) -> LayerNames:
    """How a draft's file names its layers.

    Raises:
        Eagle3Error: no layer that reads features, layers named in two ways, numbers with gaps, or a deeper
            layer without exactly one norm before its attention.
    """
    found: dict[tuple[str, int], set[str]] = {}
    for name in source:
        if match := re.match(r"(midlayer|layers)\.(?:(\d{1,6})\.)?", name):
            kind, number = match.groups()
            place = (match[0] if number is None else f"{kind}.{{i}}.", int(number or 0))
            found.setdefault(place, set()).add(name[match.end() :])
    firsts = [prefix for prefix, number in found if number == 0]
    if len(firsts) != 1 or "hidden_norm.weight" not in found[firsts[0], 0]:
        if len(firsts) > 1:
            raise Eagle3Error(f"{source.path}: its first layer is named both {firsts[0]}* and {firsts[1]}*")
        if firsts == ["layers.{i}."]:
            raise Eagle3Error(f"{source.path}: holds a target, not a draft; load it with load_target")
        raise Eagle3Error(
            f"{source.path}: neither midlayer.hidden_norm.weight nor layers.0.hidden_norm.weight is in it; "
            "this is no EAGLE-3 draft"
        )
    count, deeper = len(found), {prefix for prefix, number in found if number > 0}
    if len(deeper) > 1 or {number for _, number in found} != set(range(count)):
        raise Eagle3Error(f"{source.path}: its {count} layers are not numbered 0 .. {count - 1} in one way")
    prefix = deeper.pop() if deeper else "layers.{i}."
    norms = {
        tuple(norm for norm in ("input_layernorm", "hidden_norm") if f"{norm}.weight" in parts)
        for (_, number), parts in found.items()
        if number > 0
    } or {("input_layernorm",)}
    if len(norms) > 1 or len(norm := norms.pop()) != 1:
        raise Eagle3Error(
            f"{source.path}: layers after the first need input_layernorm.weight or hidden_norm.weight, not both, "
            "and all the same"
        )
    return LayerNames(firsts[0].format(i=0), prefix, norm[0], count)


def is_speculators(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is in speculators' nested format."""
    return config.get("speculators_model_type") is not None or config.get("transformer_layer_config") is not None


def flatten(config: Mapping[str, Any], where: str) -> tuple[dict[str, Any], list[str]]:
    """A speculators config as a flat one, and what looked odd.

    Raises:
        Eagle3Error: another algorithm than EAGLE-3, an inner model that is not supported, a field that is said
            twice and differently, or fields beside the inner config whose names bear on the maths.
    """
    outer = Fields(config, where)
    if (algorithm := outer.get("speculators_model_type")) != "eagle3":
        raise Eagle3Error(f"{where}: speculators_model_type is {quote(algorithm)}; only eagle3 is supported")
    inner = outer.get("transformer_layer_config")
    if not isinstance(inner, Mapping):
        raise Eagle3Error(f"{where}: transformer_layer_config is {quote(inner)}; an object {{...}} is needed")
    if (kind := inner.get("model_type", "llama")) not in _INNER_KINDS:
        known = " and ".join(_INNER_KINDS)
        raise Eagle3Error(f"{where}: a draft layer of type {quote(kind)} is not supported; {known} are")
    check_unknown_fields(config, [*_SETTINGS, *_OTHER], where)
    _check_proposals(outer.get("speculators_config"), f"{where}: speculators_config")
    flat, warnings = {name: value for name, value in inner.items() if name != "architectures"}, []
    for name in _SETTINGS:
        if (value := config.get(name)) is None:
            continue
        if flat.get(name) not in (None, value):
            raise Eagle3Error(
                f"{where}: {name} is {quote(value)}, but {quote(flat[name])} in transformer_layer_config"
            )
        flat[name] = value
    flat["architectures"] = config.get("architectures")
    flat["tie_word_embeddings"] = outer.flag("tie_word_embeddings") or Fields(inner, where).flag("tie_word_embeddings")
    if config.get("norm_before_residual") is None:
        flat["norm_before_residual"] = True
        warnings.append(
            "norm_before_residual is missing; taken as true, as vLLM does for this format. If acceptance is poor, "
            "compare with overrides={'norm_before_residual': False}"
        )
    return flat, warnings


def _check_proposals(settings: Any, where: str) -> None:
    """Ways to propose that an engine could choose from: there must be no doubt that they are EAGLE-3 chains."""
    if settings is None:
        return
    if not isinstance(settings, Mapping):
        raise Eagle3Error(f"{where} is {quote(settings)}; an object {{...}} is needed")
    Fields(settings, where).expect("algorithm", ["eagle3"])
    methods, default = settings.get("proposal_methods") or [], settings.get("default_proposal_method")
    if not isinstance(methods, list) or not all(isinstance(method, Mapping) for method in methods):
        raise Eagle3Error(f"{where}: proposal_methods is {quote(methods)}; a list of objects is needed")
    kinds = [method.get("proposal_type") for method in methods]
    if kinds and default not in (kinds if default is not None or len(kinds) > 1 else [None]):
        raise Eagle3Error(f"{where}: default_proposal_method is {quote(default)}; one of {quote(kinds)} is needed")


def nest(fields: Mapping[str, Any], qwen3: bool, verifier: str | None) -> dict[str, Any]:
    """The speculators config that `flatten` reads as these flat fields.

    Args:
        fields: a flat config. qwen3: whether the layer has norms over the heads of queries and keys.
        verifier: name or path of the target.
    """
    outside = {name: fields[name] for name in _SETTINGS if name in fields}
    dropped = {*_SETTINGS, "architectures", "torch_dtype", "eagle_config", "bias", "rope_theta", "rope_scaling"}
    inner = {name: value for name, value in fields.items() if name not in dropped}
    inner["model_type"] = "qwen3" if qwen3 else "llama"
    inner["rope_parameters"] = {"rope_type": "default"} | (fields["rope_scaling"] or {})
    inner["rope_parameters"]["rope_theta"] = fields["rope_theta"]
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": verifier, "architectures": []},
        },
        **outside,
        "tie_word_embeddings": False,
        "transformer_layer_config": inner,
        "dtype": fields["torch_dtype"],
    }
