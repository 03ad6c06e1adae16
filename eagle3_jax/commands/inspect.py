"""Say what a checkpoint is: architecture, dialect, taps, tensors, and what looks odd."""

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING

from eagle3_jax.commands.options import add_draft_set_argument, add_json_argument

if TYPE_CHECKING:
    from eagle3_jax.checkpoint.describe import Description


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `inspect`."""
    parser.add_argument("path", metavar="PATH", help="a known name, a folder, or a GGUF file")
    parser.add_argument("--target", help="of a draft: its target; its config is enough")
    add_draft_set_argument(parser, "override what the draft's files say (repeatable)")
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Read headers and configs; no weights."""
    from eagle3_jax.checkpoint.describe import describe

    found = describe(args.path, args.target, dict(args.draft_set))
    print(json.dumps(dataclasses.asdict(found)) if args.json else "\n".join(_lines(found)))
    return 0


def _lines(found: "Description") -> list[str]:
    lines = [f"{found.kind}, architecture {found.architecture or 'not named'}, dialect {found.dialect or 'unknown'}"]
    if found.kind == "draft":
        taps = "unknown" if found.taps is None else f"hs{found.taps}, convention {found.tap_convention}"
        lines.append(f"taps: {taps}" + (f" ({found.tap_reason})" if found.tap_reason else ""))
    lines += [f"{name}: {value}" for name, value in (found.config or {}).items() if name != "taps"]
    width = max(map(len, found.tensors), default=0)
    for name, about in found.tensors.items():
        lines.append(f"  {name:<{width}}  {about['format']:<8} {about['shape']}")
    lines += [f"warning: {' '.join(warning.split())}" for warning in found.warnings]
    return lines + ([f"does not load: {found.refusal}"] if found.refusal else [])
