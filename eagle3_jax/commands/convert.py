"""Write a draft in another dialect, or a target as a Hugging Face or Orbax folder."""

import argparse
from functools import partial
from typing import TYPE_CHECKING

from eagle3_jax.commands.options import DTYPES, add_draft_set_argument, output_folder, whole
from eagle3_jax.errors import Eagle3Error

if TYPE_CHECKING:
    import numpy as np

_HUGGING_FACE, _ORBAX = "huggingface", "orbax"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `convert`."""
    parser.add_argument("source", metavar="SOURCE", help="a draft, or a target (an Orbax folder, a GGUF file)")
    parser.add_argument("out", metavar="OUT", type=output_folder, help="the folder to write")
    parser.add_argument(
        "--to",
        required=True,
        choices=("safeailab", "vllm", "speculators", _HUGGING_FACE, _ORBAX),
        help="dialect of a draft; of a target huggingface, or orbax: opens faster, and keeps narrow weights",
    )
    parser.add_argument("--target", help="of a draft: its target, where the draft's files do not say its taps")
    add_draft_set_argument(parser, "override what the draft's files say, e.g. tap_convention=hs (repeatable)")
    parser.add_argument(
        "--draft-vocab",
        metavar="N",
        type=whole(1),
        help="of a draft with the target's whole vocabulary: keep the head's rows of the N most frequent tokens",
    )
    parser.add_argument(
        "--from-frequencies",
        metavar="F",
        help="for --draft-vocab: a JSON list with a count for each of the target's ids, or distill's token shards, "
        "in which the assistant's tokens are counted",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="of a target's weights (default: as they are held)",
    )


def run(args: argparse.Namespace) -> int:
    """Convert; drafts keep every bit."""
    if (args.draft_vocab is None) != (args.from_frequencies is None):
        raise Eagle3Error("--draft-vocab and --from-frequencies need each other; give both")
    if args.to in (_HUGGING_FACE, _ORBAX):
        from eagle3_jax.checkpoint.target_files import save_target_folder
        from eagle3_jax.checkpoint.targets import load_target, save_target_orbax

        if args.target is not None or args.draft_set or args.draft_vocab is not None:
            raise Eagle3Error(
                f"--to {args.to} converts a target; --target, --draft-set and --draft-vocab are for drafts"
            )
        if args.to == _ORBAX:
            save_target_orbax(load_target(args.source, args.dtype, widen=False), args.out)
        else:
            save_target_folder(load_target(args.source, args.dtype, widen=True), args.out, args.dtype)
        return 0
    from eagle3_jax.checkpoint.convert import convert_draft

    if args.dtype is not None:
        raise Eagle3Error("--dtype is for targets; a draft's tensors keep their bits")
    vocabulary = None if args.draft_vocab is None else partial(_most_frequent, args.from_frequencies, args.draft_vocab)
    found = convert_draft(args.source, args.out, args.to, args.target, dict(args.draft_set), vocabulary)
    print(f"{args.out}: dialect {args.to}, taps hs{list(found.taps.indices)} ({found.taps.reason})")
    return 0


def _most_frequent(path: str, size: int, vocab_size: int) -> "np.ndarray":
    from eagle3_jax.training.data import most_frequent, read_frequencies

    counts = read_frequencies(path, vocab_size)
    ids = most_frequent(counts, size)
    covered, total = int(counts[ids].sum()), int(counts.sum())
    print(f"{size} of {vocab_size} tokens, {covered / total:.2%} of the {total} counted in {path}")
    return ids
