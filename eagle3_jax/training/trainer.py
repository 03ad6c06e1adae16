"""Training an EAGLE-3 draft (arXiv 2503.01840) on text its target wrote."""

import dataclasses
import hashlib
import json
import logging
import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import struct
from jax import Array
from jax.sharding import Mesh
from tqdm import tqdm

from eagle3_jax.checkpoint.drafts import Draft, save_draft
from eagle3_jax.checkpoint.files import atomic_file, parse_json, read_json, refusing_io, write_json_atomic
from eagle3_jax.checkpoint.targets import Target
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.models.eagle3 import Eagle3, SharedWeights, shared_weights
from eagle3_jax.sharding import DATA, check_mesh, keep_sharded, on_host, shard_batch, shard_weights
from eagle3_jax.training.data import Chat, coverage, draft_vocabulary, pack, split
from eagle3_jax.training.evaluate import summary, teacher_forced
from eagle3_jax.training.features import FeatureCache, RestrictedHead, Rows, make_batch, restrict_head
from eagle3_jax.training.initial import draft_config, init_draft, with_vocabulary
from eagle3_jax.training.loss import LossConfig, Metrics, ttt_loss

log = logging.getLogger("eagle3_jax")


SCHEDULES = ("cosine", "constant", "wsd")
_RANGES = {
    **dict.fromkeys(("steps", "row_length", "save_every", "eval_every", "eval_rows"), (1, 2**31 - 1)),
    "batch_size": (1, 2**16),
    "draft_vocab_size": (0, 2**31 - 1),
    "intermediate_size": (0, 2**31 - 1),
    "seed": (0, 2**32 - 1),
    # RoPE's frequencies are powers of its base; the rest scales updates, which must stay finite and descend.
    "rope_theta": (1 + 1e-6, 1e30),
    "learning_rate": (0.0, 1e3),
    "final_rate": (0.0, 1.0),
    "weight_decay": (0.0, 1e3),
    "clip": (1e-12, 1e12),
    "beta1": (0.0, 1 - 1e-6),
    "beta2": (0.0, 1 - 1e-6),
}
"""Smallest and largest value of a setting."""


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Everything a run depends on besides target and data; static.

    Attributes:
        steps: optimiser steps. batch_size: rows of a step. row_length: tokens of a packed row.
        draft_vocab_size: Vd, the most frequent assistant tokens; 0 keeps the whole vocabulary.
        keep_vocabulary: a draft to start from brings its vocabulary along. Else it is chosen anew from the chats, and
            columns that the start's head lacks are the target's.
        taps: hidden states of the target that the draft reads. intermediate_size: width of the MLP; 0 is the target's.
        rope_theta: RoPE base. fc_norm: norm each hidden state (EAGLE-3.1). norm_output: feed back normed (EAGLE-3.1).
        init_from_target: start from the target's weights, see `init_draft`.
        freeze_head: leave the head at its initial columns: less to compute and less to overfit.
        ttt_steps: J, how many tokens deep the chain is unrolled. step_decay: step j weighs step_decay^j.
        objective: "cross_entropy", "kl" (the same gradient, less the target's entropy), or "lk" (more drafts are
            accepted above temperature 0).
        drop_uncovered: leave out rows whose most likely target token the draft vocabulary lacks.
        answers_only: learn the answers, not the turns before them too. Where the target wrote those, they are more
            of its text for the same work.
        optimizer: "adamw", or "muon" (matrices of the layer by Muon, the rest by AdamW).
        learning_rate: its peak. warmup: share of the steps in which the learning rate rises to its peak.
        schedule: after that: "cosine" falls to `final_rate` by a cosine, "constant" stays, for another run to go on
            from, "wsd" stays for four fifths of the steps and then falls in a line (arXiv 2404.06395).
        final_rate: what is left of the peak at the end, as a share of it.
        beta1, beta2: AdamW's moments. weight_decay: of the optimiser. clip: largest gradient norm.
        seed: of the initial weights and the order of rows.
        save_every: steps between checkpoints. eval_every: steps between evaluations on held-out rows.
        eval_rows: held-out rows of an evaluation.

    Raises:
        Eagle3Error: a size or a rate that is impossible, or an unknown optimiser.
    """

    steps: int = 1000
    batch_size: int = 8
    row_length: int = 512
    draft_vocab_size: int = 8192
    keep_vocabulary: bool = True
    taps: tuple[int, ...] | None = None
    intermediate_size: int = 0
    rope_theta: float = 10000.0
    fc_norm: bool = False
    norm_output: bool = False
    init_from_target: bool = True
    freeze_head: bool = False
    ttt_steps: int = 3
    step_decay: float = 0.8
    objective: str = "cross_entropy"
    drop_uncovered: bool = True
    answers_only: bool = True
    optimizer: str = "adamw"
    learning_rate: float = 2e-3
    warmup: float = 0.05
    schedule: str = "cosine"
    final_rate: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.0
    clip: float = 0.5
    seed: int = 0
    save_every: int = 100
    eval_every: int = 50
    eval_rows: int = 32

    def __post_init__(self) -> None:
        """Refuse impossible values."""
        for name, (low, high) in _RANGES.items():
            if not low <= getattr(self, name) <= high:
                raise Eagle3Error(f"{name} is {getattr(self, name)}; it must lie in [{low:g}, {high:g}]")
        if self.optimizer not in ("adamw", "muon"):
            raise Eagle3Error(f"optimizer {self.optimizer!r} is not known; use adamw or muon")
        if self.schedule not in SCHEDULES:
            raise Eagle3Error(f"schedule {self.schedule!r} is not known; use {' or '.join(SCHEDULES)}")
        if not 0 <= self.warmup < 1:
            raise Eagle3Error(f"warmup {self.warmup} is a share of the steps; it must lie in [0, 1)")
        self.loss_config()

    def loss_config(self) -> LossConfig:
        """The loss's share of the settings."""
        return LossConfig(self.ttt_steps, self.step_decay, self.objective, self.drop_uncovered)


