"""Measurements of a draft against the same numbers found another way."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
from loading import DRAFTS, TARGET_OF, TARGETS, draft
from training import selfchats, slow_ttt

from eagle3_jax.api import propose, score, score_draft
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.training.evaluate import evaluate, evaluate_decoding, evaluate_text, with_context

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


@pytest.mark.parametrize("name", ["a_safeailab", "d_fullvocab"])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_expected_acceptance_is_the_overlap_of_the_distributions(
    name: str, temperature: float, tmp_path: Path
) -> None:
    subject, steps = draft(name), 3
    measured = evaluate_text(subject, CHATS, tmp_path, row_length=64, steps=steps, temperature=temperature)
    slow = slow_ttt.read(DRAFTS / name, TARGETS / TARGET_OF[name])
    overlap, count = np.zeros(steps), np.zeros(steps)
    for chat in CHATS:
        scored = score(subject.target, _padded(chat.tokens.tolist()))
        length, segments = len(chat.tokens), np.zeros(len(chat.tokens) - 1, int)
        tapped = np.concatenate([scored.hidden_states[k] for k in subject.model.config.taps], axis=-1)[0]
        logits = slow_ttt.logits_of_steps(slow, tapped[: length - 1], chat.tokens[1:], steps)
        mask = np.append(chat.is_assistant[2:], False)
        there = np.asarray(scored.logits)[0, 1:length]
        sums = slow_ttt.sums_of_steps(slow, logits / temperature, there / temperature, mask, segments)
        overlap, count = overlap + sums.overlap, count + sums.count
    assert measured["temperature"] == temperature
    # Features are kept in float16.
    np.testing.assert_allclose(measured["expected_acceptance"], overlap / count, rtol=0, atol=1e-3)


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


def test_prompts_are_brought_to_a_context_by_the_others_texts() -> None:
    prompts, outputs = [[1, 2], [3], [4, 5, 6, 7, 8]], [[10], [11, 12], [13]]
    assert with_context(prompts, outputs, 4) == [[8, 13, 1, 2], [1, 2, 10, 3]]
    with pytest.raises(Eagle3Error, match="prompts and answers hold 11"):
        with_context(prompts, outputs, 12)
    with pytest.raises(Eagle3Error, match="every prompt is longer"):
        with_context([[1, 2]], [[3]], 1)


def test_every_temperature_and_context_has_its_cell() -> None:
    subject = draft("a_safeailab")
    prompts = [chat.tokens[:9].tolist() for chat in CHATS[:5]]
    found = evaluate(subject, prompts, 3, 10, temperatures=(0.0, 0.7), contexts=(20,), steps=2, batch_size=2)
    cells = [(cell["temperature"], cell["context"], cell["prompts"]) for cell in found["decoding"]]
    assert cells == [(0.0, None, 5), (0.0, 20, 5), (0.7, None, 5), (0.7, 20, 5)]
    assert [part["temperature"] for part in found["text"]] == [1.0, 0.7]
    for temperature, cell in ((0.0, found["decoding"][0]), (0.7, found["decoding"][2])):
        # The same whatever the batches.
        assert cell == {"context": None, **evaluate_decoding(subject, prompts, 3, 10, temperature)}
    # Every decoded token but those of a text's first two is one to predict.
    assert [part["predictions"] for part in found["text"]] == [
        cell["new_tokens"] for cell in found["decoding"] if cell["context"] is None
    ]


@pytest.mark.parametrize("temperature", [float("nan"), -1.0, float("inf")])
def test_impossible_temperatures_are_refused(temperature: float, tmp_path: Path) -> None:
    with pytest.raises(Eagle3Error, match="temperature"):
        evaluate_decoding(draft("a_safeailab"), [[1, 2]], temperature=temperature)
    with pytest.raises(Eagle3Error, match="temperature"):
        evaluate_text(draft("a_safeailab"), CHATS, tmp_path, temperature=temperature)


def test_logits_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    sound = draft("a_safeailab")
    spoilt = dataclasses.replace(
        sound, params={**sound.params, "head": jax.tree.map(lambda x: x * np.nan, sound.params["head"])}
    )
    with pytest.raises(Eagle3Error, match="a_safeailab: the loss is not finite"):
        evaluate_text(spoilt, CHATS, tmp_path, row_length=64)
    target = sound.target
    target = dataclasses.replace(target, params=jax.tree.map(lambda x: x * np.nan, target.params))
    with pytest.raises(Eagle3Error, match="llama_tied: the logits have no finite maximum"):
        evaluate_decoding(dataclasses.replace(sound, target=target), [[1, 2]])


def test_nothing_to_measure_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Eagle3Error, match="no prompts"):
        evaluate_decoding(draft("a_safeailab"), [])
    with pytest.raises(Eagle3Error, match="nothing to learn"):
        evaluate_text(draft("a_safeailab"), [], tmp_path)
