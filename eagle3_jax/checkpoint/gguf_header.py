"""The header of a GGUF file, read directly and checked against the file's size at every step.

Not by `gguf.GGUFReader`: it makes NumPy objects of every vocabulary entry (1.7 s for 49k tokens where this
takes 0.06 s), trusts every count in the file and raises whatever NumPy raises.
Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import dataclasses
import math
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from eagle3_jax.checkpoint.files import quote
from eagle3_jax.errors import Eagle3Error

MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4


@dataclasses.dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor lies in the file and how it is packed.

    Attributes:
        name: its GGUF name.
        shape: slowest dimension first, as NumPy counts.
        kind: its `gguf.GGMLQuantizationType`.
        begin, nbytes: its bytes in the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: Any
    begin: int
    nbytes: int


class _Cursor:
    """Reads a header front to back; every length is checked against the file before it is used."""

    def __init__(self, buffer: mmap.mmap, path: Path) -> None:
        self.buffer, self.path, self.at = buffer, path, 0

    def fail(self, fault: str) -> Eagle3Error:
        return Eagle3Error(f"{self.path}: not a whole GGUF file: {fault} (at byte {self.at}); fetch it again")

    def take(self, count: int) -> bytes:
        if count > len(self.buffer) - self.at:
            raise self.fail(f"{count} bytes are announced, {len(self.buffer) - self.at} are left")
        self.at += count
        return self.buffer[self.at - count : self.at]

    def one(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def count(self, smallest: int, what: str) -> int:
        """A u64 count of items that take at least `smallest` bytes each."""
        count = self.one("Q")
        if count * smallest > len(self.buffer) - self.at:
            raise self.fail(f"{count} {what} are announced, {len(self.buffer) - self.at} bytes are left")
        return count

    def string(self) -> str:
        data = self.take(self.one("Q"))
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail("a string is not UTF-8") from error

    def strings(self, count: int) -> list[str]:
        # Written out: a vocabulary and its merges are 100,000 strings, and start-up waits for them.
        buffer, at, end = self.buffer, self.at, len(self.buffer)
        unpack = struct.Struct("<Q").unpack_from
        result = []
        try:
            for _ in range(count):
                begin = at + 8
                at = begin + unpack(buffer, at)[0]
                if at > end:
                    raise self.fail("a string of an array is longer than the file")
                result.append(buffer[begin:at].decode("utf-8"))
        except (struct.error, UnicodeDecodeError) as error:
            raise self.fail("an array of strings is cut off or not UTF-8") from error
        self.at = at
        return result

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.one(_SCALARS[kind])
        if kind != _ARRAY:
            raise self.fail(f"metadata type {kind} is unknown")
        item = self.one("I")
        if item == _STRING:
            return self.strings(self.count(8, "strings"))
        if item not in _SCALARS:
            raise self.fail(f"an array of metadata type {item} is not supported")
        dtype = np.dtype(_SCALARS[item]).newbyteorder("<")
        count = self.count(dtype.itemsize, "array items")
        return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()


def read_header(buffer: mmap.mmap, path: Path, gguf: ModuleType) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    """Read the whole header.

    Args:
        buffer: the mapped file, which begins with `MAGIC`.
        path: its name for messages.
        gguf: the `gguf` package.

    Returns:
        The metadata (arrays as lists) and the tensors, by their names in the file.

    Raises:
        Eagle3Error: truncated or malformed, of another version, or a tensor type that gguf cannot dequantise.
    """
    cursor = _Cursor(buffer, path)
    cursor.at = len(MAGIC)
    version = cursor.one("I")
    if version not in (2, 3):
        kind = "big-endian" if version & 0xFFFF == 0 else f"version {version}"
        raise Eagle3Error(f"{path}: a {kind} GGUF file; little-endian version 2 or 3 is needed")
    tensor_count, pair_count = cursor.one("Q"), cursor.one("Q")
    # The least that one tensor and one pair take: an empty name, its type, one value.
    if tensor_count * 32 + pair_count * 13 > len(buffer) - cursor.at:
        raise cursor.fail(f"{tensor_count} tensors and {pair_count} metadata pairs are announced")
    metadata: dict[str, Any] = {}
    for _ in range(pair_count):
        key = cursor.string()
        if key in metadata:
            raise cursor.fail(f"metadata key {quote(key)} appears twice")
        metadata[key] = cursor.value(cursor.one("I"))
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= 2**20 or alignment & (alignment - 1):
        raise cursor.fail(f"general.alignment is {quote(alignment)}, not a power of two")
    tensors: dict[str, GGUFTensor] = {}
    for _ in range(tensor_count):
        tensor = _read_tensor(cursor, alignment, gguf)
        if tensor.name in tensors:
            raise cursor.fail(f"tensor {quote(tensor.name)} appears twice")
        tensors[tensor.name] = tensor
    start = cursor.at + -cursor.at % alignment
    tensors = {t.name: dataclasses.replace(t, begin=start + t.begin) for t in tensors.values()}
    _check_placement(cursor, tensors)
    return metadata, tensors


def _read_tensor(cursor: _Cursor, alignment: int, gguf: ModuleType) -> GGUFTensor:
    """One tensor description; `begin` still counts from the start of the data."""
    name = cursor.string()
    dims = cursor.one("I")
    if not 1 <= dims <= _MAX_DIMS:
        raise cursor.fail(f"tensor {quote(name)} has {dims} dimensions")
    shape = tuple(cursor.one("Q") for _ in range(dims))[::-1]
    code, begin = cursor.one("I"), cursor.one("Q")
    kind = _weight_kind(code, gguf)
    if kind is None:
        raise Eagle3Error(
            f"{cursor.path}: tensor {quote(name)} has GGML type {code}, "
            "which gguf cannot dequantise; use a file of another quantisation"
        )
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    if not all(shape) or shape[-1] % block:
        raise cursor.fail(f"tensor {quote(name)} of shape {shape} does not divide into blocks of {block}")
    if begin % alignment:
        raise cursor.fail(f"tensor {quote(name)} begins at {begin}, which is not a multiple of {alignment}")
    return GGUFTensor(name, shape, kind, begin, math.prod(shape) // block * block_bytes)


def _weight_kind(code: int, gguf: ModuleType) -> Any:
    """The GGML type of that number if gguf can turn it into float32, else None."""
    try:
        kind = gguf.GGMLQuantizationType(code)
        block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
        with np.errstate(all="ignore"):
            gguf.quants.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
    except (ValueError, KeyError, NotImplementedError):
        return None
    return kind


def _check_placement(cursor: _Cursor, tensors: Mapping[str, GGUFTensor]) -> None:
    end = 0
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.begin):
        if tensor.begin < end:
            raise cursor.fail(f"tensor {quote(tensor.name)} overlaps the one before it")
        end = tensor.begin + tensor.nbytes
        if end > len(cursor.buffer):
            raise cursor.fail(f"tensor {quote(tensor.name)} ends {end - len(cursor.buffer)} bytes past the file")
