"""ELF files and the stand-ins, against libraries built here by a C compiler."""

import ctypes
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from eagle3_jax.errors import Eagle3Error
from eagle3_jax.export import toolchain
from eagle3_jax.export.elf import Elf, Import

CC = shutil.which("cc") or shutil.which("gcc") or "cc"


def _library(path: Path, source: str, *flags: str) -> Path:
    code = path.with_name(f"{path.name}.c")
    code.write_text(source)
    subprocess.run([CC, "-shared", "-fPIC", "-w", "-o", str(path), str(code), *flags], check=True)
    return path


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that needs two others, one of which has versions; neither is where it could be found."""
    folder = tmp_path_factory.mktemp("elf")
    (folder / "map").write_text("FAR_1.0 { global: far_away; };\n")
    versioned = [f"-Wl,--version-script={folder / 'map'}", "-Wl,-soname,libfar.so.7"]
    far = _library(folder / "libfar.so.7", "int far_away(void) { return 1; }", *versioned)
    near = _library(folder / "libnear.so.1", "int nearby(void) { return 2; }", "-Wl,-soname,libnear.so.1")
    source = """
        int far_away(void), nearby(void), perhaps(void) __attribute__((weak));
        int answer(void) { return 42; }
        int ask(void) { return far_away() + nearby() + (perhaps ? perhaps() : 0); }
    """
    made = _library(folder / "plugin.so", source, str(far), str(near), "-Wl,--allow-shlib-undefined")
    far.unlink()
    near.unlink()
    return made


def test_what_a_library_needs_and_imports(plugin: Path) -> None:
    elf = Elf(plugin)
    assert [name for name in elf.needed() if not name.startswith("libc.")] == ["libfar.so.7", "libnear.so.1"]
    ours = {i for i in elf.imports() if not (i.library or "").startswith("libc.")}
    assert ours == {Import("far_away", "libfar.so.7", "FAR_1.0"), Import("nearby", None, None)}
    assert {"answer", "ask"} <= set(elf.symbols()) and "nearby" not in elf.symbols()
    assert elf.machine == struct.unpack_from("<H", plugin.read_bytes(), 18)[0]


def test_stand_ins_let_a_library_load_and_end_the_process_when_called(plugin: Path, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"libfar\.so\.7"):
        ctypes.CDLL(str(plugin))
    toolchain._build_stubs(tmp_path / "stubs", Elf(plugin))
    stubs = sorted(map(str, (tmp_path / "stubs").iterdir()))
    assert [Path(path).name for path in stubs] == ["libfar.so.7", "libnear.so.1"]
    program = """
import ctypes, sys
*stubs, plugin = sys.argv[1:]
kept = [ctypes.CDLL(path, ctypes.RTLD_GLOBAL) for path in stubs]
library = ctypes.CDLL(plugin)
print(library.answer(), flush=True)
library.ask()
"""
    done = subprocess.run([sys.executable, "-c", program, *stubs, str(plugin)], capture_output=True, text=True)
    assert done.stdout == "42\n"
    assert done.returncode != 0
    assert f"{toolchain.CALLED} " in done.stderr and ("far_away" in done.stderr or "nearby" in done.stderr)


def test_what_is_no_elf_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.so").write_bytes(b"not a library")
    with pytest.raises(Eagle3Error, match=r"x\.so: not an ELF file of 64 bits"):
        Elf(tmp_path / "x.so")


def test_without_a_compiler_one_line_says_what_to_install(plugin: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(Eagle3Error, match=r"no C compiler .*install gcc or clang"):
        toolchain._build_stubs(tmp_path / "stubs", Elf(plugin))
    assert not (tmp_path / "stubs").exists()


def test_a_wheel_that_cannot_be_had_is_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(Eagle3Error, match=r"jax-rocm7-pjrt==0\.0\.0 cannot be installed.*from versions: none"):
        toolchain.prepare("0.0.0")
    assert not list((tmp_path / "eagle3_jax" / "rocm" / "0.0.0").iterdir())
