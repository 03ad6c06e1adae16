"""Folders in Hugging Face's layout: config.json, stop ids, RoPE; folders written whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eagle3_jax.checkpoint.files import quote, read_json, reason
from eagle3_jax.checkpoint.tensors import TensorSource
from eagle3_jax.config import RopeConfig
from eagle3_jax.errors import Eagle3Error

_DRAFT_FIELDS = ("draft_vocab_size", "eagle_config", "speculators_model_type", "truncated_vocab_size")
_DRAFT_TENSORS = ("fc.weight", "midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight")


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json.

    Raises:
        Eagle3Error: it is missing, not a JSON object, or its architectures are no list of names.
    """
    if not (folder / "config.json").is_file():
        hint = "give the .gguf file itself" if any(folder.glob("*.gguf")) else "give a Hugging Face checkpoint folder"
        raise Eagle3Error(f"{folder}: no config.json in this folder; {hint}")
    config = read_json(folder / "config.json")
    names = config.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise Eagle3Error(f"{folder / 'config.json'}: architectures is {quote(names)}; a list of names is needed")
    return config


def is_draft(config: Mapping[str, Any], source: TensorSource | None = None) -> bool:
    """Whether a folder holds an EAGLE draft rather than a target."""
    if any(config.get(field) is not None for field in _DRAFT_FIELDS):
        return True
    return source is not None and any(name in source for name in _DRAFT_TENSORS)


def read_eos_ids(
    folder: Path, config: Mapping[str, Any], vocab_size: int, joined: bool = False
) -> tuple[int, ...] | None:
    """Ids that end a generation: generation_config.json's, else config.json's, else None.

    With `joined` both files' count, and those of a text model within config.json: Kimi's chat turns end with one
    token and its texts with another, and each file names one.

    Raises:
        Eagle3Error: generation_config.json is malformed, or an id is not in the vocabulary.
    """
    file = folder / "generation_config.json"
    generation = read_json(file) if file.is_file() else {}
    places = [(generation, file), (config, folder / "config.json")]
    if joined and isinstance(text := config.get("text_config"), Mapping):
        places.append((text, folder / "config.json"))
    found: tuple[int, ...] | None = None
    for settings, name in places:
        if (ids := settings.get("eos_token_id")) is not None and (joined or found is None):
            found = tuple(dict.fromkeys([*(found or ()), *check_eos_ids(ids, vocab_size, str(name))]))
    return found


def check_eos_ids(ids: Any, vocab_size: int, where: str) -> tuple[int, ...]:
    """One id or a list of them as a tuple.

    Raises:
        Eagle3Error: not token ids of the vocabulary.
    """
    ids = ids if isinstance(ids, list) else [ids]
    if not all(type(i) is int and 0 <= i < vocab_size for i in ids):
        raise Eagle3Error(f"{where}: eos_token_id is {quote(ids)}; ids from 0 to {vocab_size - 1} are needed")
    return tuple(dict.fromkeys(ids))


def rope_fields(rope: RopeConfig) -> dict[str, Any]:
    """The fields of config.json that `eagle3_jax.config.parse_rope` reads as this setting."""
    if rope.kind == "default":
        return {"rope_theta": rope.theta, "rope_scaling": None}
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind != "linear":
        scaling["original_max_position_embeddings"] = rope.original_max_position
    if rope.kind == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        scaling |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        optional = ("attention_factor", "mscale", "mscale_all_dim")
        scaling |= {name: value for name in optional if (value := getattr(rope, name))}
    return {"rope_theta": rope.theta, "rope_scaling": scaling}


@contextmanager
def atomic_folder(path: str | os.PathLike[str], foreign: Collection[str] = ()) -> Iterator[Path]:
    """Fill a new folder that takes its name only once it is complete.

    A folder of that name is replaced: its files of the same names by the new ones, while its others stay. Where the
    name is a link, the folder behind it is replaced.

    Args:
        path: the folder.
        foreign: names of files that a loader would read beside the new ones; an old folder's must not stay.

    Raises:
        Eagle3Error: the folder cannot be written, has a foreign file, or is or holds the working folder; the old
            one, if any, is whole.
    """
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise Eagle3Error(f"{quote(path)} names no folder; give the path of a new one")
    final, temporary = Path(path), None
    try:
        final = Path(os.path.realpath(path))
        if final in (here := Path.cwd(), *here.parents):
            # It would be moved from under the process and its shell.
            raise Eagle3Error(f"{final}: is or holds the working folder; give the path of a new one")
        if final.exists() and not final.is_dir():
            raise Eagle3Error(f"{final}: is a file; give the path of a new folder")
        final.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{final.name}.", suffix=".tmp", dir=final.parent))
        new, old = temporary / "new", temporary / "old"
        new.mkdir()  # not the folder of tempfile, which is private to the user
        yield new
        for name in foreign:
            if (final / name).exists() and not (new / name).exists():
                raise Eagle3Error(f"{final}: has {name}, which would be read with the new files; give a new folder")
        if final.exists():
            final.rename(old)
        new.rename(final)
        for entry in old.iterdir() if old.exists() else ():
            if not (final / entry.name).exists():
                entry.rename(final / entry.name)
    except Eagle3Error:
        raise
    except (OSError, ValueError) as error:
        raise Eagle3Error(f"{final}: cannot be written: {reason(error)}") from error
    finally:
        if temporary is not None:
            # An interruption between the two renames: the old folder gets its name back.
            if (temporary / "old").exists() and not final.exists():
                (temporary / "old").rename(final)
            shutil.rmtree(temporary, ignore_errors=True)