@struct.dataclass
class TrainState:
    """What a checkpoint holds; the order of the data follows from `step` and the seed.

    Attributes:
        step: int32 [], optimiser steps done.
        trainable: the weights that learn. optimizer: its state.
    """

    step: Array
    trainable: Any
    optimizer: Any


def learning_rates(config: TrainConfig) -> optax.Schedule:
    """The learning rate of each step: a rise to the peak, then `config.schedule`."""
    peak, last = config.learning_rate, config.learning_rate * config.final_rate
    warmup = max(int(config.steps * config.warmup), 1)
    if config.schedule == "cosine":
        steps = max(config.steps, warmup + 1)
        return optax.warmup_cosine_decay_schedule(peak / warmup, peak, warmup, steps, last)
    rise = optax.linear_schedule(peak / warmup, peak, warmup)
    if config.schedule == "constant":
        return rise
    fall = max(min(config.steps // 5, config.steps - warmup), 1)
    return optax.join_schedules([rise, optax.linear_schedule(peak, last, fall)], [config.steps - fall])


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Clipping, then AdamW or Muon at the rates of `learning_rates`."""
    rate = learning_rates(config)
    if config.optimizer == "adamw":
        rule = optax.adamw(rate, config.beta1, config.beta2, weight_decay=config.weight_decay)
    else:
        rule = optax.contrib.muon(
            rate,
            weight_decay=config.weight_decay,
            adam_b1=config.beta1,
            adam_b2=config.beta2,
            adam_weight_decay=config.weight_decay,
            muon_weight_dimension_numbers=_muon_matrices,  # pyright: ignore[reportArgumentType]
            # Updates of AdamW's size, so that one learning rate serves both (arXiv 2502.16982).
            consistent_rms=0.2,
        )
    return optax.chain(optax.clip_by_global_norm(config.clip), rule)


def _muon_matrices(params: dict[str, Any]) -> Any:
    """Which leaves Muon updates: every matrix but the head's."""

    def choose(name: str, leaf: Array) -> Any:
        return optax.contrib.MuonDimensionNumbers() if leaf.ndim == 2 and name != "head" else None

    return {name: jax.tree.map(partial(choose, name), part) for name, part in params.items()}


def split_trainable(params: dict[str, Any], freeze_head: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The weights that learn, and those that stay: `target_ids`, and the head if frozen."""
    still = {"target_ids", "head"} if freeze_head else {"target_ids"}
    learning = {name: part for name, part in params.items() if name not in still}
    return learning, {name: part for name, part in params.items() if name in still}


@partial(jax.jit, static_argnames=("model", "restricted", "config", "mesh"), donate_argnames="state")
def train_step(
    model: Eagle3,
    restricted: RestrictedHead,
    config: TrainConfig,
    state: TrainState,
    frozen: dict[str, Any],
    shared: SharedWeights,
    head_params: Any,
    rows: Rows,
    mesh: Mesh | None = None,
) -> tuple[TrainState, Array, Metrics, Array]:
    """One optimiser step: (state, loss, metrics, gradient norm before clipping).

    On a mesh the new state lies as the old one did, so that one program serves all steps.
    """
    batch = make_batch(rows, restricted, head_params, model.config.dtype)

    def loss(trainable: dict[str, Any]) -> tuple[Array, Metrics]:
        return ttt_loss(model, {**frozen, **trainable}, shared, batch, config.loss_config())

    (value, metrics), gradients = jax.value_and_grad(loss, has_aux=True)(state.trainable)
    # optax mixes integers and floats.
    with jax.numpy_dtype_promotion("standard"):
        updates, moments = make_optimizer(config).update(gradients, state.optimizer, state.trainable)
        trainable = optax.apply_updates(state.trainable, updates)
        norm = optax.tree.norm(gradients)
    return keep_sharded(TrainState(state.step + 1, trainable, moments), mesh), value, metrics, norm


def rows_of_step(step: int, rows: int, batch_size: int, seed: int) -> list[int]:
    """Which rows a step reads: every epoch is a permutation of its own, and batches run across epochs."""
    places = range(step * batch_size, (step + 1) * batch_size)
    orders = {i // rows: np.random.default_rng([seed, i // rows]).permutation(rows) for i in places}
    return [int(orders[i // rows][i % rows]) for i in places]


def _first_draft(
    target: Target, chats: Sequence[Chat], config: TrainConfig, start: Draft | None
) -> tuple[Eagle3, dict[str, Any]]:
    """The draft of step 0 and its weights."""
    shape = draft_config(
        target.model.config,
        config.draft_vocab_size,
        config.taps,
        config.intermediate_size,
        config.rope_theta,
        config.fc_norm,
        config.norm_output,
    )
    model = Eagle3(shape)
    if start is None:
        target_ids = draft_vocabulary(chats, shape.draft_vocab_size, shape.vocab_size)
        key = jax.random.key(config.seed)
        return model, init_draft(model, key, target.params, target_ids, config.init_from_target)
    free = {"weights"} if config.keep_vocabulary else {"weights", "draft_vocab_size"}
    ours, theirs = dataclasses.asdict(shape), dataclasses.asdict(start.model.config)
    if other := [name for name in ours if name not in free and ours[name] != theirs[name]]:
        raise Eagle3Error(f"{start.name} has another {', '.join(other)} than this run asks for")
    params = dict(start.params)
    if not config.keep_vocabulary:
        target_ids = draft_vocabulary(chats, shape.draft_vocab_size, shape.vocab_size)
        params = with_vocabulary(params, target.params, target_ids)
    # A copy: training donates its buffers.
    return model, jax.tree.map(lambda x: jnp.array(x, copy=True), params)


class Trainer:
    """One run: data, features, state, checkpoints, metrics.

    Args:
        target: the target.
        chats: what it wrote; some are held out, see `split`.
        config: the run's settings.
        out: folder of `train.json`, `metrics.jsonl` and `checkpoints/`.
        features: folder of the feature cache; `out/features` by default.
        resume: go on from the newest checkpoint in `out`.
        start: a draft to train further, of the shape that `config` asks for; it brings its vocabulary along.
        mesh: devices to share the work: rows over its "data", weights over its "model". No result depends on it.

    Attributes:
        held_out: cache of the held-out rows; None where there are fewer than five chats.

    Raises:
        Eagle3Error: data or a start that do not fit, or a folder that holds another run.
    """

    def __init__(
        self,
        target: Target,
        chats: Sequence[Chat],
        config: TrainConfig,
        out: str | os.PathLike[str],
        features: str | os.PathLike[str] | None = None,
        resume: bool = True,
        start: Draft | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        self.mesh = None if mesh is None else check_mesh(mesh)
        rows_at_once = 1 if self.mesh is None else self.mesh.shape.get(DATA, 1)
        if config.batch_size % rows_at_once:
            raise Eagle3Error(f"batch_size {config.batch_size} cannot be split over {rows_at_once} devices")
        target = dataclasses.replace(target, params=shard_weights(target.params, self.mesh))
        self.target, self.config, self.out = target, config, Path(out)
        training, held_out = split(chats)
        self.model, params = _first_draft(target, training, config, start)
        target_ids = np.asarray(params.get("target_ids", np.arange(self.model.config.vocab_size)))
        self.coverage = {
            name: round(coverage(part, target_ids, self.model.config.vocab_size), 4)
            for name, part in (("training", training), ("held_out", held_out))
        }
        log.info("a draft vocabulary of %d covers %s of the answers", len(target_ids), self.coverage)
        self.shared = shared_weights(target.params)
        self.restricted, head_params = restrict_head(target, target_ids)
        self.head_params = shard_weights(head_params, self.mesh)
        folder, taps = Path(features or self.out / "features"), self.model.config.taps
        at_once = max(4, rows_at_once)
        packed = pack(training, config.row_length)
        self.rows = FeatureCache(folder, target, packed, taps, at_once, self.mesh, config.answers_only)
        self.held_out = None
        if held_out:
            self.held_out = FeatureCache(folder, target, pack(held_out, config.row_length), taps, at_once, self.mesh)
        trainable, frozen = split_trainable(params, config.freeze_head)
        self.frozen = shard_weights(frozen, self.mesh)
        state = TrainState(jnp.int32(0), trainable, make_optimizer(config).init(trainable))
        self.state: Any = shard_weights(state, self.mesh)
        self._claim(resume, start)
        # Not in the background: the next step donates the buffers that would be read.
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        self.checkpoints = ocp.CheckpointManager((self.out / "checkpoints").resolve(), options=options)
        if self.checkpoints.latest_step() is not None:
            abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, self.state)
            newest = self.checkpoints.latest_step()
            try:
                self.state = self.checkpoints.restore(newest, args=ocp.args.StandardRestore(abstract))
            except Exception as error:  # whatever Orbax and what lies below it raise
                fault = (str(error).splitlines() or [type(error).__name__])[0]
                raise Eagle3Error(
                    f"{self.out / 'checkpoints' / str(newest)}: damaged: {fault}; remove it to use the one before"
                ) from error
        self._drop_later_metrics()

    @property
    def step(self) -> int:
        """Optimiser steps done."""
        return int(self.state.step)

    @property
    def draft(self) -> Draft:
        """The draft as it stands; it shares its weights with the state, which the next step overwrites."""
        params = {**self.frozen, **self.state.trainable}
        return Draft(self.out.name, self.model, params, "given", "as trained", (), self.target)

    def run(self, until: int | None = None) -> Draft:
        """Train up to step `until`, or to the end, and save a checkpoint there."""
        end = min(until or self.config.steps, self.config.steps)
        with tqdm(total=self.config.steps, initial=self.step, unit="step", disable=None) as bar:
            while self.step < end:
                record = self._one_step()
                bar.set_postfix(loss=record["loss"], accuracy=record["accuracy"][0], refresh=False)
                bar.update()
                if self.step % self.config.save_every == 0 or self.step == end:
                    self.checkpoints.save(self.step, args=ocp.args.StandardSave(self.state))
        return self.draft

    def _one_step(self) -> dict[str, Any]:
        started, c = time.perf_counter(), self.config
        rows = self.rows.get(rows_of_step(self.step, len(self.rows), c.batch_size, c.seed))
        ready = time.perf_counter()
        fixed = (self.frozen, self.shared, self.head_params)
        placed = shard_batch(rows, self.mesh)
        self.state, loss, metrics, norm = train_step(
            self.model, self.restricted, c, self.state, *fixed, placed, self.mesh
        )
        if not (np.isfinite(loss) and np.isfinite(norm)):
            raise Eagle3Error(
                f"the loss or its gradient is not finite at step {self.step}; start again with a lower learning_rate"
            )
        means = summary(jax.device_get(metrics))
        seconds = time.perf_counter() - started
        record = {
            "step": self.step,
            "loss": round(float(loss), 4),
            "loss_per_step": means.pop("loss"),
            **means,
            "gradient_norm": round(float(norm), 4),
            "seconds": round(seconds, 3),
            "feature_seconds": round(ready - started, 3),
            "tokens_per_second": round(rows.tokens.size / seconds, 1),
        }
        if self.held_out is not None and (self.step == c.steps or self.step % c.eval_every == 0):
            record["held_out"] = self.evaluate()
        with open(self.out / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        return record

    def evaluate(self) -> dict[str, Any]:
        """Agreement with the target on the first held-out rows; see `teacher_forced`.

        Raises:
            Eagle3Error: there are none.
        """
        if self.held_out is None:
            raise Eagle3Error("fewer than five chats: none is held out to evaluate on")
        loss, count = self.config.loss_config(), min(self.config.eval_rows, len(self.held_out))
        return teacher_forced(self.draft, self.held_out, range(count), loss, self.restricted, self.head_params)

    def _claim(self, resume: bool, start: Draft | None) -> None:
        """Write down which run the folder belongs to; refuse one that belongs to another."""
        self.out.mkdir(parents=True, exist_ok=True)
        path = self.out / "train.json"
        config = {**dataclasses.asdict(self.config), "taps": list(self.model.config.taps)}
        begins_at = None if start is None else _fingerprint(start)
        if path.exists():
            theirs = read_json(path)
            settings = theirs.get("config", {})
            usual = dataclasses.asdict(TrainConfig())
            changed = [name for name, value in config.items() if settings.get(name, usual[name]) != value]
            if not changed and theirs.get("data", self.rows.name) != self.rows.name:
                changed = ["chats or target"]
            if not changed and theirs.get("start") != begins_at:
                changed = ["start"]
            if changed or not resume:
                fault = f"a run with other {', '.join(changed)}" if changed else "a run already"
                raise Eagle3Error(f"{self.out} holds {fault}; name another folder")
        about = {"target": self.target.name, "rows": len(self.rows), "data": self.rows.name, "start": begins_at}
        write_json_atomic(path, {**about, "coverage": self.coverage, "config": config})

    def _drop_later_metrics(self) -> None:
        """Forget the records after the checkpoint: they are about to be made again."""
        path = self.out / "metrics.jsonl"
        if path.exists():
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= self.step]
            with atomic_file(path) as file:
                file.write("".join(kept).encode())


def _fingerprint(draft: Draft) -> str:
    """Sixteen hex digits of a draft's weights."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(on_host(draft.params)):
        digest.update(leaf.tobytes())
    return digest.hexdigest()[:16]


def read_metrics(out: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The records of a run's `metrics.jsonl`, one a step.

    Raises:
        Eagle3Error: there is none, or it is damaged.
    """
    path = Path(out) / "metrics.jsonl"
    with refusing_io(path):
        lines = path.read_bytes().splitlines()
    return [parse_json(line, str(path)) for line in lines]


def train(
    target: Target,
    chats: Sequence[Chat],
    config: TrainConfig,
    out: str | os.PathLike[str],
    features: str | os.PathLike[str] | None = None,
    resume: bool = True,
    start: Draft | None = None,
    mesh: Mesh | None = None,
) -> Draft:
    """Train a draft for `target` and save it in `out/draft`.

    Killed at any step and started again, a run ends with the same weights.

    Arguments and errors as in `Trainer`.

    Example:
        >>> draft = train(target, read_chats("chats"), TrainConfig(steps=600), "run")  # doctest: +SKIP
    """
    with refusing_io(out):
        draft = Trainer(target, chats, config, out, features, resume, start, mesh).run()
    save_draft(draft, Path(out) / "draft", dtype="float32")
    return draft
