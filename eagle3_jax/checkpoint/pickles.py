"""Tensors of a `pytorch_model.bin` without PyTorch and without running anything that is in the file.

The file is a ZIP archive: NAME/data.pkl is a pickle that describes the tensors, NAME/data/KEY holds the bytes of
one storage. A pickle is a program for a stack machine. The machine here knows the opcodes that `torch.save`
writes, and of the functions a pickle may call only the two that describe tensors and dicts, which it does not
call either: it notes down what they would build. (`pickle.Unpickler` with a restricted `find_class` would not
do: a damaged memo index makes it claim gigabytes.)
"""

import dataclasses
import math
import os
import pickletools
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_jax.checkpoint.files import quote, reason
from eagle3_jax.checkpoint.tensors import DTYPES, TensorSource
from eagle3_jax.errors import Eagle3Error

PICKLE_FILE = "pytorch_model.bin"

_STORAGES = {
    f"torch {kind}Storage": name
    for kind, name in {
        "Double": "F64",
        "Float": "F32",
        "Half": "F16",
        "BFloat16": "BF16",
        "Long": "I64",
        "Int": "I32",
        "Short": "I16",
        "Char": "I8",
        "Byte": "U8",
        "Bool": "BOOL",
    }.items()
}
"""What a pickle calls a storage of each dtype, and what safetensors calls it."""

_TENSOR = ("torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter")
_DICT = "collections OrderedDict"
_MOST_DIMS = 32
_MOST_MEMBERS = 100_000
_LONGEST_PICKLE = 10_000_000
_FIX = "save it again with a current torch.save, or convert it to safetensors"


@dataclasses.dataclass(frozen=True)
class _Global:
    """A function or class that the pickle names; never imported."""

    name: str


