"""Measure how often a target accepts a draft."""

import argparse
import json
import tempfile
from collections.abc import Sequence
from typing import Any

from eagle3_jax.commands.options import (
    DEFAULT_SPECULATION,
    add_data_argument,
    add_draft_arguments,
    add_features_argument,
    add_json_argument,
    add_prompt_set_arguments,
    add_seed_argument,
    add_target_arguments,
    encode_workload,
    load_draft_pair,
    number,
    read_data,
    several,
    whole,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `evaluate`."""
    add_target_arguments(parser)
    add_draft_arguments(parser, optional=False)
    parser.add_argument(
        "--speculation", metavar="SPEC", default=DEFAULT_SPECULATION, help="chain:K (default: chain:4)"
    )
    add_prompt_set_arguments(parser)
    parser.add_argument(
        "--temperature",
        metavar="T",
        type=several(number(0, 1e6)),
        default=(0.0,),
        help="of the generations; several with commas: 0,0.7,1. 0 is greedy (default)",
    )
    parser.add_argument(
        "--context",
        metavar="N",
        type=several(whole(1)),
        default=(),
        help="decode also behind other prompts and answers, N tokens in all; several with commas: 256,1024",
    )
    add_seed_argument(parser)
    parser.add_argument("--batch-size", metavar="N", type=whole(1), default=8, help="prompts at a time (default: 8)")
    parser.add_argument(
        "--ttt-steps", metavar="J", type=whole(1, 64), default=3, help="depth of the training-time test (default: 3)"
    )
    parser.add_argument(
        "--probe",
        action="store_true",
        help="only look whether the draft is wired right: accuracy of its first draft under both readings of its taps",
    )
    add_data_argument(parser, required=False)
    add_features_argument(parser)
    parser.add_argument(
        "--row-length", metavar="N", type=whole(3), default=512, help="of --data's rows (default: 512)"
    )
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Decode the prompts; with --data also compare with the target over its held-out chats."""
    from eagle3_jax.bench.workloads import load_workload
    from eagle3_jax.decoding.request import parse_speculation
    from eagle3_jax.training.evaluate import evaluate

    chain = parse_speculation(args.speculation)
    workload = load_workload(args.prompts, args.limit)
    target, draft = load_draft_pair(args)
    ids, lengths = encode_workload(workload, target)
    prompts = [row[:length].tolist() for row, length in zip(ids, lengths, strict=True)]
    if args.probe:
        return _probe(args, draft, prompts)
    settings = (chain.length, args.max_new_tokens, args.temperature, args.context, args.seed)
    found = evaluate(draft, prompts, *settings, args.ttt_steps, args.batch_size)
    report: dict[str, Any] = {"target": target.name, "draft": draft.name, "prompts": workload.name, **found}
    if args.data is not None:
        report["held_out"] = _held_out(args, draft)
    print(json.dumps(report) if args.json else "\n".join(_describe(report)))
    return 0


def _probe(args: argparse.Namespace, draft: Any, prompts: list[list[int]]) -> int:
    from eagle3_jax.training.probe import probe_taps

    found = probe_taps(draft, prompts, args.max_new_tokens)
    report = {
        "tokens": found.tokens,
        "in_use": found.in_use,
        "taps": {name: list(taps) for name, taps in found.taps.items()},
        "accuracy": found.accuracy,
        "verdict": found.verdict,
    }
    if args.json:
        print(json.dumps({"target": draft.target.name, "draft": draft.name, "probe": report}))
        return 0
    for name, accuracy in found.accuracy.items():
        share = "outside of the target" if accuracy is None else f"{accuracy:.1%} of {found.tokens} tokens"
        print(f"{name} {list(found.taps[name])}: {share}{' (in use)' if name == found.in_use else ''}")
    print(found.verdict)
    return 0


def _held_out(args: argparse.Namespace, draft: Any) -> dict[str, Any]:
    from eagle3_jax.training.data import split
    from eagle3_jax.training.evaluate import evaluate_text

    chats = split(read_data(args.data, draft.target))[1]
    with tempfile.TemporaryDirectory() as scratch:
        return evaluate_text(draft, chats, args.features or scratch, args.row_length, args.ttt_steps)


def _describe(report: dict[str, Any]) -> list[str]:
    """The report as two tables."""
    from eagle3_jax.bench.report import columns

    lines = [f"{report['target']} with {report['draft']} on {report['prompts']}", "", "by decoding:"]
    header = ["temperature", "context", "prompts", "rounds", "tokens a round", "accepted by position"]
    rows = [
        [
            f"{cell['temperature']:g}",
            str(cell["context"] or "-"),
            str(cell["prompts"]),
            str(cell["rounds"]),
            "-" if cell["mean_acceptance_length"] is None else f"{cell['mean_acceptance_length']:.3f}",
            _shares(cell["acceptance_per_position"]),
        ]
        for cell in report["decoding"]
    ]
    lines += [*columns([header, *rows]), "", "over the text, by step of the training-time test:"]
    parts = [(f"answers at {cell['temperature']:g}", found) for cell, found in _text_cells(report)]
    if "held_out" in report:
        parts.append(("held-out chats", report["held_out"]))
    header = [
        "text",
        "tokens",
        "loss",
        "target's best token",
        "at every step so far",
        "sum min(p, q)",
        "of temperature",
    ]
    rows = [
        [
            name,
            str(found["predictions"]),
            _shares(found["loss"]),
            _shares(found["accuracy"]),
            _shares(found["chain_accuracy"]),
            _shares(found["expected_acceptance"]),
            f"{found['temperature']:g}",
        ]
        for name, found in parts
    ]
    return [*lines, *columns([header, *rows])]


def _text_cells(report: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    alone = [cell for cell in report["decoding"] if cell["context"] is None]
    return list(zip(alone, report["text"], strict=True))


def _shares(values: Sequence[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values)
