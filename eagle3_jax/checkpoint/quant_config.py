"""`quantization_config` of a config.json: what it says of a checkpoint's tensors, checked against them.

How a tensor is stored is read from the tensor itself (see `eagle3_jax.checkpoint.narrow`); what a config adds is a
second opinion, and lists of modules it left alone, in whose spelling engines differ: whole names, globs, or regular
expressions after "re:".
"""

import dataclasses
import fnmatch
import re
from collections.abc import Iterator, Mapping
from typing import Any

from eagle3_jax.checkpoint.files import quote
from eagle3_jax.errors import Eagle3Error

FIELD = "quantization_config"

_EXCLUDES = ("exclude", "ignore", "modules_to_not_convert", "ignored_layers")
"""Quark's, compressed-tensors', transformers' and vLLM's name of the list."""

_KINDS = {"fp8_e4m3": "fp8", "fp8": "fp8", "fp4": "mxfp4", "mxfp4": "mxfp4", "int4": "int4"}


@dataclasses.dataclass(frozen=True)
class QuantConfig:
    """What a `quantization_config` says.

    Attributes:
        where: the file's name for messages.
        method: its quant_method, e.g. "quark".
        kinds: kinds of narrow weights it names: "fp8", "mxfp4", "int4"; empty if it names none that is known.
        exclude: modules that are not quantised, as spelled there.
    """

    where: str
    method: str
    kinds: frozenset[str]
    exclude: tuple[str, ...]

    def excludes(self, module: str) -> str | None:
        """The entry that leaves a module alone, or None.

        A plain entry is a name or a part of one between dots, as engines add and drop prefixes: "fc" is
        "model.fc", and "gate" is "mlp.gate", but not "mlp.gate_proj".
        """
        return next((entry for entry in self.exclude if _matches(entry, module)), None)

    def check(self, module: str, kind: str) -> None:
        """Refuse a module stored narrow, as `kind`, where the config says otherwise.

        Raises:
            Eagle3Error: it is excluded, or the config names other kinds.
        """
        if (entry := self.excludes(module)) is not None:
            raise Eagle3Error(
                f"{self.where}: {FIELD} excludes {quote(entry)}, but {module} is stored as {kind}; they must agree"
            )
        if self.kinds and kind not in self.kinds:
            raise Eagle3Error(
                f"{self.where}: {FIELD} names {' and '.join(sorted(self.kinds))} weights, but {module} is stored "
                f"as {kind}; they must agree"
            )


def parse_quant_config(config: Mapping[str, Any], where: str) -> QuantConfig | None:
    """Read a config.json's `quantization_config`, leniently: fields that are not known are passed over.

    Models with pictures have it beside or in their `text_config`.

    Args:
        config: the parsed file. where: its name for messages.

    Returns:
        None where it has none.

    Raises:
        Eagle3Error: not an object, no method, or a list of modules that cannot be understood.
    """
    fields, nested = config.get(FIELD), config.get("text_config")
    if fields is None and isinstance(nested, Mapping):
        fields = nested.get(FIELD)
    if fields is None:
        return None
    if not isinstance(fields, Mapping) or not isinstance(fields.get("quant_method"), str):
        raise Eagle3Error(f"{where}: {FIELD} is {quote(fields)}; an object with quant_method is needed")
    exclude: list[str] = []
    for name in _EXCLUDES:
        entries = fields.get(name)
        if entries is None:
            continue
        if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
            raise Eagle3Error(f"{where}: {FIELD}.{name} is {quote(entries)}; a list of module names is needed")
        exclude += entries
    for entry in exclude:
        if entry.startswith("re:"):
            try:
                re.compile(entry[3:])
            except re.error as error:
                raise Eagle3Error(f"{where}: {FIELD}: {quote(entry)} is no regular expression: {error}") from error
    method = fields["quant_method"].lower()
    return QuantConfig(where, method, frozenset(_kinds(fields, method)), tuple(exclude))


def _kinds(fields: Mapping[str, Any], method: str) -> Iterator[str]:
    """Kinds of weights: transformers' and vLLM's methods name theirs, the others have a specification of each."""
    if method in _KINDS:
        yield _KINDS[method]
    for spec in _weight_specs(fields):
        dtype, bits = spec.get("dtype"), (spec.get("type"), spec.get("num_bits"))
        if isinstance(dtype, str) and dtype in _KINDS:
            yield _KINDS[dtype]
        elif bits in (("float", 8), ("int", 4)):
            yield "fp8" if bits[1] == 8 else "int4"


def _weight_specs(node: Any) -> Iterator[Mapping[str, Any]]:
    """Every object under a key "weight" (Quark) or "weights" (compressed-tensors), however deep."""
    if not isinstance(node, Mapping):
        return
    for key, value in node.items():
        if key in ("weight", "weights") and isinstance(value, Mapping):
            yield value
        elif key in ("weight", "weights") and isinstance(value, list):  # Quark, several steps
            yield from (spec for spec in value if isinstance(spec, Mapping))
        else:
            yield from _weight_specs(value)


def _matches(entry: str, module: str) -> bool:
    if entry.startswith("re:"):
        return re.match(entry[3:], module) is not None
    if any(character in entry for character in "*?["):
        return fnmatch.fnmatchcase(module, entry)
    return f".{entry}." in f".{module}."
