"""Write a target's logits and hidden states of given token ids to an .npz file."""

import argparse

from eagle3_jax.commands.options import add_target_arguments, load_target, output_file
from eagle3_jax.commands.request import add_prompt_ids_argument, read_prompt_ids


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `score`."""
    add_target_arguments(parser)
    add_prompt_ids_argument(parser, required=True)
    parser.add_argument("--out", metavar="F.npz", type=output_file, required=True, help="the file to write")


def run(args: argparse.Namespace) -> int:
    """Write logits [B, T, V], hidden_states [N+1, B, T, H] and lengths [B]; T is the longest prompt.

    Positions past a prompt's length are zero.
    """
    import numpy as np

    import eagle3_jax as e3
    from eagle3_jax.checkpoint.files import atomic_file

    prompts = read_prompt_ids(args.prompt_ids)
    target = load_target(args)
    ids, lengths = e3.encode_ids(target, prompts)
    result = e3.score(target, ids, lengths)
    lengths = np.asarray(lengths)
    longest = int(lengths.max())
    logits = np.asarray(result.logits[:, :longest], np.float32)
    hidden_states = np.asarray(result.hidden_states[:, :, :longest], np.float32)
    with atomic_file(args.out) as file:
        np.savez(file, logits=logits, hidden_states=hidden_states, lengths=lengths)
    return 0
