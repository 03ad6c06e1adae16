"""Measure plain against speculative decoding, in turns, in one process."""

import argparse
import json
import re

from eagle3_jax.commands.caches import add_cache_arguments, cache_config
from eagle3_jax.commands.options import (
    DEFAULT_SPECULATION,
    add_draft_arguments,
    add_json_argument,
    add_plot_argument,
    add_prompt_set_arguments,
    add_seed_argument,
    add_target_arguments,
    load_draft_pair,
    number,
    output_file,
    several,
    whole,
)
from eagle3_jax.commands.request import encode_workload


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `bench`."""
    add_target_arguments(parser)
    add_draft_arguments(parser, optional=False)
    parser.add_argument(
        "--speculation",
        metavar="SPEC",
        action="append",
        help=f"chain:K; repeatable, or several with commas (default: {DEFAULT_SPECULATION})",
    )
    add_prompt_set_arguments(parser)
    parser.add_argument("--temperature", type=number(0, 1e6), default=0.0, help="0 is greedy (default)")
    add_seed_argument(parser)
    add_cache_arguments(parser)
    parser.add_argument("--repeats", type=whole(1, 1000), default=3, help="turns of each measurement (default: 3)")
    parser.add_argument(
        "--concurrency",
        metavar="N",
        type=several(whole(1, 4096)),
        default=(1,),
        help="prompts a batch, decoded together from start to end; several with commas: 1,4,16,64 (default: 1)",
    )
    parser.add_argument("--out", metavar="F.json", type=output_file, help="also write the JSON object there")
    add_plot_argument(parser, "speed and ratio over the batch size")
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, then print the table or the JSON object."""
    from eagle3_jax.bench.report import table
    from eagle3_jax.bench.runner import run_bench
    from eagle3_jax.bench.workloads import load_workload
    from eagle3_jax.checkpoint.files import write_json_atomic
    from eagle3_jax.decoding.request import parse_speculation
    from eagle3_jax.plots import check_plotting, draw_bench

    speculations = split_speculations(args.speculation or [DEFAULT_SPECULATION])
    for text in speculations:
        parse_speculation(text)
    config = cache_config(args)
    if args.plot is not None:
        check_plotting()
    workload = load_workload(args.prompts, args.limit)
    target, draft = load_draft_pair(args)
    prompts = encode_workload(workload, target)
    report = run_bench(
        target,
        draft,
        prompts,
        prompts_name=workload.name,
        speculations=speculations,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        seed=args.seed,
        repeats=args.repeats,
        concurrencies=args.concurrency,
        config=config,
    )
    if args.out is not None:
        write_json_atomic(args.out, report)
    if args.plot is not None:
        draw_bench(report, args.plot)
    print(json.dumps(report) if args.json else table(report))
    return 0


def split_speculations(given: list[str]) -> list[str]:
    """The settings of several --speculation flags, each once.

    A comma separates settings only where another name follows: tree:depth=5,top_k=4 is one.
    """
    return list(dict.fromkeys(re.split(r",(?=[a-z]+(?::|,|$))", ",".join(given))))
