"""The trainer on a tiny target: it learns, resumes exactly, and keeps still what must not move."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import loading
import numpy as np
import pytest
from training import selfchats

from eagle3_jax.api import score
from eagle3_jax.checkpoint.drafts import load_draft
from eagle3_jax.config import LlamaConfig
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.models.eagle3 import Eagle3, shared_weights
from eagle3_jax.quant.weight import WeightFormats
from eagle3_jax.training.data import draft_vocabulary, pack, split
from eagle3_jax.training.evaluate import evaluate_decoding
from eagle3_jax.training.features import FeatureCache
from eagle3_jax.training.initial import draft_config, init_draft
from eagle3_jax.training.trainer import TrainConfig, Trainer, learning_rates, read_metrics, rows_of_step, train

CONFIG = TrainConfig(
    steps=6, batch_size=4, row_length=64, draft_vocab_size=48, save_every=2, eval_every=3, eval_rows=4
)
FEW = selfchats.chats()[:30]


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One feature cache for all runs of this file."""
    return tmp_path_factory.mktemp("features")


def trainer(out: Path, features: Path, config: TrainConfig = CONFIG, **options: Any) -> Trainer:
    return Trainer(selfchats.target(), FEW, config, out, features, **options)


def assert_same(ours: Any, theirs: Any) -> None:
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_draft_learns(tmp_path: Path) -> None:
    config = TrainConfig(
        steps=60,
        batch_size=8,
        row_length=64,
        draft_vocab_size=64,
        init_from_target=False,
        learning_rate=1e-2,
        eval_every=30,
    )
    run = Trainer(selfchats.target(), selfchats.chats(), config, tmp_path)
    prompts = [chat.tokens[:14].tolist() for chat in selfchats.chats()[4::5]]
    before = evaluate_decoding(run.draft, prompts, chain=3, max_new_tokens=20)
    at_first = run.evaluate()
    run.run()
    after = evaluate_decoding(run.draft, prompts, chain=3, max_new_tokens=20)
    made = read_metrics(tmp_path)
    assert [r["step"] for r in made] == list(range(1, 61))
    assert made[-1]["loss"] < 0.7 * made[0]["loss"]
    assert made[-1]["held_out"]["accuracy"][0] > at_first["accuracy"][0] + 0.2
    assert after["mean_acceptance_length"] > before["mean_acceptance_length"] + 0.2