@dataclasses.dataclass(frozen=True)
class _Storage:
    """A run of elements in the archive."""

    key: str
    dtype: str
    length: int


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """A strided view of a storage; offset and strides count elements."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class PickleSource(TensorSource):
    """The tensors of a file that `torch.save` wrote from a state dict (PyTorch 1.6 or later).

    A storage is read, with its checksum, once one of its tensors is asked for.

    Args:
        path: the file.

    Raises:
        Eagle3Error: the file cannot be read; is no such archive; its pickle has an opcode or names a function
            that no state dict needs; or a tensor does not lie inside of its storage.

    Example:
        >>> PickleSource("pytorch_model.bin").read("fc.weight")  # doctest: +SKIP
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        with self._archive() as archive:
            members = archive.namelist()
            found = [name for name in members if name.count("/") == 1 and name.endswith("/data.pkl")]
            if len(found) != 1 or len(set(members)) != len(members) or len(members) > _MOST_MEMBERS:
                raise Eagle3Error(f"{self.path}: not an archive with one data.pkl in it; {_FIX}")
            self._folder = found[0].removesuffix("data.pkl")
            order = f"{self._folder}byteorder"
            if order in members and self._member(archive, order, 16) != b"little":
                raise Eagle3Error(f"{self.path}: its numbers are not little-endian; {_FIX}")
            described = _run(self._member(archive, found[0], _LONGEST_PICKLE), self.path)
        if not isinstance(described, dict) or not all(isinstance(name, str) for name in described):
            raise Eagle3Error(f"{self.path}: holds no state dict (names to tensors) but {quote(described)}; {_FIX}")
        if other := [name for name, value in described.items() if not isinstance(value, _Tensor)]:
            raise Eagle3Error(f"{self.path}: {quote(other[0])} is no tensor but {quote(described[other[0]])}; {_FIX}")
        self._tensors: dict[str, _Tensor] = described
        for name, tensor in described.items():
            _check_tensor(tensor, f"{self.path}: tensor {quote(name)}")

    @contextmanager
    def _archive(self) -> Iterator[zipfile.ZipFile]:
        if not os.path.isfile(self.path):
            raise Eagle3Error(f"{self.path}: no such file; give the path of a checkpoint file")
        try:
            with zipfile.ZipFile(self.path) as archive:
                yield archive
        # What zipfile lets through of a damaged archive is not all BadZipFile.
        except (OSError, ValueError, LookupError, NotImplementedError, RuntimeError, EOFError) as error:
            if isinstance(error, Eagle3Error):
                raise
            raise Eagle3Error(f"{self.path}: cannot be read: {reason(error)}; {_FIX}") from error
        except (zipfile.BadZipFile, zlib.error) as error:
            raise Eagle3Error(f"{self.path}: damaged, or older than PyTorch 1.6: {reason(error)}; {_FIX}") from error

    def _member(self, archive: zipfile.ZipFile, name: str, most: int) -> bytes:
        info = archive.getinfo(name)
        if info.compress_type != zipfile.ZIP_STORED or info.file_size > most:
            raise Eagle3Error(f"{self.path}: {quote(name)} is compressed or too large; {_FIX}")
        return archive.read(info)

    def _tensor(self, name: str) -> _Tensor:
        if name not in self._tensors:
            raise Eagle3Error(f"{self.path}: no tensor {quote(name)} in this file")
        return self._tensors[name]

    def names(self) -> list[str]:
        """Every tensor's name, in the file's order."""
        return list(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape. Raises Eagle3Error for an unknown name."""
        return self._tensor(name).shape

    def dtype(self, name: str) -> np.dtype:
        """The tensor's dtype. Raises Eagle3Error for an unknown name."""
        return DTYPES[self._tensor(name).storage.dtype]

    def format(self, name: str) -> str:
        """The dtype's safetensors name. Raises Eagle3Error for an unknown name."""
        return self._tensor(name).storage.dtype

    def read(self, name: str) -> np.ndarray:
        """One tensor.

        Raises:
            Eagle3Error: unknown name; a storage that is missing, damaged or of another size than described; or
                a BOOL byte other than 0 and 1.
        """
        tensor, dtype = self._tensor(name), self.dtype(name)
        needed = tensor.storage.length * dtype.itemsize
        member = f"{self._folder}data/{tensor.storage.key}"
        with self._archive() as archive:
            data = self._member(archive, member, needed)
        if len(data) != needed:
            raise Eagle3Error(f"{self.path}: storage {quote(member)} has {len(data)} bytes; {needed} are needed")
        if dtype == np.bool_ and data and max(data) > 1:
            raise Eagle3Error(f"{self.path}: tensor {quote(name)} is BOOL but holds bytes other than 0 and 1")
        flat = np.frombuffer(data, dtype)[tensor.offset :]
        strides = [stride * dtype.itemsize for stride in tensor.strides]
        return np.lib.stride_tricks.as_strided(flat, tensor.shape, strides, writeable=False)


def _check_tensor(tensor: _Tensor, where: str) -> None:
    """The view must lie inside of its storage, and not repeat its elements."""
    count = math.prod(tensor.shape)
    last = tensor.offset + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.strides, strict=True))
    if count > tensor.storage.length or (count and last >= tensor.storage.length):
        raise Eagle3Error(f"{where}: shape {quote(tensor.shape)} does not fit its {tensor.storage.length} elements")


