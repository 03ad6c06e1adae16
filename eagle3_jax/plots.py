"""Figures as PNG files. matplotlib is imported when one is drawn."""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3_jax.checkpoint.files import atomic_file
from eagle3_jax.errors import Eagle3Error

_GREY = "0.4"


def check_plotting() -> None:
    """Refuse before the work what could not be drawn after it.

    Raises:
        Eagle3Error: matplotlib is not installed.
    """
    _figure(1)


def draw_bench(report: Mapping[str, Any], path: Path) -> None:
    """Draw speed and ratio to plain decoding over the batch size, from the report of `bench`.

    Raises:
        Eagle3Error: matplotlib is not installed, or the file cannot be written.
    """
    figure, (speed, ratio) = _figure(2)
    cells: dict[str, list[Mapping[str, Any]]] = {}
    for cell in report["cells"]:
        cells.setdefault(cell["speculation"], []).append(cell)
    for name, own in cells.items():
        own.sort(key=lambda cell: cell["concurrency"])
        rows = [cell["concurrency"] for cell in own]
        ratios = [cell["ratio_to_plain"] for cell in own]
        speed.plot(rows, [cell["output_tokens_per_second"] for cell in own], marker="o", label=name)
        low, high = ([abs(r["median"] - r[end]) for r in ratios] for end in ("min", "max"))
        ratio.errorbar(rows, [r["median"] for r in ratios], (low, high), marker="o", capsize=3, label=name)
    first = next(iter(cells.values()))
    plain = [statistics.median([run["plain_tokens_per_second"] for run in cell["runs"]]) for cell in first]
    speed.plot([cell["concurrency"] for cell in first], plain, marker="s", color=_GREY, linestyle="--", label="plain")
    ratio.axhline(1, color=_GREY, linestyle="--")
    for axes, label in ((speed, "output tokens per second"), (ratio, "speed against plain decoding")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({cell["concurrency"] for cell in report["cells"]}))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set(xlabel="requests in a batch", ylabel=label)
    speed.set_ylim(bottom=0)
    speed.legend()
    figure.suptitle(f"{report['target']} with {report['draft']} on {report['cells'][0]['prompts']}")
    figure.text(0.5, 0.005, report["machine"], ha="center", fontsize="x-small", color=_GREY)
    _save(figure, path)


def draw_training(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw a run's loss and accuracy of each training-time test step, from the records of its metrics.jsonl.

    Raises:
        Eagle3Error: matplotlib is not installed, there are no records, or the file cannot be written.
    """
    if not records:
        raise Eagle3Error("no steps to draw: the run has not made one")
    figure, (loss, accuracy) = _figure(2)
    measured = [record for record in records if "held_out" in record]
    for axes, own, name in ((loss, "loss_per_step", "loss"), (accuracy, "accuracy", "accuracy")):
        for j in range(len(records[0][own])):
            color = f"C{j}"
            _smooth_line(axes, records, [record[own][j] for record in records], color, f"step {j}")
            steps = [record["step"] for record in measured]
            values = [record["held_out"][name][j] for record in measured]
            axes.plot(steps, values, color=color, marker="o", linestyle="--")
        axes.set(xlabel="optimiser step", ylabel=f"{name} (dashed: held out)")
    accuracy.set_ylim(0, 1)
    accuracy.legend(title="of the chain")
    _save(figure, path)


def _smooth_line(axes: Any, records: Sequence[Mapping[str, Any]], values: Sequence[float], color: str, label: str):
    """Means of as many batches as leave about a hundred points."""
    width = math.ceil(len(values) / 100)
    starts = range(0, len(values), width)
    means = [sum(values[i : i + width]) / len(values[i : i + width]) for i in starts]
    steps = [records[min(i + width, len(values)) - 1]["step"] for i in starts]
    axes.plot(steps, means, color=color, label=label)


def _figure(panels: int) -> tuple[Any, Any]:
    try:
        # Not pyplot: no window, no state that outlives the figure.
        from matplotlib.figure import Figure
    except ImportError as error:
        raise Eagle3Error("figures need matplotlib; run: pip install 'eagle3-jax[plot]'") from error
    figure = Figure(figsize=(4.8 * panels, 4), layout="constrained")
    return figure, figure.subplots(1, panels)


def _save(figure: Any, path: Path) -> None:
    with atomic_file(path) as file:
        figure.savefig(file, format="png", dpi=120, metadata={"Software": None})
