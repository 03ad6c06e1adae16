"""Build the kernel for this processor, keep it, and hand it to XLA."""

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
from eagle3_jax.quant import few_rows

log = logging.getLogger("eagle3_jax")

SOURCE = Path(__file__).with_name("few_rows.cc")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC")
SECONDS = 300
"""Longest compilation."""


def use_native_products(on: bool = True) -> bool:
    """Multiply one to sixteen rows by a float32 matrix with the native kernel, in programs traced from now on.

    XLA's own product of a few rows takes longer than of one, which is what a verify pass pays for. The kernel reads
    the matrix at the rate that memory has for all of them, and gives a row the same bits alone and among others. It
    is for one CPU device; elsewhere, and for other products, nothing changes. The first call compiles it with the C++
    compiler that the environment variable CXX names, or c++, and keeps it in the user's cache. Programs to export are
    to be traced without it.

    Args:
        on: False goes back to XLA's products.

    Returns:
        Whether the kernel is in use: not on other back ends or several devices, nor where it cannot be built. The
        log says why.

    Example:
        >>> use_native_products()  # doctest: +SKIP
        True
    """
    fault = _registered() if on else None
    if fault is not None:
        level = logging.INFO if few_rows.suited() else logging.DEBUG
        log.log(level, "products of a few rows are XLA's: %s", fault)
    few_rows.use(on and fault is None)
    return on and fault is None


@cache
def _registered() -> str | None:
    """Hand the kernel to XLA; returns what is in the way of it."""
    if not few_rows.suited():
        return f"the kernel is for one CPU device, not {jax.device_count()} of {jax.default_backend()}"
    compiler = shutil.which(os.environ.get("CXX") or "c++")
    if compiler is None:
        return f"no C++ compiler {os.environ.get('CXX') or 'c++'} to build the kernel with"
    try:
        library = _built(compiler)
        handler = getattr(ctypes.CDLL(str(library)), few_rows.TARGET)
    except subprocess.SubprocessError as error:
        output = getattr(error, "stderr", None) or ""
        return f"{compiler} cannot build the kernel: {next(iter(output.splitlines()), error)}"
    except (OSError, RuntimeError) as error:  # RuntimeError: nobody knows the home folder
        return f"the kernel cannot be kept or loaded: {error}"
    jax.ffi.register_ffi_target(few_rows.TARGET, jax.ffi.pycapsule(handler), platform="cpu")
    return None


def _built(compiler: str) -> Path:
    """The library for this compiler, processor, JAX and source."""
    about = (compiler, *FLAGS, jax.__version__, platform.machine(), _processor(), SOURCE.read_text())
    name = hashlib.sha256("\0".join(about).encode()).hexdigest()[:16]
    library = user_cache() / "native" / f"few_rows-{name}.so"
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
