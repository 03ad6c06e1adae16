"""Promises that the project's own files make to each other."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def _files(*folders: str) -> list[Path]:
    """Files that git tracks or would track, below `folders` or everywhere."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *folders]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.fail(f"git ls-files: {listed.stderr.strip()}", pytrace=False)
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def _make_targets() -> set[str]:
    rules = re.findall(r"^([a-z][\w -]*):(?!=)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    return {target for rule in rules for target in rule.split()}


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_make_targets_in_documents_exist(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    code = re.findall(r"^```.*?^```|`[^`\n]+`", text, re.MULTILINE | re.DOTALL)
    named = {target for block in code for target in re.findall(r"(?:^|[`\s;&])make ([a-z][\w-]*)", block)}
    assert named, f"{document} names no make target"
    assert named <= _make_targets()


def test_tests_named_in_documents_exist() -> None:
    named = [found for path in _files("docs") for found in re.findall(r"`(\S+\.py)::(\w+)", path.read_text("utf-8"))]
    assert named, "no document in docs/ names a test"
    missing = [
        f"{file}::{test}" for file, test in named if f"def {test}(" not in (ROOT / "tests" / file).read_text("utf-8")
    ]
    assert not missing


def test_changelog_has_an_unreleased_section() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(r"^## \[Unreleased\]$", text, re.MULTILINE)


def test_version_and_requirements_parse() -> None:
    assert str(Version(PROJECT["version"])) == PROJECT["version"]
    requirements = {r.name: r.specifier for r in map(Requirement, PROJECT["dependencies"])}
    assert "0.10.2" in requirements["jax"]
    caps = [name for name, spec in requirements.items() if any(s.operator in ("<", "<=", "==", "~=") for s in spec)]
    assert not caps, f"an upper cap breaks newer Pythons: {caps}"


def test_no_file_names_a_machine_path() -> None:
    # Put together from parts, so that this file does not name one itself.
    pattern = re.compile(r"(?<![\w.$})-])/(" + "|".join(["work", "root"]) + ")/")
    found = []
    for path in _files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [
            f"{path.relative_to(ROOT)}:{number}"
            for number, line in enumerate(text.splitlines(), 1)
            if pattern.search(line)
        ]
    assert not found


def test_wheel_holds_the_package_and_its_configs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {path.relative_to(ROOT).as_posix() for path in _files("eagle3_jax", "configs")}
    expected = {
        name.replace("configs/", "eagle3_jax/configs/", 1) if name.startswith("configs/") else name
        for name in expected
    }
    assert expected <= names, sorted(expected - names)
    assert not [name for name in names if name.startswith(("tests/", "configs/"))]
