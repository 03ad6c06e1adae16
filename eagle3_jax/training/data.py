"""Chats as token shards, their split, their packing into rows, and the draft's vocabulary.

A shard is one npz file: `tokens` (uint16 or uint32, all chats joined), `is_assistant` (uint8 per token),
`offsets` (int64 [chats + 1]), `temperature` (float32 per chat, of the answer) and optionally `prefix`: tokens
every chat starts with, stored once.

Dimension letters: R rows, L tokens of a row, V vocabulary, Vd draft vocabulary.
"""

import dataclasses
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from eagle3_jax.checkpoint.files import atomic_file, read_json_value, reason, refusing_io
from eagle3_jax.errors import Eagle3Error

PADDING = -1
"""Segment id of unused positions of a row."""

HELD_OUT_EVERY, HELD_OUT_OF = 5, 2000
"""Every fifth chat is held out, of the first so many: more would teach more than they could tell."""


@dataclasses.dataclass(frozen=True)
class Chat:
    """One chat: int32 `tokens` [n], bool `is_assistant` [n], `temperature` of the answer."""

    tokens: np.ndarray
    is_assistant: np.ndarray
    temperature: float


@dataclasses.dataclass(frozen=True)
class PackedRows:
    """Chats packed into rows of L tokens.

    Attributes:
        tokens: int32 [R, L]; 0 where unused.
        segment_ids: int32 [R, L], index of the chat within its row, `PADDING` where unused.
        positions: int32 [R, L], position within the chat.
        is_assistant: bool [R, L], tokens the target itself wrote as answers.
        dropped: tokens of chats longer than a row that were cut off.
    """

    tokens: np.ndarray
    segment_ids: np.ndarray
    positions: np.ndarray
    is_assistant: np.ndarray
    dropped: int = 0


def write_shard(path: str | os.PathLike[str], chats: Sequence[Chat], prefix: Sequence[int] = ()) -> None:
    """Write one shard whole or not at all; `prefix` is taken off every chat.

    Raises:
        Eagle3Error: no chat, a chat that does not start with the prefix, or the file cannot be written.
    """
    if not chats:
        raise Eagle3Error(f"{path}: a shard without chats")
    length = len(prefix)
    for index, chat in enumerate(chats):
        if chat.tokens[:length].tolist() != list(prefix):
            raise Eagle3Error(f"chat {index} does not start with the common prefix of {length} tokens")
    sizes = [len(chat.tokens) - length for chat in chats]
    tokens = np.concatenate([chat.tokens[length:] for chat in chats])
    arrays = {
        "tokens": tokens.astype(np.uint16 if tokens.max(initial=0) < 2**16 else np.uint32),
        "is_assistant": np.concatenate([chat.is_assistant[length:] for chat in chats]).astype(np.uint8),
        "offsets": np.cumsum([0, *sizes], dtype=np.int64),
        "temperature": np.asarray([chat.temperature for chat in chats], np.float32),
        "prefix": np.asarray(prefix, np.int32),
    }
    with atomic_file(Path(path)) as file:
        np.savez_compressed(file, **arrays)


def read_chats(path: str | os.PathLike[str], prefix: Sequence[int] = ()) -> list[Chat]:
    """Read a shard, or a folder of shards in the order of their names.

    Args:
        path: an .npz file or a folder of them.
        prefix: tokens before every chat, for shards that do not hold them.

    Raises:
        Eagle3Error: nothing there, or a file that is not a shard.
    """
    path = Path(path)
    with refusing_io(path):
        files = sorted(path.glob("*.npz")) if path.is_dir() else [path]
        if not files or not files[0].exists():
            raise Eagle3Error(f"{path}: no token shards (.npz) here; make some with eagle3-jax distill")
    return [chat for file in files for chat in _read_shard(file, prefix)]


def _read_shard(path: Path, prefix: Sequence[int]) -> list[Chat]:
    shard = _read_arrays(path)
    tokens, offsets = shard["tokens"], shard["offsets"]
    before = shard["prefix"] if len(shard["prefix"]) else np.asarray(prefix, np.int32)
    spoken = np.zeros(len(before), bool)
    return [
        Chat(
            np.concatenate([before, tokens[begin:end]]),
            np.concatenate([spoken, shard["is_assistant"][begin:end] != 0]),
            float(temperature),
        )
        for begin, end, temperature in zip(offsets[:-1], offsets[1:], shard["temperature"], strict=True)
    ]


