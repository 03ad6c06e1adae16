from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from eagle3_jax.errors import Eagle3Error
from eagle3_jax.training.data import (
    PADDING,
    Chat,
    coverage,
    draft_vocabulary,
    loss_mask,
    pack,
    read_chats,
    split,
    write_shard,
)


def make_chat(tokens: list[int], spoken_from: int, temperature: float = 0.0) -> Chat:
    spoken = np.arange(len(tokens)) >= spoken_from
    return Chat(np.asarray(tokens, np.int32), spoken, temperature)


CHATS = [
    make_chat([7, 8, 1, 2, 3], 3),
    make_chat([7, 8, 4, 5], 3, 0.5),
    make_chat([7, 8, 6, 1, 1, 1, 2], 4),
]


@pytest.mark.parametrize("prefix", [(), (7, 8)])
@pytest.mark.parametrize("offset", [0, 70000])
def test_a_shard_comes_back(tmp_path: Path, prefix: tuple[int, ...], offset: int) -> None:
    chats = [
        Chat(np.where(c.tokens < 7, c.tokens + offset, c.tokens), *(c.is_assistant, c.temperature)) for c in CHATS
    ]
    write_shard(tmp_path / "chats.npz", chats, prefix)
    back = read_chats(tmp_path / "chats.npz")
    for ours, theirs in zip(chats, back, strict=True):
        np.testing.assert_array_equal(ours.tokens, theirs.tokens)
        np.testing.assert_array_equal(ours.is_assistant, theirs.is_assistant)
        assert ours.temperature == theirs.temperature
    with np.load(tmp_path / "chats.npz") as file:
        assert file["tokens"].dtype == (np.uint32 if offset else np.uint16)


def test_a_folder_reads_in_order_and_a_prefix_is_put_back(tmp_path: Path) -> None:
    write_shard(tmp_path / "b.npz", CHATS[1:])
    write_shard(tmp_path / "a.npz", CHATS[:1])
    chats = read_chats(tmp_path, prefix=(9, 9))
    assert [c.tokens.tolist() for c in chats] == [[9, 9, *c.tokens.tolist()] for c in CHATS]
    assert not any(c.is_assistant[:2].any() for c in chats)
    assert not list(tmp_path.glob(".*"))


def test_a_chat_without_the_prefix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Eagle3Error, match="chat 0 does not start"):
        write_shard(tmp_path / "chats.npz", CHATS, (7, 9))


def damaged(name: str, value: object) -> dict[str, np.ndarray]:
    shard = {
        "tokens": np.arange(4, dtype=np.uint16),
        "is_assistant": np.ones(4, np.uint8),
        "offsets": np.asarray([0, 2, 4]),
        "temperature": np.zeros(2, np.float32),
    }
    shard |= {name: np.asarray(value)}
    return shard


@pytest.mark.parametrize(
    ("name", "value"),
    [("offsets", [0, 4, 2]), ("offsets", [0, 2, 5]), ("is_assistant", [1]), ("temperature", [0.0])],
)
def test_damaged_shards_are_refused(tmp_path: Path, name: str, value: object) -> None:
    np.savez(tmp_path / "chats.npz", **damaged(name, value))
    with pytest.raises(Eagle3Error, match="not a token shard"):
        read_chats(tmp_path)


def test_files_that_are_no_shards_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Eagle3Error, match="no token shards"):
        read_chats(tmp_path)
    with pytest.raises(Eagle3Error, match="no token shards"):
        read_chats(tmp_path / "nothing.npz")
    (tmp_path / "text.npz").write_text("text")
    with pytest.raises(Eagle3Error, match="not a token shard"):
        read_chats(tmp_path)
    (tmp_path / "text.npz").write_bytes(b"PK\x03\x04 cut short")
    with pytest.raises(Eagle3Error, match="not a token shard"):
        read_chats(tmp_path)
    np.savez(tmp_path / "text.npz", tokens=np.zeros(3))
    with pytest.raises(Eagle3Error, match="no is_assistant, offsets, temperature"):
        read_chats(tmp_path)


def test_split_is_by_chat_and_stable() -> None:
    chats = [make_chat([i] * 3, 1) for i in range(12)]
    training, held_out = split(chats)
    assert [int(c.tokens[0]) for c in held_out] == [4, 9]
    assert len(training) == 10
    assert [c.tokens[0] for c in split(chats[:7])[0]] == [c.tokens[0] for c in training[:6]]
    assert [len(part) for part in split(chats * 200)] == [2000, 400]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(3, 30))
