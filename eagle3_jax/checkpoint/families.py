"""The families of targets: how each one's config.json reads, what runs it, and what its tensors are called.

Adding a family is one entry of `FAMILIES`.
"""

import dataclasses
from collections.abc import Callable, Container, Mapping
from typing import Any

from eagle3_jax.checkpoint.deepseek import deepseek_fields, deepseek_names
from eagle3_jax.checkpoint.folders import rope_fields
from eagle3_jax.checkpoint.names import Fused, KeyMap, layer_names
from eagle3_jax.config import (
    DecoderConfig,
    LlamaConfig,
    MoEConfig,
    parse_deepseek_v3,
    parse_gpt_oss,
    parse_llama,
    parse_minimax_m2,
    parse_qwen3,
    parse_qwen3_moe,
)
from eagle3_jax.config.deepseek import WRAPPERS
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.models.decoder import Decoder
from eagle3_jax.models.deepseek import Deepseek
from eagle3_jax.models.llama import Llama


@dataclasses.dataclass(frozen=True)
class Family:
    """One family of targets.

    Attributes:
        architecture: its name in config.json's `architectures`.
        parse: reads (config.json as a dict, its name for messages).
        model: the module class.
        names: what its tensors are called; where that depends on the model and the file, a function of its config
            and the names in the file.
        fields: the config.json that `parse` reads as a config, without what all families spell alike.
        aliases: other architectures that are read alike. kinds: other values of `model_type`.
        joins_stop_ids: stop ids are those of all config files together (see `read_eos_ids`).
    """

    architecture: str
    parse: Callable[[Mapping[str, Any], str], DecoderConfig]
    model: type[Decoder]
    names: KeyMap | Callable[[Any, Container[str]], KeyMap]
    fields: Callable[[Any], dict[str, Any]]
    aliases: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    joins_stop_ids: bool = False

    def key_map(self, config: DecoderConfig, tensors: Container[str]) -> KeyMap:
        """What one checkpoint, with these names in it, calls the tensors of a model."""
        return self.names if isinstance(self.names, KeyMap) else self.names(config, tensors)


def _names(layer: Mapping[str, str | Fused]) -> KeyMap:
    """A decoder in Hugging Face's names; `layer` is what its layers have besides or call otherwise."""
    norms = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    modules = {
        "embed": "model.embed_tokens",
        **layer_names("layers_{i}/", "model.layers.{i}.", norms),
        "final_norm": "model.norm",
        "head": "lm_head",
    }
    for path, place in layer.items():
        if isinstance(place, Fused):
            place = dataclasses.replace(place, name=f"model.layers.{{i}}.{place.name}")
        else:
            place = f"model.layers.{{i}}.{place}"
        modules[f"layers_{{i}}/{path}"] = place
    return KeyMap(modules, ignored=(r"(.*\.)?rotary_emb\.inv_freq",))


def _expert_names(block: str, gate: str, up: str, down: str) -> dict[str, str | Fused]:
    """One tensor an expert and matrix, as all but gpt-oss have them."""
    names = {"gate": gate, "up": up, "down": down}
    experts = {f"mlp/experts/{ours}": f"{block}.experts.{{e}}.{theirs}" for ours, theirs in names.items()}
    return {**experts, "mlp/router": f"{block}.gate"}


_QK_NORMS = {"attention/q_norm": "self_attn.q_norm", "attention/k_norm": "self_attn.k_norm"}
_MINIMAX_M2 = {
    **_expert_names("block_sparse_moe", "w1", "w3", "w2"),
    "mlp/router/correction": "block_sparse_moe.e_score_correction_bias",
}
_GPT_OSS = {
    "attention/sinks": "self_attn.sinks",
    "mlp/router": "mlp.router",
    "mlp/experts/gate/weight": Fused("mlp.experts.gate_up_proj", 0, 2),
    "mlp/experts/gate/bias": Fused("mlp.experts.gate_up_proj_bias", 0, 2),
    "mlp/experts/up/weight": Fused("mlp.experts.gate_up_proj", 1, 2),
    "mlp/experts/up/bias": Fused("mlp.experts.gate_up_proj_bias", 1, 2),
    "mlp/experts/down/weight": Fused("mlp.experts.down_proj"),
    "mlp/experts/down/bias": Fused("mlp.experts.down_proj_bias"),
}


