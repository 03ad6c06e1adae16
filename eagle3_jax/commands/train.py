"""Train a draft on chats that its target wrote."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3_jax.commands.options import add_json_argument, add_target_arguments, output_folder
from eagle3_jax.commands.settings import add_config_arguments, read_config

if TYPE_CHECKING:
    from eagle3_jax.checkpoint.targets import Target
    from eagle3_jax.training.data import Chat


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `train`."""
    from eagle3_jax.training.trainer import TrainConfig

    add_target_arguments(parser)
    add_data_argument(parser, required=True)
    parser.add_argument(
        "--out",
        metavar="DIR",
        type=output_folder,
        required=True,
        help="folder of the run; its draft/ is the trained draft",
    )
    add_features_argument(parser)
    parser.add_argument(
        "--resume",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="go on from the newest checkpoint in --out (default)",
    )
    add_config_arguments(parser, TrainConfig)
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Train to the last step and save the draft."""
    import eagle3_jax as e3
    from eagle3_jax.training.trainer import TrainConfig, train

    config = read_config(args, TrainConfig)
    target = e3.load_target(args.target, dtype=args.dtype)
    chats = read_data(args.data, target)
    train(target, chats, config, args.out, args.features, args.resume)
    draft = str(Path(args.out) / "draft")
    print(json.dumps({"target": target.name, "draft": draft, "steps": config.steps}) if args.json else draft)
    return 0


def add_data_argument(parser: argparse.ArgumentParser, required: bool) -> None:
    """--data."""
    parser.add_argument("--data", metavar="PATH", required=required, help="a token shard (.npz) or a folder of them")


def add_features_argument(parser: argparse.ArgumentParser) -> None:
    """--features."""
    parser.add_argument(
        "--features", metavar="DIR", type=output_folder, help="cache of the target's hidden states (large)"
    )


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