def test_killed_at_any_step_it_ends_with_the_same_weights(tmp_path: Path, features: Path) -> None:
    whole = trainer(tmp_path / "whole", features)
    whole.run()
    broken = trainer(tmp_path / "broken", features)
    broken.run(until=2)
    broken._one_step()  # step 3 is done and recorded, but not saved
    del broken
    with open(tmp_path / "broken" / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "lo')
    again = trainer(tmp_path / "broken", features)
    assert again.step == 2
    again.run()
    assert_same(whole.state, again.state)
    assert_same(whole.draft.params, again.draft.params)
    timed = {"seconds", "feature_seconds", "tokens_per_second"}
    ours, theirs = (
        [{k: v for k, v in r.items() if k not in timed} for r in read_metrics(tmp_path / name)]
        for name in ("whole", "broken")
    )
    assert ours == theirs and len(ours) == 6
    assert [r["step"] for r in ours if "held_out" in r] == [3, 6]


def test_a_finished_draft_is_saved_and_loads(tmp_path: Path, features: Path) -> None:
    draft = train(selfchats.target(), FEW, CONFIG, tmp_path, features)
    loaded = load_draft(tmp_path / "draft", selfchats.target())
    assert dataclasses.replace(loaded.model.config, weights=WeightFormats()) == draft.model.config
    assert_same(loaded.params, draft.params)
    # Asking again finds the work done.
    assert_same(train(selfchats.target(), FEW, CONFIG, tmp_path, features).params, draft.params)
    assert len(read_metrics(tmp_path)) == 6


def test_a_draft_can_be_trained_further(tmp_path: Path, features: Path) -> None:
    first = trainer(tmp_path / "first", features).draft
    before = jax.device_get(first.params)
    more = trainer(tmp_path / "more", features, dataclasses.replace(CONFIG, seed=5), start=first)
    assert_same(more.draft.params, before)
    more.run(until=1)
    assert_same(first.params, before)
    # What is frozen comes from the start: the folder may not go on without it, or from another.
    for other in (None, more.draft):
        with pytest.raises(Eagle3Error, match="other start"):
            trainer(tmp_path / "more", features, dataclasses.replace(CONFIG, seed=5), start=other)
    with pytest.raises(Eagle3Error, match="another norm_output"):
        trainer(tmp_path / "other", features, dataclasses.replace(CONFIG, norm_output=True), start=first)


def test_a_start_can_take_another_vocabulary(tmp_path: Path, features: Path) -> None:
    first = trainer(tmp_path / "first", features, dataclasses.replace(CONFIG, draft_vocab_size=20))
    first.run(until=2)
    start = jax.device_get(first.draft.params)
    wider = dataclasses.replace(CONFIG, draft_vocab_size=40, keep_vocabulary=False)
    with pytest.raises(Eagle3Error, match="another draft_vocab_size"):
        trainer(tmp_path / "kept", features, dataclasses.replace(wider, keep_vocabulary=True), start=first.draft)
    ours = jax.device_get(trainer(tmp_path / "wider", features, wider, start=first.draft).draft.params)
    counts = np.bincount(np.concatenate([c.tokens[c.is_assistant] for c in split(FEW)[0]]), minlength=96)
    ids = np.sort(np.argsort(-counts, kind="stable")[:40])
    np.testing.assert_array_equal(ours["target_ids"], ids)
    had = {int(token): start["head"]["weight"].value[:, i] for i, token in enumerate(start["target_ids"])}
    embedding = np.asarray(selfchats.target().params["embed"]["weight"].value).T
    for column, token in zip(ours["head"]["weight"].value.T, ids, strict=True):
        np.testing.assert_array_equal(column, had.get(int(token), embedding[token]))
    assert 0 < sum(int(token) in had for token in ids) == 20
    assert any(not np.array_equal(column, embedding[token]) for token, column in had.items())
    for name in start.keys() - {"head", "target_ids"}:
        assert_same(ours[name], start[name])
    whole = dataclasses.replace(wider, draft_vocab_size=0)
    assert "target_ids" not in trainer(tmp_path / "whole", features, whole, start=first.draft).draft.params


def test_another_run_in_the_folder_is_refused(tmp_path: Path, features: Path) -> None:
    trainer(tmp_path, features)
    with pytest.raises(Eagle3Error, match="other seed"):
        trainer(tmp_path, features, dataclasses.replace(CONFIG, seed=1))
    with pytest.raises(Eagle3Error, match="other chats or target"):
        Trainer(selfchats.target(), FEW[:20], CONFIG, tmp_path, features)
    with pytest.raises(Eagle3Error, match="a run already"):
        trainer(tmp_path, features, resume=False)


def test_what_is_frozen_stays(tmp_path: Path, features: Path) -> None:
    config = dataclasses.replace(CONFIG, steps=1, freeze_head=True, optimizer="muon")
    run = trainer(tmp_path, features, config)
    before = jax.device_get(run.draft.params)
    after = jax.device_get(run.run().params)
    same = {name: np.array_equal(a, b) for name, (a, b) in _leaves(before, after).items()}
    assert [name for name, equal in same.items() if equal] == ["head/weight", "target_ids"]


def _leaves(before: Any, after: Any) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    pairs = zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True)
    return {"/".join(k.key for k in path if hasattr(k, "key")): (a, b) for (path, a), b in pairs}


def test_features_are_computed_once(features: Path) -> None:
    target, rows = selfchats.target(), pack(FEW, 64)
    cache = FeatureCache(features, target, rows, (1, 2))
    first = cache.get([3, 0, 3])
    assert cache.done.sum() == 2
    broken = dataclasses.replace(target, model=None, params=target.params)
    again = FeatureCache(features, target, rows, (1, 2))
    again.target = broken
    second = again.get([3, 0, 3])
    assert_same(first, second)
    assert np.array_equal(first.features[0], first.features[2])
    assert FeatureCache(features, target, rows, (1, 3)).done.sum() == 0


def test_cached_states_are_the_targets_own_per_chat(features: Path) -> None:
    target = selfchats.target()
    chats = sorted(FEW, key=lambda chat: len(chat.tokens))[:6]
    rows = pack(chats, 96)
    states = FeatureCache(features, target, rows, (2, 7)).get(range(len(rows.tokens)))
    for r, segment in [(0, 0), (0, 1)]:
        place = rows.segment_ids[r] == segment
        alone = score(target, rows.tokens[r][place][None])
        wanted = np.concatenate([alone.hidden_states[2, 0], alone.hidden_states[7, 0]], axis=-1)
        np.testing.assert_allclose(states.features[r][place], wanted, rtol=2e-3, atol=2e-3)
        np.testing.assert_allclose(states.hidden[r][place], alone.hidden_states[7, 0], rtol=2e-3, atol=2e-3)
        np.testing.assert_array_equal(states.argmax[r][place], np.argmax(alone.logits[0], -1))


