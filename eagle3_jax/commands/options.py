"""Flags that several verbs share, and what they turn into."""

import argparse
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3_jax.commands.caches import cache_config
from eagle3_jax.errors import Eagle3Error

if TYPE_CHECKING:
    from eagle3_jax.checkpoint.drafts import Draft
    from eagle3_jax.checkpoint.targets import Target
    from eagle3_jax.training.data import Chat

log = logging.getLogger(__name__)

DEFAULT_SPECULATION = "chain:4"
DTYPES = ("float32", "bfloat16", "float16")
"""Choices of --dtype."""
_OF_A_DRAFT = ("speculation", "draft_set", "draft_cache_format", "draft_page_size")


def whole(low: int, high: int = 2**31 - 1) -> Callable[[str], int]:
    """An argparse type: a whole number in [low, high]."""

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number in [{low}, {high}]")
        return value

    return convert


def number(low: float, high: float) -> Callable[[str], float]:
    """An argparse type: a number in [low, high]; NaN lies in no range."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number in [{low:g}, {high:g}]")
        return value

    return convert


def several(item: Callable[[str], Any]) -> Callable[[str], tuple]:
    """An argparse type: items separated by commas, each once, in the given order."""
    return lambda text: tuple(dict.fromkeys(item(part) for part in text.split(",")))


def assignment(text: str) -> tuple[str, Any]:
    """An argparse type: key=value, where a value that is JSON is read as such and any other is text."""
    key, equals, value = text.partition("=")
    if not (key and equals and value):
        raise argparse.ArgumentTypeError(f"{text!r} is not key=value")
    try:
        return key, json.loads(value)
    except (ValueError, RecursionError):
        return key, value


def sizes(count: int, separator: str) -> Callable[[str], tuple[int, ...]]:
    """An argparse type: `count` whole numbers from 1, as in 4,2 or 1x1x8."""

    def convert(text: str) -> tuple[int, ...]:
        parts = text.split(separator)
        if len(parts) != count:
            raise argparse.ArgumentTypeError(f"{text!r:.40} is not {count} whole numbers, joined by {separator!r}")
        return tuple(map(whole(1, 2**16 - 1), parts))

    return convert


def output_file(text: str) -> Path:
    """An argparse type: a file to write. Its folder is looked at now, not after the work."""
    path = Path(text)
    try:
        if not text or (os.path.exists(path) and not os.path.isfile(path)):
            raise argparse.ArgumentTypeError(f"{text!r} is not the name of a regular file")
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise argparse.ArgumentTypeError(f"no folder {str(path.parent)!r} that can be written")
    except ValueError as error:  # a NUL character
        raise argparse.ArgumentTypeError(f"{text!r} is not a file name") from error
    return path


def output_folder(text: str) -> str:
    """An argparse type: a folder to write, which need not exist yet."""
    if not text or "\0" in text or (os.path.exists(text) and not os.path.isdir(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not the name of a folder")
    return text


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    """--target, --dtype, --widen, --activations and --mesh."""
    parser.add_argument("--target", required=True, help="model name, Hugging Face folder, GGUF file or Orbax folder")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="of the target's matrices and activations (default: float32 on CPU, bfloat16 elsewhere)",
    )
    parser.add_argument(
        "--widen",
        action=argparse.BooleanOptionalAction,
        help="turn the target's narrow weights into --dtype when they are loaded (default: on CPU only)",
    )
    parser.add_argument(
        "--activations",
        choices=("wide", "fake_quant", "mxfp8"),
        help="how activations are rounded that meet the target's narrow weights (default: as a card does for FP8 "
        "weights that stay narrow, else not at all); of a draft: --draft-set activations=fake_quant",
    )
    help = "share the work among D x M devices: rows over the first number, weights over the second"
    parser.add_argument("--mesh", metavar="D,M", type=sizes(2, ","), help=help)


def load_target(args: argparse.Namespace) -> "Target":
    """The target that the flags of `add_target_arguments` name.

    Raises:
        Eagle3Error: whatever the loader refuses, or a mesh of more devices than there are.
    """
    import eagle3_jax as e3
    from eagle3_jax.sharding import make_mesh

    mesh = None if args.mesh in (None, (1, 1)) else make_mesh(*args.mesh)
    return e3.load_target(args.target, dtype=args.dtype, widen=args.widen, activations=args.activations, mesh=mesh)


def add_draft_arguments(parser: argparse.ArgumentParser, optional: bool = True) -> None:
    """--draft and --draft-set, and --no-draft where the draft is optional."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--draft", help="draft name or EAGLE-3 folder (default: the one made for the target)")
    if optional:
        group.add_argument("--no-draft", action="store_true", help="plain decoding")
    add_draft_set_argument(parser, "override what the draft's files say, e.g. norm_output=true (repeatable)")


def add_draft_set_argument(parser: argparse.ArgumentParser, help: str) -> None:
    """--draft-set."""
    parser.add_argument(
        "--draft-set",
        metavar="KEY=VALUE",
        type=assignment,
        action="append",
        default=[],
        help=help,
    )


