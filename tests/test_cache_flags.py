"""Flags of the caches: what they become, that every verb has them, and what is refused."""

import json
from pathlib import Path

import pytest
from loading import DRAFTS, TARGETS, draft, expected, target

from eagle3_jax import cli
from eagle3_jax.commands import generate
from eagle3_jax.commands.caches import cache_config
from eagle3_jax.commands.request import make_request, read_prompts
from eagle3_jax.decoding.drafters import Eagle3Drafter
from eagle3_jax.decoding.request import GenerationConfig

TARGET = str(TARGETS / "llama_tied")
PAIR = ("--target", TARGET, "--draft", str(DRAFTS / "a_safeailab"))
FLAGS = ("--cache-format", "fp8", "--draft-cache-format", "fp8", "--block-size", "64")
FLAGS += ("--page-size", "8", "--draft-page-size", "64")
VERBS = {"generate": ("--prompt", "x"), "verify": ("--prompt", "x"), "evaluate": (), "bench": ()}


@pytest.fixture
def ids(tmp_path: Path) -> str:
    (tmp_path / "ids.json").write_text(json.dumps(expected(TARGETS / "llama_tied")["greedy_prompt_ids"].tolist()))
    return str(tmp_path / "ids.json")


@pytest.mark.parametrize("verb", VERBS)
def test_flags_are_fields_of_the_configuration(verb: str) -> None:
    argv = [verb, *PAIR, *VERBS[verb]]
    given = cache_config(cli.make_parser().parse_args([*argv, *FLAGS]))
    assert given == GenerationConfig(
        cache_format="fp8", draft_cache_format="fp8", block_size=64, page_size=8, draft_page_size=64
    )
    assert cache_config(cli.make_parser().parse_args(argv)) == GenerationConfig()


def test_generate_uses_them_for_target_and_draft(ids: str) -> None:
    args = cli.make_parser().parse_args(["generate", *PAIR, "--prompt-ids", ids, *FLAGS])
    one, other = target("llama_tied"), draft("a_safeailab")
    request = make_request(args, read_prompts(args), one, other)
    assert (request.config.cache_format, request.config.block_size, request.config.page_size) == ("fp8", 64, 8)
    setup, _ = generate._setup(one, other, request)
    assert setup.drafter == Eagle3Drafter(other.model, 64, "fp8") and setup.config == request.config


@pytest.mark.parametrize(
    ("verb", "flags", "said"),
    [
        ("generate", "--cache-format int8", "invalid choice: 'int8'"),
        ("verify", "--page-size 5", "page_size is 5; a divisor of the block size 32 is needed"),
        ("evaluate", "--draft-page-size 0", "draft_page_size is 0; a divisor of the block size 32 is needed"),
        ("bench", "--block-size 0", "block_size is 0; an integer from 1"),
        ("bench", "--page-size all", "invalid int value: 'all'"),
        (
            "generate",
            "--no-draft --draft-cache-format fp8",
            "--draft-cache-format needs a draft; leave out --no-draft",
        ),
        ("generate", "--no-draft --draft-page-size 8", "--draft-page-size needs a draft; leave out"),
        ("generate", "--draft-page-size 8", "no draft is registered for"),
    ],
)
def test_what_cannot_be_meant_is_one_line(
    capsys: pytest.CaptureFixture[str], ids: str, verb: str, flags: str, said: str
) -> None:
    draftless = verb == "generate"
    prompts = "--prompts" if verb in ("evaluate", "bench") else "--prompt-ids"
    code = cli.main([verb, *(PAIR[:2] if draftless else PAIR), prompts, ids, *flags.split()])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "") and said in err.splitlines()[-1], err
    assert [line for line in err.splitlines() if "error:" in line] == err.splitlines()[-1:]
