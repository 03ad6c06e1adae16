"""Tensor containers: one interface over safetensors files and folders, and atomic writers.

Headers are checked in full before any tensor is touched, so a truncated or lying file is refused when it is
opened. The data is mapped, not read: a tensor costs memory only once somebody looks at it.
"""

import dataclasses
import json
import math
import mmap
import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from eagle3_jax.checkpoint.files import atomic_file, map_file, parse_json, quote, read_json
from eagle3_jax.checkpoint.files import write_json_atomic as write_json_atomic
from eagle3_jax.errors import Eagle3Error

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

DTYPES: dict[str, np.dtype] = {
    name: np.dtype(kind)
    for name, kind in {
        "F64": np.float64,
        "F32": np.float32,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
        "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
        "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
        "I64": np.int64,
        "I32": np.int32,
        "I16": np.int16,
        "I8": np.int8,
        "U64": np.uint64,
        "U32": np.uint32,
        "U16": np.uint16,
        "U8": np.uint8,
        "BOOL": np.bool_,
    }.items()
}
"""Safetensors dtype names and what they are in NumPy."""

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER = 100_000_000  # the limit of the safetensors library itself
_MAX_DIMS = 32


class TensorSource(ABC):
    """Named tensors in a checkpoint, read one at a time.

    Attributes:
        path: the file or folder they come from.
    """

    path: Path

    @abstractmethod
    def names(self) -> list[str]:
        """Every tensor's name, in the container's order."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """The shape `read` will return. Raises Eagle3Error for an unknown name."""

    @abstractmethod
    def dtype(self, name: str) -> np.dtype:
        """The dtype `read` will return. Raises Eagle3Error for an unknown name."""

    @abstractmethod
    def format(self, name: str) -> str:
        """The container's own word for how a tensor is stored ("BF16", "F8_E4M3", "Q4_1")."""

    @abstractmethod
    def read(self, name: str) -> np.ndarray:
        """One tensor; where possible a read-only view of the mapped file.

        Raises:
            Eagle3Error: unknown name, or values that its dtype does not allow.
        """

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return len(self.names())

    def __contains__(self, name: object) -> bool:
        return name in self.names()


@dataclasses.dataclass(frozen=True)
class _Entry:
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsSource(TensorSource):
    """One safetensors file (format: github.com/huggingface/safetensors), every dtype of `DTYPES`.

    Attributes:
        metadata: the file's `__metadata__`, str to str.

    Example:
        >>> SafetensorsSource("model.safetensors").read("model.norm.weight")  # doctest: +SKIP

    Args:
        path: the file.

    Raises:
        Eagle3Error: the file cannot be read, or its header is malformed or does not describe exactly the
            bytes that follow it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._buffer = map_file(self.path)
        header, self._start = _read_header(self._buffer, self.path)
        self.metadata = _check_metadata(header.pop("__metadata__", {}), self.path)
        self._entries = {name: _check_entry(name, entry, self.path) for name, entry in header.items()}
        _check_coverage(self._entries, len(self._buffer) - self._start, self.path)

    def names(self) -> list[str]:
        """Every tensor's name, in the header's order."""
        return list(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise Eagle3Error(f"{self.path}: no tensor {quote(name)} in this file")
        return self._entries[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape. Raises Eagle3Error for an unknown name."""
        return self._entry(name).shape

    def dtype(self, name: str) -> np.dtype:
        """The tensor's dtype, float8 included. Raises Eagle3Error for an unknown name."""
        return DTYPES[self._entry(name).dtype]

    def format(self, name: str) -> str:
        """The dtype's safetensors name. Raises Eagle3Error for an unknown name."""
        return self._entry(name).dtype

    def read(self, name: str) -> np.ndarray:
        """One tensor as a read-only view of the file, or a copy where the file does not align it.

        Raises:
            Eagle3Error: unknown name, or a BOOL byte other than 0 and 1.
        """
        entry = self._entry(name)
        dtype = DTYPES[entry.dtype]
        count = entry.end - entry.begin
        raw = np.frombuffer(self._buffer, np.uint8, count, self._start + entry.begin)
        if raw.ctypes.data % dtype.alignment:
            raw = raw.copy()
        if dtype == np.bool_ and count and raw.max() > 1:
            raise Eagle3Error(f"{self.path}: tensor {quote(name)} is BOOL but holds bytes other than 0 and 1")
        return raw.view(dtype).reshape(entry.shape)


