"""Damaged drafts: refused in one line, or loaded as what their files plainly say; nothing in them is run.

EAGLE3_FUZZ sets how many damaged folders are tried.
"""

import json
import os
import random
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torchlike
from loading import DRAFTS, TARGET_OF, draft, target, tensors_of

from eagle3_jax.checkpoint.drafts import Draft, load_draft
from eagle3_jax.errors import Eagle3Error

COUNT = int(os.environ.get("EAGLE3_FUZZ", "300"))
NAMES = list(TARGET_OF)
HARMFUL = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.", "pickle.find_class", "socket.connect")
"""Events of Python's audit hooks that loading a draft never causes."""

Files = dict[str, bytes]
Mutation = Callable[[random.Random, str, Files], str]
"""Damages a draft's files in place; says what may become of it: "refuse", or "same or refuse", or "as said"."""

WORDS: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 40, 96, 2**31, 2**63, 1.5, 1e-9, 1e308, "", "x", "1", [], [1], [2, 3, 4],
    [1, 2, 3], ["LlamaForCausalLM"], {}, {"a": 1}, [[]], "silu", "llama", float("nan"), {"rope_theta": -1},
]  # fmt: skip


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    length = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def joined(header: Any, data: bytes, text: bytes | None = None) -> bytes:
    text = json.dumps(header).encode() if text is None else text
    return struct.pack("<Q", len(text)) + text + data


def header_bytes(rng: random.Random, name: str, files: Files) -> str:
    """Flip, cut or repeat bytes of the safetensors header."""
    data = files["model.safetensors"]
    length = struct.unpack("<Q", data[:8])[0]
    text = scrambled(rng, data[8 : 8 + length])
    size = rng.choice([len(text), len(text), len(text), rng.getrandbits(64), length + rng.randint(-9, 9)])
    files["model.safetensors"] = struct.pack("<Q", size % 2**64) + text + data[8 + length :]
    return "same or refuse"


def cut(rng: random.Random, name: str, files: Files) -> str:
    """End a file early, or add to it."""
    file = rng.choice(list(files))
    data = files[file]
    if rng.random() < 0.3 and file != "config.json":
        files[file] = data + rng.randbytes(rng.randint(1, 64))
    else:
        files[file] = data[: rng.randrange(len(data))]
    return "same or refuse"


def header_fields(rng: random.Random, name: str, files: Files) -> str:
    """Lie about a tensor's shape, dtype or place, or lose, copy or rename it."""
    header, data = split(files["model.safetensors"])
    tensor = rng.choice([key for key in header if key != "__metadata__"])
    entry = header[tensor]
    kind = rng.randrange(6)
    if kind == 0:
        shape = entry["shape"]
        entry["shape"] = rng.choice([shape[::-1], [*shape, 1], shape[:-1], [2**40], [-1], ["a"]])
    elif kind == 1:
        entry["dtype"] = rng.choice(["I32", "U32", "F64", "F16", "BOOL", "F8_E4M3", "Q4", None, 3])
    elif kind == 2:
        entry["data_offsets"] = rng.choice([[0, 4], [4, 0], [0, 2**62], [-4, 0], "0,4", [entry["data_offsets"][0]]])
    elif kind == 3:
        del header[tensor]
    elif kind == 4:
        header[tensor + rng.choice(["x", ".weight", "_scale", "\u0000"])] = header.pop(tensor)
    else:
        header[f"model.{tensor}"] = dict(entry)
    files["model.safetensors"] = joined(header, data)
    return "same or refuse"


def maps(rng: random.Random, name: str, files: Files) -> str:
    """Change elements of d2t or t2d; each says what the other must be."""
    header, data = split(files["model.safetensors"])
    tensor = rng.choice(["d2t", "t2d"])
    if tensor not in header:
        return header_fields(rng, name, files)
    begin, end = header[tensor]["data_offsets"]
    body = bytearray(data)
    for _ in range(rng.choice([1, 1, 3, 20])):
        body[rng.randrange(begin, end)] ^= rng.randint(1, 255)
    files["model.safetensors"] = joined(header, bytes(body))
    return "same or refuse"


