"""How tests compile: quickly, but for programs that are read or that run for long."""

import importlib.util
import mmap
from pathlib import Path
from typing import Any

# What users get, and what tests compile with. Most of the suite's time was XLA's; with the older emitters and without
# LLVM's optimisation it is less than half. Results differ by rounding, but for one fault: the older emitters turn
# small negative numbers into NaN where they cast to e4m3fnuz.
OPTIONS = {
    "xla_backend_optimization_level": (3, 0),
    "xla_cpu_use_fusion_emitters": (True, False),
    "xla_cpu_parallel_codegen_split_count": (32, 1),
}


def known_options() -> dict[str, tuple[int, int]]:
    """Those of `OPTIONS` that this jaxlib has: XLA ends the process at a flag it does not know."""
    package = importlib.util.find_spec("jaxlib")
    assert package is not None and package.origin is not None
    found = {}
    for library in Path(package.origin).parent.glob("libjax_common.*"):
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            found |= {name: values for name, values in OPTIONS.items() if content.find(name.encode()) >= 0}
    return found


def quick_flags() -> list[str]:
    """Flags for `XLA_FLAGS`."""
    return [f"--{name}={str(quick).lower()}" for name, (_, quick) in known_options().items()]


SHIPPED: dict[str, Any] = {name: usual for name, (usual, _) in known_options().items()}
"""`compiler_options` with which a program is compiled as for users: to read it, or to run it over much data."""