def test_every_epoch_is_another_permutation() -> None:
    order = [i for step in range(15) for i in rows_of_step(step, 10, 4, seed=0)]
    epochs = [order[i : i + 10] for i in range(0, 60, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 6
    assert rows_of_step(0, 10, 4, seed=1) != order[:4]


def test_initial_weights_are_the_targets() -> None:
    target = selfchats.target()
    config = draft_config(target.model.config, 48)
    assert config.taps == (2, 3, 4)
    model = Eagle3(config)
    ids = draft_vocabulary(FEW, 48, 96)
    params = init_draft(model, jax.random.key(0), target.params, ids, from_target=True)
    width = config.hidden_size
    features = jax.random.normal(jax.random.key(1), (1, 2, 3 * width))
    shared = shared_weights(target.params)
    fused = model.apply({"params": params}, features, shared, method="fuse")
    np.testing.assert_array_equal(fused, features[..., -width:])
    y = jax.random.normal(jax.random.key(2), (2, width))
    ours: Any = model.apply({"params": params}, y, shared, method="logits")
    theirs: Any = target.model.apply({"params": target.params}, y, method="logits")
    np.testing.assert_allclose(ours, theirs[:, ids], rtol=1e-6, atol=1e-6)
    last = target.params["layers_6"]
    for name in "qkv":
        np.testing.assert_array_equal(
            params["attention"][name]["weight"].value[width:], last["attention"][name]["weight"].value
        )
    np.testing.assert_array_equal(params["mlp"]["down"]["weight"].value, last["mlp"]["down"]["weight"].value)
    assert params["target_ids"].dtype == jnp.int32


@pytest.mark.parametrize(("name", "attention"), [("qwen3_moe", True), ("gpt_oss", True), ("deepseek_v3_kimi", False)])
def test_a_layer_of_another_kind_is_taken_as_far_as_it_fits(name: str, attention: bool) -> None:
    """Experts and latent attention have no place in the draft's layer; its norms and the head do."""
    target = loading.target(name)
    config = draft_config(target.model.config, 48, (1, 2, 4))
    params = init_draft(Eagle3(config), jax.random.key(0), target.params, np.arange(48), from_target=True)
    last = target.params[f"layers_{target.model.config.num_layers - 1}"]
    np.testing.assert_array_equal(params["mlp_norm"]["weight"].value, last["mlp_norm"]["weight"].value)
    np.testing.assert_array_equal(params["head"]["weight"].value, target.params["head"]["weight"].value[:, :48])
    if attention:
        ours = params["attention"]["k"]["weight"].value[config.hidden_size :]
        np.testing.assert_array_equal(ours, last["attention"]["k"]["weight"].value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"steps": 0}, "steps is 0"),
        ({"optimizer": "sgd"}, "'sgd'"),
        ({"warmup": 1.0}, "warmup"),
        ({"schedule": "step"}, "'step' is not known; use cosine or constant or wsd"),
        ({"final_rate": 1.5}, "final_rate is 1.5"),
        ({"ttt_steps": 0}, "0 training-time"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(Eagle3Error, match=words):
        TrainConfig(**settings)


def test_learning_rates_rise_stay_and_fall() -> None:
    def rates(schedule: str) -> list[float]:
        config = TrainConfig(steps=20, learning_rate=0.4, warmup=0.2, schedule=schedule, final_rate=0.25)
        return [round(float(learning_rates(config)(step)), 6) for step in range(21)]

    rise = [0.1, 0.175, 0.25, 0.325]
    assert rates("constant") == [*rise, *[0.4] * 17]
    assert rates("wsd") == [*rise, *[0.4] * 13, 0.325, 0.25, 0.175, 0.1]
    cosine = [0.1 + 0.3 * (1 + math.cos(math.pi * step / 16)) / 2 for step in range(17)]
    assert rates("cosine") == pytest.approx([*rise, *cosine], abs=1e-6)


@pytest.mark.parametrize("taps", [(), (3, 2), (2, 2), (2, 8), (-1, 2)])
def test_taps_outside_the_target_are_refused(taps: tuple[int, ...]) -> None:
    config: LlamaConfig = selfchats.target().model.config
    with pytest.raises(Eagle3Error, match="taps"):
        draft_config(config, 48, taps)
