"""Safetensors files and folders: right values, refused lies, writes that are whole or not at all."""

import json
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from eagle3_jax.checkpoint import tensors as ct
from eagle3_jax.errors import Eagle3Error

rng = np.random.default_rng(0)


def file_bytes(header: Any, data: bytes, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: Any, shape: Any, begin: Any, end: Any, **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end], **more}


def one_line(error: pytest.ExceptionInfo[Eagle3Error]) -> str:
    text = str(error.value)
    assert text and "\n" not in text
    return text


def examples() -> dict[str, np.ndarray]:
    arrays = {}
    for name, dtype in ct.DTYPES.items():
        if name == "BOOL":
            arrays[name] = rng.integers(0, 2, (3, 5)).astype(bool)
        else:
            raw = rng.integers(0, 256, 3 * 5 * dtype.itemsize, np.uint8)
            arrays[name] = raw.view(dtype).reshape(3, 5)
    arrays["scalar"] = np.array(2.5, np.float32)
    arrays["empty"] = np.zeros((0, 7), ml_dtypes.bfloat16)
    arrays["transposed"] = np.arange(12, dtype=np.int32).reshape(3, 4).T
    return arrays


def test_written_file_is_what_the_safetensors_library_reads(tmp_path: Path) -> None:
    arrays = examples()
    path = tmp_path / "x.safetensors"
    ct.write_safetensors(path, arrays, {"format": "np"})
    known = {"F8_E4M3FNUZ", "F8_E5M2FNUZ"}
    read = dict(safetensors.deserialize(path.read_bytes()))
    assert set(read) == set(arrays)
    for name, array in arrays.items():
        assert tuple(read[name]["shape"]) == array.shape
        assert bytes(read[name]["data"]) == np.ascontiguousarray(array).tobytes()
        if name in ct.DTYPES and name not in known:
            assert read[name]["dtype"] == name
    (length,) = struct.unpack("<Q", path.read_bytes()[:8])
    assert length % 8 == 0


def test_every_dtype_round_trips(tmp_path: Path) -> None:
    arrays = examples()
    ct.write_safetensors(tmp_path / "x.safetensors", arrays, {"a": "b"})
    source = ct.SafetensorsSource(tmp_path / "x.safetensors")
    assert source.metadata == {"a": "b"}
    assert set(source) == set(arrays) and len(source) == len(arrays)
    for name, array in arrays.items():
        read = source.read(name)
        assert name in source and (read.dtype, read.shape) == (array.dtype, array.shape)
        assert (source.dtype(name), source.shape(name)) == (array.dtype, array.shape)
        assert read.tobytes() == np.ascontiguousarray(array).tobytes()
        assert not read.flags.writeable or read.size == 0


def test_library_written_file_is_read(tmp_path: Path) -> None:
    arrays = {"a": rng.normal(size=(4, 3)).astype(np.float32), "b": np.arange(5)}
    safetensors.numpy.save_file(arrays, tmp_path / "x.safetensors", {"k": "v"})
    source = ct.SafetensorsSource(tmp_path / "x.safetensors")
    assert source.metadata == {"k": "v"}
    assert source.format("a") == "F32"
    for name, array in arrays.items():
        np.testing.assert_array_equal(source.read(name), array)


def test_unaligned_data_is_copied_to_alignment(tmp_path: Path) -> None:
    array = np.arange(6, dtype=np.float64)
    header = json.dumps({"x": entry("F64", [6], 0, 48)}).encode()
    header += b" " * ((3 - len(header)) % 8)  # the data then starts 3 bytes past a multiple of 8
    (tmp_path / "x").write_bytes(file_bytes(header, array.tobytes()))
    read = ct.SafetensorsSource(tmp_path / "x").read("x")
    assert read.flags.aligned
    np.testing.assert_array_equal(read, array)


