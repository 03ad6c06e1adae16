"""Checkpoint folders for tests: the fixtures, and copies of them with something changed."""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from eagle3_jax.checkpoint.drafts import Draft, load_draft
from eagle3_jax.checkpoint.targets import Target, load_target

FIXTURES = Path(__file__).resolve().parent / "fixtures"
TARGETS = FIXTURES / "targets"
DRAFTS = FIXTURES / "drafts"
TARGET_OF = {
    "a_safeailab": "llama_tied",
    "b_speculators": "llama_gqa_rope3",
    "c_eagle31": "llama_gqa_rope3",
    "d_fullvocab": "llama_tied",
    "e_width": "llama_tied",
    "f_speculators_qwen3": "llama_gqa_rope3",
}

Edit = Callable[[dict[str, Any]], object]


@functools.cache
def target(name: str) -> Target:
    """A fixture target, loaded once; not to be changed."""
    return load_target(TARGETS / name)


@functools.cache
def draft(name: str) -> Draft:
    """A fixture draft, loaded once; not to be changed."""
    return load_draft(DRAFTS / name, target(TARGET_OF[name]))


def expected(folder: Path) -> dict[str, np.ndarray]:
    """The reference outputs of a fixture."""
    with np.load(folder / "expected.npz") as file:
        return dict(file)


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    """A checkpoint's tensors, read by the safetensors library."""
    return load_file(folder / "model.safetensors")


def edited(folder: Path, place: Path, tensors: Edit | None = None, config: Edit | None = None) -> Path:
    """A copy of a checkpoint folder at `place` after edits of its tensors and its config, both dicts."""
    place.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(folder / "config.json", place / "config.json")
    shutil.copyfile(folder / "model.safetensors", place / "model.safetensors")
    if tensors is not None:
        changed = tensors_of(folder)
        tensors(changed)
        save_file({name: np.ascontiguousarray(x) for name, x in changed.items()}, place / "model.safetensors")
    if config is not None:
        fields = json.loads((folder / "config.json").read_text())
        config(fields)
        (place / "config.json").write_text(json.dumps(fields))
    return place


def put(name: str, value: Any) -> Edit:
    """An edit that sets one entry."""
    return lambda entries: entries.update({name: value})


def drop(name: str) -> Edit:
    """An edit that removes one entry."""
    return lambda entries: entries.pop(name)


def change(name: str, function: Callable[[Any], Any]) -> Edit:
    """An edit that replaces one entry by a function of it."""
    return lambda entries: entries.update({name: function(entries[name])})


def poison(value: float) -> Callable[[np.ndarray], np.ndarray]:
    """A function that puts `value` into the middle of an array."""

    def apply(array: np.ndarray) -> np.ndarray:
        array = array.copy()
        array.reshape(-1)[array.size // 2] = value
        return array

    return apply
