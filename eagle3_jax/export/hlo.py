"""What an optimised HLO module says of itself: collectives, library calls, aliases, and buffers that should not be.

Reads XLA's text. Instructions inside fusions are no buffers: what they give stays in registers.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

TRITON = "__gpu$xla.gpu.triton"
"""The custom call of a kernel that is in the code objects; other custom calls need a library."""
COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_COPYING = ("copy", "copy-start", "transpose")
_SLICING = ("slice", "dynamic-slice", "gather")
_VIEWS = ("parameter", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "constant")
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\((.*)")
_ARRAY = re.compile(r"\b([a-z]+\d+(?:[a-z]\w*)?|pred)\[([\d,]*)\]")
_DTYPES = {"pred": "bool", "bf16": "bfloat16", "s": "int", "u": "uint", "f": "float", "c": "complex"}

Shape = tuple[str, tuple[int, ...]]
"""HLO's name of a dtype, and dimensions."""


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of a module.

    Attributes:
        name, opcode: its own. computation: the one it stands in. root: whether it is what that gives.
        shapes: the arrays it gives. text: what follows its opcode.
    """

    name: str
    opcode: str
    computation: str
    root: bool
    shapes: tuple[Shape, ...]
    text: str


class Module:
    """A parsed module.

    Attributes:
        aliases: how many outputs lie where an argument lay.
        instructions: all of them.
    """

    def __init__(self, text: str) -> None:
        head = text.partition("\n")[0]
        self.aliases = len(re.findall(r"(?:may|must)-alias", head))
        self.instructions = list(_instructions(text))
        fused = (re.search(r"calls=%?([\w.\-]+)", i.text) for i in self.instructions if i.opcode == "fusion")
        applied = (re.search(r"to_apply=%?([\w.\-]+)", i.text) for i in self.instructions if i.opcode != "call")
        self._inside = {match[1] for match in (*fused, *applied) if match}
        self._roots = {i.computation: i for i in self.instructions if i.root}
        self._named = {i.name: i for i in self.instructions}

    def collectives(self) -> dict[str, int]:
        """How many of each kind of collective there are."""
        names = (i.opcode.removesuffix("-start") for i in self.instructions)
        return counted(name for name in names if name in COLLECTIVES)

    def library_calls(self) -> dict[str, int]:
        """How many calls there are of each library function."""
        targets = (re.search(r'custom_call_target="([^"]*)"', i.text) for i in self._buffers(("custom-call",)))
        return counted(target[1] for target in targets if target and target[1] != TRITON)

    def copies(self, wanted: Iterable[Shape], slices: bool = False) -> dict[str, int]:
        """How many copies and transpositions there are of arrays of these shapes, by shape.

        Args:
            wanted: the shapes; their dimensions may come in any order. slices: those cut out of larger arrays too.
        """
        shapes = {_unordered(shape) for shape in wanted}
        opcodes = (*_COPYING, *(_SLICING if slices else ()))
        return self._found(lambda i, shape: self._opcode(i) in opcodes and _unordered(shape) in shapes)

    def widened(self, stored: Iterable[tuple[float, tuple[int, ...]]]) -> dict[str, int]:
        """How many arrays there are of a matrix's dimensions and more bits, by shape.

        Args:
            stored: bits an element and dimensions of the matrices as they are kept.
        """
        widths: dict[tuple[int, ...], float] = {}
        for bits, dims in stored:
            key = tuple(sorted(dims))
            widths[key] = max(widths.get(key, 0), bits)

        def wide(_: Instruction, shape: Shape) -> bool:
            known = widths.get(tuple(sorted(shape[1])))
            return known is not None and item_bits(shape[0]) > known

        return self._found(wide)

    def largest(self, count: int) -> list[dict[str, object]]:
        """The largest arrays that are computed, by shape."""
        sizes: dict[Shape, int] = {}
        names: dict[Shape, str] = {}
        for instruction in self._buffers():
            for shape in instruction.shapes:
                sizes[shape] = array_bytes(shape)
                names.setdefault(shape, instruction.name)
        best = sorted(sizes, key=lambda shape: -sizes[shape])[:count]
        return [{"shape": spelled(shape), "bytes": sizes[shape], "instruction": names[shape]} for shape in best]

    def _found(self, test: Callable[[Instruction, Shape], bool]) -> dict[str, int]:
        return counted(spelled(shape) for i in self._buffers() for shape in i.shapes if test(i, shape))

    def _buffers(self, opcodes: tuple[str, ...] | None = None) -> Iterator[Instruction]:
        """The instructions whose results lie in memory."""
        for i in self.instructions:
            wanted = i.opcode not in _VIEWS if opcodes is None else i.opcode in opcodes
            if wanted and i.computation not in self._inside:
                yield i

    def _opcode(self, instruction: Instruction) -> str:
        """The opcode, and of a fusion that of what it gives."""
        match = re.search(r"calls=%?([\w.\-]+)", instruction.text) if instruction.opcode == "fusion" else None
        root = self._roots.get(match[1]) if match else None
        while root is not None and root.opcode == "bitcast":
            operand = re.match(r"%?([\w.\-]+)", root.text)
            root = self._named.get(operand[1]) if operand else None
        return root.opcode if root else instruction.opcode


def _instructions(text: str) -> Iterator[Instruction]:
    computation = ""
    for line in text.splitlines():
        if line[:1] in ("%", "E") and line.endswith("{"):
            computation = line.removeprefix("ENTRY ").lstrip("%").split(" ", 1)[0]
        elif line.startswith(" ") and (match := _INSTRUCTION.match(line)):
            shapes = tuple((d, tuple(int(n) for n in dims.split(",") if n)) for d, dims in _ARRAY.findall(match[2]))
            root = line.lstrip().startswith("ROOT ")
            yield Instruction(match[1], match[3], computation, root, shapes, match[4])


def hlo_dtype(dtype: np.dtype) -> str:
    """HLO's name of a dtype, e.g. "f8e4m3fn" of float8_e4m3fn."""
    name = dtype.name
    for short, long in _DTYPES.items():
        if name == long:
            return short
        if name.startswith(long) and long != "bool":
            return short + name.removeprefix(long).replace("_", "")
    raise ValueError(f"{name} has no name in HLO")


def item_bits(dtype: str) -> int:
    """Bits of one element of an HLO dtype: the first number in its name."""
    match = re.search(r"\d+", dtype)
    return int(match[0]) if match else 8


def array_bytes(shape: Shape) -> int:
    """Bytes of an array."""
    return -(-math.prod(shape[1]) * item_bits(shape[0]) // 8)


def spelled(shape: Shape) -> str:
    """A shape as HLO writes it, e.g. "bf16[4,8]"."""
    return f"{shape[0]}[{','.join(map(str, shape[1]))}]"


def _unordered(shape: Shape) -> Shape:
    return shape[0], tuple(sorted(shape[1]))


def counted(*found: Iterable[str] | Mapping[str, int]) -> dict[str, int]:
    """How often each name occurs, all in all, in the order of the names.

    Args:
        found: names, or how often each of them was found before.
    """
    total = collections.Counter[str]()
    for names in found:
        total.update(names)
    return dict(sorted(total.items()))
