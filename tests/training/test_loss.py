"""The training-time test against speculators' own forward, explicit masks, and the drafter that decodes."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from loading import DRAFTS, TARGET_OF, TARGETS, draft, expected
from training import slow_ttt

from eagle3_jax.checkpoint.drafts import Draft
from eagle3_jax.decoding.drafters import Eagle3Drafter, Verified
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.models.eagle3 import shared_weights
from eagle3_jax.models.layers import apply
from eagle3_jax.training.loss import Batch, LossConfig, Metrics, lk_loss, shift_left, ttt_loss, ttt_outputs

STEPS = 3
SPECULATORS = LossConfig(STEPS, decay=1.0, objective="kl", drop_uncovered=False)
each_draft = pytest.mark.parametrize(
    "name", ("a_safeailab", "b_speculators", "c_eagle31", "d_fullvocab", "f_speculators_qwen3")
)


def fixture_batch(name: str) -> tuple[Draft, Batch, dict[str, np.ndarray]]:
    subject, arrays = draft(name), expected(DRAFTS / name)
    logits = full_logits(subject, arrays)
    ids = subject.params.get("target_ids")
    return (
        subject,
        Batch(
            features=jnp.asarray(arrays["ttt_features"]),
            token_ids=jnp.asarray(arrays["ttt_input_ids"], jnp.int32),
            target_logits=logits if ids is None else logits[..., ids],
            target_argmax=jnp.argmax(logits, -1).astype(jnp.int32),
            loss_mask=jnp.asarray(arrays["ttt_loss_mask"]),
            segment_ids=jnp.zeros(logits.shape[:2], jnp.int32),
        ),
        arrays,
    )


def full_logits(subject: Draft, arrays: dict[str, np.ndarray]) -> Any:
    """The target's [2, 23, V]."""
    hidden = jnp.asarray(arrays["ttt_verifier_last_hidden"])
    return apply(subject.target.model, subject.target.params, hidden, method="logits")


jitted_loss = jax.jit(ttt_loss, static_argnames=("model", "config"))


@partial(jax.jit, static_argnames=("model", "steps"))
def jitted_logits(model: Any, params: Any, shared: Any, batch: Batch, steps: int) -> Array:
    outputs = ttt_outputs(model, params, shared, batch, steps)
    return jnp.stack([apply(model, params, y, shared, method="logits") for y in outputs])


def run_loss(subject: Draft, batch: Batch, config: LossConfig) -> tuple[float, Metrics]:
    shared = shared_weights(subject.target.params)
    total, metrics = jitted_loss(subject.model, subject.params, shared, batch, config)
    return float(total), metrics


def step_logits(subject: Draft, batch: Batch, steps: int = STEPS) -> np.ndarray:
    """[J, B, T, Vd]."""
    shared = shared_weights(subject.target.params)
    return np.asarray(jitted_logits(subject.model, subject.params, shared, batch, steps))


@each_draft
def test_logits_of_every_step_match_speculators(name: str) -> None:
    subject, batch, arrays = fixture_batch(name)
    for ours, theirs, valid in zip(
        step_logits(subject, batch), arrays["ttt_logits"], arrays["ttt_valid"], strict=True
    ):
        np.testing.assert_allclose(ours[:, valid], theirs[:, valid], rtol=1e-5, atol=1e-5)


@each_draft
def test_losses_and_accuracies_match_speculators(name: str) -> None:
    subject, batch, arrays = fixture_batch(name)
    for row in range(2):
        one = jax.tree.map(lambda x, row=row: x[row : row + 1], batch)
        total, metrics = run_loss(subject, one, SPECULATORS)
        means = np.asarray(metrics.loss) / np.asarray(metrics.weight)
        np.testing.assert_allclose(means, arrays["ttt_loss_kl_per_step"][row], rtol=0, atol=1e-5)
        # Their denominators hold 1e-5 more.
        np.testing.assert_allclose(total, arrays["ttt_loss_kl_total"][row], rtol=1e-6, atol=0)
        # They count a step only where the earlier ones were right: our chain.
        correct, count = arrays["ttt_full_acc"][row].T
        np.testing.assert_array_equal(metrics.chain_correct, correct)
        np.testing.assert_array_equal(metrics.count, count)