def add_seed_argument(parser: argparse.ArgumentParser) -> None:
    """--seed."""
    parser.add_argument("--seed", type=whole(0, 2**32 - 1), default=0, help="of the random draws (default: 0)")


def add_prompt_set_arguments(parser: argparse.ArgumentParser) -> None:
    """--prompts, --limit and --max-new-tokens: what is decoded to measure."""
    parser.add_argument(
        "--prompts",
        metavar="SET",
        default="dev",
        help="dev, mt-bench (80 first turns), humaneval (164), or F.json: a list of chats; several with commas are "
        "joined (default: dev)",
    )
    parser.add_argument("--limit", metavar="N", type=whole(1), help="only the first N prompts of each set")
    parser.add_argument(
        "--max-new-tokens", metavar="N", type=whole(1), default=96, help="of each prompt (default: 96)"
    )


def add_data_argument(parser: argparse.ArgumentParser, required: bool) -> None:
    """--data."""
    parser.add_argument("--data", metavar="PATH", required=required, help="a token shard (.npz) or a folder of them")


def add_features_argument(parser: argparse.ArgumentParser) -> None:
    """--features."""
    parser.add_argument(
        "--features", metavar="DIR", type=output_folder, help="cache of the target's hidden states (large)"
    )


def add_plot_argument(parser: argparse.ArgumentParser, what: str) -> None:
    """--plot."""
    parser.add_argument("--plot", metavar="F.png", type=output_file, help=f"also draw {what} there")


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """--json."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def chosen_speculation(args: argparse.Namespace, draft: "Draft | None") -> str:
    """What --speculation says, else what suits the draft if it is registered, else the default."""
    if args.speculation or draft is None:
        return args.speculation or DEFAULT_SPECULATION
    from eagle3_jax.checkpoint.registry import entries

    entry = entries("draft").get(draft.name)
    return (entry and entry.fields.get("speculation")) or DEFAULT_SPECULATION


def check_speculation(args: argparse.Namespace) -> None:
    """Refuse flags of speculation and caches that cannot be meant, before a model is loaded.

    Raises:
        Eagle3Error: --speculation that is not understood, pages that do not fill a block, or flags of a draft beside
            --no-draft.
    """
    from eagle3_jax.decoding.request import parse_speculation

    if args.speculation is not None:
        parse_speculation(args.speculation)
    cache_config(args)
    if getattr(args, "no_draft", False) and (given := _draft_flags(args)):
        raise Eagle3Error(f"{given[0]} needs a draft; leave out --no-draft or {given[0]}")


def _draft_flags(args: argparse.Namespace) -> list[str]:
    """The flags among those given that mean nothing without a draft."""
    return [f"--{name.replace('_', '-')}" for name in _OF_A_DRAFT if getattr(args, name, None)]


def load_pair(args: argparse.Namespace) -> "tuple[Target, Draft | None]":
    """The target and, unless --no-draft, the draft: the named one or the one registered for the target.

    Raises:
        Eagle3Error: a checkpoint that does not load, or draft flags where no draft is registered.
    """
    target = load_target(args)
    name = args.draft
    if name is None and not getattr(args, "no_draft", False):
        from eagle3_jax.checkpoint.registry import draft_for

        name = draft_for(args.target)
        if name is None and _draft_flags(args):
            raise Eagle3Error(f"no draft is registered for {args.target}; name one with --draft")
        log.info("draft: %s", name or f"none is registered for {args.target}, decoding plainly")
    return target, None if name is None else load_draft(args, name, target)


def load_draft(args: argparse.Namespace, name: str, target: "Target") -> "Draft":
    """A draft of that name or folder, under --draft-set, and as the native kernel likes it where that is in use.

    Raises:
        Eagle3Error: whatever the loader refuses.
    """
    import eagle3_jax as e3
    from eagle3_jax.native.weights import in_bfloat16
    from eagle3_jax.quant import few_rows

    settings = dict(args.draft_set)
    loading = {key: settings.pop(key) for key in ("widen", "activations") if key in settings}
    draft = e3.load_draft(name, target, overrides=settings, **loading)
    return in_bfloat16(draft) if few_rows.in_use() else draft


def load_draft_pair(args: argparse.Namespace) -> "tuple[Target, Draft]":
    """Load what --target and --draft name, for verbs that are nothing without a draft.

    Raises:
        Eagle3Error: whatever the loaders refuse, or no draft is known for the target.
    """
    target, draft = load_pair(args)
    if draft is None:
        raise Eagle3Error(f"no draft is registered for {args.target}; name one with --draft")
    return target, draft


def read_data(path: str, target: "Target") -> "list[Chat]":
    """The chats of --data; shards that do not hold what every chat starts with get the template's header.

    Raises:
        Eagle3Error: nothing there, or not token shards.
    """
    from eagle3_jax.training.data import read_chats
    from eagle3_jax.training.distill import chat_frame

    tokenizer = target.tokenizer
    if tokenizer is None or not tokenizer.has_chat_template:
        return read_chats(path)
    return read_chats(path, chat_frame(tokenizer).header)
