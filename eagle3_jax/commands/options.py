"""Flags that several verbs share, and what they turn into."""

import argparse
import dataclasses
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3_jax.commands.caches import cache_config
from eagle3_jax.errors import Eagle3Error

if TYPE_CHECKING:
    from jax import Array

    from eagle3_jax.bench.workloads import Workload
    from eagle3_jax.checkpoint.drafts import Draft
    from eagle3_jax.checkpoint.targets import Target
    from eagle3_jax.decoding.request import GenerationConfig
    from eagle3_jax.decoding.sampling import Sampling
    from eagle3_jax.training.data import Chat

log = logging.getLogger(__name__)

CAPACITY_STEP = 128
"""Result capacities are rounded up to a multiple of this, so that nearby --max-new-tokens share a program."""
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


def add_prompt_arguments(parser: argparse.ArgumentParser) -> None:
    """--prompt, --messages, --prompt-ids: exactly one."""
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--prompt", metavar="TEXT", help="one user message (plain text without a chat template)")
    group.add_argument("--messages", metavar="F.json", help="a chat, or a list of chats")
    add_prompt_ids_argument(group)


def add_prompt_ids_argument(parser: Any, help: str = "a list of lists of token ids", **options: Any) -> None:
    """--prompt-ids alone; `parser` may be a group."""
    parser.add_argument("--prompt-ids", metavar="F.json", help=help, **options)


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """What is drawn, how much of it, and when to stop."""
    parser.add_argument(
        "--max-new-tokens", metavar="N", type=whole(1), default=128, help="of each prompt (default: 128)"
    )
    parser.add_argument(
        "--speculation",
        metavar="SPEC",
        help=f"chain:K, K drafts a round (default: what suits a registered draft, else {DEFAULT_SPECULATION})",
    )
    parser.add_argument("--temperature", type=number(0, 1e6), default=0.0, help="0 is greedy (default)")
    parser.add_argument(
        "--top-k", type=whole(0), default=0, help="draw from the K most likely tokens; 0 is off (default)"
    )
    parser.add_argument(
        "--top-p", type=number(1e-6, 1), default=1.0, help="draw from that probability mass; 1 is off (default)"
    )
    parser.add_argument(
        "--min-p", type=number(0, 1), default=0.0, help="least share of the best probability; 0 is off (default)"
    )
    parser.add_argument(
        "--repetition-penalty", type=number(1e-6, 1e6), default=1.0, help="on all tokens so far; 1 is off (default)"
    )
    parser.add_argument(
        "--presence-penalty", type=number(-1e6, 1e6), default=0.0, help="on generated tokens; 0 is off (default)"
    )
    parser.add_argument(
        "--frequency-penalty",
        type=number(-1e6, 1e6),
        default=0.0,
        help="on each generation of a token; 0 is off (default)",
    )
    parser.add_argument("--min-tokens", type=whole(0), default=0, help="no stop before that many tokens")
    add_seed_argument(parser)
    parser.add_argument("--ignore-eos", action="store_true", help="the end-of-text tokens do not stop")
    parser.add_argument(
        "--stop-id", type=whole(0), action="append", default=[], help="one more token that stops (repeatable)"
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
    """A draft of that name or folder, under --draft-set.

    Raises:
        Eagle3Error: whatever the loader refuses.
    """
    import eagle3_jax as e3

    settings = dict(args.draft_set)
    loading = {key: settings.pop(key) for key in ("widen", "activations") if key in settings}
    return e3.load_draft(name, target, overrides=settings, **loading)


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


@dataclasses.dataclass(frozen=True)
class Prompts:
    """Prompts as given: a text, chats, or token ids; exactly one is set."""

    text: str | None = None
    chats: list | None = None
    ids: list[list[int]] | None = None

    def encode(self, target: "Target") -> "tuple[Array, Array]":
        """Padded ids int32 [B, P] and lengths int32 [B].

        Raises:
            Eagle3Error: text for a target without a tokenizer, or prompts the target cannot take.
        """
        import eagle3_jax as e3

        if self.ids is not None:
            return e3.encode_ids(target, self.ids)
        if target.tokenizer is None:
            raise Eagle3Error(f"{target.name} has no tokenizer; give its prompts with --prompt-ids")
        if self.text is None:
            return e3.encode(target, self.chats or [])
        if target.tokenizer.has_chat_template:
            return e3.encode(target, [[{"role": "user", "content": self.text}]])
        return e3.encode_ids(target, [target.tokenizer.encode(self.text, add_special_tokens=True)])


def read_prompts(args: argparse.Namespace) -> Prompts:
    """The prompts that --prompt, --messages or --prompt-ids name.

    Raises:
        Eagle3Error: a file that cannot be read or holds something else.
    """
    if args.prompt is not None:
        return Prompts(text=args.prompt)
    if args.messages is not None:
        return Prompts(chats=read_chats(args.messages))
    return Prompts(ids=read_prompt_ids(args.prompt_ids))


def read_chats(path: str) -> list:
    """A file of one chat or of a list of chats, as a list of chats.

    Raises:
        Eagle3Error: the file cannot be read or holds something else.
    """
    from eagle3_jax.checkpoint.files import read_json_value

    value = read_json_value(path)
    if isinstance(value, list) and value and all(isinstance(message, dict) for message in value):
        return [value]
    if isinstance(value, list) and value and all(isinstance(chat, list) and chat for chat in value):
        return value
    raise Eagle3Error(
        f'{path}: holds no chats; a list of {{"role": ..., "content": ...}} or a list of such lists is needed'
    )


def read_prompt_ids(path: str) -> list[list[int]]:
    """A file of a list of lists of token ids.

    Raises:
        Eagle3Error: the file cannot be read or holds something else.
    """
    from eagle3_jax.checkpoint.files import read_json_value

    value = read_json_value(path)
    if not isinstance(value, list) or not value or not all(_is_prompt(prompt) for prompt in value):
        raise Eagle3Error(f"{path}: holds no token ids; a list of non-empty lists, such as [[1, 2, 3]], is needed")
    return value


def _is_prompt(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(i) is int and 0 <= i < 2**31 for i in prompt)


def encode_workload(workload: "Workload", target: "Target") -> "tuple[Array, Array]":
    """Padded ids int32 [B, P] and lengths int32 [B] of a prompt set.

    Raises:
        Eagle3Error: chats for a target without a tokenizer, or prompts the target cannot take.
    """
    return Prompts(chats=workload.chats or None, ids=workload.ids or None).encode(target)


@dataclasses.dataclass(frozen=True)
class Request:
    """Arguments of a generation, as `eagle3_jax.stream` takes them."""

    token_ids: "Array"
    lengths: "Array"
    keys: "Array"
    sampling: "Sampling"
    config: "GenerationConfig"

    @property
    def arrays(self) -> "tuple[Array, Array, Array, Sampling]":
        """The traced ones, in the order of the functions that take them."""
        return self.token_ids, self.lengths, self.keys, self.sampling

    def prompt_ids(self) -> list[list[int]]:
        """The prompts without their padding."""
        from eagle3_jax.decoding.batches import unpad_rows

        return unpad_rows(self.token_ids, self.lengths)


def make_request(
    args: argparse.Namespace, prompts: Prompts, target: "Target", draft: "Draft | None" = None
) -> Request:
    """Turn prompts and sampling flags into arrays, and check them against the target.

    Raises:
        Eagle3Error: prompts or values that do not fit.
    """
    import eagle3_jax as e3
    from eagle3_jax.decoding.request import check_request, parse_speculation
    from eagle3_jax.decoding.sampling import TRANSFORMS, used_transforms

    token_ids, lengths = prompts.encode(target)
    batch = len(lengths)
    sampling = e3.Sampling.make(
        batch,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        max_tokens=args.max_new_tokens,
        min_tokens=args.min_tokens,
        eos_ids=target.eos_ids,
        stop_ids=args.stop_id,
        ignore_eos=args.ignore_eos,
    )
    vocab_size = target.model.config.vocab_size
    if (last := max(args.stop_id, default=0)) >= vocab_size:
        raise Eagle3Error(f"--stop-id {last} is no token; ids from 0 to {vocab_size - 1} are needed")
    used = used_transforms(sampling)
    capacity = -(-args.max_new_tokens // CAPACITY_STEP) * CAPACITY_STEP
    config = dataclasses.replace(
        cache_config(args),
        max_new_tokens=min(capacity, target.model.config.max_position),
        speculation=parse_speculation(chosen_speculation(args, draft)),
        transforms=tuple(name for name in TRANSFORMS if name in used),
    )
    check_request(token_ids, lengths, sampling, target.model.config, config)
    return Request(token_ids, lengths, e3.row_keys(args.seed, batch), sampling, config)