SEGMENTS = np.asarray([[0] * 9 + [1] * 14, [0] * 23])


@each_draft
def test_every_number_matches_a_slow_restatement(name: str) -> None:
    """NumPy in float64, from the files, with explicit masks, over packed texts and a mask with holes."""
    subject, batch, arrays = fixture_batch(name)
    rng = np.random.default_rng(0)
    mask = np.asarray(batch.loss_mask) & (rng.random(batch.loss_mask.shape) < 0.8)
    batch = batch.replace(segment_ids=jnp.asarray(SEGMENTS, jnp.int32), loss_mask=jnp.asarray(mask))
    ours = step_logits(subject, batch)
    slow = slow_ttt.read(DRAFTS / name, TARGETS / TARGET_OF[name])
    whole = np.array(full_logits(subject, arrays))
    for row, t in np.ndindex(whole.shape[:2]):
        # The target agrees with one of the steps that end here, so that chains are sometimes right.
        step = rng.integers(min(STEPS, t + 1))
        whole[row, t, slow.target_ids[np.argmax(ours[step, row, t - step])]] += 20
    batch = batch.replace(
        target_logits=jnp.asarray(whole[..., slow.target_ids]),
        target_argmax=jnp.asarray(np.argmax(whole, axis=-1), jnp.int32),
    )
    correct = chain_correct = 0
    for row in range(2):
        inputs = (np.asarray(batch.features[row]), np.asarray(batch.token_ids[row]))
        logits = slow_ttt.logits_of_steps(slow, *inputs, STEPS, SEGMENTS[row])
        for j in range(STEPS):
            np.testing.assert_allclose(ours[j, row, : 23 - j], logits[j, : 23 - j], rtol=1e-5, atol=1e-5)
        sums = slow_ttt.sums_of_steps(slow, logits, whole[row], mask[row], SEGMENTS[row])
        correct, chain_correct = correct + sums.correct, chain_correct + sums.chain_correct
        one = jax.tree.map(lambda x, row=row: x[row : row + 1], batch)
        total, metrics = run_loss(subject, one, LossConfig(STEPS, decay=0.7))
        for field in ("weight", "correct", "chain_correct", "count"):
            np.testing.assert_array_equal(getattr(metrics, field), getattr(sums, field))
        np.testing.assert_allclose(metrics.loss, sums.loss, rtol=1e-5, atol=0)
        np.testing.assert_allclose(total, (sums.loss / sums.weight) @ [1, 0.7, 0.49], rtol=1e-5, atol=0)
        total, metrics = run_loss(subject, one, LossConfig(STEPS, decay=0.7, objective="lk"))
        np.testing.assert_allclose(metrics.loss, sums.lk, rtol=1e-5, atol=0)
        np.testing.assert_allclose(total, (sums.lk / sums.weight) @ [1, 0.7, 0.49], rtol=1e-5, atol=0)
    assert correct[1] + correct[2] > chain_correct[1] + chain_correct[2] > 0


@each_draft
def test_rows_are_what_the_drafter_computes(name: str) -> None:
    """Row n - 1 of step j is the j-th draft after n verified rows, had the drafter picked the true tokens."""
    subject, batch, _ = fixture_batch(name)
    ours = step_logits(subject, batch)
    block, verified = 8, 11
    table = jnp.arange(6, dtype=jnp.int32).reshape(2, 3)
    rows = Verified(
        batch.features[:, :verified],
        batch.token_ids[:, :verified],
        jnp.zeros(2, jnp.int32),
        jnp.full(2, verified, jnp.int32),
        table,
    )

    @jax.jit
    def chain(params: tuple[Any, Any]) -> list[Array]:
        seen: list[Array] = []

        def true_token(j: int, logits: Array, target_ids: Array | None) -> Array:
            seen.append(logits)
            return batch.token_ids[:, verified + j]

        drafter = Eagle3Drafter(subject.model)
        drafter.propose(params, drafter.make_cache(6 * block), rows, STEPS, true_token, block)
        return seen

    seen = chain((subject.params, subject.target.params))
    for j in range(STEPS):
        np.testing.assert_allclose(ours[j][:, verified - 1], seen[j], rtol=0, atol=1e-4)


