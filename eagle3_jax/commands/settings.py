"""Flags made from the fields of a configuration dataclass."""

import argparse
import dataclasses
import types
import typing
from collections.abc import Callable
from typing import Any


def add_config_arguments(parser: argparse.ArgumentParser, config: type) -> None:
    """One flag for each field: `draft_vocab_size` is --draft-vocab-size, a list is written 2,15,27."""
    group = parser.add_argument_group(f"settings (eagle3_jax {config.__name__})")
    for field in dataclasses.fields(config):
        flag, default = f"--{field.name.replace('_', '-')}", field.default
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
        text = f"(default: {'chosen by the model' if default is None else shown})"
        if field.type is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=default, help=text)
        else:
            group.add_argument(flag, type=_converter(field.type), default=default, metavar="X", help=text)


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