def weights(rng: random.Random, name: str, files: Files) -> str:
    """Put NaN or infinity into a weight."""
    header, data = split(files["model.safetensors"])
    tensor = rng.choice([key for key, entry in header.items() if key != "__metadata__" and entry["dtype"] == "F32"])
    begin, end = header[tensor]["data_offsets"]
    at = begin + 4 * rng.randrange((end - begin) // 4)
    value = struct.pack("<f", rng.choice([float("nan"), float("inf"), float("-inf")]))
    files["model.safetensors"] = joined(header, data[:at] + value + data[at + 4 :])
    return "refuse"


def config_bytes(rng: random.Random, name: str, files: Files) -> str:
    """Flip, cut or repeat bytes of config.json."""
    files["config.json"] = scrambled(rng, files["config.json"])
    return "as said"


def config_fields(rng: random.Random, name: str, files: Files) -> str:
    """Change, drop, add or move fields of config.json."""
    config = json.loads(files["config.json"])
    place = config
    for _ in range(2):
        inner = [value for value in place.values() if isinstance(value, dict) and value]
        if inner and rng.random() < 0.5:
            place = rng.choice(inner)
    field = rng.choice([*place, rng.choice(["norm_x", "rope_x", "x", "head_x", "eagle_config", "kv_lora_rank"])])
    kind = rng.randrange(4)
    if kind == 0:
        place.pop(field, None)
    elif kind == 1:
        place[field] = rng.choice(WORDS)
    elif kind == 2 and isinstance(place.get(field), int | float):
        place[field] = place[field] * rng.choice([2, 0.5, -1]) + rng.choice([0, 1, -1])
    else:
        place[rng.choice(list(place))] = place.get(field)
    files["config.json"] = json.dumps(config).encode()
    return "as said"


def pickled(rng: random.Random, name: str, files: Files) -> str:
    """Flip, cut or repeat bytes of a pickle, or put other opcodes into it."""
    data = PICKLES[name]
    if rng.random() < 0.4:
        at = rng.randrange(2, len(data))
        call = b"cos\nsystem\n(X\x04\x00\x00\x00truetR"
        data = data[:at] + rng.choice([call, b"cbuiltins\nexec\n", b"\x93", b"\x81", b"R", b"o", b"b"]) + data[at:]
    else:
        data = scrambled(rng, data)
    del files["model.safetensors"]
    files["data.pkl"] = data
    return "same or refuse"


def scrambled(rng: random.Random, data: bytes) -> bytes:
    body = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8])):
        at, kind = rng.randrange(len(body)), rng.randrange(4)
        if kind == 0:
            body[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            body[at] = rng.randrange(256)
        elif kind == 2:
            del body[at : at + rng.randint(1, 8)]
        else:
            body[at:at] = body[at : at + rng.randint(1, 16)]
        if not body:
            break
    return bytes(body)


MUTATIONS: list[Mutation] = [
    header_bytes, cut, header_fields, maps, weights, config_bytes, config_fields, config_fields, pickled,
]  # fmt: skip
PICKLES: dict[str, bytes] = {}
HEARD: list[str] = []
LISTENING = False


def listen(event: str, _: Any) -> None:
    if LISTENING and event.startswith(HARMFUL):
        HEARD.append(event)


def write(folder: Path, name: str, files: Files) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for file, data in files.items():
        if file == "data.pkl":
            torchlike.save(folder / "pytorch_model.bin", data, tensors_of(DRAFTS / name))
        else:
            (folder / file).write_bytes(data)


def same(a: Draft, b: Draft) -> bool:
    leaves, others = jax.tree.leaves(a.params), jax.tree.leaves(b.params)
    equal = len(leaves) == len(others) and all(np.array_equal(x, y) for x, y in zip(leaves, others, strict=True))
    return a.model == b.model and equal


FIELD_OF = {
    "rms_norm_eps": "rms_norm_eps",
    "norm_output": "norm_output",
    "norm_before_residual": "norm_before_residual",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
}
"""Fields that weights cannot contradict, and what the loaded config calls them."""


def as_said(loaded: Draft, original: Draft, text: bytes) -> str | None:
    """What is wrong with a draft loaded under a changed config.json, if anything."""
    leaves, others = jax.tree.leaves(loaded.params), jax.tree.leaves(original.params)
    if not all(np.array_equal(x, y) for x, y in zip(leaves, others, strict=False)):
        return "other weights"
    said = json.loads(text)
    said = {**said, **(said.get("transformer_layer_config") or {})}
    for field, ours in FIELD_OF.items():
        if said.get(field) is not None and said[field] != getattr(loaded.model.config, ours):
            return f"{field} is {getattr(loaded.model.config, ours)}, not {said[field]}"
    config, before = loaded.model.config, original.model.config
    if (config.rope, config.taps) != (before.rope, before.taps) and b"rope" not in text and b"layer" not in text:
        return "other taps or rope, of which the file says nothing"
    fixed = "hidden_size vocab_size draft_vocab_size intermediate_size fc_norm norm_before_fc qk_norm".split()
    return next((f"other {name}" for name in fixed if getattr(config, name) != getattr(before, name)), None)


def test_damaged_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    global LISTENING
    sys.addaudithook(listen)
    for name in NAMES:
        PICKLES[name] = torchlike.described(tensors_of(DRAFTS / name), monkeypatch)
    outcomes = {"refused": 0, "same": 0, "as said": 0}
    for seed in range(COUNT):
        rng = random.Random(seed)
        name, mutate = rng.choice(NAMES), MUTATIONS[seed % len(MUTATIONS)]
        files = {file: (DRAFTS / name / file).read_bytes() for file in ("config.json", "model.safetensors")}
        allowed = mutate(rng, name, files)
        write(tmp_path / "draft", name, files)
        what = f"seed {seed}: {mutate.__name__} of {name}"
        caplog.clear()
        LISTENING = True
        try:
            loaded = load_draft(tmp_path / "draft", target(TARGET_OF[name]))
        except Eagle3Error as error:
            assert "\n" not in str(error), what
            outcomes["refused"] += 1
            continue
        except Exception as error:
            pytest.fail(f"{what}: {type(error).__name__}: {error}")
        finally:
            LISTENING = False
            assert not HEARD, f"{what}: {HEARD}"
        assert allowed != "refuse", f"{what} was loaded"
        if same(loaded, draft(name)):
            outcomes["same"] += 1
            continue
        assert allowed == "as said", f"{what} was loaded as something else"
        fault = as_said(loaded, draft(name), files["config.json"])
        assert fault is None, f"{what}: {fault}"
        outcomes["as said"] += 1
    print(outcomes)
    assert outcomes["refused"] > COUNT / 2 and outcomes["same"] > 0
