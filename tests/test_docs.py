"""What the documentation says of the tests is true."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
NAMED = re.findall(r"`([\w/]+\.py)::(\w+)(\[[^`]*\])?`", (TESTS.parent / "docs" / "targets.md").read_text())


@pytest.mark.parametrize("file", sorted({file for file, _, _ in NAMED}))
def test_every_test_that_is_named_exists(file: str) -> None:
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert {name for other, name, _ in NAMED if other == file} <= functions


def test_there_are_tests_named() -> None:
    assert len(NAMED) > 40
