"""Which kind of draft a folder holds, and the refusal of kinds that are not supported."""

from collections.abc import Iterable, Mapping
from typing import Any

from eagle3_jax.checkpoint.dialects import is_speculators
from eagle3_jax.checkpoint.files import quote
from eagle3_jax.checkpoint.tensors import TensorSource
from eagle3_jax.errors import Eagle3Error

LLAMA_DRAFTS = (
    "LlamaForCausalLM",
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "EAGLE3LlamaForCausalLM",
    "Eagle3MiniMaxM2ForCausalLM",
)
_QWEN3_DRAFTS = ("Qwen3ForCausalLM", "Eagle3Qwen3ForCausalLM")
MLA_DRAFTS = ("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM", "Eagle3DeepSeekV3ForCausalLM")
_SPECULATORS_DRAFTS = ("Eagle3Speculator", "Eagle3DraftModel")
_MLA_FIELDS = ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
_MLA_TENSOR = "kv_a_proj_with_mqa"


def is_latent(tensors: Iterable[str]) -> bool:
    """Whether a draft's attention is latent (an MLA draft), by the names of its tensors."""
    return any(f".{_MLA_TENSOR}." in name for name in tensors)


def check_kind(config: Mapping[str, Any], source: TensorSource, where: str) -> None:
    """Refuse, by name, what is no EAGLE-3 draft of Llama, Qwen3 or DeepSeek layers.

    Raises:
        Eagle3Error: P-EAGLE, another architecture, or weights and config that are of different kinds.
    """
    architectures, latent = config.get("architectures") or [None], is_latent(source)
    if not latent:
        lacks = f"means an MLA draft, but {source.path} has no tensor {_MLA_TENSOR}.weight"
        if found := [name for name in _MLA_FIELDS if config.get(name) is not None]:
            raise Eagle3Error(f"{where}: field {found[0]} {lacks}")
        if architectures[0] in MLA_DRAFTS:
            raise Eagle3Error(f"{where}: architecture {quote(architectures)} {lacks}")
    elif config.get("kv_lora_rank") is None:
        raise Eagle3Error(f"{source.path}: tensor {_MLA_TENSOR} means an MLA draft, but {where} has no kv_lora_rank")
    known = MLA_DRAFTS if latent else (*LLAMA_DRAFTS, *_QWEN3_DRAFTS)
    known = (None, *(_SPECULATORS_DRAFTS if is_speculators(config) else known))
    if len(architectures) != 1 or architectures[0] not in known:
        raise Eagle3Error(
            f"{where}: architecture {quote(architectures)} is not supported{' of an MLA draft' if latent else ''}; "
            f"drafts of {', '.join(known[1:])} are"
        )
    if "mask_hidden" in source or config.get("pard_token") is not None:
        raise Eagle3Error(f"{where}: mask_hidden or pard_token means a P-EAGLE draft, which is not supported")
