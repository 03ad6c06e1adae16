"""Strict reading of foreign config dictionaries: typed access, and refusal of what was not understood."""

import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any

from eagle3_jax.errors import Eagle3Error

log = logging.getLogger("eagle3_jax")

INERT_FIELDS = frozenset(
    """_name_or_path architectures attention_dropout auto_map bos_token_id dtype eos_token_id
    initializer_range is_llama_config model_type pad_token_id pretraining_tp quantization_config
    torch_dtype transformers_version transformers.js_config unk_token_id use_cache
    resid_pdrop embd_pdrop mlp_dropout unsloth_fixed""".split()
)
"""Fields of a Hugging Face config.json that do not change what a Llama-style model computes.

How weights are quantised is found out from the tensors, and `quantization_config` checked against them, when they
are loaded.
"""

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
