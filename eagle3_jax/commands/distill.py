"""Let a target write the chats that a draft learns from."""

import argparse
import json

from eagle3_jax.commands.options import add_json_argument, add_target_arguments, load_target, output_folder
from eagle3_jax.commands.request import add_prompt_ids_argument, read_prompt_ids
from eagle3_jax.commands.settings import add_config_arguments, read_config
from eagle3_jax.errors import Eagle3Error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `distill`."""
    from eagle3_jax.training.distill import DistillConfig

    add_target_arguments(parser)
    parser.add_argument("--out", metavar="DIR", type=output_folder, required=True, help="folder of the token shards")
    add_prompt_ids_argument(parser, help="user turns, instead of sampled ones: a list of lists of token ids")
    parser.add_argument(
        "--openings",
        metavar="F.json",
        help=(
            "first words of the user turns, which the target continues: a list of texts, or an object of openings and "
            "topics, one of which takes the place of {topic}"
        ),
    )
    add_config_arguments(parser, DistillConfig)
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Write the shards; run again, it goes on where it was interrupted."""
    from eagle3_jax.training.distill import DistillConfig, distill, read_openings

    config = read_config(args, DistillConfig)
    user_turns = None if args.prompt_ids is None else read_prompt_ids(args.prompt_ids)
    target = load_target(args)
    openings = None
    if args.openings is not None:
        if target.tokenizer is None:
            raise Eagle3Error(f"{target.name} has no tokenizer, and --openings are texts; give --prompt-ids")
        openings = read_openings(args.openings, target.tokenizer)
    chats = distill(target, args.out, config, user_turns, openings=openings)
    if args.json:
        print(json.dumps({"target": target.name, "out": args.out, "chats": chats}))
    return 0
