"""Measure how often a target accepts a draft."""

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Sequence
from typing import Any

from eagle3_jax.commands.caches import add_cache_arguments, cache_config
from eagle3_jax.commands.options import (
    DEFAULT_SPECULATION,
    add_data_argument,
    add_draft_arguments,
    add_features_argument,
    add_json_argument,
    add_prompt_set_arguments,
    add_seed_argument,
    add_target_arguments,
    load_draft,
    load_draft_pair,
    number,
    read_data,
    several,
    whole,
)
from eagle3_jax.commands.request import encode_workload
from eagle3_jax.errors import Eagle3Error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `evaluate`."""
    add_target_arguments(parser)
    add_draft_arguments(parser, optional=False)
    parser.add_argument(
        "--compare",
        metavar="DRAFT",
        action="append",
        default=[],
        help="another draft for the same prompts and keys: what it accepts more, with a confidence interval, and the "
        "bytes of each (repeatable; --draft-set is for all)",
    )
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
    add_cache_arguments(parser)
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
    """Decode the prompts; with --data also compare with the target over its held-out chats.

    With --compare the drafts are decoded with side by side instead.
    """
    from eagle3_jax.bench.workloads import load_workload
    from eagle3_jax.decoding.batches import unpad_rows
    from eagle3_jax.decoding.request import parse_speculation
    from eagle3_jax.training.evaluate import evaluate

    chain, config = parse_speculation(args.speculation), cache_config(args)
    if args.compare and (args.probe or args.data is not None):
        raise Eagle3Error("--compare only decodes; leave out --probe and --data")
    workload = load_workload(args.prompts, args.limit)
    target, draft = load_draft_pair(args)
    prompts = unpad_rows(*encode_workload(workload, target))
    if args.probe:
        return _probe(args, draft, prompts)
    if args.compare:
        return _compare(args, draft, chain.length, config, workload.name, prompts)
    settings = (chain.length, args.max_new_tokens, args.temperature, args.context, args.seed)
    found = evaluate(draft, prompts, *settings, args.ttt_steps, args.batch_size, config)
    report: dict[str, Any] = {"target": target.name, "draft": draft.name, "prompts": workload.name, **found}
    if args.data is not None:
        report["held_out"] = _held_out(args, draft)
    print(json.dumps(report) if args.json else "\n".join(_describe(report)))
    return 0


def _compare(
    args: argparse.Namespace, draft: Any, chain: int, config: Any, prompt_set: str, prompts: list[list[int]]
) -> int:
    from eagle3_jax.checkpoint.drafts import open_draft_folder
    from eagle3_jax.checkpoint.narrow import stored_bytes
    from eagle3_jax.checkpoint.public import locate_draft
    from eagle3_jax.training.compare import compare

    names = [args.draft or draft.name, *args.compare]
    sizes = [stored_bytes(open_draft_folder(locate_draft(name)[1])) for name in names]
    drafts = [draft, *(load_draft(args, name, draft.target) for name in args.compare)]
    settings = (chain, args.max_new_tokens, args.temperature, args.context, args.seed, args.batch_size, config)
    report = {
        "target": draft.target.name,
        "prompts": prompt_set,
        "drafts": [
            {"draft": name, "bytes": {**dataclasses.asdict(size), "ratio": size.ratio}}
            for name, size in zip(names, sizes, strict=True)
        ],
        "comparison": compare(drafts, prompts, *settings),
    }
    print(json.dumps(report) if args.json else "\n".join(_describe_comparison(report)))
    return 0


def _describe_comparison(report: dict[str, Any]) -> list[str]:
    """The report of --compare as two tables."""
    from eagle3_jax.bench.report import columns

    names = [draft["draft"] for draft in report["drafts"]]
    header = ["draft", "bytes", "of quantised layers", "of these in bfloat16"]
    rows = []
    for name, size in zip(names, (draft["bytes"] for draft in report["drafts"]), strict=True):
        narrow = ["-", "-"]
        if size["ratio"] is not None:
            narrow = [str(size["quantized"]), f"{size['quantized_as_bfloat16']} ({size['ratio']:.3f} of them)"]
        rows.append([name, str(size["weights"]), *narrow])
    lines = [f"{report['target']} on {report['prompts']}", "", *columns([header, *rows]), ""]
    lines.append(f"differences to {names[0]}, with 95 % intervals:")
    header = ["temperature", "context", "draft", "tokens a round", "difference", "accepted by position", "difference"]
    rows = [
        [
            f"{cell['temperature']:g}",
            str(cell["context"] or "-"),
            name,
            "-" if found["mean_acceptance_length"] is None else f"{found['mean_acceptance_length']:.3f}",
            _change(found["difference"]["mean_acceptance_length"]) if "difference" in found else "-",
            _shares(found["acceptance_per_position"]),
            ", ".join(map(_change, found["difference"]["acceptance_per_position"])) if "difference" in found else "-",
            f"{found['tokens_per_second']:.1f}",
        ]
        for cell in report["comparison"]
        for name, found in zip(names, cell["drafts"], strict=True)
    ]
    return [*lines, *columns([[*header, "tok/s"], *rows])]


def _change(found: dict[str, float] | None) -> str:
    return "-" if found is None else f"{found['value']:+.3f} [{found['low']:+.3f}, {found['high']:+.3f}]"


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
