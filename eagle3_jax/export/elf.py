"""Just enough of the ELF format (64 bits, little endian) to stub a library's imports and to name code objects.

Sources: the System V ABI, chapters 4 and 5; the Linux Standard Base (symbol versions); LLVM's AMDGPU usage guide.
"""

import dataclasses
import mmap
import struct
from pathlib import Path

from eagle3_jax.errors import Eagle3Error

AMDGPU = 224
"""`e_machine` of AMD's code objects."""
_DYNAMIC, _DYNSYM, _VERNEED, _VERSYM, _SYMTAB = 6, 11, 0x6FFFFFFE, 0x6FFFFFFF, 2
_NEEDED, _GLOBAL = 1, 1


@dataclasses.dataclass(frozen=True)
class Import:
    """A symbol that a library takes from another.

    Attributes:
        name: the symbol. library, version: where it is versioned, the library it must come from and its version.
    """

    name: str
    library: str | None
    version: str | None


class Elf:
    """An ELF file.

    Attributes:
        machine: `e_machine`. flags: `e_flags`.

    Raises:
        Eagle3Error: another kind of file.
    """

    def __init__(self, path: Path) -> None:
        with open(path, "rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if self._data[:6] != b"\x7fELF\x02\x01":
            raise Eagle3Error(f"{path}: not an ELF file of 64 bits; the download may be damaged")
        (self.machine,) = struct.unpack_from("<H", self._data, 18)
        (start, self.flags) = struct.unpack_from("<QI", self._data, 40)
        size, count = struct.unpack_from("<HH", self._data, 58)
        # Of a section: type, offset, size, link.
        fields = [struct.unpack_from("<IIQQQQII", self._data, start + i * size) for i in range(count)]
        self._sections = [(f[1], f[4], f[5], f[6]) for f in fields]

    def needed(self) -> list[str]:
        """The libraries that must be loaded with this one."""
        found = []
        for offset, size, names in self._of_type(_DYNAMIC):
            for at in range(offset, offset + size, 16):
                tag, value = struct.unpack_from("<QQ", self._data, at)
                if tag == _NEEDED:
                    found.append(self._text(names + value))
        return found

    def imports(self) -> list[Import]:
        """The symbols this library must get from others; weak ones, which may be missing, are left out."""
        versions, found = self._versions(), []
        table = next((offset for offset, _, _ in self._of_type(_VERSYM)), None)
        for offset, size, names in self._of_type(_DYNSYM):
            for i in range(1, size // 24):
                name, info, _, section = struct.unpack_from("<IBBH", self._data, offset + i * 24)
                if section == 0 and info >> 4 == _GLOBAL:
                    index = 0 if table is None else struct.unpack_from("<H", self._data, table + 2 * i)[0] & 0x7FFF
                    found.append(Import(self._text(names + name), *versions.get(index, (None, None))))
        return found

    def symbols(self) -> list[str]:
        """Names of all symbols defined here."""
        found = set()
        for kind in (_DYNSYM, _SYMTAB):
            for offset, size, names in self._of_type(kind):
                for i in range(1, size // 24):
                    name, _, _, section = struct.unpack_from("<IBBH", self._data, offset + i * 24)
                    if section != 0:
                        found.add(self._text(names + name))
        return sorted(found)

    def find(self, start: bytes, end: bytes = b"\0") -> str:
        """The first text in the file that begins with `start`, up to `end`; "" if there is none."""
        at = self._data.find(start)
        return "" if at < 0 else self._data[at : self._data.find(end, at)].decode("latin-1")

    def _versions(self) -> dict[int, tuple[str, str]]:
        """Library and version of each version index."""
        found = {}
        for offset, _, names in self._of_type(_VERNEED):
            at = offset
            while True:
                _, count, file, first, following = struct.unpack_from("<HHIII", self._data, at)
                entry = at + first
                for _ in range(count):
                    _, _, index, name, step = struct.unpack_from("<IHHII", self._data, entry)
                    found[index] = (self._text(names + file), self._text(names + name))
                    entry += step
                if not following:
                    break
                at += following
        return found

    def _of_type(self, kind: int) -> list[tuple[int, int, int]]:
        """(offset, size, offset of its strings) of each section of a type."""
        return [(o, size, self._sections[link][1]) for t, o, size, link in self._sections if t == kind]

    def _text(self, offset: int) -> str:
        return self._data[offset : self._data.find(b"\0", offset)].decode()
