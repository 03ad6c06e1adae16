"""Build the kernels for this processor, keep them, and hand them to XLA."""

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import jax

from eagle3_jax.checkpoint.files import user_cache
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.models import few_queries
from eagle3_jax.quant import few_rows

log = logging.getLogger("eagle3_jax")

SOURCE = Path(__file__).with_name("kernels.cc")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC")
SECONDS = 300
"""Longest compilation."""


def use_native_kernels(on: bool = True) -> bool:
    """Let native kernels do what decoding does with a few float32 rows; programs are traced anew where that changes.

    These are products of one to sixteen rows with a matrix (128 with one in bfloat16), and attention of up to sixteen
    queries over a paged cache. XLA's own take longer for a few rows than for one, which is what a verify pass pays
    for. The kernels read weights and cache once for all rows, at the rate that memory has, and give a row the same
    bits alone and among as many others. They are for one CPU device; elsewhere, and for other formats, nothing
    changes. The first call compiles them with the C++ compiler that the environment variable CXX names, or c++, and
    keeps them in the user's cache. Programs to export are to be traced without them.

    Args:
        on: False goes back to XLA's own.

    Returns:
        Whether the kernels are in use: not on other back ends or several devices, nor where they cannot be built. The
        log says why.

    Example:
        >>> use_native_kernels()  # doctest: +SKIP
        True
    """
    usable = on
    if on:
        try:
            _register()
        except Eagle3Error as fault:
            log.log(logging.INFO if few_rows.suited() else logging.DEBUG, "no native kernels: %s", fault)
            usable = False
    few_rows.use(usable)
    return usable


@cache
def _register() -> None:
    """Build the kernels and hand them to XLA, once.

    Raises:
        Eagle3Error: what is in the way of it.
    """
    if not few_rows.suited():
        raise Eagle3Error(f"they are for one CPU device, not {jax.device_count()} of {jax.default_backend()}")
    named = os.environ.get("CXX") or "c++"
    compiler = shlex.split(named)
    if not compiler or shutil.which(compiler[0]) is None:
        raise Eagle3Error(f"no C++ compiler {named} to build them with")
    try:
        library = _library(compiler)
        for name in (few_rows.TARGET, few_queries.TARGET):
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    except subprocess.TimeoutExpired as error:
        raise Eagle3Error(f"{named} has not built them in {SECONDS} s") from error
    except subprocess.CalledProcessError as error:
        lines = error.stderr.splitlines()
        line = next((line for line in lines if "error" in line), lines[0] if lines else error)
        raise Eagle3Error(f"{named} cannot build them: {line}") from error
    except (OSError, RuntimeError) as error:  # RuntimeError: nobody knows the home folder
        raise Eagle3Error(f"they cannot be kept or loaded: {error}") from error


def _library(compiler: list[str]) -> ctypes.CDLL:
    """The library for this compiler, processor, JAX and source."""
    about = (*compiler, *FLAGS, jax.__version__, platform.machine(), _processor(), SOURCE.read_text())
    name = hashlib.sha256("\0".join(about).encode()).hexdigest()[:16]
    path = user_cache() / "native" / f"kernels-{name}.so"
    if path.exists():
        try:
            return ctypes.CDLL(str(path))
        except OSError:
            log.info("%s cannot be loaded here and is built anew", path)
    path.parent.mkdir(parents=True, exist_ok=True)
    log.info("building the native kernels with %s, once", shlex.join(compiler))
    # Built beside its place: another process may be at the same, and none may load half of it.
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        new = Path(folder) / path.name
        command = [*compiler, *FLAGS, f"-I{jax.ffi.include_dir()}", str(SOURCE), "-o", str(new)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS)
        new.replace(path)
    return ctypes.CDLL(str(path))


def _processor() -> str:
    """What the processor can do, as far as the system says."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor()
    lines = cpuinfo.read_text(errors="replace").splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
