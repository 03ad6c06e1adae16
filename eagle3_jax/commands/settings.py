"""Flags made from the fields of a configuration dataclass."""

import argparse
import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Callable
from typing import Any


def add_config_arguments(parser: argparse.ArgumentParser, config: type) -> None:
    """One flag for each field: `draft_vocab_size` is --draft-vocab-size, a list is written 2,15,27."""
    group = parser.add_argument_group(f"settings (eagle3_jax {config.__name__})")
    said = _descriptions(config)
    for field in dataclasses.fields(config):
        flag, default = f"--{field.name.replace('_', '-')}", field.default
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
        text = f"{said[field.name]} (default: {'chosen by the model' if default is None else shown})"
        if field.type is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=default, help=text)
        else:
            group.add_argument(flag, type=_converter(field.type), default=default, metavar="X", help=text)


def _descriptions(config: type) -> dict[str, str]:
    """What a configuration's docstring says under Attributes about each field: "names: words. names: words."."""
    section = inspect.getdoc(config) or ""
    words = " ".join(section.partition("Attributes:")[2].partition("Raises:")[0].split()).replace("%", "%%")
    names = {field.name for field in dataclasses.fields(config)}
    heads = [head for head in re.finditer(r"(\w+(?:, \w+)*): ", words) if set(head[1].split(", ")) <= names]
    ends = [*(head.start() for head in heads[1:]), len(words)]
    found = dict.fromkeys(names, "")
    for head, end in zip(heads, ends, strict=True):
        found |= dict.fromkeys(head[1].split(", "), words[head.end() : end].strip().removesuffix("."))
    return found


def read_config(args: argparse.Namespace, config: type) -> Any:
    """The configuration that the flags of `add_config_arguments` describe.

    Raises:
        Eagle3Error: the configuration refuses a value.
    """
    return config(**{field.name: getattr(args, field.name) for field in dataclasses.fields(config)})


def _converter(annotation: Any) -> Callable[[str], Any]:
    """An argparse type for int, float, str, tuple[T, ...], or one of them or None."""
    if isinstance(annotation, types.UnionType):
        annotation = next(part for part in typing.get_args(annotation) if part is not type(None))
    if typing.get_origin(annotation) is not tuple:
        return _named(annotation)
    item = _named(typing.get_args(annotation)[0])
    return lambda text: tuple(item(part) for part in text.split(","))


def _named(kind: type) -> Callable[[str], Any]:
    names = {int: "a whole number", float: "a finite number"}

    def convert(text: str) -> Any:
        try:
            value = kind(text)
            if isinstance(value, float) and not abs(value) < float("inf"):
                raise ValueError
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {names.get(kind, kind.__name__)}") from None
        return value

    return convert
