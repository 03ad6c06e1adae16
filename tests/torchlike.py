"""Files as `torch.save` writes them, made without PyTorch: Python's own pickler and zip writer."""

import io
import pickle
import sys
import types
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

_KINDS = {
    np.dtype(np.float32): "FloatStorage",
    np.dtype(np.float16): "HalfStorage",
    np.dtype(ml_dtypes.bfloat16): "BFloat16Storage",
    np.dtype(np.float64): "DoubleStorage",
    np.dtype(np.int64): "LongStorage",
    np.dtype(np.bool_): "BoolStorage",
}


class _Stored:
    """One array on its way into a storage of its own."""

    def __init__(self, key: str, array: np.ndarray, torch: Any) -> None:
        self.key, self.array, self.torch = key, array, torch

    def __reduce__(self) -> Any:
        strides = tuple(stride // self.array.itemsize for stride in self.array.strides)
        return self.torch._utils._rebuild_tensor_v2, (self.storage, 0, self.array.shape, strides, False, OrderedDict())

    @property
    def storage(self) -> Any:
        return _Storage(self.key, getattr(self.torch, _KINDS[self.array.dtype]), self.array.size)


class _Storage:
    def __init__(self, key: str, kind: type, length: int) -> None:
        self.id = ("storage", kind, key, "cpu", length)


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return obj.id if isinstance(obj, _Storage) else None


def described(tensors: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch) -> bytes:
    """The data.pkl of a state dict."""
    torch, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")
    for name in _KINDS.values():
        setattr(torch, name, type(name, (), {"__module__": "torch"}))

    def rebuild(*_: Any) -> None:
        raise AssertionError("a pickle was run")

    rebuild.__module__, rebuild.__qualname__ = "torch._utils", "_rebuild_tensor_v2"
    utils._rebuild_tensor_v2, torch._utils = rebuild, utils  # type: ignore[attr-defined]
    state: OrderedDict[str, Any] = OrderedDict()
    for i, (name, array) in enumerate(tensors.items()):
        state[name] = _Stored(str(i), np.array(array, order="C"), torch)
    state._metadata = OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
    out = io.BytesIO()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch", torch)
        patch.setitem(sys.modules, "torch._utils", utils)
        _Pickler(out, protocol=2).dump(state)
    return out.getvalue()


def save(path: Path, pickled: bytes, tensors: dict[str, np.ndarray], compression: int = zipfile.ZIP_STORED) -> None:
    """The archive around a data.pkl and the storages of the tensors, in order."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("pytorch_model/data.pkl", pickled)
        archive.writestr("pytorch_model/byteorder", b"little")
        for i, array in enumerate(tensors.values()):
            archive.writestr(f"pytorch_model/data/{i}", np.ascontiguousarray(array).tobytes())
        archive.writestr("pytorch_model/version", b"3\n")
