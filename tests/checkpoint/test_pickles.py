"""pytorch_model.bin: read without PyTorch, and without running what is in it."""

import json
import os
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import torchlike
from loading import DRAFTS, draft, target, tensors_of

from eagle3_jax.checkpoint.drafts import load_draft
from eagle3_jax.checkpoint.pickles import PickleSource
from eagle3_jax.errors import Eagle3Error

A = DRAFTS / "a_safeailab"


@pytest.fixture
def tensors() -> dict[str, np.ndarray]:
    return tensors_of(A)


@pytest.fixture
def pickled(tensors: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch) -> bytes:
    return torchlike.described(tensors, monkeypatch)


def folder_of(place: Path, pickled: bytes, tensors: dict[str, np.ndarray]) -> Path:
    shutil.copyfile(A / "config.json", place / "config.json")
    torchlike.save(place / "pytorch_model.bin", pickled, tensors)
    return place


def test_a_pickled_draft_loads_as_the_same(tensors: dict, pickled: bytes, tmp_path: Path) -> None:
    loaded = load_draft(folder_of(tmp_path, pickled, tensors), target("llama_tied"))
    assert loaded.model == draft("a_safeailab").model
    jax.tree.map(np.testing.assert_array_equal, loaded.params, draft("a_safeailab").params)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64, np.int64, np.bool_])
def test_dtypes(dtype: type, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tensors = {"a": np.arange(6).reshape(2, 3).astype(dtype), "b": np.array(1).astype(dtype)}
    torchlike.save(tmp_path / "m.bin", torchlike.described(tensors, monkeypatch), tensors)
    source = PickleSource(tmp_path / "m.bin")
    for name, value in tensors.items():
        assert source.dtype(name) == value.dtype and source.shape(name) == value.shape
        np.testing.assert_array_equal(source.read(name), value)


def test_safetensors_win_over_pickles(tensors: dict, pickled: bytes, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, pickled, {name: np.zeros_like(x) for name, x in tensors.items()})
    shutil.copyfile(A / "model.safetensors", folder / "model.safetensors")
    loaded = load_draft(folder, target("llama_tied"))
    jax.tree.map(np.testing.assert_array_equal, loaded.params, draft("a_safeailab").params)


class Harm:
    """Runs a command if it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def test_nothing_in_a_pickle_is_run(tensors: dict, tmp_path: Path) -> None:
    sign = tmp_path / "sign"
    harm = pickle.dumps({"fc.weight": Harm(f"touch {sign}")}, protocol=2)
    with pytest.raises(Eagle3Error, match=r"the name 'posix\.system', which no state dict needs; it is not run"):
        load_draft(folder_of(tmp_path, harm, tensors), target("llama_tied"))
    assert not sign.exists()
    pickle.loads(harm)  # the harm was real
    assert sign.exists()


PROGRAMS: dict[str, tuple[bytes, str]] = {
    "instance": (b"(cos\nsystem\nS'true'\no.", "the name 'os.system'|opcode OBJ"),
    "import by stack": (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "opcode STACK_GLOBAL"),
    "new object": (b"\x80\x02ctorch\nFloatStorage\n)\x81.", "opcode NEWOBJ"),
    "extension": (b"\x80\x02\x82\x01.", "opcode EXT1"),
    "another function": (b"\x80\x02cbuiltins\neval\nX\x01\x00\x00\x001\x85R.", r"the name 'builtins\.eval'"),
    "a class called": (b"\x80\x02ctorch\nFloatStorage\n)R.", "its pickle is damaged"),
    "no state dict": (b"\x80\x02K\x01.", "holds no state dict .* but 1"),
    "no tensor": (b"\x80\x02}X\x01\x00\x00\x00aK\x01s.", "'a' is no tensor but 1"),
    "memo far away": (b"\x80\x02}r\xff\xff\xff\xffj\xff\xff\xff\x7f.", "its pickle is damaged"),
    "stack empty": (b"\x80\x02.", "its pickle is damaged"),
    "mark missing": (b"\x80\x02t.", "its pickle is damaged"),
    "text that ends": (b"\x80\x02X\xff\xff\xff\x7fa.", "its pickle is damaged"),
    "no end": (b"\x80\x02}", "its pickle is damaged"),
    "name twice": (b"\x80\x02}(X\x01\x00\x00\x00aNX\x01\x00\x00\x00aNu.", "'a' appears twice"),
    "unhashable name": (b"\x80\x02}}Ns.", "its pickle is damaged"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_that_are_no_state_dict_are_refused(name: str, tensors: dict, tmp_path: Path) -> None:
    program, match = PROGRAMS[name]
    torchlike.save(tmp_path / "m.bin", program, tensors)
    with pytest.raises(Eagle3Error, match=match) as caught:
        PickleSource(tmp_path / "m.bin")
    assert "\n" not in str(caught.value)


VIEWS = {
    "rows past the end": (b"K K`\x86", b"K!K`\x86", r"shape \(33, 96\) does not fit its 3072 elements"),
    "offset past the end": (b"QK\x00", b"QK\x01", "does not fit its"),
}


@pytest.mark.parametrize("name", VIEWS)
def test_tensors_outside_of_their_storage_are_refused(
    name: str, tensors: dict, pickled: bytes, tmp_path: Path
) -> None:
    old, new, match = VIEWS[name]
    assert old in pickled
    torchlike.save(tmp_path / "m.bin", pickled.replace(old, new, 1), tensors)
    with pytest.raises(Eagle3Error, match=match):
        PickleSource(tmp_path / "m.bin")


def test_damaged_archives_are_refused(tensors: dict, pickled: bytes, tmp_path: Path) -> None:
    file = tmp_path / "m.bin"

    def refused(match: str) -> None:
        with pytest.raises(Eagle3Error, match=match):
            source = PickleSource(file)
            for name in source:
                source.read(name)

    torchlike.save(file, pickled, tensors, zipfile.ZIP_DEFLATED)
    refused("is compressed")
    torchlike.save(file, pickled, dict(list(tensors.items())[:-1]))
    refused("There is no item named")
    torchlike.save(file, pickled, {name: x[:1] for name, x in tensors.items()})
    refused("bytes; .* are needed")
    torchlike.save(file, pickled, tensors)
    whole = file.read_bytes()
    data = tensors["fc.weight"].tobytes()
    file.write_bytes(whole.replace(data, data[:-1] + bytes([data[-1] ^ 1])))
    refused("Bad CRC-32")
    file.write_bytes(whole[: len(whole) // 2])
    refused("damaged, or older than PyTorch 1.6")
    file.write_bytes(pickle.dumps({}, protocol=2))
    refused("damaged, or older than PyTorch 1.6")
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("config.json", json.dumps({}))
    refused("one data.pkl")
