"""Heads of fewer tokens: which rows are kept, what files say, that the text stays the target's, what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loading import DRAFTS, TARGETS, draft, target, tensors_of
from training import selfchats

from eagle3_jax.api import score_draft
from eagle3_jax.checkpoint.convert import convert_draft
from eagle3_jax.checkpoint.drafts import load_draft
from eagle3_jax.cli import main
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.training.data import read_frequencies, write_shard

FULL, TARGET, SIZE = DRAFTS / "d_fullvocab", TARGETS / "llama_tied", 40
VOCAB = draft("d_fullvocab").model.config.vocab_size


def written(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value))
    return path


def frequencies() -> list[int]:
    """Counts with ties, and with tokens that never occur."""
    return np.random.default_rng(0).integers(0, 9, VOCAB).tolist()


def test_the_most_frequent_rows_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counts, out = frequencies(), tmp_path / "out"
    line = ["convert", str(FULL), str(out), "--to", "vllm", "--draft-vocab", str(SIZE), "--from-frequencies"]
    assert main([*line, str(written(tmp_path / "f.json", counts))]) == 0
    kept = sorted(sorted(range(VOCAB), key=lambda i: (-counts[i], i))[:SIZE])
    share = sum(counts[i] for i in kept) / sum(counts)
    assert f"{SIZE} of {VOCAB} tokens, {share:.2%} of the {sum(counts)} counted" in capsys.readouterr().out
    before, after = tensors_of(FULL), tensors_of(out)
    assert after.pop("lm_head.weight").tobytes() == before.pop("lm_head.weight")[kept].tobytes()
    assert (after.pop("d2t") + np.arange(SIZE)).tolist() == kept
    assert np.flatnonzero(after.pop("t2d")).tolist() == kept
    # Nothing else has changed.
    assert sorted(x.tobytes() for x in after.values()) == sorted(
        x.tobytes() for name, x in before.items() if name not in ("d2t", "t2d")
    )
    config = json.loads((out / "config.json").read_text())
    assert (config["draft_vocab_size"], config["vocab_size"]) == (SIZE, VOCAB)
    reduced, full = load_draft(out, target("llama_tied")), draft("d_fullvocab")
    rng = np.random.default_rng(1)
    features = rng.standard_normal((1, 5, 3 * full.model.config.target_hidden_size)).astype(np.float32)
    ids = rng.integers(0, VOCAB, (1, 5)).astype(np.int32)
    few, all_of_them = (np.asarray(score_draft(one, features, ids)) for one in (reduced, full))
    np.testing.assert_allclose(few, all_of_them[..., kept], rtol=0, atol=1e-5)


def test_the_text_stays_the_targets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a head that lacks most of what the target says."""
    rare = sorted(range(VOCAB), key=lambda i: i % 7)[: VOCAB // 2]
    convert_draft(FULL, tmp_path / "out", "safeailab", TARGET, vocabulary=lambda size: np.sort(rare))
    prompts = written(tmp_path / "p.json", [chat.tokens[:9].tolist() for chat in selfchats.chats()[:3]])
    line = ["verify", "--target", str(TARGET), "--draft", str(tmp_path / "out"), "--prompt-ids", str(prompts)]
    line += ["--max-new-tokens", "12", "--temperature", "0.7"]
    assert main(line) == 0, capsys.readouterr().out


def test_shards_count_what_the_assistant_says(tmp_path: Path) -> None:
    chats = selfchats.chats()[:6]
    write_shard(tmp_path / "0.npz", chats[:4])
    write_shard(tmp_path / "1.npz", chats[4:])
    counts = [0] * VOCAB
    for chat in chats:
        for token, said in zip(chat.tokens.tolist(), chat.is_assistant.tolist(), strict=True):
            counts[token] += said
    assert read_frequencies(tmp_path, VOCAB).tolist() == counts
    with pytest.raises(Eagle3Error, match="the chats hold tokens"):
        read_frequencies(tmp_path, 3)


def test_nonsense_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sound = written(tmp_path / "sound.json", frequencies())
    line = ["convert", str(FULL), str(tmp_path / "out"), "--to", "vllm"]
    one_short = written(tmp_path / "short.json", frequencies()[1:])
    negative = written(tmp_path / "negative.json", [-1, *frequencies()[1:]])
    nothing = written(tmp_path / "nothing.json", [0] * VOCAB)
    reduced = ["convert", str(DRAFTS / "a_safeailab"), str(tmp_path / "out"), "--to", "vllm", "--target", str(TARGET)]
    for flags, message in (
        ([*line, "--draft-vocab", "8"], "need each other"),
        ([*line, "--from-frequencies", str(sound)], "need each other"),
        ([*line, "--draft-vocab", "8", "--from-frequencies", str(one_short)], f"counts of {VOCAB - 1} tokens"),
        ([*line, "--draft-vocab", "8", "--from-frequencies", str(negative)], "is no list of counts"),
        ([*line, "--draft-vocab", "8", "--from-frequencies", str(nothing)], "counts no token"),
        ([*line, "--draft-vocab", "8", "--from-frequencies", str(tmp_path / "none")], "cannot be read"),
        ([*line, "--draft-vocab", str(VOCAB), "--from-frequencies", str(sound)], "is no smaller than the target's"),
        ([*line, "--draft-vocab", "9999", "--from-frequencies", str(sound)], "does not fit a vocabulary of"),
        ([*reduced, "--draft-vocab", "8", "--from-frequencies", str(sound)], "already; give a draft with all"),
        ([*line[:-1], "orbax", "--draft-vocab", "8", "--from-frequencies", str(sound)], "converts a target"),
    ):
        assert main(flags) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
