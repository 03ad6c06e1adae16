"""The shape of the package: imports point one way, and every module keeps the house rules.

Only the syntax tree is read, so a module that cannot be imported yet is checked all the same.
"""

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "eagle3_jax"
MAX_LINES = 500
HEAVY = ("tokenizers", "jinja2", "gguf", "matplotlib", "optax", "orbax")

# A part is a module or subpackage directly below the package; it may import itself and the parts named here.
_BASE = {"errors", "config", "quant", "sharding"}
_DECODING = _BASE | {"cache", "models"}
_LOADERS = {"text", "checkpoint"}
_USERS = {"training", "engine", "bench", "export"}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "tiktoken": {"errors"},
    "text": {"errors", "tiktoken"},
    "config": _BASE,
    "quant": _BASE,
    "sharding": _BASE,
    "cache": _BASE,
    "plots": {"errors", "checkpoint"},
    "models": _BASE | {"cache"},
    "decoding": _DECODING,
    "checkpoint": _BASE | {"models", "text"},
    "native": _BASE | {"checkpoint", "models"},
    **{part: _DECODING | {"decoding"} | _LOADERS | _USERS for part in _USERS},
}
# Edges that see everything: the public names, the function-level facade behind them, the shell and its verbs.
FACADES = {"__init__", "__main__", "api", "cli", "commands"}


def _name(path: Path) -> str:
    """Dotted name below the package: `__init__` for the package itself, `cache` for cache/__init__.py."""
    parts = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
    if parts[-1] == "__init__" and len(parts) > 1:
        parts = parts[:-1]
    return ".".join(parts)


PATHS = sorted((ROOT / PACKAGE).rglob("*.py"))
MODULES = {_name(path): path for path in PATHS}
TREES = {name: ast.parse(path.read_text(encoding="utf-8"), str(path)) for name, path in MODULES.items()}
each_module = pytest.mark.parametrize("name", sorted(MODULES))


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def _nodes(node: ast.AST, at_import_only: bool) -> Iterator[ast.AST]:
    """All nodes below `node`; with `at_import_only`, without function bodies and blocks for type checkers."""
    for child in ast.iter_child_nodes(node):
        if at_import_only and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if at_import_only and _is_type_checking(child):
            continue
        yield child
        yield from _nodes(child, at_import_only)


def _imports(name: str, at_import_only: bool = False) -> set[str]:
    """Names of the package's own modules that module `name` imports."""
    here = name.split(".") if name != "__init__" else []
    if MODULES[name].name != "__init__.py":
        here = here[:-1]
    found = set()
    for node in _nodes(TREES[name], at_import_only):
        if isinstance(node, ast.Import):
            targets = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module.split(".") if node.module else []
            if node.level:
                base = [PACKAGE, *here[: len(here) - node.level + 1], *base]
            targets = [[*base, alias.name] for alias in node.names]
        else:
            continue
        for target in targets:
            if target[0] != PACKAGE:
                continue
            # `from x import y`: y is a module, or else a name defined in module x.
            dotted = ".".join(target[1:])
            found.add(dotted if dotted in MODULES else ".".join(target[1:-1]) or "__init__")
    return found - {name}


def _part(name: str) -> str:
    return name.partition(".")[0]


def _acyclic(graph: dict[str, set[str]]) -> None:
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail("imports run in a circle: " + " -> ".join(error.args[1]), pytrace=False)


def test_the_package_has_modules() -> None:
    assert "__init__" in MODULES and "errors" in MODULES


@each_module
def test_imports_point_one_way(name: str) -> None:
    part = _part(name)
    if part in FACADES:
        return
    assert part in ALLOWED, f"{part} has no place in the direction table: add it to ALLOWED"
    back = sorted(other for other in _imports(name) if _part(other) not in ALLOWED[part] | {part})
    assert not back, f"{PACKAGE}.{name} must not import {back}; it may import {sorted(ALLOWED[part])}"


def test_no_module_imports_in_a_circle() -> None:
    _acyclic({name: _imports(name, at_import_only=True) for name in MODULES})


def test_no_part_imports_in_a_circle() -> None:
    graph: dict[str, set[str]] = {}
    for name in MODULES:
        if _part(name) not in FACADES:
            graph.setdefault(_part(name), set()).update(_part(other) for other in _imports(name))
    _acyclic({part: others - {part} for part, others in graph.items()})


def test_importing_the_package_stays_light() -> None:
    program = f"import sys, {PACKAGE}; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@each_module
def test_module_keeps_the_house_rules(name: str) -> None:
    text = MODULES[name].read_text(encoding="utf-8")
    lines = text.count("\n") + 1
    assert lines <= MAX_LINES, f"{lines} lines; {MAX_LINES} at most"
    private = [
        node.lineno
        for node in ast.walk(TREES[name])
        if (isinstance(node, ast.Import) and any(a.name.startswith("jax._src") for a in node.names))
        or (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jax._src"))
        or (isinstance(node, ast.Attribute) and ast.unparse(node).startswith("jax._src"))
    ]
    assert not private, f"uses JAX internals on lines {private}"
    left = [number for number, line in enumerate(text.splitlines(), 1) if re.search(r"\b(TODO|FIXME)\b", line)]
    assert not left, f"unfinished work on lines {left}: do it or write it down elsewhere"


def _public(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.stmt]]:
    """Public functions and classes of a module, and the public methods of those classes."""
    for node in body:
        if isinstance(node, ast.If | ast.Try):
            yield from _public(node.body + node.orelse, prefix)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if node.name.startswith("_"):
            continue
        decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
        if any(text.endswith(("overload", ".setter", ".deleter")) for text in decorators):
            continue
        yield prefix + node.name, node
        if isinstance(node, ast.ClassDef):
            yield from _public(node.body, f"{prefix}{node.name}.")


def _missing(name: str, node: ast.stmt) -> list[str]:
    """What a public definition lacks."""
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    lacks = [] if ast.get_docstring(node) else ["docstring"]
    if isinstance(node, ast.ClassDef):
        return lacks
    arguments = node.args.posonlyargs + node.args.args
    static = any(ast.unparse(decorator) == "staticmethod" for decorator in node.decorator_list)
    if "." in name and not static:
        arguments = arguments[1:]
    arguments += node.args.kwonlyargs + [a for a in (node.args.vararg, node.args.kwarg) if a]
    lacks += [f"annotation of {argument.arg}" for argument in arguments if argument.annotation is None]
    return lacks + ([] if node.returns else ["return annotation"])


@each_module
def test_public_names_are_documented_and_annotated(name: str) -> None:
    problems = {full: lacks for full, node in _public(TREES[name].body) if (lacks := _missing(full, node))}
    assert not problems, problems