class ShardedSource(TensorSource):
    """A folder of safetensors shards behind a `model.safetensors.index.json`.

    Args:
        path: the folder.

    Raises:
        Eagle3Error: bad index, a shard that is missing or outside the folder, or shards that do not hold
            exactly what the index says.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        index = self.path / INDEX_FILE
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise Eagle3Error(f"{index}: no weight_map; a non-empty object of tensor name to file is needed")
        by_shard: dict[str, set[str]] = {}
        for name, shard in weight_map.items():
            by_shard.setdefault(_check_shard_name(shard, name, index), set()).add(name)
        shards = {shard: self._open_shard(shard, names, index) for shard, names in by_shard.items()}
        self._home = {name: shards[shard] for name, shard in weight_map.items()}

    def _open_shard(self, shard: str, indexed: set[str], index: Path) -> SafetensorsSource:
        file = self.path / shard
        if not os.path.exists(file):
            raise Eagle3Error(f"{index}: shard {quote(shard)} is missing; it should hold {quote(min(indexed))}")
        source = SafetensorsSource(file)
        if missing := indexed.difference(source):
            raise Eagle3Error(f"{file}: tensor {quote(min(missing))} is missing; {INDEX_FILE} says it is here")
        if extra := set(source) - indexed:
            raise Eagle3Error(f"{file}: holds tensor {quote(min(extra))}, which {INDEX_FILE} does not put here")
        return source

    def names(self) -> list[str]:
        """Every tensor's name, in the index's order."""
        return list(self._home)

    def __contains__(self, name: object) -> bool:
        return name in self._home

    def _shard(self, name: str) -> SafetensorsSource:
        if name not in self._home:
            raise Eagle3Error(f"{self.path}: no tensor {quote(name)} in {INDEX_FILE}")
        return self._home[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape. Raises Eagle3Error for an unknown name."""
        return self._shard(name).shape(name)

    def dtype(self, name: str) -> np.dtype:
        """The tensor's dtype. Raises Eagle3Error for an unknown name."""
        return self._shard(name).dtype(name)

    def format(self, name: str) -> str:
        """The dtype's safetensors name. Raises Eagle3Error for an unknown name."""
        return self._shard(name).format(name)

    def read(self, name: str) -> np.ndarray:
        """One tensor, as `SafetensorsSource.read`."""
        return self._shard(name).read(name)


def open_checkpoint_folder(path: str | os.PathLike[str]) -> TensorSource:
    """Open the weights of a Hugging Face folder.

    Args:
        path: a folder with `model.safetensors`, or else with `model.safetensors.index.json` and its shards.

    Returns:
        The tensors under the names in the files.

    Raises:
        Eagle3Error: no such folder, no safetensors weights in it, or any fault of the files.

    Example:
        >>> open_checkpoint_folder("Llama-3.2-1B").names()  # doctest: +SKIP
    """
    folder = Path(path)
    if not os.path.isdir(folder):
        raise Eagle3Error(f"{folder}: no such folder; give a folder with {SINGLE_FILE} or {INDEX_FILE}")
    if os.path.exists(folder / SINGLE_FILE):
        return SafetensorsSource(folder / SINGLE_FILE)
    if os.path.exists(folder / INDEX_FILE):
        return ShardedSource(folder)
    pickled = ("pytorch_model.bin", "pytorch_model.bin.index.json")
    hint = (
        "; convert pytorch_model.bin to safetensors" if any(map(os.path.exists, map(folder.joinpath, pickled))) else ""
    )
    raise Eagle3Error(f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE} is in this folder{hint}")


