"""Compile a program with XLA's ROCm back end for an AMD chip, on a machine that has none, and report what came out.

The compiler is AMD's own (see `eagle3_jax.export.toolchain`); it runs in a process of its own, because loading it
changes what devices JAX finds, and because it may end the process.
"""

import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle3_jax.errors import Eagle3Error
from eagle3_jax.export.chips import CHIPS
from eagle3_jax.export.programs import Program, abstract_draft, abstract_target, lower
from eagle3_jax.export.toolchain import CALLED, prepare

NOTE = (
    "Compiled, not executed: no card was there. Without one XLA does not autotune, so a card's own compilation picks "
    "other matrix kernels. That the code objects load, give right numbers or are fast is not shown."
)
"""What a report shows and what not; part of every report."""


def gemm_tile(rows: int, columns: int, depth: int) -> dict[str, str]:
    """Compiler options that force the tile of every matrix product.

    They show what instructions a tuned program can use: without a card XLA takes the smallest tiles, which use none of
    the matrix cores.

    Example:
        >>> compile_for_chip(program, options=gemm_tile(64, 64, 64))  # doctest: +SKIP
    """
    text = f"block_m: {rows} block_n: {columns} block_k: {depth} num_stages: 2 num_warps: 4 num_ctas: 1"
    return {"xla_gpu_override_gemm_autotuner": text}


def compile_for_chip(
    program: Program, chip: str = "gfx950", options: Mapping[str, str | bool | int] | None = None
) -> dict[str, Any]:
    """Compile a program for a chip.

    Args:
        program: what to compile; its mesh says for how many cards of one host.
        chip: a key of `CHIPS`.
        options: of the compiler, by XLA's names, e.g. those of `gemm_tile`.

    Returns:
        The report, ready for JSON: `note`, `program`, `chip`, `options`, `versions`, `seconds`, `stablehlo_sha256`,
        `code_objects` (kernels, ELF machine and flags, target, matrix instructions), `matrix_instructions` in all,
        `collectives`, `library_calls`, `aliases`, `bytes_per_device` by kind, `copies` of pools, weights and
        single experts, `widened` (arrays of a weight's dimensions and a wider dtype), `largest` arrays computed.

    Raises:
        Eagle3Error: an unknown chip, a compiler that cannot be had, or a program that it does not compile.

    Example:
        >>> report = compile_for_chip(Program("round", "smollm2-135m"))  # doctest: +SKIP
        >>> report["code_objects"][0]["target"]  # doctest: +SKIP
        'amdgcn--amdhsa-amdgiz-gfx950:sramecc+:xnack-'
    """
    if chip not in CHIPS:
        raise Eagle3Error(f"chip {chip!r:.40} is not known; known chips are {', '.join(CHIPS)}")
    # Refused before anything is fetched.
    target = abstract_target(program)
    if program.draft is not None:
        abstract_draft(program, target)
    tools = prepare()
    with tempfile.TemporaryDirectory(prefix="eagle3-rocm-") as name:
        work = Path(name)
        job = {
            "program": dataclasses.asdict(program),
            "chip": chip,
            "options": dict(options or {}),
            "stubs": [str(path) for path in tools.stubs],
            "version": tools.version,
        }
        (work / "job.json").write_text(json.dumps(job), encoding="utf-8")
        (work / "kernels").mkdir()
        done = subprocess.run(
            [sys.executable, "-m", "eagle3_jax.export.worker", str(work)],
            env=_environment(work, tools.plugin),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode or not (work / "report.json").is_file():
            raise Eagle3Error(f"{program.what} of {program.target} for {chip}: {_reason(done)}")
        report = json.loads((work / "report.json").read_text(encoding="utf-8"))
    return {"note": NOTE, **report}


def is_fresh(report: dict[str, Any]) -> bool:
    """Whether the library still lowers a report's program to the StableHLO that the report was made of.

    Needs no compiler. Another version of JAX lowers otherwise, so compare reports only within one.

    Raises:
        Eagle3Error: not a report.
    """
    try:
        fields, expected = report["program"], report["stablehlo_sha256"]
    except (KeyError, TypeError) as error:
        raise Eagle3Error("not a report of a compiled program: it has no program and no stablehlo_sha256") from error
    return lower(Program.of(fields)).sha256() == expected


def _environment(work: Path, plugin: Path) -> dict[str, str]:
    """The process's: JAX on CPU, the compiler as a plug-in beside it, and kernels left where they can be read."""
    return {
        **os.environ,
        # Any other platform would make JAX look for a card.
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "PJRT_NAMES_AND_LIBRARY_PATHS": f"rocm:{plugin}",
        "TF_ROCM_KEEP_XLA_TEMPFILES": "1",
        "TMPDIR": str(work / "kernels"),
    }


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    """Why the process failed, in one line."""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    if calls := [line for line in lines if CALLED in line]:
        return f"the compiler asked a GPU for {calls[0].partition(CALLED)[2].strip()}, and there is none"
    errors = [line for line in lines if re.match(r"[\w.]+Error: ", line)]
    # A crash leaves only the compiler's chatter.
    return errors[-1].partition(": ")[2] if errors else f"the compiler ended with code {done.returncode}"
