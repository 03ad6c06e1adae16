"""Flags of the caches of keys and values, which several verbs share."""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eagle3_jax.decoding.request import GenerationConfig

_FIELDS = ("cache_format", "draft_cache_format", "block_size", "page_size", "draft_page_size")


def add_cache_arguments(parser: argparse.ArgumentParser) -> None:
    """--cache-format, --block-size, --page-size, and the first and last of them for the draft."""
    parser.add_argument(
        "--cache-format",
        choices=("fp8",),
        help="keep the target's keys and values as FP8 (default: as the model computes); the text may differ from "
        "that of a wide cache, with and without a draft alike",
    )
    parser.add_argument("--draft-cache-format", choices=("fp8",), help="the same for the draft's; the text stays")
    parser.add_argument(
        "--block-size", metavar="N", type=int, default=32, help="tokens of a cache block (default: 32)"
    )
    parser.add_argument(
        "--page-size",
        metavar="N",
        type=int,
        help="tokens that the target's attention gathers as one unit, a divisor of the block size (default: a block)",
    )
    parser.add_argument("--draft-page-size", metavar="N", type=int, help="the same for the draft's attention")


def cache_config(args: argparse.Namespace) -> "GenerationConfig":
    """The configuration that the flags of `add_cache_arguments` describe; what else it has is at its default.

    Raises:
        Eagle3Error: pages that do not fill a block.
    """
    from eagle3_jax.decoding.request import GenerationConfig

    return GenerationConfig(**{name: getattr(args, name) for name in _FIELDS})
