"""The training-time test against speculators' own forward, explicit masks, and the drafter that decodes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from loading import DRAFTS, draft, expected

from eagle3_jax.checkpoint.drafts import Draft
from eagle3_jax.decoding.drafters import Eagle3Drafter, Verified
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.models.attention import MASKED
from eagle3_jax.models.eagle3 import shared_weights
from eagle3_jax.training import loss
from eagle3_jax.training.loss import Batch, LossConfig, Metrics, shift_left, ttt_loss, ttt_outputs

STEPS = 3
SPECULATORS = LossConfig(STEPS, decay=1.0, objective="kl", drop_uncovered=False)
each_draft = pytest.mark.parametrize("name", ("a_safeailab", "c_eagle31", "d_fullvocab"))


def fixture_batch(name: str) -> tuple[Draft, Batch, dict[str, np.ndarray]]:
    subject, arrays = draft(name), expected(DRAFTS / name)
    hidden = jnp.asarray(arrays["ttt_verifier_last_hidden"])
    target = subject.target
    logits: Any = target.model.apply({"params": target.params}, hidden, method="logits")
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


def run_loss(subject: Draft, batch: Batch, config: LossConfig) -> tuple[float, Metrics]:
    shared = shared_weights(subject.target.params)
    total, metrics = ttt_loss(subject.model, subject.params, shared, batch, config)
    return float(total), metrics


def step_logits(subject: Draft, batch: Batch, steps: int = STEPS) -> np.ndarray:
    """[J, B, T, Vd]."""
    shared = shared_weights(subject.target.params)
    outputs = ttt_outputs(subject.model, subject.params, shared, batch, steps)
    return np.stack([subject.model.apply({"params": subject.params}, y, shared, method="logits") for y in outputs])


@each_draft
def test_logits_of_every_step_match_speculators(name: str) -> None:
    subject, batch, arrays = fixture_batch(name)
    for ours, theirs, valid in zip(
        step_logits(subject, batch), arrays["ttt_logits"], arrays["ttt_valid"], strict=True
    ):
        np.testing.assert_allclose(ours[:, valid], theirs[:, valid], rtol=0, atol=5e-5)


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


@each_draft
def test_attention_equals_explicit_masks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject, batch, _ = fixture_batch(name)
    segments = jnp.asarray([[0] * 9 + [1] * 14, [0] * 23], jnp.int32)
    batch = batch.replace(segment_ids=segments)
    ours = step_logits(subject, batch)

    def explicit(segment_ids: Array) -> Any:
        length = segment_ids.shape[1]
        own = jnp.eye(length, dtype=bool)[None]
        causal = jnp.tril(jnp.ones((length, length), bool))
        first = causal & (segment_ids[:, :, None] == segment_ids[:, None])

        def attend(q: Array, k: Array, v: Array, cache: tuple, **_: Any) -> tuple[Array, tuple]:
            cache = (*cache, (k, v))
            groups = q.shape[2] // k.shape[2]
            keys, values = (jnp.repeat(jnp.concatenate([p[i] for p in cache], axis=1), groups, axis=2) for i in (0, 1))
            later = jnp.broadcast_to(own, first.shape)
            mask = jnp.concatenate([first] + [later] * (len(cache) - 1), axis=-1)
            scores = jnp.einsum("btnd,bcnd->bntc", q, keys) * q.shape[-1] ** -0.5
            weights = jax.nn.softmax(jnp.where(mask[:, None], scores, MASKED), axis=-1)
            return jnp.einsum("bntc,bcnd->btnd", weights, values).reshape(*q.shape[:2], -1), cache

        return attend

    monkeypatch.setattr(loss, "ttt_attention", explicit)
    np.testing.assert_allclose(step_logits(subject, batch), ours, rtol=0, atol=1e-5)


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
    seen: list[Array] = []

    def true_token(j: int, logits: Array, target_ids: Array | None) -> Array:
        seen.append(logits)
        return batch.token_ids[:, verified + j]

    drafter = Eagle3Drafter(subject.model)
    params = (subject.params, subject.target.params)
    drafter.propose(params, drafter.make_cache(6 * block), rows, STEPS, true_token, block)
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

        return jax.grad(of)(subject.params["fc"])["weight"].value

    np.testing.assert_allclose(gradient("kl"), gradient("cross_entropy"), rtol=1e-4, atol=1e-6)


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