def _grouped_query_fields(config: LlamaConfig) -> dict[str, Any]:
    return {"num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim}


def _qwen3_fields(config: LlamaConfig) -> dict[str, Any]:
    return {**_grouped_query_fields(config), "attention_bias": config.attention_bias}


def _llama_fields(config: LlamaConfig) -> dict[str, Any]:
    return {**_qwen3_fields(config), "mlp_bias": config.mlp_bias}


def _qwen3_moe_fields(config: LlamaConfig) -> dict[str, Any]:
    moe = _moe(config)
    return {
        **_qwen3_fields(config),
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.intermediate_size,
        "norm_topk_prob": moe.normalize,
        "mlp_only_layers": list(config.dense_layers),
    }


def _minimax_m2_fields(config: LlamaConfig) -> dict[str, Any]:
    moe = _moe(config)
    return {
        **_grouped_query_fields(config),
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "rotary_dim": config.rotary_dim,
    }


def _gpt_oss_fields(config: LlamaConfig) -> dict[str, Any]:
    moe = _moe(config)
    return {
        **_qwen3_fields(config),
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "sliding_window": next(filter(None, config.windows), config.max_position),
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in config.windows],
        "swiglu_limit": moe.gate_limit,
        "swiglu_alpha": moe.gate_slope,
    }


def _moe(config: LlamaConfig) -> MoEConfig:
    assert config.moe is not None
    return config.moe


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", parse_llama, Llama, _names({}), _llama_fields),
    "qwen3": Family("Qwen3ForCausalLM", parse_qwen3, Llama, _names(_QK_NORMS), _qwen3_fields),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        parse_qwen3_moe,
        Llama,
        _names({**_QK_NORMS, **_expert_names("mlp", "gate_proj", "up_proj", "down_proj")}),
        _qwen3_moe_fields,
    ),
    "minimax_m2": Family(
        "MiniMaxM2ForCausalLM", parse_minimax_m2, Llama, _names({**_QK_NORMS, **_MINIMAX_M2}), _minimax_m2_fields
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        parse_deepseek_v3,
        Deepseek,
        deepseek_names,
        deepseek_fields,
        aliases=WRAPPERS,
        kinds=("kimi_k2", "kimi_k25"),
        joins_stop_ids=True,
    ),
    "gpt_oss": Family("GptOssForCausalLM", parse_gpt_oss, Llama, _names(_GPT_OSS), _gpt_oss_fields),
}
"""By `model_type` of config.json, which is also `DecoderConfig.family`."""


def family_of(config: Mapping[str, Any], where: str) -> Family:
    """The family of a config.json: by its architecture, else by its model type, else Llama.

    Args:
        config: the parsed file. where: its name for messages.

    Raises:
        Eagle3Error: a family that is not supported.
    """
    architectures, kind = config.get("architectures"), config.get("model_type", "llama")
    for name, family in FAMILIES.items():
        known_as = [[architecture] for architecture in (family.architecture, *family.aliases)]
        if architectures in known_as or (architectures is None and kind in (name, *family.kinds)):
            return family
    found = f"model_type {kind!r:.80}" if architectures is None else f"architectures {architectures!r:.80}"
    known = ", ".join(family.architecture for family in FAMILIES.values())
    raise Eagle3Error(f"{where}: {found} is not supported; supported are {known}")


def config_fields(config: DecoderConfig) -> dict[str, Any]:
    """The config.json that reads as this config, all but the stop ids."""
    family = FAMILIES[config.family]
    return {
        "architectures": [family.architecture],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        **family.fields(config),
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        **rope_fields(config.rope),
        "max_position_embeddings": config.max_position,
        "tie_word_embeddings": config.tied,
        "torch_dtype": config.dtype,
    }
