"""Runs that were damaged, starved or misled: they say so, and the next one goes on."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from training import selfchats
from training.test_trainer import CONFIG, FEW

from eagle3_jax.errors import Eagle3Error
from eagle3_jax.training.distill import DistillConfig, distill
from eagle3_jax.training.trainer import Trainer, read_metrics, train

TESTS = Path(__file__).resolve().parents[1]


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


KILLED_RUNS = """
import os, pathlib, signal, sys
import numpy as np
import loading
from eagle3_jax.training import trainer
from eagle3_jax.training.data import Chat

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def run(out, where, step):
    one_step, rename = trainer.Trainer._one_step, os.rename
    if where == "after a step":
        def then_die(self):
            record = one_step(self)
            return die() if self.step == step else record
        trainer.Trainer._one_step = then_die
    elif where == "in a checkpoint":
        # Its files are written, its folder has not got its name yet.
        os.rename = lambda old, new: die() if str(new).endswith(f"/checkpoints/{step}") else rename(old, new)
        pathlib.Path.rename = lambda old, new: os.rename(old, new)
    elif where == "in saving the draft":
        trainer.save_draft = die
    rng = np.random.default_rng(0)
    chats = [Chat(rng.integers(0, 96, 24).astype(np.int32), np.arange(24) >= 6, 0.0) for _ in range(4)]
    config = trainer.TrainConfig(steps=5, batch_size=2, row_length=32, draft_vocab_size=48, save_every=2, ttt_steps=1)
    trainer.train(loading.target("llama_tied"), chats, config, out)

for out, where, step in [line.split(",") for line in sys.argv[1:]]:
    # Forked before JAX starts: each has a JAX of its own, and none imports anything again.
    if not (child := os.fork()):
        run(out, where, int(step))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_killed_by_the_system_anywhere_a_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    places = ["after a step,1", "in a checkpoint,4", "in saving the draft,5"]
    attempts = ["whole,nowhere,0", *(f"killed,{place}" for place in places), "killed,nowhere,0"]
    done = subprocess.run(
        [sys.executable, "-c", KILLED_RUNS, *attempts],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    killed = str(-signal.SIGKILL)
    assert done.stdout.split() == ["0", killed, killed, killed, "0"], done.stderr
    whole, killed = ((tmp_path / name / "draft" / "model.safetensors").read_bytes() for name in ("whole", "killed"))
    assert whole == killed
    assert [record["step"] for record in read_metrics(tmp_path / "killed")] == [1, 2, 3, 4, 5]


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
