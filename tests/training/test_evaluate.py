"""Measurements of a draft against the same numbers found another way."""

from pathlib import Path

import jax
import numpy as np
import pytest
from loading import draft
from training import selfchats

from eagle3_jax.api import propose, score, score_draft
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.training.evaluate import evaluate_decoding, evaluate_text

CHATS = selfchats.chats()[:6]


@pytest.mark.parametrize("name", ["a_safeailab", "d_fullvocab"])
def test_agreement_is_that_of_the_public_functions(name: str, tmp_path: Path) -> None:
    subject = draft(name)
    measured = evaluate_text(subject, CHATS, tmp_path, row_length=64, steps=2)
    hits, count = 0, 0
    for chat in CHATS:
        scored = score(subject.target, chat.tokens[None])
        tapped = np.concatenate([scored.hidden_states[k] for k in subject.model.config.taps], axis=-1)
        logits = np.asarray(score_draft(subject, tapped[:, :-1], chat.tokens[None, 1:]))[0]
        best = np.argmax(logits, -1)
        if "target_ids" in subject.params:
            best = np.asarray(subject.params["target_ids"])[best]
        wanted = np.argmax(np.asarray(scored.logits)[0, 1:], -1)
        mask = chat.is_assistant[2:]
        hits, count = hits + int((best == wanted)[:-1][mask].sum()), count + int(mask.sum())
    assert measured["predictions"] == count
    assert measured["accuracy"][0] == pytest.approx(hits / count, abs=2e-3)
    assert measured["chain_accuracy"][0] == measured["accuracy"][0]
    assert measured["expected_length"] == pytest.approx(1 + sum(measured["chain_accuracy"]), abs=2e-4)


def test_acceptance_is_that_of_hand_made_rounds() -> None:
    subject, chain, new = draft("a_safeailab"), 3, 10
    prompts = [chat.tokens[:9].tolist() for chat in CHATS[:3]]
    measured = evaluate_decoding(subject, prompts, chain, new)
    rounds, accepted, reached, kept = 0, 0, np.zeros(chain, int), np.zeros(chain, int)
    for prompt in prompts:
        text = list(prompt)
        text.append(_next(subject, text))
        limit = len(prompt) + new
        while len(text) < limit and text[-1] not in subject.target.eos_ids:
            drafts = _drafts(subject, text, chain)
            start = len(text)
            for token in drafts:
                text.append(_next(subject, text))
                if text[-1] != token or len(text) == limit or text[-1] in subject.target.eos_ids:
                    break
            else:
                text.append(_next(subject, text))
            right = [a == b for a, b in zip(text[start:], drafts, strict=False)]
            agreed = int(np.cumprod(right).sum())
            rounds, accepted = rounds + 1, accepted + agreed
            reached[: limit - start] += 1
            kept[:agreed] += 1
    assert measured["rounds"] == rounds
    assert measured["mean_acceptance_length"] == pytest.approx(1 + accepted / rounds)
    assert measured["acceptance_per_position"] == pytest.approx(list(kept / reached))
    assert measured["prompts"] == 3 and measured["chain"] == chain


def _next(subject: object, text: list[int]) -> int:
    return int(np.argmax(score(subject.target, _padded(text)).logits[0, len(text) - 1]))  # pyright: ignore


def _padded(text: list[int]) -> np.ndarray:
    """One width, one program."""
    return np.asarray([text + [0] * (64 - len(text))], np.int32)


def _drafts(subject: object, text: list[int], n: int) -> list[int]:
    hidden = jax.device_get(score(subject.target, _padded(text)).hidden_states)  # pyright: ignore
    taps = [hidden[k] for k in subject.model.config.taps]  # pyright: ignore
    features = np.concatenate(taps, axis=-1)[:, : len(text) - 1]
    ids, _ = propose(subject, features, np.asarray([text[1:]], np.int32), n)  # pyright: ignore
    return np.asarray(ids)[0].tolist()


def test_nothing_to_measure_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Eagle3Error, match="no prompts"):
        evaluate_decoding(draft("a_safeailab"), [])
    with pytest.raises(Eagle3Error, match="nothing to learn"):
        evaluate_text(draft("a_safeailab"), [], tmp_path)
