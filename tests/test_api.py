"""The public functions: parity with the reference outputs, batching, refusals."""

import shutil
import tomllib
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from loading import DRAFTS, FIXTURES, TARGET_OF, TARGETS, draft, expected, target

import eagle3_jax as e3
from eagle3_jax import api
from eagle3_jax.checkpoint.files import read_json

ATOL = 2e-4  # of the fixtures' README
each_draft = pytest.mark.parametrize("name", TARGET_OF)


def test_every_public_name_loads() -> None:
    for name in e3.__all__:
        assert getattr(e3, name) is not None
    assert set(e3.__all__) <= set(dir(e3))
    with pytest.raises(AttributeError, match="no attribute 'generates'"):
        e3.generates  # noqa: B018


def test_version_is_the_projects() -> None:
    project = tomllib.loads((FIXTURES.parents[1] / "pyproject.toml").read_text())["project"]
    assert e3.__version__ == project["version"]


# Targets


@pytest.mark.parametrize("config", ["config.json", "config.public.json"])
@pytest.mark.parametrize("name", ["llama_tied", "llama_gqa_rope3"])
def test_score_matches_transformers(name: str, config: str, tmp_path: Path) -> None:
    shutil.copyfile(TARGETS / name / "model.safetensors", tmp_path / "model.safetensors")
    shutil.copyfile(TARGETS / name / config, tmp_path / "config.json")
    x = expected(TARGETS / name)
    found = e3.score(e3.load_target(tmp_path), x["input_ids"])
    assert found.logits.dtype == jnp.float32
    np.testing.assert_allclose(found.logits, x["logits"], atol=ATOL, rtol=0)
    np.testing.assert_allclose(found.hidden_states, x["hs"], atol=ATOL, rtol=0)


def test_score_of_padded_rows() -> None:
    x = expected(TARGETS / "llama_tied")
    ids = np.array(x["input_ids"])
    ids[1, 10:] = 5
    found = e3.score(target("llama_tied"), ids, np.array([24, 10]))
    np.testing.assert_allclose(found.logits[0], x["logits"][0], atol=ATOL, rtol=0)
    np.testing.assert_allclose(found.logits[1, :10], x["logits"][1, :10], atol=ATOL, rtol=0)
    np.testing.assert_allclose(found.hidden_states[:, 1, :10], x["hs"][:, 1, :10], atol=ATOL, rtol=0)
    assert not np.any(found.logits[1, 10:]) and not np.any(found.hidden_states[:, 1, 10:])


def test_score_in_bfloat16_is_close() -> None:
    x = expected(TARGETS / "llama_tied")
    found = e3.score(e3.load_target(TARGETS / "llama_tied", "bfloat16"), x["input_ids"])
    assert (found.logits.dtype, found.hidden_states.dtype) == (jnp.float32, jnp.bfloat16)
    error = np.abs(np.asarray(found.logits) - x["logits"])
    assert 1e-3 < error.max() < 1.0 and error.mean() < 0.1


@pytest.mark.parametrize(
    ("ids", "lengths", "match"),
    [
        (np.zeros(4, np.int32), None, r"integers \[B, T\]"),
        (np.zeros((1, 4), np.float32), None, "integers"),
        (np.zeros((0, 4), np.int32), None, "integers"),
        (np.full((1, 4), 96, np.int32), None, "ids from 0 to 95"),
        (np.full((1, 4), -1, np.int32), None, "ids from 0 to 95"),
        (np.zeros((1, 1025), np.int32), None, "do not fit the context of 1024"),
        (np.zeros((1, 4), np.int32), np.array([5]), "lengths"),
        (np.zeros((1, 4), np.int32), np.array([0]), "lengths"),
        (np.zeros((1, 4), np.int32), np.array([1, 1]), "lengths"),
    ],
)
def test_bad_token_ids_are_refused(ids: np.ndarray, lengths: np.ndarray | None, match: str) -> None:
    with pytest.raises(e3.Eagle3Error, match=match):
        e3.score(target("llama_tied"), ids, lengths)


# Drafts


