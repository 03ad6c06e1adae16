"""Compile the programs of a target and a draft for an AMD card that is not here, or export them for any platform."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3_jax.commands.options import (
    DEFAULT_SPECULATION,
    DTYPES,
    add_draft_set_argument,
    assignment,
    output_file,
    several,
    sizes,
    whole,
)
from eagle3_jax.errors import Eagle3Error

if TYPE_CHECKING:
    from eagle3_jax.export.programs import Program

STALE = 1
"""Exit code where a report is of another program than the library has now."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `export`."""
    from eagle3_jax.decoding.sampling import TRANSFORMS
    from eagle3_jax.export.chips import CHIPS
    from eagle3_jax.export.portable import PLATFORMS
    from eagle3_jax.export.programs import WHAT
    from eagle3_jax.quant.formats import NARROW_FORMATS

    goal = parser.add_mutually_exclusive_group(required=True)
    goal.add_argument("--target-chip", choices=CHIPS, help="compile with XLA's ROCm back end; no card needed")
    goal.add_argument("--platforms", type=several(str), help=f"write StableHLO for some of {','.join(PLATFORMS)}")
    goal.add_argument("--check", metavar="R.json", nargs="+", help="are the reports of today's programs? exit 1: no")
    parser.add_argument("--report", metavar="R.json", type=output_file, help="where the report goes (default: stdout)")
    parser.add_argument("--out", metavar="FILE", type=output_file, help="where the StableHLO goes")
    parser.add_argument("--what", choices=WHAT, default="round", help="which program (default: round)")
    parser.add_argument("--target", help="model name, Hugging Face folder or GGUF file; its config is enough")
    parser.add_argument("--draft", help="draft name or folder, or new: as train makes it (default: plain decoding)")
    add_draft_set_argument(
        parser, "override what the draft's files say, or shape a new one: draft_vocab_size=32000 (repeatable)"
    )
    parser.add_argument("--batch", metavar="N", type=whole(1), default=1, help="prompts at once (default: 1)")
    parser.add_argument("--prompt-tokens", metavar="N", type=whole(1), default=128, help="of a prompt (default: 128)")
    parser.add_argument("--max-new-tokens", metavar="N", type=whole(1), default=128, help="of a prompt (default: 128)")
    parser.add_argument("--speculation", metavar="SPEC", default=DEFAULT_SPECULATION, help="chain:K")
    parser.add_argument(
        "--transforms",
        type=several(str),
        default=(),
        help=f"in the program, of {','.join(TRANSFORMS)}",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="default: bfloat16")
    for side in ("target", "draft"):
        parser.add_argument(
            f"--{side}-format", choices=NARROW_FORMATS, help=f"of the {side}'s matrices (default: --dtype)"
        )
        parser.add_argument(
            f"--{side}-keep",
            metavar="REGEX",
            action="append",
            help=f"modules of the {side} that stay in --dtype, by path in the tree (repeatable)",
        )
    parser.add_argument(
        "--layout", choices=("kn", "nk"), help="of matrices in --dtype (default: kn for cpu alone, else nk)"
    )
    parser.add_argument("--layers", metavar="N", type=whole(1), help="only the target's first N layers")
    parser.add_argument(
        "--topology",
        metavar="1x1xN",
        type=sizes(3, "x"),
        default=(1, 1, 1),
        help="slices x hosts x cards (default: 1x1x1)",
    )
    parser.add_argument("--mesh", metavar="D,M", type=sizes(2, ","), help="how the cards are laid out (default: 1,N)")
    parser.add_argument(
        "--gemm-tile",
        metavar="MxNxK",
        type=sizes(3, "x"),
        help="force the tile of every matrix product, e.g. 64x64x64",
    )
    parser.add_argument(
        "--xla-set",
        metavar="KEY=VALUE",
        type=assignment,
        action="append",
        default=[],
        help="an option of the compiler, e.g. xla_gpu_enable_triton_gemm=false (repeatable)",
    )


