"""Check that speculative decoding gives the target's own tokens on given prompts."""

import argparse
import dataclasses
import json
from typing import Any

from eagle3_jax.commands.caches import add_cache_arguments
from eagle3_jax.commands.options import (
    add_draft_arguments,
    add_json_argument,
    add_target_arguments,
    check_speculation,
    chosen_speculation,
    load_draft_pair,
)
from eagle3_jax.commands.request import add_prompt_arguments, add_sampling_arguments, make_request, read_prompts

DIFFERENT = 1
"""Exit code where a token is not the target's."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `verify`."""
    add_target_arguments(parser)
    add_draft_arguments(parser, optional=False)
    add_prompt_arguments(parser)
    add_sampling_arguments(parser)
    add_cache_arguments(parser)
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Generate with and without the draft and compare, token by token."""
    from eagle3_jax.decoding.verify import verify_lossless

    check_speculation(args)
    prompts = read_prompts(args)
    target, draft = load_draft_pair(args)
    request = make_request(args, prompts, target, draft)
    report = verify_lossless(target, draft, *request.arrays, request.config)
    if args.json:
        head = {
            "target": target.name,
            "draft": draft.name,
            "speculation": chosen_speculation(args, draft),
        }
        rows = [dataclasses.asdict(row) for row in report.rows]
        found = {"ok": report.ok, "equal": report.equal, "tolerance": report.tolerance, "rows": rows}
        print(json.dumps({**head, **found}))
    else:
        print("\n".join(_describe(row, report.tolerance) for row in report.rows))
    return 0 if report.ok else DIFFERENT


def _describe(row: Any, tolerance: float) -> str:
    if row.equal:
        return f"prompt {row.row}: equal"
    margin = "" if row.margin is None else f", decision margin {row.margin:.2g}"
    verdict = f"within rounding (below {tolerance:g})" if row.excused else "NOT the target's token"
    return (
        f"prompt {row.row}: token {row.first_difference} is {row.got}, plain decoding gives {row.expected}"
        f"{margin}: {verdict}"
    )