@each_draft
def test_score_draft_matches_its_peer(name: str) -> None:
    x = expected(DRAFTS / name)
    logits = e3.score_draft(draft(name), x["features"], x["next_ids"])
    np.testing.assert_allclose(logits, x["logits"], atol=ATOL, rtol=0)


@each_draft
def test_features_are_the_targets_own(name: str) -> None:
    """The taps and the features of the fixture are those that `score` gives."""
    x, y = expected(DRAFTS / name), expected(TARGETS / TARGET_OF[name])
    hidden = e3.score(target(TARGET_OF[name]), y["input_ids"]).hidden_states
    features = np.concatenate([hidden[k] for k in draft(name).model.config.taps], axis=-1)
    np.testing.assert_allclose(features, x["features"], atol=ATOL, rtol=0)


@each_draft
def test_proposals_match_their_peer(name: str) -> None:
    x = expected(DRAFTS / name)
    for prefix, tokens, logits in zip(x["chain_prefix"], x["chain_tokens"], x["chain_logits"], strict=True):
        n = int(prefix)
        ids, found = e3.propose(draft(name), x["features"][:, :n], x["next_ids"][:, :n], 4)
        np.testing.assert_array_equal(ids, tokens)
        np.testing.assert_allclose(found, logits, atol=ATOL, rtol=0)
        np.testing.assert_allclose(found[:, 0], x["logits"][:, n - 1], atol=ATOL, rtol=0)


def test_a_shared_embedding_follows_the_target() -> None:
    x, loaded = expected(DRAFTS / "a_safeailab"), draft("a_safeailab")
    ids = {**target("llama_tied").params}
    weight = ids["embed"]["weight"]
    ids["embed"] = {"weight": weight.replace(value=weight.value * 2)}
    swapped = e3.Target("twice", target("llama_tied").model, ids, None, ())
    moved = e3.Draft("a", loaded.model, loaded.params, "", "", (), swapped)
    # The norm on the embedding takes a common factor out; only its epsilon is left.
    np.testing.assert_allclose(e3.score_draft(moved, x["features"], x["next_ids"]), x["logits"], atol=1e-2, rtol=0)
    ids["embed"] = {"weight": weight.replace(value=weight.value[:, ::-1])}
    difference = np.abs(np.asarray(e3.score_draft(moved, x["features"], x["next_ids"])) - x["logits"])
    assert difference.max() > 0.1


def test_bad_rows_are_refused() -> None:
    x, loaded = expected(DRAFTS / "a_safeailab"), draft("a_safeailab")
    for features, ids, match in (
        (x["features"][..., :64], x["next_ids"], r"floats \(2, 24, 96\) are needed"),
        (x["features"][:, :4], x["next_ids"], r"floats \(2, 24, 96\)"),
        (x["features"].astype(np.int32), x["next_ids"], "floats"),
        (x["features"], x["next_ids"] + 96, "ids from 0 to 95"),
    ):
        with pytest.raises(e3.Eagle3Error, match=match):
            e3.score_draft(loaded, features, ids)
    for n in (0, 1.5, True):
        with pytest.raises(e3.Eagle3Error, match="cannot be proposed"):
            e3.propose(loaded, x["features"], x["next_ids"], n)  # pyright: ignore[reportArgumentType]


# Prompts


@pytest.mark.parametrize(
    ("length", "bucket"), [(1, 32), (32, 32), (33, 64), (64, 64), (129, 256), (600, 1024), (1023, 1024)]
)
def test_prompts_are_padded_to_buckets(length: int, bucket: int) -> None:
    rows = [list(range(1, 3)), [i % 90 + 1 for i in range(length)]]
    ids, lengths = api.encode_ids(target("llama_tied"), rows)
    assert ids.shape == (2, bucket if length > 2 else 32) and ids.dtype == lengths.dtype == jnp.int32
    assert lengths.tolist() == [2, length]
    for row, padded in zip(rows, np.asarray(ids), strict=True):
        assert padded[: len(row)].tolist() == row and not padded[len(row) :].any()