def test_packing_keeps_every_chat_whole_or_cut(sizes: list[int], row_length: int) -> None:
    chats = [make_chat([100 * i + k for k in range(size)], size // 2) for i, size in enumerate(sizes)]
    rows = pack(chats, row_length)
    found = {}
    for r in range(len(rows.tokens)):
        for segment in set(rows.segment_ids[r].tolist()) - {PADDING}:
            place = rows.segment_ids[r] == segment
            assert np.all(np.diff(np.flatnonzero(place)) == 1)
            assert rows.positions[r][place].tolist() == list(range(place.sum()))
            number = rows.tokens[r][place][0] // 100
            found[int(number)] = (rows.tokens[r][place], rows.is_assistant[r][place])
    assert sorted(found) == list(range(len(chats)))
    for i, chat in enumerate(chats):
        np.testing.assert_array_equal(found[i][0], chat.tokens[:row_length])
        np.testing.assert_array_equal(found[i][1], chat.is_assistant[:row_length])
    assert rows.dropped == sum(max(size - row_length, 0) for size in sizes)


def test_loss_mask_is_the_token_after_next_of_the_same_chat() -> None:
    rows = pack([make_chat([1, 2, 3, 4], 2), make_chat([5, 6, 7], 1)], 9)
    assert rows.tokens.tolist() == [[1, 2, 3, 4, 5, 6, 7, 0, 0]]
    assert loss_mask(rows).tolist() == [[True, True, False, False, True, False, False, False]]
    rows = pack([make_chat([1, 2, 3, 4], 3), make_chat([5, 6, 7], 3)], 9)
    assert loss_mask(rows).tolist() == [[False, True, False, False, False, False, False, False]]
    assert loss_mask(rows, answers_only=False).tolist() == [[True, True, False, False, True, False, False, False]]


def test_nothing_to_pack_is_refused() -> None:
    with pytest.raises(Eagle3Error, match="nothing to learn"):
        pack([], 8)
    with pytest.raises(Eagle3Error, match="nothing to learn"):
        pack(CHATS, 2)


def test_vocabulary_is_the_most_frequent_answers_ascending() -> None:
    ids = draft_vocabulary(CHATS, 2, 10)
    assert ids.dtype == np.int32 and ids.tolist() == [1, 2]
    assert coverage(CHATS, ids, 10) == pytest.approx(4 / 6)
    assert draft_vocabulary(CHATS, 10, 10).tolist() == list(range(10))
    assert coverage([], ids, 10) == 0.0


def test_vocabularies_that_do_not_fit_are_refused() -> None:
    with pytest.raises(Eagle3Error, match="11 tokens does not fit"):
        draft_vocabulary(CHATS, 11, 10)
    with pytest.raises(Eagle3Error, match="5; the target has 5 tokens"):
        draft_vocabulary(CHATS, 2, 5)


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": np.array(["a"] * 5)},
        {"tokens": np.full(5, np.nan)},
        {"tokens": np.full(5, -1)},
        {"tokens": np.full(5, 2**40)},
        {"tokens": np.int64(5)},
        {"offsets": np.array([0.0, 2.0, 5.0])},
        {"offsets": np.array([[0, 2, 5]])},
        {"is_assistant": np.zeros((5, 1))},
        {"is_assistant": np.array(["0"] * 5)},
        {"temperature": np.array(["warm", "cold"])},
        {"temperature": np.zeros((2, 2))},
        {"prefix": np.ones((2, 2), int)},
        {"prefix": np.array([-5])},
        {"prefix": np.array(["a"])},
    ],
)
def test_arrays_of_another_kind_are_no_shard(tmp_path: Path, change: dict[str, np.ndarray]) -> None:
    sound = {"tokens": np.arange(5), "offsets": np.array([0, 2, 5]), "is_assistant": np.ones(5, bool)}
    np.savez(tmp_path / "x.npz", **{**sound, "temperature": np.zeros(2), **change})
    with pytest.raises(Eagle3Error, match="not a token shard"):
        read_chats(tmp_path / "x.npz")


def test_a_damaged_archive_is_no_shard(tmp_path: Path) -> None:
    chat = Chat(np.arange(500, dtype=np.int32) % 7, np.ones(500, bool), 0.0)
    write_shard(tmp_path / "x.npz", [chat] * 8)
    whole = (tmp_path / "x.npz").read_bytes()
    refused = 0
    for at in range(40, len(whole), 31):
        (tmp_path / "x.npz").write_bytes(whole[:at] + b"\xff\xff\xff" + whole[at + 3 :])
        try:
            read_chats(tmp_path / "x.npz")
        except Eagle3Error:
            refused += 1
    assert refused > 10