def count_chats(path: Path) -> int:
    """Chats of one shard.

    Raises:
        Eagle3Error: it is not a whole shard.
    """
    return len(_read_arrays(path)["temperature"])


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The checked arrays of a shard, `tokens` and `prefix` as int32; an empty `prefix` where it has none."""
    try:
        # NumPy leaves a damaged archive open.
        if not zipfile.is_zipfile(path):
            raise ValueError("no whole npz archive")
        with open(path, "rb") as raw, np.load(raw, allow_pickle=False) as file:
            shard = {name: file[name] for name in file.files}
    except Exception as error:  # zip, zlib, NumPy and the tokenizer of its headers each have their own
        raise Eagle3Error(f"{path}: not a token shard: {reason(error)}") from error
    missing = {"tokens", "is_assistant", "offsets", "temperature"} - set(shard)
    if missing:
        raise Eagle3Error(f"{path}: not a token shard: no {', '.join(sorted(missing))}")
    shard.setdefault("prefix", np.zeros(0, np.int32))
    kinds = {"tokens": "iu", "offsets": "iu", "prefix": "iu", "is_assistant": "iub", "temperature": "fiu"}
    for name, kind in kinds.items():
        if shard[name].ndim != 1 or shard[name].dtype.kind not in kind:
            raise Eagle3Error(f"{path}: not a token shard: {name} is no list of numbers of its kind")
    tokens, offsets = shard["tokens"], shard["offsets"].astype(np.int64)
    sound = len(offsets) > 1 and offsets[0] == 0 and offsets[-1] == len(tokens)
    if not sound or np.any(np.diff(offsets) <= 0) or len(shard["is_assistant"]) != len(tokens):
        raise Eagle3Error(f"{path}: not a token shard: offsets, tokens and is_assistant do not fit")
    if len(shard["temperature"]) != len(offsets) - 1:
        raise Eagle3Error(f"{path}: not a token shard: temperature needs one entry a chat")
    for name in ("tokens", "prefix"):
        if shard[name].min(initial=0) < 0 or shard[name].max(initial=0) >= 2**31:
            raise Eagle3Error(f"{path}: not a token shard: {name} holds what is no token id")
    ids = {name: shard[name].astype(np.int32) for name in ("tokens", "prefix")}
    return {**shard, **ids, "offsets": offsets}


def split(chats: Sequence[Chat]) -> tuple[list[Chat], list[Chat]]:
    """Training and held-out chats: the fifth of every five is held out, of the first 2,000.

    Adding chats at the end moves none from one side to the other.
    """
    held = range(HELD_OUT_EVERY - 1, min(len(chats), HELD_OUT_OF), HELD_OUT_EVERY)
    return [chat for i, chat in enumerate(chats) if i not in held], [chats[i] for i in held]


def pack(chats: Sequence[Chat], row_length: int) -> PackedRows:
    """Pack chats into rows, longest first, each into the first row with room; one longer than a row is cut.

    Raises:
        Eagle3Error: no chat, or rows too short for a prediction.
    """
    if row_length < 3 or not chats:
        raise Eagle3Error(f"{len(chats)} chats in rows of {row_length} tokens: nothing to learn from")
    order = sorted(range(len(chats)), key=lambda i: -len(chats[i].tokens))
    rows: list[list[int]] = []
    room: list[int] = []
    first_open = 0
    for i in order:
        need = min(len(chats[i].tokens), row_length)
        row = next((r for r in range(first_open, len(rows)) if room[r] >= need), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(row_length)
        rows[row].append(i)
        room[row] -= need
        while first_open < len(rows) and room[first_open] < 3:
            first_open += 1
    shape = (len(rows), row_length)
    tokens, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    segments, spoken = np.full(shape, PADDING, np.int32), np.zeros(shape, bool)
    dropped = 0
    for r, members in enumerate(rows):
        at = 0
        for segment, i in enumerate(members):
            chat = chats[i]
            size = min(len(chat.tokens), row_length)
            place = slice(at, at + size)
            tokens[r, place], spoken[r, place] = chat.tokens[:size], chat.is_assistant[:size]
            segments[r, place], positions[r, place] = segment, np.arange(size)
            dropped += len(chat.tokens) - size
            at += size
    return PackedRows(tokens, segments, positions, spoken, dropped)


def loss_mask(rows: PackedRows, answers_only: bool = True) -> np.ndarray:
    """Which predictions to learn, bool [R, L - 1]: row t predicts x_{t+2} from x_{t+1} and the feature of t.

    The token must be the assistant's, unless not only answers are learnt, and t, t+1 and t+2 of one chat. The last
    row has no x_{t+2}.
    """
    here, next_but_one = rows.segment_ids[:, :-2], rows.segment_ids[:, 2:]
    learn = (here == next_but_one) & (here != PADDING)
    if answers_only:
        learn &= rows.is_assistant[:, 2:]
    return np.concatenate([learn, np.zeros((len(learn), 1), bool)], axis=1)


def draft_vocabulary(chats: Sequence[Chat], size: int, vocab_size: int) -> np.ndarray:
    """The `size` most frequent assistant tokens (ties: lower id first), ascending: int32 [size].

    Source: FR-Spec (arXiv 2502.14856); EAGLE-3's `d2t` is this list less its own index.

    Raises:
        Eagle3Error: a size outside [1, vocab_size], or tokens outside the vocabulary.
    """
    return most_frequent(token_counts(chats, vocab_size), size)


def most_frequent(counts: np.ndarray, size: int) -> np.ndarray:
    """The `size` tokens with the highest counts [V] (ties: lower id first), ascending: int32 [size].

    Raises:
        Eagle3Error: a size outside [1, V].
    """
    if not 1 <= size <= len(counts):
        raise Eagle3Error(f"a draft vocabulary of {size} tokens does not fit a vocabulary of {len(counts)}")
    return np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int32)


def read_frequencies(path: str | os.PathLike[str], vocab_size: int) -> np.ndarray:
    """How often the target says each of its tokens: int64 [V].

    Args:
        path: a JSON list with one count for each id; or a token shard or a folder of them, in which the
            assistant's tokens are counted.
        vocab_size: V, the target's vocabulary.

    Raises:
        Eagle3Error: nothing there, no such list, one of another length, tokens of another tokenizer, or no token
            counted at all.
    """
    path = Path(path)
    if path.is_dir() or path.suffix == ".npz":
        counts = token_counts(read_chats(path), vocab_size)
    else:
        value = read_json_value(path)
        if not isinstance(value, list) or not all(type(n) is int and 0 <= n < 2**53 for n in value):
            raise Eagle3Error(f"{path}: is no list of counts; a whole number from 0 for each token id is needed")
        if len(value) != vocab_size:
            raise Eagle3Error(f"{path}: has counts of {len(value)} tokens; the target has {vocab_size}")
        counts = np.asarray(value, np.int64)
    if not counts.any():
        raise Eagle3Error(f"{path}: counts no token; frequencies of the target's answers are needed")
    return counts


def token_counts(chats: Sequence[Chat], vocab_size: int) -> np.ndarray:
    """How often the assistant says each token: int64 [V].

    Raises:
        Eagle3Error: a token outside the vocabulary: the chats are another tokenizer's.
    """
    said = np.concatenate([np.zeros(0, np.int32), *(chat.tokens[chat.is_assistant] for chat in chats)])
    check_vocabulary(said, vocab_size)
    return np.bincount(said, minlength=vocab_size)


def check_vocabulary(tokens: np.ndarray, vocab_size: int) -> None:
    """Refuse tokens [...] outside the vocabulary.

    Raises:
        Eagle3Error: there is one: the chats are another tokenizer's.
    """
    if tokens.min(initial=0) < 0 or tokens.max(initial=0) >= vocab_size:
        raise Eagle3Error(
            f"the chats hold tokens from {tokens.min()} to {tokens.max()}; the target has {vocab_size} tokens, from 0"
        )


def coverage(chats: Sequence[Chat], target_ids: np.ndarray, vocab_size: int) -> float:
    """Share of the assistant's tokens that a draft vocabulary int32 [Vd] holds."""
    counts = token_counts(chats, vocab_size)
    return float(counts[target_ids].sum() / max(counts.sum(), 1))