def _run(program: bytes, path: Path) -> Any:
    """What a pickle describes, in `dict`, `tuple` and the classes above."""
    machine = _Machine(path)
    try:
        for opcode, argument, _ in pickletools.genops(program):
            if opcode.name == "STOP":
                break
            if (step := _STEPS.get(opcode.name)) is None:
                raise machine.refuse(f"opcode {opcode.name}")
            step(machine, argument)
        (result,) = machine.stack
    except (ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
        if isinstance(error, Eagle3Error):
            raise
        raise Eagle3Error(f"{path}: its pickle is damaged: {error}; {_FIX}") from error
    return result


class _Machine:
    """The pickle machine's stack and memo."""

    def __init__(self, path: Path) -> None:
        self.path, self.stack, self.memo = path, list[Any](), dict[int, Any]()

    def refuse(self, what: str) -> Eagle3Error:
        return Eagle3Error(f"{self.path}: its pickle has {what}, which no state dict needs; it is not run. {_FIX}")

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def since_mark(self) -> list[Any]:
        at = len(self.stack) - 1 - self.stack[::-1].index(_MARK)
        items = self.stack[at + 1 :]
        del self.stack[at:]
        return items

    def tuple_of(self, count: int) -> None:
        if len(self.stack) < count:
            raise ValueError("a tuple of items that are not there")
        self.stack[len(self.stack) - count :] = [tuple(self.stack[len(self.stack) - count :])]

    def set_items(self, items: list[Any]) -> None:
        if not isinstance(self.stack[-1], dict) or len(items) % 2:
            raise ValueError("items of something that is no dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if key in self.stack[-1]:
                raise ValueError(f"{quote(key)} appears twice")
            self.stack[-1][key] = value

    def name(self, text: str) -> None:
        if text not in (*_STORAGES, *_TENSOR, _DICT):
            raise self.refuse(f"the name {quote(text.replace(' ', '.'))}")
        self.push(_Global(text))

    def storage(self) -> None:
        kind, dtype, key, _, length = self.stack.pop()
        known = isinstance(dtype, _Global) and dtype.name in _STORAGES
        if kind != "storage" or not known or not isinstance(key, str) or not _is_size(length):
            raise ValueError(f"storage {quote(key)} is not described as torch.save does")
        self.push(_Storage(key, _STORAGES[dtype.name], length))

    def call(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, _Global) or not isinstance(arguments, tuple):
            raise ValueError("a call of something that is no function")
        if function.name == _DICT and not arguments:
            self.push({})
        elif function.name == _TENSOR[0]:
            self.push(_view(*arguments[:4]))
        elif function.name == _TENSOR[1] and isinstance(arguments[0], _Tensor):
            self.push(arguments[0])
        else:
            raise ValueError(f"a call of {function.name} that torch.save does not write")

    def build(self) -> None:
        """Attributes of a dict (torch keeps module versions there) say nothing about tensors."""
        self.stack.pop()
        if not isinstance(self.stack[-1], dict):
            raise ValueError("attributes of something that is no dict")


def _view(storage: Any, offset: Any, shape: Any, strides: Any) -> _Tensor:
    sizes = isinstance(shape, tuple) and isinstance(strides, tuple) and len(shape) == len(strides) <= _MOST_DIMS
    if not isinstance(storage, _Storage) or not sizes or not all(map(_is_size, (offset, *shape, *strides))):
        raise ValueError("a tensor that is not described as torch.save does")
    return _Tensor(storage, offset, shape, strides)


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**48


_MARK = object()
_STEPS: dict[str, Callable[[_Machine, Any], Any]] = {
    "PROTO": lambda machine, argument: None,
    "FRAME": lambda machine, argument: None,
    "MARK": lambda machine, argument: machine.push(_MARK),
    "NONE": lambda machine, argument: machine.push(None),
    "NEWTRUE": lambda machine, argument: machine.push(True),
    "NEWFALSE": lambda machine, argument: machine.push(False),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE"), _Machine.push),
    "EMPTY_DICT": lambda machine, argument: machine.push({}),
    "EMPTY_TUPLE": lambda machine, argument: machine.push(()),
    "TUPLE": lambda machine, argument: machine.push(tuple(machine.since_mark())),
    "TUPLE1": lambda machine, argument: machine.tuple_of(1),
    "TUPLE2": lambda machine, argument: machine.tuple_of(2),
    "TUPLE3": lambda machine, argument: machine.tuple_of(3),
    "SETITEM": lambda machine, argument: machine.set_items([machine.stack.pop(-2), machine.stack.pop()]),
    "SETITEMS": lambda machine, argument: machine.set_items(machine.since_mark()),
    "GLOBAL": lambda machine, argument: machine.name(argument),
    "BINPERSID": lambda machine, argument: machine.storage(),
    "REDUCE": lambda machine, argument: machine.call(),
    "BUILD": lambda machine, argument: machine.build(),
    **dict.fromkeys(
        ("BINPUT", "LONG_BINPUT"), lambda machine, argument: machine.memo.update({argument: machine.stack[-1]})
    ),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda machine, argument: machine.push(machine.memo[argument])),
}
"""What each opcode does. All others are refused, those that import or call among them."""
