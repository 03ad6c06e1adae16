"""What the documentation says of the tests is true."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
DOCS = {page: (TESTS.parent / "docs" / f"{page}.md").read_text() for page in ("targets", "drafts")}
NAMED = re.findall(r"`([\w/]+\.py)::(\w+)(\[[^`]*\])?`", "".join(DOCS.values()))


@pytest.mark.parametrize("file", sorted({file for file, _, _ in NAMED}))
def test_every_test_that_is_named_exists(file: str) -> None:
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert {name for other, name, _ in NAMED if other == file} <= functions


def test_there_are_tests_named() -> None:
    assert len(NAMED) > 40


def test_every_known_trap_of_drafts_has_one_outcome_and_a_test() -> None:
    row = r"^\| (\d+) \| .* \| (handled|warned of|refused): .* \| (.*) \|$"
    rows = re.findall(row, DOCS["drafts"], re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == list(range(1, 19))
    assert all("::" in tests for _, _, tests in rows)
