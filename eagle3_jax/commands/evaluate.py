"""Measure how often a target accepts a draft."""

import argparse
import json
import tempfile
from typing import Any

from eagle3_jax.commands.options import (
    DEFAULT_SPECULATION,
    add_draft_arguments,
    add_json_argument,
    add_seed_argument,
    add_target_arguments,
    encode_workload,
    load_pair,
    number,
    whole,
)
from eagle3_jax.commands.train import add_data_argument, add_features_argument, read_data
from eagle3_jax.errors import Eagle3Error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `evaluate`."""
    add_target_arguments(parser)
    add_draft_arguments(parser, optional=False)
    parser.add_argument("--prompts", default="dev", help="packaged prompt set (dev), or F.json: a list of chats")
    parser.add_argument("--speculation", metavar="SPEC", default=DEFAULT_SPECULATION, help="(default: chain:4)")
    parser.add_argument("--max-new-tokens", metavar="N", type=whole(1), default=96, help="(default: 96)")
    parser.add_argument("--temperature", type=number(0, 1e6), default=0.0, help="0 is greedy (default)")
    add_seed_argument(parser)
    add_data_argument(parser, required=False)
    add_features_argument(parser)
    parser.add_argument("--row-length", type=whole(3), default=512, help="of --data's rows (default: 512)")
    parser.add_argument("--ttt-steps", type=whole(1, 64), default=3, help="depth on --data (default: 3)")
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Decode the prompts; with --data also compare with the target over its held-out chats."""
    from eagle3_jax.bench.workloads import load_workload
    from eagle3_jax.decoding.request import parse_speculation
    from eagle3_jax.training.evaluate import evaluate_decoding

    chain = parse_speculation(args.speculation)
    workload = load_workload(args.prompts)
    target, draft = load_pair(args)
    if draft is None:
        raise Eagle3Error(f"no draft is registered for {args.target}; name one with --draft")
    ids, lengths = encode_workload(workload, target)
    prompts = [row[:length].tolist() for row, length in zip(ids, lengths, strict=True)]
    decoding = evaluate_decoding(draft, prompts, chain.length, args.max_new_tokens, args.temperature, args.seed)
    report: dict[str, Any] = {"target": target.name, "draft": draft.name, "decoding": decoding}
    if args.data is not None:
        report["held_out"] = _held_out(args, draft)
    if args.json:
        print(json.dumps(report))
    else:
        parts = {name: value for name, value in report.items() if isinstance(value, dict)}
        for part, found in parts.items():
            print("\n".join(f"{part} {name}: {value}" for name, value in found.items()))
    return 0


def _held_out(args: argparse.Namespace, draft: Any) -> dict[str, Any]:
    from eagle3_jax.training.data import split
    from eagle3_jax.training.evaluate import evaluate_text

    chats = split(read_data(args.data, draft.target))[1]
    with tempfile.TemporaryDirectory() as scratch:
        return evaluate_text(draft, chats, args.features or scratch, args.row_length, args.ttt_steps)
