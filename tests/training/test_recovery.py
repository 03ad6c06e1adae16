"""Runs that were damaged, starved or misled: they say so, and the next one goes on."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from training import selfchats
from training.test_trainer import CONFIG, FEW

from eagle3_jax.errors import Eagle3Error
from eagle3_jax.training.distill import DistillConfig, distill
from eagle3_jax.training.trainer import Trainer, train


def test_a_damaged_checkpoint_is_named_and_the_one_before_serves(tmp_path: Path) -> None:
    Trainer(selfchats.target(), FEW, CONFIG, tmp_path).run(until=4)
    for file in (tmp_path / "checkpoints" / "4").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    with pytest.raises(Eagle3Error, match="checkpoints/4: damaged"):
        Trainer(selfchats.target(), FEW, CONFIG, tmp_path)
    (tmp_path / "checkpoints" / "4").rename(tmp_path / "aside")
    again = Trainer(selfchats.target(), FEW, CONFIG, tmp_path)
    assert again.step == 2
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2]


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    run = Trainer(selfchats.target(), FEW, CONFIG, tmp_path)
    run.rows.features[:] = np.nan
    run.rows.done[:] = 1
    with pytest.raises(Eagle3Error, match="not finite at step 1"):
        run.run()
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_run_in_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Eagle3Error):
        train(selfchats.target(), FEW, CONFIG, tmp_path / "file")
    with pytest.raises(Eagle3Error):
        distill(selfchats.target(), tmp_path / "file", selfchats.DISTILL, frame=selfchats.FRAME)


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    (tmp_path / "chats-00000.npz").write_bytes(b"PK")
    with pytest.raises(Eagle3Error, match=r"chats-00000\.npz: not a token shard"):
        distill(selfchats.target(), tmp_path, selfchats.DISTILL, frame=selfchats.FRAME)


def test_user_turns_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    config = dataclasses.replace(selfchats.DISTILL, chats=1)
    for turn in ([5000], [-1]):
        with pytest.raises(Eagle3Error, match=str(turn[0])):
            distill(selfchats.target(), tmp_path, config, [turn], selfchats.FRAME)


@pytest.mark.parametrize(
    "wrong", [{"min_p": 5.0}, {"temperatures": (0.0, -1.0)}, {"user_temperature": -1.0}, {"seed": -1}]
)
def test_what_the_sampler_refuses_is_refused_before_a_folder_is_marked(wrong: dict) -> None:
    with pytest.raises(Eagle3Error):
        DistillConfig(**wrong)