def test_buckets_of_choice_and_the_context_as_the_last() -> None:
    assert api.encode_ids(target("llama_tied"), [[1] * 40], bucket_sizes=(16, 48, 96))[0].shape == (1, 48)
    assert api.encode_ids(target("llama_gqa_rope3"), [[1] * 200])[0].shape == (1, 256)
    with pytest.raises(e3.Eagle3Error, match="no bucket"):
        api.encode_ids(target("llama_tied"), [[1] * 40], bucket_sizes=(16, 32))


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        ([], "non-empty list"),
        ([[]], "non-empty lists"),
        ([1, 2], "non-empty lists"),
        ("ab", "non-empty lists"),
        ([[1, 96]], "96 is no token id; ids from 0 to 95"),
        ([[1, -1]], "-1 is no token id"),
        ([[1, True]], "True is no token id"),
        ([[1, 1.0]], "1.0 is no token id"),
        ([[1] * 1024], "1024 tokens leaves no room in the context of 1024"),
    ],
)
def test_bad_prompts_are_refused(rows: Any, match: str) -> None:
    with pytest.raises(e3.Eagle3Error, match=match):
        api.encode_ids(target("llama_tied"), rows)


def test_chats_without_a_tokenizer_are_refused() -> None:
    with pytest.raises(e3.Eagle3Error, match="llama_tied has no tokenizer; give token ids"):
        e3.encode(target("llama_tied"), [[{"role": "user", "content": "Hi"}]])


@pytest.mark.model
def test_smollm2_answers_as_transformers_does() -> None:
    """Teacher-forced: at every row of every answer, the argmax is the token transformers emitted."""
    smollm = e3.load_target("smollm2-135m")
    prompts = read_json(FIXTURES / "real" / "smollm2_135m_dev.json")["prompts"]
    # The short ones, to be quick; they hold no digits, which transformers' tokenizer of a GGUF gets wrong.
    prompts = [p for p in prompts if len(p["prompt_ids"] + p["output_ids"]) <= 128]
    assert len(prompts) == 4
    rows = [p["prompt_ids"] + p["output_ids"] for p in prompts]
    ids, lengths = api.encode_ids(smollm, rows)
    best = np.asarray(jnp.argmax(e3.score(smollm, ids, lengths).logits, axis=-1))
    for row, prompt in zip(best, prompts, strict=True):
        first, count = len(prompt["prompt_ids"]) - 1, len(prompt["output_ids"])
        assert row[first : first + count].tolist() == prompt["output_ids"], prompt["name"]
    ids, lengths = e3.encode(smollm, [p["messages"] for p in prompts])
    for row, length, prompt in zip(ids.tolist(), lengths.tolist(), prompts, strict=True):
        assert row[:length] == prompt["prompt_ids"]
    with pytest.raises(e3.Eagle3Error, match="list of chats"):
        e3.encode(smollm, prompts[0]["messages"])


@pytest.mark.parametrize("rows", [None, 5, {1: 2}, np.array([[1, 2]]), iter([[1]])])
def test_what_is_no_list_of_prompts_is_refused(rows: Any) -> None:
    with pytest.raises(e3.Eagle3Error, match="non-empty list of non-empty lists"):
        e3.encode_ids(target("llama_tied"), rows)


@pytest.mark.parametrize("sizes", [5, ["a"], [None], [0], "abc", [1.5]])
def test_what_are_no_buckets_is_refused(sizes: Any) -> None:
    with pytest.raises(e3.Eagle3Error, match="bucket"):
        e3.encode_ids(target("llama_tied"), [[1, 2]], sizes)


@pytest.mark.parametrize(
    ("ids", "lengths"),
    [
        ([[1, 2], [3]], None),
        ([[1, 2]], [1.5]),
        ([[1, 2]], [float("nan")]),
        ([[1, 2]], ["a"]),
        ([[1, 2]], [[1], [2, 3]]),
    ],
)
def test_ragged_ids_and_lengths_of_another_kind_are_refused(ids: Any, lengths: Any) -> None:
    with pytest.raises(e3.Eagle3Error):
        e3.score(target("llama_tied"), ids, lengths)
