"""Quantise a draft's files in AMD Quark's layout (FP8 or MXFP4)."""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3_jax.commands.options import add_json_argument, output_folder
from eagle3_jax.errors import Eagle3Error

if TYPE_CHECKING:
    from eagle3_jax.checkpoint.targets import Target


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `quantize`."""
    from eagle3_jax.checkpoint.quark import KEPT, QUARK_SCHEMES

    parser.add_argument("--draft", required=True, help="draft name or EAGLE-3 folder, with plain weights")
    parser.add_argument(
        "--scheme",
        required=True,
        choices=QUARK_SCHEMES,
        help="ptpc_fp8: a scale an output, activations scaled as they come; mxfp4: groups of 32; fp8: one scale a "
        "matrix, activations scaled by --calibration",
    )
    parser.add_argument(
        "--exclude",
        metavar="REGEX",
        default=KEPT,
        help=f"modules that stay as they are, by name or by its end after a dot (default: {KEPT})",
    )
    parser.add_argument(
        "--calibration",
        metavar="F.json",
        help="of scheme fp8: prompts, as chats or as lists of token ids, over which activations are measured",
    )
    parser.add_argument("--target", help="of scheme fp8: the draft's target (default: the one it is registered for)")
    parser.add_argument("--out", metavar="DIR", type=output_folder, required=True, help="the folder to write")
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Write the folder and say what each layer lost."""
    from eagle3_jax.checkpoint.quark import quantize_folder
    from eagle3_jax.checkpoint.registry import locate

    if (args.scheme == "fp8") != (args.calibration is not None):
        raise Eagle3Error("--calibration belongs to --scheme fp8, whose activations have fixed scales; give both")
    name, folder = locate(args.draft, "draft")
    maxima = None if args.calibration is None else _maxima(args, folder)
    layers = quantize_folder(folder, args.out, args.scheme, args.exclude, maxima)
    before, after = (sum(getattr(layer, size) for layer in layers) for size in ("before", "after"))
    if args.json:
        found = [dataclasses.asdict(layer) for layer in layers]
        report = {"draft": name, "scheme": args.scheme, "out": args.out, "bytes_before": before, "bytes_after": after}
        print(json.dumps({**report, "layers": found}))
        return 0
    width = max(len(layer.module) for layer in layers)
    for layer in layers:
        print(f"{layer.module:{width}}  error {layer.error:.3%}  bytes {layer.after / layer.before:.3f}")
    print(f"{args.out}: {len(layers)} layers, {after} of {before} bytes ({after / before:.3f})")
    return 0


def _maxima(args: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Largest activation of each module of the file over the calibration's prompts."""
    import eagle3_jax as e3
    from eagle3_jax.checkpoint.dialects import find_layers
    from eagle3_jax.checkpoint.drafts import open_draft_folder
    from eagle3_jax.checkpoint.registry import entries
    from eagle3_jax.training.calibrate import activation_maxima

    known = entries("draft").get(args.draft)
    if (target_name := args.target or (known and known.target)) is None:
        raise Eagle3Error(f"{args.draft} is registered for no target; name its target with --target")
    target = e3.load_target(target_name)
    draft = e3.load_draft(args.draft, target)
    names = find_layers(open_draft_folder(folder)).key_map()
    found = activation_maxima(draft, _prompts(args.calibration, target))
    return {names.file_name(path).removesuffix(".weight"): value for path, value in found.items()}


def _prompts(path: str, target: "Target") -> list[list[int]]:
    """Token ids of the calibration's prompts."""
    from eagle3_jax.checkpoint.files import read_json_value
    from eagle3_jax.commands.request import Prompts, read_chats, read_prompt_ids
    from eagle3_jax.decoding.batches import unpad_rows

    value = read_json_value(path)
    rows = isinstance(value, list) and value and all(isinstance(row, list) for row in value)
    if rows and all(isinstance(i, int) for row in value for i in row):
        return read_prompt_ids(path)
    return unpad_rows(*Prompts(chats=read_chats(path)).encode(target))
