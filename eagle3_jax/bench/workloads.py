"""Prompts to measure with."""

import dataclasses
import os
from pathlib import Path

from eagle3_jax.checkpoint.files import quote, read_json_value
from eagle3_jax.checkpoint.registry import configs_folder
from eagle3_jax.errors import Eagle3Error

PACKAGED = ("dev",)
"""Names of the packaged prompt sets, configs/prompts/NAME.json."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """A set of prompts.

    Attributes:
        name: the packaged set's or the file's name.
        chats: lists of {"role": ..., "content": ...}; empty where `ids` are given.
        ids: token ids of each prompt, for targets without a tokenizer; empty where `chats` are given.
    """

    name: str
    chats: list[list[dict[str, str]]] = dataclasses.field(default_factory=list)
    ids: list[list[int]] = dataclasses.field(default_factory=list)


def load_workload(name: str) -> Workload:
    """Read a prompt set.

    Args:
        name: "dev", or a JSON file: a list of chats, or a list of lists of token ids.

    Raises:
        Eagle3Error: no such set or file, or a file that holds something else.

    Example:
        >>> load_workload("dev").chats[0]
        [{'role': 'user', 'content': 'Why do leaves change colour in autumn?'}]
    """
    if name in PACKAGED:
        path = configs_folder() / "prompts" / f"{name}.json"
    else:
        path = Path(name)
        if not os.path.exists(path):
            raise Eagle3Error(
                f"prompts {quote(name)}: no such file and no packaged set; packaged: {', '.join(PACKAGED)}"
            )
    value = read_json_value(path)
    prompts = value if isinstance(value, list) and all(isinstance(p, list) and p for p in value) else []
    for kind, key in ((dict, "chats"), (int, "ids")):
        if prompts and all(type(item) is kind for prompt in prompts for item in prompt):
            return Workload(path.stem, **{key: prompts})
    raise Eagle3Error(f"{path}: holds no prompts; a list of chats or a list of lists of token ids is needed")