def write_safetensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, np.ndarray],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a safetensors file atomically: an interrupted write leaves the old file whole.

    Args:
        path: the file; its folder must exist.
        tensors: name to array of any shape, with a dtype of `DTYPES`.
        metadata: str to str, stored as `__metadata__`.

    Raises:
        Eagle3Error: a dtype, name or metadata the format does not have, or the file cannot be written.

    Example:
        >>> write_safetensors("d.safetensors", {"w": np.zeros((2, 3), np.float32)})  # doctest: +SKIP
    """
    header: dict[str, Any] = {}
    if metadata:
        header["__metadata__"] = _check_metadata(dict(metadata), path)
    arrays = {name: _native(np.asarray(tensor)) for name, tensor in tensors.items()}
    for name, array in arrays.items():
        if not isinstance(name, str) or name == "__metadata__":
            raise Eagle3Error(f"{path}: {quote(name)} cannot name a tensor; use a string, not __metadata__")
        if array.dtype not in _DTYPE_NAMES:
            raise Eagle3Error(
                f"{path}: tensor {quote(name)} has dtype {array.dtype}, which safetensors does not have; "
                f"use one of {', '.join(DTYPES)}"
            )
    # Widest first, so that every tensor starts at a multiple of its item size.
    order = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))
    end = 0
    for name in order:
        begin, end = end, end + arrays[name].nbytes
        dtype, shape = _DTYPE_NAMES[arrays[name].dtype], list(arrays[name].shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with atomic_file(Path(path)) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            file.write(arrays[name].reshape(-1).view(np.uint8).data)


def _native(array: np.ndarray) -> np.ndarray:
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _is_size(value: object) -> bool:
    return type(value) is int and value >= 0  # not isinstance: JSON's true is an int to Python


def _read_header(buffer: mmap.mmap, path: Path) -> tuple[dict[str, Any], int]:
    if len(buffer) < 8:
        raise Eagle3Error(f"{path}: {len(buffer)} bytes are too few for a safetensors file; fetch it again")
    (length,) = struct.unpack("<Q", buffer[:8])
    if length > min(len(buffer) - 8, _MAX_HEADER):
        raise Eagle3Error(
            f"{path}: says its header has {length} bytes, but the file has {len(buffer)}; "
            "it is truncated or not safetensors"
        )
    text = buffer[8 : 8 + length]
    if not text.startswith(b"{"):
        raise Eagle3Error(f"{path}: its header is not a JSON object; this is not a safetensors file")
    header = parse_json(text, f"{path}: damaged header, fetch the file again")
    return header, 8 + length


def _check_metadata(metadata: Any, path: str | os.PathLike[str]) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(x, str) for item in metadata.items() for x in item):
        raise Eagle3Error(f"{path}: __metadata__ must map strings to strings, not {quote(metadata)}")
    return metadata


def _check_entry(name: str, entry: Any, path: Path) -> _Entry:
    where = f"{path}: tensor {quote(name)}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise Eagle3Error(f"{where}: needs dtype, shape and data_offsets and nothing else, not {quote(entry)}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise Eagle3Error(f"{where}: dtype {quote(dtype)} is not one of {', '.join(DTYPES)}")
    if not isinstance(shape, list) or len(shape) > _MAX_DIMS or not all(map(_is_size, shape)):
        raise Eagle3Error(f"{where}: shape {quote(shape)} is not a list of at most {_MAX_DIMS} sizes >= 0")
    itemsize = DTYPES[dtype].itemsize
    if math.prod(max(size, 1) for size in shape) * itemsize >= 2**63:
        raise Eagle3Error(f"{where}: shape {quote(shape)} is larger than any memory")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise Eagle3Error(f"{where}: data_offsets {quote(offsets)} is not [begin, end] with both >= 0")
    begin, end = offsets
    size = math.prod(shape) * itemsize
    if end - begin != size:
        raise Eagle3Error(
            f"{where}: {dtype} {shape} needs {size} bytes, data_offsets {quote(offsets)} span {end - begin}"
        )
    return _Entry(dtype, tuple(shape), begin, end)


def _check_coverage(entries: Mapping[str, _Entry], size: int, path: Path) -> None:
    """The tensors must tile the data exactly: the format allows neither holes nor overlaps."""
    expected = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.end > size:
            raise Eagle3Error(
                f"{path}: tensor {quote(name)} ends at byte {entry.end} of the data, which has {size}; "
                "the file is truncated; fetch it again"
            )
        if entry.begin != expected:
            fault = "overlaps the tensor before it" if entry.begin < expected else "leaves a hole before it"
            raise Eagle3Error(
                f"{path}: tensor {quote(name)} begins at byte {entry.begin} of the data and {fault}; "
                f"it should begin at {expected}"
            )
        expected = entry.end
    if expected != size:
        raise Eagle3Error(f"{path}: has {size} bytes of data, its header describes {expected}; fetch it again")


def _check_shard_name(shard: Any, name: str, index: Path) -> str:
    # A plain name, not a resolved path: the Hugging Face cache links shards to blobs outside the folder.
    plain = isinstance(shard, str) and not set(shard) & set("/\\\0:") and shard.endswith(".safetensors")
    if not plain:
        raise Eagle3Error(
            f"{index}: tensor {quote(name)} is in {quote(shard)}; a .safetensors file in this folder is needed"
        )
    return shard
