"""The benchmark's report: its keys, its counts, its table. Never its times."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from loading import DRAFTS, TARGETS, draft, target

from eagle3_jax import cli
from eagle3_jax.bench import runner
from eagle3_jax.bench.report import table
from eagle3_jax.commands.bench import split_speculations
from eagle3_jax.decoding.request import Chain
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.quant.weight import weight_bytes


def test_the_report_is_the_contract(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(runner, "VERIFY_ROWS", (2,))
    prompts, out = tmp_path / "ids.json", tmp_path / "report.json"
    prompts.write_text("[[1, 2, 3], [4, 5], [6]]")
    argv = [
        "bench",
        "--target",
        TARGETS / "llama_tied",
        "--draft",
        DRAFTS / "a_safeailab",
        "--prompts",
        prompts,
    ]
    argv += ["--speculation", "chain:1", "--max-new-tokens", 8, "--repeats", 2, "--concurrency", "2,1"]
    argv += ["--cache-format", "fp8", "--draft-page-size", 8]
    code = cli.main([*map(str, argv), "--json", "--out", str(out), "--plot", str(tmp_path / "curve.png")])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    report = json.loads(captured.out)
    assert json.loads(out.read_text()) == report
    assert list(report) == ["machine", "target", "draft", "floor", "stages", "cells"]
    assert (report["target"], report["draft"]) == ("llama_tied", "a_safeailab")
    floor, stages = report["floor"], report["stages"]
    assert list(floor) == ["weight_bytes", "bytes_per_second", "step_seconds"]
    assert floor["weight_bytes"] == weight_bytes(target("llama_tied").params)
    assert floor["step_seconds"] == pytest.approx(floor["weight_bytes"] / floor["bytes_per_second"])
    assert list(stages) == ["plain_step_seconds", "verify_seconds", "draft_step_seconds", "round_overhead"]
    assert list(stages["verify_seconds"]) == ["2"]
    assert list(stages["round_overhead"]) == ["greedy", "sampled"]
    assert [cell["concurrency"] for cell in report["cells"]] == [2, 1]
    cell = report["cells"][0]
    assert list(cell)[:8] == [
        *("prompts", "speculation", "concurrency", "output_tokens_per_second", "ratio_to_plain"),
        *("mean_acceptance_length", "acceptance_per_position", "runs"),
    ]
    assert [cell[key] for key in ("prompts", "speculation", "concurrency")] == ["ids", "chain:1", 2]
    assert (cell["cache_format"], cell["draft_cache_format"]) == ("fp8", None)
    assert len(cell["acceptance_per_position"]) == 1
    assert list(cell["ratio_to_plain"]) == ["min", "median", "max"]
    ratios = [run["tokens_per_second"] / run["plain_tokens_per_second"] for run in cell["runs"]]
    assert cell["ratio_to_plain"]["min"] == pytest.approx(min(ratios))
    assert len(ratios) == 2
    assert "chain:1" in table(report)
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    for cell in report["cells"]:
        check_other_names(cell)


def check_other_names(cell: dict[str, Any]) -> None:
    """vLLM's keys say what ours say; three prompts make two batches of two or three of one."""
    rows = cell["concurrency"]
    assert cell["max_concurrency"] == rows
    assert (cell["completed"], cell["total_input_tokens"]) == {2: (4, 9), 1: (3, 6)}[rows]
    rounds, accepted = cell["spec_decode_num_drafts"], cell["spec_decode_accepted_tokens"]
    # Every token comes from prefill, from a round, or is an accepted draft.
    assert cell["total_output_tokens"] == cell["completed"] + rounds + accepted
    assert cell["spec_decode_acceptance_length"] == cell["mean_acceptance_length"] == 1 + accepted / rounds
    assert cell["spec_decode_acceptance_rate"] == pytest.approx(100 * accepted / cell["spec_decode_draft_tokens"])
    assert cell["spec_decode_per_position_acceptance_rates"] == [accepted / rounds]
    assert cell["output_throughput"] == pytest.approx(cell["total_output_tokens"] / cell["duration"])


def test_settings_are_split_where_a_name_follows() -> None:
    assert split_speculations(["chain:2,chain:4", "chain:4"]) == ["chain:2", "chain:4"]
    assert split_speculations(["tree:depth=5,top_k=4,auto"]) == ["tree:depth=5,top_k=4", "auto"]


def test_the_last_batch_is_filled_up() -> None:
    ids, lengths = jnp.arange(6, dtype=jnp.int32).reshape(3, 2), jnp.array([2, 1, 2], jnp.int32)
    batches = runner._batches(ids, lengths, 2)
    assert [batch[0].tolist() for batch in batches] == [[[0, 1], [2, 3]], [[4, 5], [0, 1]]]
    assert [batch[1].tolist() for batch in batches] == [[2, 1], [2, 2]]
    assert len(runner._batches(ids, lengths, 4)) == 1
    # Each batch is as wide as its own prompts need.
    lengths = jnp.array([3, 33, 64, 65], jnp.int32)
    widths = [batch[0].shape for batch in runner._batches(jnp.zeros((4, 100), jnp.int32), lengths, 1)]
    assert widths == [(1, 32), (1, 64), (1, 64), (1, 100)]


def test_acceptance_counts_as_vllm_does() -> None:
    # Row 0: 4 rounds of 2 drafts, accepted 2 1 0 1. Row 1: 2 rounds; the last had room for one draft only.
    stats = SimpleNamespace(
        rounds=np.array([4, 2]),
        drafted=np.array([8, 3]),
        accepted=np.array([4, 2]),
        drafted_per_position=np.array([[4, 4], [2, 1]]),
        accepted_per_position=np.array([[3, 1], [2, 0]]),
    )
    assert runner.acceptance(stats) == {
        "rounds": 6,
        "mean_acceptance_length": 2.0,
        "acceptance_rate": 6 / 11,
        "acceptance_per_position": [5 / 6, 1 / 5],
    }


def test_nothing_drafted_has_no_acceptance() -> None:
    none = np.zeros((1, 0), int)
    plain = SimpleNamespace(
        rounds=np.array([3]),
        drafted=np.array([0]),
        accepted=np.array([0]),
        drafted_per_position=none,
        accepted_per_position=none,
    )
    found = runner.acceptance(plain)
    assert found["rounds"] == 3 and found["acceptance_per_position"] == []
    assert found["mean_acceptance_length"] is found["acceptance_rate"] is None


def test_a_context_too_short_to_measure_in_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "CONTEXT", 1000)
    prompts = (jnp.ones((1, 4), jnp.int32), jnp.array([4], jnp.int32))
    with pytest.raises(Eagle3Error, match="context of 1024"):
        runner.measure_stages(target("llama_tied"), draft("a_safeailab"), prompts, Chain(4), 1)
