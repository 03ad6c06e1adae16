"""AMD's build of the XLA compiler from PyPI, and stand-ins for the ROCm libraries it links against.

The wheel `jax-rocm7-pjrt` holds the whole compiler, but loads only where the libraries of a ROCm installation are. A
stand-in exports what the compiler imports and ends the process when it is called: a compilation that finishes has
asked no GPU for anything.
"""

import dataclasses
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import jax

from eagle3_jax.checkpoint.files import user_cache
from eagle3_jax.checkpoint.folders import atomic_folder
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.export.elf import Elf, Import

PACKAGE = "jax-rocm7-pjrt"
CALLED = "stand-in called:"
"""What a stand-in prints before it ends the process; the name of the function follows."""
_PLUGIN = "jax_plugins/xla_rocm7/xla_rocm_plugin.so"
_SYSTEM = re.compile(r"ld-linux|lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s)\.so")
_ON_LOADING = {
    "__hipRegisterFatBinary": "void *{}(void *binary) {{ static void *handle[1]; return handle; }}",
    "__hipRegisterFunction": "void {}(void) {{}}",
    "__hipRegisterVar": "void {}(void) {{}}",
    "__hipUnregisterFatBinary": "void {}(void) {{}}",
    "rocprofiler_force_configure": "int {}(void *configure) {{ return 0; }}",
}
"""Calls made while the compiler is loaded and unloaded: they announce kernels and a profiler, and do nothing here."""


@dataclasses.dataclass(frozen=True)
class Toolchain:
    """The compiler, ready to load.

    Attributes:
        plugin: the compiler. stubs: the stand-ins, to be loaded before it. version: the wheel's.
    """

    plugin: Path
    stubs: tuple[Path, ...]
    version: str


def prepare(version: str = jax.__version__) -> Toolchain:
    """Fetch the compiler and build the stand-ins, unless they lie in the user's cache already.

    Args:
        version: of the wheel; the one that belongs to the installed JAX.

    Raises:
        Eagle3Error: the wheel cannot be installed, or there is no C compiler.
    """
    folder = user_cache() / "rocm" / version
    if not (folder / "pjrt" / _PLUGIN).is_file():
        _install(folder / "pjrt", version)
    plugin = folder / "pjrt" / _PLUGIN
    if not (folder / "stubs").is_dir():
        _build_stubs(folder / "stubs", Elf(plugin))
    stubs = sorted(path for path in (folder / "stubs").iterdir() if ".so" in path.name)
    return Toolchain(plugin, tuple(stubs), version)


def _install(folder: Path, version: str) -> None:
    requirement = f"{PACKAGE}=={version}"
    with atomic_folder(folder) as place:
        # Outside of the environment: in it, every import of JAX would look for a card.
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(place), requirement]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or not (place / _PLUGIN).is_file():
            lines = [line for line in done.stderr.splitlines() if "ERROR" in line or "No module named" in line]
            why = lines[0] if lines else "the wheel holds no compiler"
            raise Eagle3Error(f"{requirement} cannot be installed from the package index: {why}")


def _build_stubs(folder: Path, plugin: Elf) -> None:
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    if compiler is None:
        raise Eagle3Error("no C compiler for the stand-ins of the ROCm libraries; install gcc or clang")
    libraries = [name for name in plugin.needed() if not _SYSTEM.match(name)]
    wanted: dict[str, list[Import]] = {name: [] for name in libraries}
    for symbol in plugin.imports():
        # Without a version any library may have it, and C++'s own has the types of its exceptions.
        if symbol.library in wanted or (symbol.library is None and not symbol.name.startswith("_ZTI")):
            wanted[symbol.library or libraries[0]].append(symbol)
    with atomic_folder(folder) as place:
        for name, symbols in wanted.items():
            _build_stub(compiler, place / name, symbols)


def _build_stub(compiler: str, library: Path, symbols: Iterable[Import]) -> None:
    lines = [
        "#include <stdio.h>",
        "#include <stdlib.h>",
        f'static void *end(const char *name) {{ fprintf(stderr, "{CALLED} %s\\n", name); abort(); }}',
    ]
    versions: dict[str, list[str]] = {}
    for symbol in symbols:
        known = _ON_LOADING.get(symbol.name, 'void *{0}(void) {{ return end("{0}"); }}')
        lines.append(known.format(symbol.name))
        if symbol.version is not None:
            versions.setdefault(symbol.version, []).append(symbol.name)
    source, script = library.with_name(f"{library.name}.c"), library.with_name(f"{library.name}.map")
    source.write_text("\n".join(lines) + "\n")
    script.write_text("".join(f"{name} {{ global: {'; '.join(names)}; }};\n" for name, names in versions.items()))
    flags = ["-w", "-O1", "-shared", "-fPIC", "-fno-builtin", f"-Wl,-soname,{library.name}"]
    flags += [f"-Wl,--version-script={script}"] if versions else []
    command = [compiler, *flags, "-o", str(library), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Eagle3Error(f"{compiler} cannot build a stand-in for {library.name}: {done.stderr.strip()[-300:]}")
    source.unlink()
    script.unlink()
