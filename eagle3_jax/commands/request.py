"""Prompts and sampling wishes: the flags that give them, and the request they become."""

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from eagle3_jax.commands.caches import cache_config
from eagle3_jax.commands.options import (
    DEFAULT_SPECULATION,
    add_seed_argument,
    chosen_speculation,
    number,
    whole,
)
from eagle3_jax.errors import Eagle3Error

if TYPE_CHECKING:
    from jax import Array

    from eagle3_jax.bench.workloads import Workload
    from eagle3_jax.checkpoint.drafts import Draft
    from eagle3_jax.checkpoint.targets import Target
    from eagle3_jax.decoding.request import GenerationConfig
    from eagle3_jax.decoding.sampling import Sampling

CAPACITY_STEP = 128
"""Result capacities are rounded up to a multiple of this, so that nearby --max-new-tokens share a program."""


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
