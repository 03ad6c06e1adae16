"""Public drafts as the package knows them: configs/drafts/public.yaml. What is not known stays unknown."""

import dataclasses
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from eagle3_jax.checkpoint.dialects import DIALECTS
from eagle3_jax.checkpoint.files import quote
from eagle3_jax.checkpoint.registry import configs_folder, locate, read_yaml
from eagle3_jax.checkpoint.taps import IDS_FIELD, Taps, resolve_taps
from eagle3_jax.config import Eagle3Config, Eagle3LatentConfig
from eagle3_jax.errors import Eagle3Error

_SIZES = """hidden_size intermediate_size num_heads num_kv_heads head_dim target_hidden_size vocab_size
    draft_vocab_size max_position target_layers q_rank kv_rank nope_dim rope_dim value_dim""".split()
_FLAGS = """norm_before_residual norm_before_fc fc_norm norm_output use_aux_hidden_state own_embedding
    latent""".split()
_TEXTS = ("architecture", "dialect", "rope_scaling", "quantization", "odd")
_NUMBERS = ("rope_theta", "rms_norm_eps")
_NEEDED = ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "vocab_size")
_LATENT = ("q_rank", "kv_rank", "nope_dim", "rope_dim")


@dataclasses.dataclass(frozen=True)
class PublicDraft:
    """A public draft.

    Attributes:
        name: its repository on the Hugging Face hub, or the name of SpecForge's config.
        fields: what is known of it; None says that its config.json does not have the field.
    """

    name: str
    fields: Mapping[str, Any]

    def taps(self) -> Taps:
        """The hidden states of the target that it reads.

        Raises:
            Eagle3Error: too little is known.
        """
        if "layer_ids" not in self.fields:
            raise Eagle3Error(f"{self.name}: its layer ids are not known")
        speculators = self.fields.get("dialect") == "speculators"
        config = {IDS_FIELD: self.fields["layer_ids"]}
        return resolve_taps(config, self.fields.get("target_layers"), self.name, speculators=speculators)

    def config(self) -> Eagle3Config:
        """Its shape, e.g. for `eagle3_jax.checkpoint.names.abstract_params`.

        Raises:
            Eagle3Error: a size is not known.
        """
        known = self.fields
        kind, extra, head = Eagle3Config, (), "head_dim"
        if known.get("latent"):
            kind, extra, head = Eagle3LatentConfig, _LATENT, "value_dim"
        if missing := [name for name in (*_NEEDED, *extra, head, "draft_vocab_size") if name not in known]:
            raise Eagle3Error(f"{self.name}: its {missing[0]} is not known")
        sizes = {name: known[name] for name in (*_NEEDED, *extra)}
        flags = {name: known.get(name, False) for name in _FLAGS[:4]}
        return kind(
            **sizes,
            **flags,
            draft_vocab_size=known["draft_vocab_size"] or known["vocab_size"],
            target_hidden_size=known.get("target_hidden_size") or known["hidden_size"],
            head_dim=known[head] or known["hidden_size"] // known["num_heads"],
            taps=self.taps().indices,
            shares_embedding=not known.get("own_embedding", False),
        )


@cache
def public_drafts() -> dict[str, PublicDraft]:
    """All public drafts that the package knows, by name.

    Raises:
        Eagle3Error: the list is malformed.
    """
    file = configs_folder() / "drafts" / "public.yaml"
    listed = read_yaml(file)
    if not isinstance(listed, dict) or not all(isinstance(fields, dict) for fields in listed.values()):
        raise Eagle3Error(f"{file}: names of drafts with their fields are needed")
    return {name: PublicDraft(name, _checked(fields, f"{file}: {name}")) for name, fields in listed.items()}


def _checked(fields: dict[str, Any], where: str) -> dict[str, Any]:
    for name, value in fields.items():
        good = value is None
        if name in _SIZES:
            good |= type(value) is int and value > 0
        elif name in _FLAGS:
            good |= isinstance(value, bool)
        elif name in _TEXTS:
            good |= isinstance(value, str) and (name != "dialect" or value in DIALECTS)
        elif name in _NUMBERS:
            good |= type(value) in (int, float) and value > 0
        elif name == "layer_ids":
            good |= isinstance(value, list) and all(type(i) is int for i in value)
        else:
            raise Eagle3Error(f"{where}: unknown field {quote(name)}")
        if not good:
            raise Eagle3Error(f"{where}: field {name} is {quote(value)}, which it cannot be")
    return fields


def locate_draft(path: str | os.PathLike[str]) -> tuple[str, Path]:
    """Name and place of a draft, as `eagle3_jax.checkpoint.registry.locate`.

    Raises:
        Eagle3Error: as there; for a public draft that is not here, with the command that fetches it.
    """
    if isinstance(path, str) and "/" in path and path in public_drafts() and not os.path.exists(path):
        folder = path.partition("/")[2]
        raise Eagle3Error(f"{path} is not here; run: hf download {path} --local-dir {folder}, and give that folder")
    return locate(path, "draft")
