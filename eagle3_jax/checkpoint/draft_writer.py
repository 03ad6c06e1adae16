"""Writing drafts in each dialect, so that every reader of it finds the same draft."""

import logging
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from eagle3_jax.checkpoint.deepseek import latent_fields
from eagle3_jax.checkpoint.dialects import DIALECTS, LayerNames, nest
from eagle3_jax.checkpoint.draft_kind import MLA_DRAFTS
from eagle3_jax.checkpoint.files import write_json_atomic
from eagle3_jax.checkpoint.folders import atomic_folder, rope_fields
from eagle3_jax.checkpoint.names import lay
from eagle3_jax.checkpoint.taps import resolve_taps, tap_fields
from eagle3_jax.checkpoint.tensors import SINGLE_FILE, write_safetensors
from eagle3_jax.config import Eagle3Config, Eagle3LatentConfig
from eagle3_jax.errors import Eagle3Error

log = logging.getLogger("eagle3_jax")

FILLED_IN = {"eagle3_jax.embedding": "target"}
"""Metadata of a file whose embedding is a copy of the target's, not the draft's own."""

_ABSENT = {
    "safeailab": ("qk_norm", "norm_before_fc"),
    "vllm": (),
    "speculators": ("fc_bias", "shares_head"),
}
"""Settings that no reader of the dialect has: the draft would be read as another one."""


def write_draft(
    path: str | os.PathLike[str],
    tensors: Mapping[str, np.ndarray],
    target_ids: np.ndarray | None,
    config: Eagle3Config,
    dialect: str,
    dtype: str,
    max_position: int,
    verifier: str,
    target_embedding: np.ndarray | None = None,
) -> None:
    """Write a draft's folder: config.json and model.safetensors, complete or not at all.

    Args:
        path: the folder; other files in an old one of that name stay.
        tensors: its weights as files hold them ([out, in]), by their path in the parameter tree.
        target_ids: int [Vd], the target's id of each draft id, if the vocabulary is reduced.
        config: what the draft is. dialect: one of `DIALECTS`. dtype: what config.json says of the weights.
        max_position: the target's context length. verifier: the target's name, which speculators writes down.
        target_embedding: [V, Ht]; needed where a draft that reads its target's goes to speculators, whose own
            class takes a missing embedding for memory that it happens to find.

    Raises:
        Eagle3Error: a dialect that is not known or cannot say what the draft is, or a folder that cannot be
            written.
    """
    fields = config_fields(config, dialect, dtype, max_position, verifier)
    names = layer_names_of(config, dialect).key_map()
    named: dict[str, np.ndarray] = {}
    for place, tensor in tensors.items():
        lay(named, names.place(place), tensor)
    if target_ids is not None:
        ids = np.asarray(target_ids, np.int64)
        named["d2t"] = ids - np.arange(len(ids))
        named["t2d"] = np.zeros(config.vocab_size, bool)
        named["t2d"][ids] = True
    metadata = {"format": "pt"}
    if dialect == "speculators" and config.shares_embedding:
        if target_embedding is None:
            raise Eagle3Error("dialect speculators needs the target's embedding in the file; name the target")
        named[names.file_name("embed/weight")] = target_embedding
        metadata |= FILLED_IN
    with atomic_folder(path) as folder:
        write_safetensors(folder / SINGLE_FILE, named, metadata)
        write_json_atomic(folder / "config.json", fields)


def layer_names_of(config: Eagle3Config, dialect: str) -> LayerNames:
    """How a dialect names the layers of a draft."""
    latent = (config.nope_dim, config.head_dim) if isinstance(config, Eagle3LatentConfig) else None
    return LayerNames("midlayer." if dialect == "safeailab" else "layers.0.", count=config.num_layers, latent=latent)


def config_fields(config: Eagle3Config, dialect: str, dtype: str, max_position: int, verifier: str) -> dict[str, Any]:
    """The config.json that `eagle3_jax.checkpoint.draft_config.parse_draft` reads as this config.

    Args: see `write_draft`.

    Raises:
        Eagle3Error: a dialect that is not known or cannot say what the draft is.
    """
    _check_dialect(config, dialect)
    fields = {
        "architectures": [_architecture(config, dialect)],
        "model_type": "qwen3" if config.qk_norm else "llama",
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.target_hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        **rope_fields(config.rope),
        "max_position_embeddings": max_position,
        "tie_word_embeddings": False,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "bias": config.fc_bias,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        **(tap_fields(config.taps) if config.fuses else {"eagle_config": {"use_aux_hidden_state": False}}),
        "torch_dtype": dtype,
    }
    if isinstance(config, Eagle3LatentConfig):
        fields |= {"model_type": "deepseek_v3", **latent_fields(config)}
        del fields["head_dim"]
    # SafeAILab and SGLang take the file's own embedding if, and only if, this field is there.
    if config.shares_embedding:
        del fields["target_hidden_size"]
    # SGLang takes the target's head only where no draft vocabulary is named.
    if config.shares_head:
        del fields["draft_vocab_size"]
    return nest(fields, config.qk_norm, verifier) if dialect == "speculators" else fields


def _architecture(config: Eagle3Config, dialect: str) -> str:
    if dialect == "safeailab":
        return "LlamaForCausalLMEagle3"
    if isinstance(config, Eagle3LatentConfig):
        return MLA_DRAFTS[0]
    return "Eagle3Qwen3ForCausalLM" if config.qk_norm else "Eagle3LlamaForCausalLM"


def _check_dialect(config: Eagle3Config, dialect: str) -> None:
    if dialect not in DIALECTS:
        raise Eagle3Error(f"dialect {dialect!r:.40} is not known; the dialects are {', '.join(DIALECTS)}")
    absent = [name for name in _ABSENT[dialect] if getattr(config, name)]
    if dialect != "vllm" and isinstance(config, Eagle3LatentConfig):
        absent.append("latent attention")
    if dialect == "safeailab" and config.num_layers > 1:
        absent.append(f"{config.num_layers} layers")
    if dialect == "speculators" and not config.fuses:
        absent.append("a draft without fc")
    if absent:
        raise Eagle3Error(
            f"dialect {dialect} has no {absent[0]}: the draft would be read wrongly; use another dialect"
        )
    if dialect == "safeailab" and config.norm_before_residual:
        log.warning(
            "SGLang and SafeAILab ignore norm_before_residual: only vLLM and this library read this draft right"
        )
    if dialect == "speculators":
        fields = {"eagle_aux_hidden_state_layer_ids": list(config.taps)}
        if resolve_taps(fields, None, "config.json", speculators=True).indices != config.taps:
            raise Eagle3Error(
                f"dialect speculators: taps {list(config.taps)} start at 1, as ids of another convention do; "
                "use another"
            )
