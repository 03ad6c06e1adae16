"""Train a draft on chats that its target wrote."""

import argparse
import json
from pathlib import Path

from eagle3_jax.commands.options import (
    add_data_argument,
    add_features_argument,
    add_json_argument,
    add_plot_argument,
    add_target_arguments,
    load_target,
    output_folder,
    read_data,
)
from eagle3_jax.commands.settings import add_config_arguments, read_config


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
        "--start",
        metavar="DRAFT",
        help="draft name or folder to train further, of the shape that the settings ask for",
    )
    parser.add_argument(
        "--resume",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="go on from the newest checkpoint in --out (default)",
    )
    add_plot_argument(parser, "loss and accuracy")
    add_config_arguments(parser, TrainConfig)
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Train to the last step and save the draft."""
    import eagle3_jax as e3
    from eagle3_jax.plots import check_plotting, draw_training
    from eagle3_jax.sharding import make_mesh
    from eagle3_jax.training.trainer import TrainConfig, read_metrics, train

    config = read_config(args, TrainConfig)
    if args.plot is not None:
        check_plotting()
    target = load_target(args)
    chats = read_data(args.data, target)
    # Drafts learn in float32, whatever the target's dtype.
    start = None if args.start is None else e3.load_draft(args.start, target, {"dtype": "float32"}, widen=True)
    mesh = None if args.mesh is None else make_mesh(*args.mesh)
    train(target, chats, config, args.out, args.features, args.resume, start, mesh)
    if args.plot is not None:
        draw_training(read_metrics(args.out), args.plot)
    draft = str(Path(args.out) / "draft")
    print(json.dumps({"target": target.name, "draft": draft, "steps": config.steps}) if args.json else draft)
    return 0