def run(args: argparse.Namespace) -> int:
    """Compile, export or check."""
    if args.check:
        return _check(args.check)
    program = _program(args)
    if args.platforms:
        from eagle3_jax.export.portable import export_program

        if args.out is None:
            raise Eagle3Error("--platforms writes a file; name it with --out")
        export_program(program, args.platforms, args.out)
        return 0
    from eagle3_jax.checkpoint.files import write_json_atomic
    from eagle3_jax.export.rocm import compile_for_chip, gemm_tile

    options = dict(args.xla_set)
    if args.gemm_tile is not None:
        options |= gemm_tile(*args.gemm_tile)
    report = compile_for_chip(program, args.target_chip, options)
    if args.report is None:
        print(json.dumps(report))
    else:
        write_json_atomic(args.report, report)
        print(_summary(report))
    return 0


def _program(args: argparse.Namespace) -> "Program":
    from eagle3_jax.export.programs import Program
    from eagle3_jax.quant.quantize import KEPT

    if args.target is None:
        raise Eagle3Error("which model? name it with --target")
    slices, hosts, cards = args.topology
    if slices * hosts != 1:
        raise Eagle3Error(f"--topology {slices}x{hosts}x{cards}: one host is supported, 1x1xN")
    data, model = args.mesh or (1, cards)
    if data * model != cards:
        raise Eagle3Error(f"--mesh {data},{model} is not {cards} cards, as --topology has")
    return Program(
        what=args.what,
        target=args.target,
        draft=args.draft,
        draft_settings=dict(args.draft_set),
        batch=args.batch,
        prompt=args.prompt_tokens,
        max_new_tokens=args.max_new_tokens,
        speculation=args.speculation,
        transforms=args.transforms,
        dtype=args.dtype,
        target_format=args.target_format,
        draft_format=args.draft_format,
        target_kept=(*KEPT, *(args.target_keep or ())),
        draft_kept=(*KEPT, *(args.draft_keep or ())),
        layout=args.layout or ("kn" if args.platforms and set(args.platforms) == {"cpu"} else "nk"),
        layers=args.layers,
        mesh=(data, model),
    )


def _check(paths: list[str]) -> int:
    from eagle3_jax.checkpoint.files import read_json
    from eagle3_jax.export.rocm import is_fresh

    fresh = {path: is_fresh(read_json(Path(path))) for path in paths}
    for path, ok in fresh.items():
        print(f"{path}: {'the program is the same' if ok else 'STALE: the program has changed; compile it again'}")
    return 0 if all(fresh.values()) else STALE


def _summary(report: dict[str, Any]) -> str:
    memory, copies, chip = report["bytes_per_device"], report["copies"], report["chip"]
    objects = sum(entry["objects"] for entry in report["code_objects"])
    lines = [
        f"{objects} code objects for {chip['isa']} ({chip['spec']}) in {report['seconds']['compile']} s",
        "bytes a device: " + ", ".join(f"{name} {memory[name]}" for name in ("weights", "pools", "temporaries")),
        f"copies of pools {sum(copies['pools'].values())}, of weights {sum(copies['weights'].values())}, "
        f"of single experts {sum(copies['experts'].values())}; "
        f"arrays wider than the weight they are of {sum(report['widened'].values())}",
        *_shortened(report),
        "collectives: " + _counts(report["collectives"]),
        "library calls: " + _counts(report["library_calls"]),
        "matrix instructions: " + _counts(report["matrix_instructions"]),
        report["note"],
    ]
    return "\n".join(lines)


def _shortened(report: dict[str, Any]) -> list[str]:
    whole = report["all_layers"]
    if report["program"]["layers"] in (None, whole["layers"]):
        return []
    return [f"with all {whole['layers']} layers, by their shapes: weights {whole['weights']}, pools {whole['pools']}"]


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"
