"""Drafts side by side: acceptance, intervals and bytes against the same numbers found another way."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loading import DRAFTS, FIXTURES, TARGETS, draft
from training import selfchats

from eagle3_jax.cli import main
from eagle3_jax.decoding.stats import Stats
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.training.compare import compare, paired_difference
from eagle3_jax.training.evaluate import evaluate_decoding

PROMPTS = [chat.tokens[:9].tolist() for chat in selfchats.chats()[:3]]
QUARK = FIXTURES / "quant" / "quark_ptpc_fp8_draft_a"


def every_resample(first: list[Any], other: list[Any]) -> list[float]:
    """Ratio of sums (kept, tried) under `other` less that under `first`, for all equally likely draws, ascending."""

    def ratio(counts: list[Any], picks: tuple[int, ...]) -> float:
        return sum(counts[i][0] for i in picks) / sum(counts[i][1] for i in picks)

    draws = itertools.product(range(len(first)), repeat=len(first))
    return sorted(ratio(other, picks) - ratio(first, picks) for picks in draws)


def ends(values: list[float]) -> tuple[float, float]:
    """Where the middle 95 % of equally likely values begin and end."""
    cut = int(0.025 * len(values))
    return values[cut], values[-1 - cut]


def stats(rounds: list, drafted: list, accepted: list) -> Stats:
    """Counts by prompt; the last two also by position."""
    tried, kept = np.array(drafted), np.array(accepted)
    return Stats(np.array(rounds), tried.sum(1), kept.sum(1), tried, kept)  # pyright: ignore


def header(folder: Path) -> dict[str, Any]:
    """What a safetensors file says of its tensors."""
    data = (folder / "model.safetensors").read_bytes()
    found = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    found.pop("__metadata__", None)
    return found


def test_the_interval_is_that_of_all_resamples() -> None:
    """Three prompts have 27 resamples: few enough to list, and 10 000 drawn ones meet each of them."""
    first = stats([10, 7, 5], [[10, 9, 0], [7, 7, 0], [5, 4, 0]], [[6, 2, 0], [3, 1, 0], [1, 0, 0]])
    other = stats([8, 7, 6], [[8, 8, 0], [7, 6, 0], [6, 6, 0]], [[7, 3, 0], [3, 1, 0], [0, 0, 0]])
    found = paired_difference(first, other)
    pairs = [
        (found["mean_acceptance_length"], [[8, 10], [4, 7], [1, 5]], [[10, 8], [4, 7], [0, 6]]),
        (found["acceptance_per_position"][0], [[6, 10], [3, 7], [1, 5]], [[7, 8], [3, 7], [0, 6]]),
        (found["acceptance_per_position"][1], [[2, 9], [1, 7], [0, 4]], [[3, 8], [1, 6], [0, 6]]),
    ]
    for interval, one, two in pairs:
        values = every_resample(one, two)
        assert (interval["low"], interval["high"]) == pytest.approx(ends(values))
        whole = np.sum(two, axis=0), np.sum(one, axis=0)
        assert interval["value"] == pytest.approx(whole[0][0] / whole[0][1] - whole[1][0] / whole[1][1])
    # Nobody drafted a third token.
    assert len(found["acceptance_per_position"]) == 2


def test_pairing_cancels_what_prompts_do_to_both() -> None:
    easy_and_hard = [[9], [1], [8], [2], [9], [0], [7], [3]]
    first = stats([10] * 8, [[10]] * 8, easy_and_hard)
    one_more = stats([10] * 8, [[10]] * 8, [[kept + 1] for (kept,) in easy_and_hard])
    change = paired_difference(first, one_more)["mean_acceptance_length"]
    assert (change["value"], change["low"], change["high"]) == pytest.approx((0.1, 0.1, 0.1))
    same = paired_difference(first, first)["mean_acceptance_length"]
    assert same == {"value": 0.0, "low": 0.0, "high": 0.0}


def test_drafts_are_compared_over_the_same_prompts() -> None:
    drafts, settings = [draft("a_safeailab"), draft("d_fullvocab")], (3, 10)
    (cell,) = compare(drafts, PROMPTS, *settings, batch_size=1)
    counts: list[list[list[float]]] = []
    for subject, found in zip(drafts, cell["drafts"], strict=True):
        alone = [evaluate_decoding(subject, [prompt], *settings, batch_size=1) for prompt in PROMPTS]
        counts.append([[(one["mean_acceptance_length"] - 1) * one["rounds"], one["rounds"]] for one in alone])
        together = evaluate_decoding(subject, PROMPTS, *settings, batch_size=1)
        assert {key: found[key] for key in together} == together
        assert found["tokens_per_second"] > 0
    assert "difference" not in cell["drafts"][0]
    change = cell["drafts"][1]["difference"]["mean_acceptance_length"]
    lengths = [found["mean_acceptance_length"] for found in cell["drafts"]]
    assert change["value"] == pytest.approx(lengths[1] - lengths[0])
    assert (change["low"], change["high"]) == pytest.approx(ends(every_resample(*counts)))


def test_one_command_prints_acceptance_and_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps(PROMPTS))
    plain = DRAFTS / "a_safeailab"
    line = ["evaluate", "--target", str(TARGETS / "llama_tied"), "--draft", str(plain), "--compare", str(QUARK)]
    line += ["--prompts", str(prompts), "--speculation", "chain:2", "--max-new-tokens", "8"]
    line += ["--draft-cache-format", "fp8"]
    assert main([*line, "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert [entry["draft"] for entry in report["drafts"]] == [str(plain), str(QUARK)]
    wide, narrow = (entry["bytes"] for entry in report["drafts"])
    files = [header(folder) for folder in (plain, QUARK)]
    ends_of_data = [max(entry["data_offsets"][1] for entry in tensors.values()) for tensors in files]
    assert [wide["weights"], narrow["weights"]] == ends_of_data
    assert (wide["quantized"], wide["ratio"]) == (0, None)
    shapes = [entry["shape"] for entry in files[1].values() if entry["dtype"] == "F8_E4M3"]
    taken, wide_bytes = sum(n * k + 4 * n for n, k in shapes), sum(2 * n * k for n, k in shapes)
    assert (narrow["quantized"], narrow["quantized_as_bfloat16"]) == (taken, wide_bytes)
    assert len(shapes) == 7 and narrow["ratio"] == pytest.approx(taken / wide_bytes)
    (cell,) = report["comparison"]
    assert [found["draft_cache_format"] for found in cell["drafts"]] == ["fp8", "fp8"]
    assert set(cell["drafts"][1]["difference"]) == {"mean_acceptance_length", "acceptance_per_position"}
    assert len(cell["drafts"][1]["difference"]["acceptance_per_position"]) == 2
    assert main(line) == 0
    text = capsys.readouterr().out
    change = cell["drafts"][1]["difference"]["mean_acceptance_length"]
    assert f"{change['value']:+.3f} [{change['low']:+.3f}, {change['high']:+.3f}]" in text
    assert f"({narrow['ratio']:.3f} of them)" in text
    assert main([*line, "--probe"]) == 2 and "--compare only decodes" in capsys.readouterr().err


def test_what_cannot_be_compared_is_refused() -> None:
    a, b = draft("a_safeailab"), draft("b_speculators")
    for drafts, prompts, match in (
        ([a], PROMPTS, "1 drafts on 3 prompts"),
        ([a, a], PROMPTS[:1], "2 drafts on 1 prompts"),
        ([a, b], PROMPTS, "drafts of different targets"),
    ):
        with pytest.raises(Eagle3Error, match=match):
            compare(drafts, prompts)