def test_big_endian_arrays_are_written_little_endian(tmp_path: Path) -> None:
    ct.write_safetensors(tmp_path / "x", {"x": np.arange(4, dtype=">f4")})
    np.testing.assert_array_equal(ct.SafetensorsSource(tmp_path / "x").read("x"), np.arange(4, dtype=np.float32))


GOOD = {"a": entry("F32", [2, 2], 0, 16), "b": entry("I8", [4], 16, 20)}
DATA = bytes(20)


def with_a(**changes: Any) -> dict[str, Any]:
    return {**GOOD, "a": {**GOOD["a"], **changes}}


def without_a(key: str) -> dict[str, Any]:
    return {**GOOD, "a": {k: v for k, v in GOOD["a"].items() if k != key}}


TEXT = json.dumps(GOOD).encode()
HOSTILE: dict[str, bytes] = {
    "empty file": b"",
    "seven bytes": b"\0" * 7,
    "header length 2^60": file_bytes(GOOD, DATA, 2**60),
    "header length 2^64-1": file_bytes(GOOD, DATA, 2**64 - 1),
    "header longer than the file": file_bytes(GOOD, DATA, len(TEXT) + 21),
    "header length 0": file_bytes(GOOD, DATA, 0),
    "header cut": file_bytes(GOOD, DATA, len(TEXT) - 1),
    "header with data behind": file_bytes(GOOD, DATA, len(TEXT) + 3),
    "not JSON": file_bytes(b"{hello}", DATA),
    "a list": file_bytes(b"[]", b""),
    "leading space": file_bytes(b" " + TEXT, DATA),
    "not UTF-8": file_bytes(b'{"\xff": 1}', DATA),
    "UTF-16": file_bytes(json.dumps(GOOD).encode("utf-16"), DATA),
    "tensor twice": file_bytes(TEXT[:-1] + b', "a": ' + json.dumps(GOOD["a"]).encode() + b"}", DATA),
    "key twice": file_bytes(TEXT.replace(b'"dtype": "F32"', b'"dtype": "F16", "dtype": "F32"'), DATA),
    "nested too deeply": file_bytes(b'{"a":' * 100_000, DATA),
    "unknown dtype": file_bytes(with_a(dtype="F7"), DATA),
    "lower-case dtype": file_bytes(with_a(dtype="f32"), DATA),
    "dtype is a number": file_bytes(with_a(dtype=32), DATA),
    "dtype is a list": file_bytes(with_a(dtype=["F32"]), DATA),
    "dtype is null": file_bytes(with_a(dtype=None), DATA),
    "no dtype": file_bytes(without_a("dtype"), DATA),
    "no shape": file_bytes(without_a("shape"), DATA),
    "no offsets": file_bytes(without_a("data_offsets"), DATA),
    "unknown field": file_bytes(with_a(strides=[8, 4]), DATA),
    "negative size": file_bytes(with_a(shape=[-2, -2]), DATA),
    "size is true": file_bytes({**GOOD, "a": entry("F32", [4, True], 0, 16)}, DATA),
    "size is a float": file_bytes(with_a(shape=[2.0, 2]), DATA),
    "size is text": file_bytes(with_a(shape=["2", 2]), DATA),
    "size is NaN": file_bytes(with_a(shape=[float("nan")]), DATA),
    "shape is a number": file_bytes(with_a(shape=4), DATA),
    "shape is an object": file_bytes(with_a(shape={"2": 2}), DATA),
    "33 dimensions": file_bytes(with_a(shape=[4] + [1] * 32), DATA),
    "2^124 elements": file_bytes(with_a(shape=[2**62, 2**62]), DATA),
    "0 times 2^70": file_bytes({**GOOD, "c": entry("F32", [0, 2**70], 20, 20)}, DATA),
    "size of 5000 digits": file_bytes(TEXT.replace(b"[2, 2]", b"[" + b"9" * 5000 + b"]"), DATA),
    "shape too large for the span": file_bytes(with_a(shape=[2, 3]), DATA),
    "dtype too small for the span": file_bytes(with_a(dtype="F16"), DATA),
    "end before begin": file_bytes(with_a(data_offsets=[16, 0]), DATA),
    "negative begin": file_bytes(with_a(data_offsets=[-16, 0]), DATA),
    "three offsets": file_bytes(with_a(data_offsets=[0, 16, 20]), DATA),
    "offsets are text": file_bytes(with_a(data_offsets=["0", "16"]), DATA),
    "offsets are floats": file_bytes(with_a(data_offsets=[0.0, 16.0]), DATA),
    "offsets are null": file_bytes(with_a(data_offsets=None), DATA),
    "offsets past 2^64": file_bytes(with_a(data_offsets=[2**70, 2**70 + 16]), DATA),
    "past the end": file_bytes({**GOOD, "b": entry("I8", [40], 16, 56)}, DATA),
    "overlap": file_bytes({**GOOD, "b": entry("I8", [5], 15, 20)}, DATA),
    "two names for the same bytes": file_bytes({**GOOD, "c": entry("I8", [4], 16, 20)}, DATA),
    "hole between": file_bytes({**GOOD, "b": entry("I8", [3], 17, 20)}, DATA),
    "hole in front": file_bytes({"b": entry("I8", [4], 16, 20)}, DATA),
    "bytes left over": file_bytes(GOOD, DATA + b"\0"),
    "data cut": file_bytes(GOOD, DATA[:-1]),
    "no data": file_bytes(GOOD, b""),
    "entry is null": file_bytes({**GOOD, "a": None}, DATA),
    "entry is a list": file_bytes({**GOOD, "a": [1, 2]}, DATA),
    "metadata is a list": file_bytes({**GOOD, "__metadata__": []}, DATA),
    "metadata holds a number": file_bytes({**GOOD, "__metadata__": {"a": 1}}, DATA),
    "metadata is null": file_bytes({**GOOD, "__metadata__": None}, DATA),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_lying_header_is_refused(case: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(HOSTILE[case])
    with pytest.raises(Eagle3Error) as error:
        ct.SafetensorsSource(path)
    assert "x.safetensors" in one_line(error)
    assert len(str(error.value)) < 1000


def test_good_header_of_the_hostile_cases_is_read(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(file_bytes(GOOD, DATA))
    assert ct.SafetensorsSource(tmp_path / "x").read("a").shape == (2, 2)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    whole = file_bytes(GOOD, DATA)
    for length in range(len(whole)):
        (tmp_path / "x").write_bytes(whole[:length])
        with pytest.raises(Eagle3Error):
            ct.SafetensorsSource(tmp_path / "x")


def test_damaged_bytes_never_raise_anything_else(tmp_path: Path) -> None:
    whole = file_bytes(GOOD, DATA)
    dice = random.Random(0)
    refused = 0
    for _ in range(1500):
        damaged = bytearray(whole)
        for _ in range(dice.choice([1, 1, 2, 5])):
            damaged[dice.randrange(len(whole) - len(DATA))] = dice.randrange(256)
        (tmp_path / "x").write_bytes(damaged)
        try:
            source = ct.SafetensorsSource(tmp_path / "x")
            for name in source:
                source.read(name)
        except Eagle3Error as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 1000


def test_bool_tensor_with_other_bytes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(file_bytes({"t2d": entry("BOOL", [3], 0, 3)}, b"\0\1\2"))
    with pytest.raises(Eagle3Error, match="BOOL"):
        ct.SafetensorsSource(tmp_path / "x").read("t2d")


@pytest.mark.parametrize("method", ["read", "shape", "dtype", "format"])
def test_unknown_name_is_refused(method: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(file_bytes(GOOD, DATA))
    with pytest.raises(Eagle3Error, match="'c'"):
        getattr(ct.open_checkpoint_folder(tmp_path), method)("c")


@pytest.mark.parametrize("path", ["absent", ".", "nul\0byte", "x" * 5000])
def test_path_that_is_no_file_is_refused(path: str, tmp_path: Path) -> None:
    for attempt in (ct.SafetensorsSource, ct.read_json):
        with pytest.raises(Eagle3Error):
            attempt(tmp_path / path)
    with pytest.raises(Eagle3Error):
        ct.open_checkpoint_folder(tmp_path / path)


# Folders


def sharded(folder: Path, weight_map: Any = None, **more: Any) -> Path:
    ct.write_safetensors(folder / "one.safetensors", {"a": np.ones(2, np.float32), "b": np.zeros(3, np.int8)})
    ct.write_safetensors(folder / "two.safetensors", {"c": np.full((2, 2), 7, np.float16)})
    good = {"c": "two.safetensors", "a": "one.safetensors", "b": "one.safetensors"}
    index = {"metadata": {"total_size": 19}, "weight_map": good if weight_map is None else weight_map(good)}
    (folder / ct.INDEX_FILE).write_text(json.dumps({**index, **more}))
    return folder


def test_sharded_folder_reads_like_one_file(tmp_path: Path) -> None:
    source = ct.open_checkpoint_folder(sharded(tmp_path))
    assert source.names() == ["c", "a", "b"] and "a" in source and "d" not in source
    np.testing.assert_array_equal(source.read("c"), np.full((2, 2), 7, np.float16))
    assert (source.shape("b"), source.dtype("b"), source.format("b")) == ((3,), np.int8, "I8")
    assert source.path == tmp_path


def test_single_file_is_taken_before_the_index(tmp_path: Path) -> None:
    ct.write_safetensors(sharded(tmp_path) / "model.safetensors", {"only": np.ones(1, np.float32)})
    assert ct.open_checkpoint_folder(tmp_path).names() == ["only"]


def test_shards_may_be_links_as_in_the_hugging_face_cache(tmp_path: Path) -> None:
    folder = tmp_path / "snapshot"
    folder.mkdir()
    sharded(folder)
    os.rename(folder / "one.safetensors", tmp_path / "blob")
    (folder / "one.safetensors").symlink_to(tmp_path / "blob")
    assert ct.open_checkpoint_folder(folder).read("a").sum() == 2


BAD_MAPS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "shard above the folder": (lambda m: {**m, "a": "../one.safetensors"}, "'a'"),
    "absolute shard": (lambda m: {**m, "a": "/one.safetensors"}, "'a'"),
    "shard in a subfolder": (lambda m: {**m, "a": "sub/one.safetensors"}, "'a'"),
    "backslashes": (lambda m: {**m, "a": "..\\one.safetensors"}, "'a'"),
    "NUL byte": (lambda m: {**m, "a": "one\0.safetensors"}, "'a'"),
    "newline in the name": (lambda m: {**m, "a": "one\n.safetensors"}, "missing"),
    "shard is a number": (lambda m: {**m, "a": 1}, "'a'"),
    "shard is null": (lambda m: {**m, "a": None}, "'a'"),
    "shard is a pickle": (lambda m: {**m, "a": "pytorch_model.bin"}, "'a'"),
    "shard is missing": (lambda m: {**m, "c": "three.safetensors"}, "three.safetensors"),
    "shard with a name too long": (lambda m: {**m, "c": "3" * 5000 + ".safetensors"}, "'c'"),
    "tensor is missing": (lambda m: {**m, "d": "two.safetensors"}, "'d'"),
    "tensor is elsewhere": (lambda m: {**m, "a": "two.safetensors"}, "'a'"),
    "tensor is not indexed": (lambda m: {k: v for k, v in m.items() if k != "b"}, "'b'"),
    "empty map": (lambda m: {}, "weight_map"),
    "map is a list": (lambda m: [1], "weight_map"),
}


@pytest.mark.parametrize("case", BAD_MAPS)
def test_index_that_disagrees_with_the_shards_is_refused(case: str, tmp_path: Path) -> None:
    change, named = BAD_MAPS[case]
    with pytest.raises(Eagle3Error) as error:
        ct.open_checkpoint_folder(sharded(tmp_path, change))
    assert named in one_line(error)


def test_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Eagle3Error, match="neither"):
        ct.open_checkpoint_folder(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(Eagle3Error, match="convert"):
        ct.open_checkpoint_folder(tmp_path)


# Writing


def write_tensors(path: Path) -> None:
    ct.write_safetensors(path, {"a": np.ones(1000, np.float32)})


def write_json(path: Path) -> None:
    ct.write_json_atomic(path, {"a": [1, 2]})


@pytest.mark.parametrize("write", [write_tensors, write_json])
@pytest.mark.parametrize(
    ("step", "failure", "raised"),
    [
        ("replace", OSError(28, "No space left on device"), Eagle3Error),
        ("fsync", OSError(5, "Input/output error"), Eagle3Error),
        ("fsync", KeyboardInterrupt(), KeyboardInterrupt),
        ("replace", KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_interrupted_write_leaves_the_old_file_whole(
    write: Callable[[Path], None],
    step: str,
    failure: BaseException,
    raised: type[BaseException],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fail(*arguments: Any) -> None:
        raise failure

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(raised):
        write(path)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("write", [write_tensors, write_json])
def test_write_replaces_and_follows_the_umask(write: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    write(path)
    assert path.read_bytes() != b"old"
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert sorted(os.listdir(tmp_path)) == ["file", "plain"]


@pytest.mark.parametrize("write", [write_tensors, write_json])
@pytest.mark.parametrize("path", ["no/such/folder/file", ".", "nul\0byte", "x" * 300])
def test_unwritable_path_is_refused(write: Callable[[Path], None], path: str, tmp_path: Path) -> None:
    with pytest.raises(Eagle3Error):
        write(tmp_path / path)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("tensors", "metadata"),
    [
        ({"a": np.ones(2, np.complex64)}, None),
        ({"a": np.ones(2, ml_dtypes.int4)}, None),
        ({"a": np.array(["text"])}, None),
        ({"a": np.array([None])}, None),
        ({"__metadata__": np.ones(2, np.float32)}, None),
        ({1: np.ones(2, np.float32)}, None),
        ({}, {"a": 1}),
    ],
)
def test_what_the_format_cannot_hold_is_refused(tensors: Any, metadata: Any, tmp_path: Path) -> None:
    with pytest.raises(Eagle3Error):
        ct.write_safetensors(tmp_path / "x", tensors, metadata)
    assert os.listdir(tmp_path) == []


# JSON


def test_json_round_trips(tmp_path: Path) -> None:
    value = {"a": [1, 2.5, None, True], "é\n": {"b": "☕"}}
    ct.write_json_atomic(tmp_path / "x.json", value)
    assert ct.read_json(tmp_path / "x.json") == value


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[1]",
        b"null",
        b"3",
        b'{"a": 1, "a": 2}',
        b'{"a": {"b": 1, "b": 1}}',
        b"\xff\xfe",
        b'{"a":' * 10**5,
    ],
)
def test_bad_json_is_refused(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(text)
    with pytest.raises(Eagle3Error) as error:
        ct.read_json(tmp_path / "x.json")
    assert "x.json" in one_line(error)


@pytest.mark.parametrize("value", [float("nan"), {1, 2}, {(1, 2): 3}, np.ones(2)])
def test_what_json_cannot_say_is_refused(value: Any, tmp_path: Path) -> None:
    with pytest.raises(Eagle3Error):
        ct.write_json_atomic(tmp_path / "x.json", {"a": value})
    assert os.listdir(tmp_path) == []


def test_a_device_or_pipe_is_never_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(Eagle3Error, match="no regular file"):
        ct.write_json_atomic(tmp_path / "pipe", {})
    assert (tmp_path / "pipe").is_fifo()


def test_the_file_behind_a_link_is_written(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder" / "file")
    ct.write_json_atomic(tmp_path / "link", {"a": 1})
    assert (tmp_path / "link").is_symlink()
    assert json.loads((tmp_path / "folder" / "file").read_text()) == {"a": 1}
