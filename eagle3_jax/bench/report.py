"""What a benchmark found, as tables for the terminal."""

from collections.abc import Sequence
from typing import Any


def table(report: dict[str, Any]) -> str:
    """Render the report of `eagle3_jax.bench.runner.run_bench` for people."""
    floor, stages = report["floor"], report["stages"]
    step, plain = floor["step_seconds"], stages["plain_step_seconds"]
    verify = [
        f"{rows} rows {_ms(seconds)} ({seconds / plain:.2f}x plain)"
        for rows, seconds in stages["verify_seconds"].items()
    ]
    overhead = [f"{name} {100 * share:.1f} %" for name, share in stages["round_overhead"].items()]
    lines = [
        ("machine", report["machine"]),
        ("target", report["target"]),
        ("draft", report["draft"]),
        (
            "floor",
            f"{floor['weight_bytes'] / 1e6:.1f} MB of weights at {floor['bytes_per_second'] / 1e9:.1f} GB/s:"
            f" {_ms(step)} a step",
        ),
        ("plain step", f"{_ms(plain)} ({plain / step:.2f}x the floor)"),
        ("verify", ", ".join(verify)),
        ("draft step", _ms(stages["draft_step_seconds"])),
        ("round overhead", ", ".join(overhead)),
    ]
    head = [f"{name:<16}{value}" for name, value in lines]
    return "\n".join([*head, "", *_cells(report["cells"])])


def _cells(cells: Sequence[dict[str, Any]]) -> list[str]:
    header = [
        "prompts",
        "speculation",
        "rows",
        "plain tok/s",
        "tok/s",
        "ratio (min-max)",
        "tok/round",
        "accepted",
    ]
    rows = [header]
    for cell in cells:
        ratio = cell["ratio_to_plain"]
        rates = sorted(run["plain_tokens_per_second"] for run in cell["runs"])
        length = cell["mean_acceptance_length"]
        rows.append(
            [
                cell["prompts"],
                cell["speculation"],
                str(cell["concurrency"]),
                f"{rates[len(rates) // 2]:.1f}",
                f"{cell['output_tokens_per_second']:.1f}",
                f"{ratio['median']:.2f} ({ratio['min']:.2f}-{ratio['max']:.2f})",
                "-" if length is None else f"{length:.2f}",
                " ".join(f"{share:.2f}" for share in cell["acceptance_per_position"]),
            ]
        )
    return columns(rows)


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table given by its rows, the columns as wide as their widest cell."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"
