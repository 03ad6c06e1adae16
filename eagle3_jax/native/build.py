"""Build the kernels for this processor, keep them, and hand them to XLA."""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import jax

from eagle3_jax.checkpoint.files import user_cache
from eagle3_jax.models import few_queries
from eagle3_jax.quant import few_rows

log = logging.getLogger("eagle3_jax")

SOURCE = Path(__file__).with_name("kernels.cc")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC")
SECONDS = 300
"""Longest compilation."""


def use_native_kernels(on: bool = True) -> bool:
    """Let native kernels do what decoding does with a few float32 rows, in programs traced from now on.

    These are products of one to sixteen rows with a matrix, and attention of up to sixteen queries over a paged
    cache. XLA's own take longer for a few rows than for one, which is what a verify pass pays for. The kernels read
    weights and cache once for all rows, at the rate that memory has, and give a row the same bits alone and among
    others. They are for one CPU device; elsewhere, and for other formats, nothing changes. The first call compiles
    them with the C++ compiler that the environment variable CXX names, or c++, and keeps them in the user's cache.
    Programs to export are to be traced without them.

    Args:
        on: False goes back to XLA's own.

    Returns:
        Whether the kernels are in use: not on other back ends or several devices, nor where they cannot be built. The
        log says why.

    Example:
        >>> use_native_kernels()  # doctest: +SKIP
        True
    """
    fault = _registered() if on else None
    if fault is not None:
        level = logging.INFO if few_rows.suited() else logging.DEBUG
        log.log(level, "no native kernels: %s", fault)
    few_rows.use(on and fault is None)
    return on and fault is None


@cache
def _registered() -> str | None:
    """Hand the kernels to XLA; returns what is in the way of it."""
    if not few_rows.suited():
        return f"they are for one CPU device, not {jax.device_count()} of {jax.default_backend()}"
    compiler = shutil.which(os.environ.get("CXX") or "c++")
    if compiler is None:
        return f"no C++ compiler {os.environ.get('CXX') or 'c++'} to build them with"
    try:
        library = _built(compiler)
        handlers = {name: getattr(ctypes.CDLL(str(library)), name) for name in (few_rows.TARGET, few_queries.TARGET)}
    except subprocess.SubprocessError as error:
        output = getattr(error, "stderr", None) or ""
        return f"{compiler} cannot build them: {next(iter(output.splitlines()), error)}"
    except (OSError, RuntimeError) as error:  # RuntimeError: nobody knows the home folder
        return f"they cannot be kept or loaded: {error}"
    for name, handler in handlers.items():
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler), platform="cpu")
    return None


def _built(compiler: str) -> Path:
    """The library for this compiler, processor, JAX and source."""
    about = (compiler, *FLAGS, jax.__version__, platform.machine(), _processor(), SOURCE.read_text())
    name = hashlib.sha256("\0".join(about).encode()).hexdigest()[:16]
    library = user_cache() / "native" / f"kernels-{name}.so"
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    # Built beside its place: another process may be at the same, and none may load half of it.
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        new = Path(folder) / library.name
        command = [compiler, *FLAGS, f"-I{jax.ffi.include_dir()}", str(SOURCE), "-o", str(new)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS)
        new.replace(library)
    return library


def _processor() -> str:
    """What the processor can do, as far as the system says."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor()
    lines = cpuinfo.read_text(errors="replace").splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
