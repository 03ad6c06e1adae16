"""Training over a mesh of devices gives what one device gives."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import loading
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from eagle3_jax.checkpoint.drafts import load_draft, save_draft
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.quant.quantize import quantize_tree
from eagle3_jax.sharding import make_mesh, shard_weights, weight_shardings
from eagle3_jax.training.data import Chat
from eagle3_jax.training.trainer import TrainConfig, Trainer, read_metrics, train_step

CONFIG = TrainConfig(
    steps=3,
    batch_size=8,
    row_length=32,
    draft_vocab_size=48,
    save_every=2,
    eval_every=3,
    eval_rows=4,
    learning_rate=3e-4,
)
TIMED = {"seconds", "feature_seconds", "tokens_per_second"}


def chats() -> list[Chat]:
    rng = np.random.default_rng(1)
    return [Chat(rng.integers(0, 96, 24).astype(np.int32), np.arange(24) >= 6, 0.0) for _ in range(50)]


def run(out: Path, mesh: Mesh | None, config: TrainConfig = CONFIG, until: int | None = None) -> Trainer:
    trainer = Trainer(loading.target("llama_tied"), chats(), config, out, mesh=mesh)
    trainer.run(until)
    return trainer


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """The run on one device."""
    return run(tmp_path_factory.mktemp("alone"), None)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """The same run on 2 x 4 devices, by one program."""
    before = train_step._cache_size()
    trainer = run(tmp_path_factory.mktemp("sharded"), make_mesh(2, 4))
    assert train_step._cache_size() == before + 1
    return trainer


def assert_close(ours: Any, theirs: Any) -> None:
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_a_sharded_run_equals_one_on_one_device(alone: Trainer, sharded: Trainer, tmp_path: Path) -> None:
    # The optimiser's moments are the gradients, before Adam makes all of them alike in size.
    assert_close(sharded.state, alone.state)
    for ours, theirs in zip(read_metrics(sharded.out), read_metrics(alone.out), strict=True):
        assert_close(*({k: v for k, v in record.items() if k not in TIMED} for record in (ours, theirs)))
    save_draft(sharded.draft, tmp_path, dtype="float32")
    assert_close(load_draft(tmp_path, alone.target).params, alone.draft.params)


def test_weights_and_moments_are_split_by_their_logical_axes(sharded: Trainer) -> None:
    state = sharded.state
    trees = [state.trainable, *(x for x in moments(state.optimizer) if "mlp" in x)]
    assert len(trees) == 3
    for tree in trees:
        for name, axes in {"fc": (), "head": (None, "model"), "final_norm": ()}.items():
            assert tree[name]["weight"].value.sharding.spec == PartitionSpec(*axes)
        up, down = tree["mlp"]["up"]["weight"].value, tree["mlp"]["down"]["weight"].value
        assert up.sharding.spec == PartitionSpec(None, "model") and down.sharding.spec == PartitionSpec("model")
        # Each device holds a quarter.
        assert {shard.data.shape for shard in up.addressable_shards} == {(up.shape[0], up.shape[1] // 4)}
    theirs = sharded.target.params["layers_0"]["mlp"]["up"]["weight"].value
    assert theirs.sharding.spec == PartitionSpec(None, "model")


def moments(optimizer: Any) -> list[dict[str, Any]]:
    """The trees of weights inside an optax state."""
    return [x for x in jax.tree.leaves(optimizer, is_leaf=lambda x: isinstance(x, dict)) if isinstance(x, dict)]


def test_a_layout_turns_the_axes_round_and_odd_sizes_stay_whole() -> None:
    weight = loading.target("llama_tied").params["layers_0"]["mlp"]["up"]["weight"]
    turned = weight.replace(value=weight.value.T, layout="nk")
    odd = weight.replace(value=weight.value[:, :-1])
    mesh = make_mesh(1, 8)
    assert weight_shardings(turned, mesh).value.spec == PartitionSpec("model")
    assert weight_shardings(odd, mesh).value.spec == PartitionSpec()
    np.testing.assert_array_equal(shard_weights(turned, mesh).value, turned.value)


def test_scales_lie_as_their_codes_where_they_divide() -> None:
    wide = loading.target("llama_tied").params["layers_0"]["mlp"]["up"]["weight"]
    mesh = make_mesh(1, 8)
    for scheme, spec in (("ptpc_fp8", PartitionSpec("model")), ("fp8_block", PartitionSpec())):
        narrow = quantize_tree(wide, scheme)
        places = weight_shardings(narrow, mesh)
        assert (places.value.spec, places.scale.spec) == (PartitionSpec("model"), spec)
        x = np.ones((2, 32), np.float32)
        np.testing.assert_allclose(shard_weights(narrow, mesh).matmul(x), narrow.matmul(x), rtol=1e-6)


def test_a_run_goes_on_over_another_mesh(tmp_path: Path, alone: Trainer) -> None:
    run(tmp_path, make_mesh(4, 2), until=2)
    # A mesh as JAX makes it by default; its axes are of another kind.
    again = Trainer(loading.target("llama_tied"), chats(), CONFIG, tmp_path, mesh=jax.make_mesh((8,), ("data",)))
    assert again.step == 2
    again.run()
    assert_close(again.state, alone.state)


def test_meshes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Eagle3Error, match="axes x; it may have data and model"):
        run(tmp_path, jax.make_mesh((2,), ("x",)))
    with pytest.raises(Eagle3Error, match="batch_size 6 cannot be split over 4 devices"):
        run(tmp_path, make_mesh(4, 1), dataclasses.replace(CONFIG, batch_size=6))
    with pytest.raises(Eagle3Error, match=r"a mesh of 3 x 3 devices: .* there are 8"):
        make_mesh(3, 3)
