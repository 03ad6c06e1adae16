"""The committed reports: of today's programs, and with the numbers that docs/rocm.md states."""

import json
from pathlib import Path
from typing import Any

import jax
import pytest

from eagle3_jax.export.rocm import is_fresh

FOLDER = Path(__file__).parents[2] / "docs" / "rocm"
PATHS = sorted(FOLDER.glob("*.json"))
REPORTS: dict[str, dict[str, Any]] = {path.stem: json.loads(path.read_text()) for path in PATHS}
SHORT = [name for name, report in REPORTS.items() if report["program"]["layers"] is not None]
"""Those of shortened targets: others take long to lower, and `make rocm-check` looks at all."""
FULL_SIZE = [name for name in REPORTS if name.startswith(("kimi", "minimax"))]
CARD = 288 * 10**9


@pytest.mark.parametrize("name", SHORT)
def test_the_report_is_of_todays_program(name: str) -> None:
    if (version := REPORTS[name]["versions"]["jax"]) != jax.__version__:
        pytest.skip(f"NOT CHECKED: the reports are of JAX {version}, which lowers otherwise than {jax.__version__}")
    assert is_fresh(REPORTS[name]), f"docs/rocm/{name}.json is of another program: run make rocm-report"


@pytest.mark.parametrize("name", REPORTS)
def test_nothing_is_copied_widened_gathered_or_left_to_a_library(name: str) -> None:
    report = REPORTS[name]
    copies, widened = report["copies"], report["widened"]
    if report["program"]["what"] == "prefill":
        # An expert that gets many rows is copied out of its stack, and of MXFP4 a slice unpacked (docs/rocm.md).
        assert copies["experts"] and set(widened) <= {"bf16[512,7168]"}
        copies, widened = {**copies, "experts": {}}, {}
    assert copies == {"pools": {}, "weights": {}, "experts": {}}
    assert widened == {} and report["library_calls"] == {}
    assert not {"all-gather", "all-to-all"} & set(report["collectives"])
    assert (FOLDER / f"{name}.json").stat().st_size < 100_000


@pytest.mark.parametrize("name", FULL_SIZE)
def test_the_model_fits_a_card_with_small_temporaries(name: str) -> None:
    sizes, whole = REPORTS[name]["bytes_per_device"], REPORTS[name]["all_layers"]
    assert whole["weights"] + whole["pools"] + sizes["temporaries"] < CARD
    # Prefill is compiled with two layers, whose weights are few beside the activations of 16,384 tokens.
    weights = whole["weights"] if REPORTS[name]["program"]["what"] == "prefill" else sizes["weights"]
    assert sizes["temporaries"] <= 0.1 * weights


@pytest.mark.parametrize("name", [name for name in FULL_SIZE if REPORTS[name]["program"]["what"] == "round"])
def test_experts_take_few_more_products_than_asked_for(name: str) -> None:
    assert REPORTS[name]["experts"]["most_products"] <= 1.3


def test_fp8_products_have_matrix_instructions_under_a_forced_tile() -> None:
    tiled = [report for report in REPORTS.values() if report["options"]]
    assert tiled and all(any("f8f6f4" in name for name in report["matrix_instructions"]) for report in tiled)