def test_packed_texts_train_like_separate_ones() -> None:
    subject, batch, _ = fixture_batch("a_safeailab")
    first, second = (jax.tree.map(lambda x, row=row: x[row : row + 1], batch) for row in range(2))
    packed = jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), first, second)
    packed = packed.replace(segment_ids=jnp.repeat(jnp.arange(2, dtype=jnp.int32), 23)[None])
    alone = [run_loss(subject, part, LossConfig(STEPS))[1] for part in (first, second)]
    together = run_loss(subject, packed, LossConfig(STEPS))[1]
    for name in ("loss", "weight", "correct", "chain_correct", "count"):
        parts = [np.asarray(getattr(metrics, name)) for metrics in alone]
        np.testing.assert_allclose(getattr(together, name), sum(parts), rtol=1e-5)


def test_total_is_the_decayed_sum_of_means() -> None:
    subject, batch, _ = fixture_batch("d_fullvocab")
    total, metrics = run_loss(subject, batch, LossConfig(STEPS, decay=0.5))
    means = np.asarray(metrics.loss) / np.asarray(metrics.weight)
    np.testing.assert_allclose(total, means @ [1, 0.5, 0.25], rtol=1e-6)


def test_uncovered_targets_are_dropped_but_counted() -> None:
    subject, batch, _ = fixture_batch("a_safeailab")
    outside = np.setdiff1d(np.arange(96), np.asarray(subject.params["target_ids"]))[0]
    batch = batch.replace(target_argmax=jnp.full_like(batch.target_argmax, int(outside)))
    batch = batch.replace(target_argmax=batch.target_argmax.at[:, ::2].set(subject.params["target_ids"][0]))
    _, kept = run_loss(subject, batch, LossConfig(STEPS, drop_uncovered=False))
    _, dropped = run_loss(subject, batch, LossConfig(STEPS))
    np.testing.assert_array_equal(kept.count, dropped.count)
    np.testing.assert_array_equal(kept.weight, kept.count)
    mask = np.asarray(batch.loss_mask)
    assert float(dropped.weight[0]) == mask[:, ::2].sum() < mask.sum()


def test_objectives_share_their_gradient() -> None:
    subject, batch, _ = fixture_batch("c_eagle31")
    shared = shared_weights(subject.target.params)

    def gradient(objective: str) -> Array:
        def of(fc: Any) -> Array:
            params = {**subject.params, "fc": fc}
            return ttt_loss(subject.model, params, shared, batch, LossConfig(STEPS, objective=objective))[0]

        return jax.jit(jax.grad(of))(subject.params["fc"])["weight"].value

    np.testing.assert_allclose(gradient("kl"), gradient("cross_entropy"), rtol=1e-4, atol=1e-6)


def test_the_gradient_of_the_lk_loss_holds_its_shares_still() -> None:
    rng = np.random.default_rng(0)
    z, target = rng.normal(size=(2, 6, 9)) * 2
    p, q = slow_ttt.softmax(target), slow_ttt.softmax(z)
    share = np.exp(-3 * np.minimum(p, q).sum(axis=-1, keepdims=True))
    # The overlap's is that of the draft's probabilities where they are the smaller ones.
    smaller = np.where(q < p, q, 0)
    overlap = smaller - q * smaller.sum(axis=-1, keepdims=True)
    expected = share * (q - p) - (1 - share) * overlap

    def loss(z: Array) -> Array:
        divergence = jnp.sum(jax.scipy.special.rel_entr(jnp.float32(p), jax.nn.softmax(z, axis=-1)), axis=-1)
        return jnp.sum(lk_loss(divergence, jnp.float32(p), z))

    np.testing.assert_allclose(jax.jit(jax.grad(loss))(jnp.float32(z)), expected, rtol=1e-4, atol=1e-6)


def test_shift_left() -> None:
    x = jnp.asarray([[1, 2, 3]], jnp.int32)
    assert shift_left(x, 0).tolist() == [[1, 2, 3]]
    assert shift_left(x, 2, fill=-1).tolist() == [[3, -1, -1]]


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"steps": 0}, "0 training-time"), ({"decay": 0.0}, "decay"), ({"objective": "mse"}, "'mse'")],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(Eagle3Error, match=words):
        LossConfig(**settings)
