"""The sampler against numpy restatements of each transform, their order, and the law of its draws.

Logits here are multiples of 1/4 and penalties powers of two, so that float32 is exact and sets of surviving tokens
can be compared for equality, ties included.
"""

import dataclasses
from collections.abc import Collection
from functools import partial
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats
from hypothesis import given
from jax import Array

from eagle3_jax.decoding.sampling import (
    TRANSFORMS,
    UNLIMITED,
    History,
    Sampling,
    adjust,
    check_keys,
    check_transforms,
    draw,
    gumbel_noise,
    is_stop,
    log_probability,
    noise_if_sampled,
    row_keys,
    temper,
    truncate,
    used_transforms,
)
from eagle3_jax.errors import Eagle3Error

INF = float("inf")


@dataclasses.dataclass
class Wish:
    """One row's settings in plain Python, and their restatement."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: dict[int, float] = dataclasses.field(default_factory=dict)

    def process(self, logits: np.ndarray, prompt: set[int], output: list[int], eos: tuple[int, ...]) -> np.ndarray:
        """The processed logits [V] of the token after `output`, float64, step by step as design section 1 orders."""
        z = np.array(logits, np.float64)
        if len(output) < self.min_tokens:
            for token in (*self.stop_ids, *(() if self.ignore_eos else eos)):
                if token < len(z):
                    z[token] = -INF
        for token, value in self.logit_bias.items():
            if token < len(z):
                z[token] += value
        for token in prompt | set(output):
            z[token] = z[token] / self.repetition_penalty if z[token] > 0 else z[token] * self.repetition_penalty
        for token in set(output):
            z[token] -= self.presence_penalty + self.frequency_penalty * output.count(token)
        z = z / (self.temperature or 1.0)
        z = keep(z, min_p_set(z, self.min_p))
        z = keep(z, top_k_set(z, self.top_k))
        return keep(z, top_p_set(z, self.top_p))


def keep(z: np.ndarray, kept: np.ndarray) -> np.ndarray:
    return np.where(kept, z, -INF)


def min_p_set(z: np.ndarray, min_p: float) -> np.ndarray:
    return np.ones(len(z), bool) if min_p == 0 else np.exp(z - z.max()) >= min_p


def top_k_set(z: np.ndarray, top_k: int) -> np.ndarray:
    """The k largest and whatever equals the k-th."""
    return z >= np.sort(z)[::-1][min(top_k or len(z), len(z)) - 1]


def top_p_set(z: np.ndarray, top_p: float) -> np.ndarray:
    """The shortest run of the most probable tokens with at least that mass, and whatever equals its last."""
    if top_p == 1:
        return np.ones(len(z), bool)
    ordered = np.sort(z)[::-1]
    mass = np.cumsum(scipy.special.softmax(ordered))
    return z >= ordered[np.argmax(mass >= top_p)]


def rows(wishes: list[Wish], eos: tuple[int, ...] = (), width: int | None = None) -> Sampling:
    """One batch of the wishes; `width` pads the tables so that every batch has the same shapes."""
    sampling = Sampling.make(
        len(wishes),
        eos_ids=eos,
        **{field.name: [getattr(wish, field.name) for wish in wishes] for field in dataclasses.fields(Wish)},
    )
    if width is None:
        return sampling

    def padded(table: Array, filler: float) -> Array:
        return jnp.pad(table, ((0, 0), (0, width - table.shape[1])), constant_values=filler)

    return sampling.replace(
        stop_ids=padded(sampling.stop_ids, -1),
        bias_ids=padded(sampling.bias_ids, -1),
        bias_values=padded(sampling.bias_values, 0.0),
    )


@partial(jax.jit, static_argnames="transforms")
def process(
    logits: Array,
    sampling: Sampling,
    history: History | None,
    drafts: Array,
    produced: Array,
    transforms: tuple[str, ...] = TRANSFORMS,
) -> Array:
    z = adjust(logits, sampling, transforms, history, drafts, produced)
    return truncate(temper(z, sampling), sampling, transforms)


def process_alone(
    logits: list[float], wish: Wish, prompt: Collection[int] = (), output: Collection[int] = ()
) -> np.ndarray:
    """One row, one token: [V]."""
    history = history_of([prompt], [output], len(logits))
    z = process(
        jnp.asarray([[logits]], jnp.float32),
        rows([wish], width=2),
        history,
        jnp.zeros((1, 0), jnp.int32),
        jnp.asarray([len(output)], jnp.int32),
    )
    return np.asarray(z)[0, 0]


def history_of(prompts: list[Collection[int]], outputs: list[Collection[int]], vocab: int) -> History:
    in_prompt = np.zeros((len(prompts), vocab), bool)
    counts = np.zeros((len(prompts), vocab), np.int32)
    for b, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        in_prompt[b, list(prompt)] = True
        np.add.at(counts[b], list(output), 1)
    return History(jnp.asarray(in_prompt), jnp.asarray(counts))


def survivors(z: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.isfinite(z)).tolist())


# Everything at once, against the restatement.

VOCAB, WIDTH, EOS = 7, 3, (2, 6)
tokens = st.integers(0, VOCAB - 1)
logit = st.integers(-12, 12).map(lambda n: n / 4) | st.just(-INF) | st.sampled_from([0.0, -0.0, 1.0, 1.0])
wish = st.builds(
    Wish,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 3, VOCAB, 100]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.55, 0.2, 1e-6]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.4, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 2.0, 0.5]),
    presence_penalty=st.sampled_from([0.0, 0.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -0.5]),
    min_tokens=st.integers(0, 4),
    stop_ids=st.lists(st.integers(0, VOCAB), max_size=WIDTH).map(tuple),  # VOCAB: not in the vocabulary
    ignore_eos=st.booleans(),
    logit_bias=st.dictionaries(st.integers(0, VOCAB), st.sampled_from([2.0, -3.5, 0.25]), max_size=WIDTH),
)


@st.composite
def passes(draw_value: st.DrawFn) -> tuple:
    """Two rows of a verify pass with two drafts: (wishes, logits [2, 3, V], prompts, outputs, drafts)."""
    wishes = [draw_value(wish) for _ in range(2)]
    logits = [[draw_value(st.lists(logit, min_size=VOCAB, max_size=VOCAB)) for _ in range(3)] for _ in range(2)]
    prompts = [draw_value(st.sets(tokens, max_size=4)) for _ in range(2)]
    outputs = [draw_value(st.lists(tokens, max_size=3)) for _ in range(2)]
    return (
        wishes,
        np.asarray(logits, np.float32),
        prompts,
        outputs,
        [draw_value(st.tuples(tokens, tokens)) for _ in range(2)],
    )


@given(passes())
def test_every_row_of_a_verify_pass_is_processed_as_if_its_drafts_had_been_emitted(case: tuple) -> None:
    wishes, logits, prompts, outputs, drafts = case
    produced = jnp.asarray([len(output) for output in outputs], jnp.int32)
    history = history_of(prompts, outputs, VOCAB)
    got = process(jnp.asarray(logits), rows(wishes, EOS, WIDTH), history, jnp.asarray(drafts, jnp.int32), produced)
    for b, row in enumerate(wishes):
        for t in range(3):
            expected = row.process(logits[b, t], prompts[b], [*outputs[b], *drafts[b][:t]], EOS)
            assert np.asarray(got)[b, t].tolist() == expected.tolist()


# Each transform alone, at its edges.


@pytest.mark.parametrize(
    ("logits", "k", "expected"),
    [
        ([1.0, 3.0, 2.0, 0.0], 1, {1}),
        ([1.0, 3.0, 2.0, 0.0], 3, {0, 1, 2}),
        ([1.0, 3.0, 2.0, 0.0], 0, {0, 1, 2, 3}),
        ([1.0, 3.0, 2.0, 0.0], 4, {0, 1, 2, 3}),
        ([1.0, 3.0, 2.0, 0.0], UNLIMITED, {0, 1, 2, 3}),
        ([3.0, 3.0, 3.0, 0.0], 1, {0, 1, 2}),
        ([2.0, 2.0, 2.0, 2.0], 2, {0, 1, 2, 3}),
        ([-1.0, -3.0, -2.0, -9.0], 2, {0, 2}),
        ([-1.0, 0.0, -0.0, 1.0], 2, {1, 2, 3}),
        ([-INF, 5.0, -INF, 4.0], 3, {1, 3}),
        ([-1e30, 1e30, 1e-30, -1e-30], 2, {1, 2}),
    ],
)
def test_top_k_keeps_the_k_largest_and_ties_of_the_last(logits: list[float], k: int, expected: set[int]) -> None:
    assert survivors(process_alone(logits, Wish(1.0, top_k=k))) == expected


EIGHTHS = [*np.log([1 / 2, 1 / 4, 1 / 8, 1 / 8])]


@pytest.mark.parametrize(
    ("logits", "p", "expected"),
    [
        (EIGHTHS, 0.4, {0}),
        (EIGHTHS, 0.6, {0, 1}),
        (EIGHTHS, 0.8, {0, 1, 2, 3}),  # the two eighths are equal
        (EIGHTHS, 1.0, {0, 1, 2, 3}),
        (EIGHTHS, 1e-6, {0}),
        (EIGHTHS[::-1], 0.6, {2, 3}),
        ([4.0, 4.0, 4.0, 4.0], 0.3, {0, 1, 2, 3}),
        ([4.0, 4.0, 4.0, 4.0], 1e-6, {0, 1, 2, 3}),
        ([0.0, -0.0, -5.0, -6.0], 0.3, {0, 1}),
        ([-INF, 1.0, -INF, 0.0], 0.9999, {1, 3}),
        ([-100.0, -101.0, -200.0, -INF], 0.9, {0, 1}),
        ([1e4, 0.0, 0.0, 0.0], 0.999999, {0}),
    ],
)
def test_top_p_keeps_the_shortest_run_with_that_mass(logits: list[float], p: float, expected: set[int]) -> None:
    assert survivors(process_alone(logits, Wish(1.0, top_p=p))) == expected


@pytest.mark.parametrize(
    ("logits", "p", "expected"),
    [
        (EIGHTHS, 0.3, {0, 1}),
        (EIGHTHS, 0.2, {0, 1, 2, 3}),
        (EIGHTHS, 1.0, {0}),
        ([7.0, 7.0, 6.75, -1.0], 1.0, {0, 1}),
        ([-50.0, -50.5, -60.0, -INF], 0.5, {0, 1}),
        ([2.0, 2.0, 2.0, 2.0], 1.0, {0, 1, 2, 3}),
        ([0.0, -20.0, -INF, -3.0], 1e-5, {0, 3}),
    ],
)
def test_min_p_keeps_what_is_that_share_of_the_best(logits: list[float], p: float, expected: set[int]) -> None:
    assert survivors(process_alone(logits, Wish(1.0, min_p=p))) == expected


def test_truncation_leaves_the_survivors_logits_as_they_were() -> None:
    z = process_alone([1.0, 3.0, 2.0, 0.5], Wish(0.5, top_k=2, top_p=0.99, min_p=0.01))
    assert z.tolist() == [-INF, 6.0, 4.0, -INF]


def test_slack_moves_each_cut() -> None:
    def kept(slack: float, **wish: Any) -> set[int]:
        z = jnp.asarray([[[0.0, -1.0, -1.25, -3.0]]], jnp.float32)
        return survivors(np.asarray(truncate(z, rows([Wish(1.0, **wish)]), TRANSFORMS, slack))[0, 0])

    # In logits: the second best is at -1; exp(-1.1) lies between the second and the third.
    assert [kept(s, top_k=2) for s in (0.0, 0.3, 2.5, -0.5)] == [{0, 1}, {0, 1, 2}, {0, 1, 2, 3}, {0}]
    assert [kept(s, min_p=float(np.exp(-1.1))) for s in (0.0, 0.2, -0.2)] == [{0, 1}, {0, 1, 2}, {0}]
    # In probability: the masses are 0.589, 0.806, 0.975, 1.
    assert [kept(s, top_p=0.7) for s in (0.0, 0.2, -0.2)] == [{0, 1}, {0, 1, 2}, {0}]


def test_the_penalties_by_hand() -> None:
    """Token 0 twice in the output, 1 in the prompt, 2 in both, 3 new; 4 in the output with a negative logit."""
    logits, output = [4.0, 4.0, 4.0, 4.0, -2.0, -2.0], (0, 0, 2, 4)
    wish = Wish(1.0, repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    z = process_alone(logits, wish, prompt={1, 2, 5}, output=output)
    assert z.tolist() == [2 - 0.5 - 0.5, 2.0, 2 - 0.5 - 0.25, 4.0, -4 - 0.5 - 0.25, -4.0]


def test_drafts_count_row_by_row() -> None:
    """Frequency penalty 1 on drafts 3, 3: nothing before row 0, one before row 1, two before row 2."""
    logits = jnp.zeros((1, 3, 4))
    z = process(
        logits,
        rows([Wish(1.0, frequency_penalty=1.0)]),
        history_of([set()], [[3]], 4),
        jnp.asarray([[3, 3]], jnp.int32),
        jnp.asarray([1], jnp.int32),
    )
    assert np.asarray(z)[0, :, 3].tolist() == [-1.0, -2.0, -3.0] and not np.asarray(z)[0, :, :3].any()


def test_min_tokens_bans_eos_and_stop_ids_until_enough_tokens_are_out() -> None:
    sampling = rows(
        [Wish(1.0, min_tokens=3, stop_ids=(1,)), Wish(1.0, min_tokens=3, stop_ids=(1,), ignore_eos=True)], (0,)
    )
    z = process(jnp.zeros((2, 3, 4)), sampling, None, jnp.zeros((2, 2), jnp.int32), jnp.asarray([1, 1], jnp.int32))
    # Rows stand for tokens 1, 2 and 3: the first two come before three tokens are out.
    assert [survivors(x) for x in np.asarray(z)[0]] == [{2, 3}, {2, 3}, {0, 1, 2, 3}]
    assert [survivors(x) for x in np.asarray(z)[1]] == [{0, 2, 3}, {0, 2, 3}, {0, 1, 2, 3}]


def test_logit_bias_adds_to_its_ids_and_padding_to_none() -> None:
    sampling = rows([Wish(1.0, logit_bias={3: 1.5, 0: -2.0}), Wish(1.0, logit_bias={9: 4.0}), Wish(1.0)])
    assert np.asarray(sampling.bias_ids).tolist() == [[3, 0], [9, -1], [-1, -1]]
    z = process(jnp.zeros((3, 1, 4)), sampling, None, jnp.zeros((3, 0), jnp.int32), jnp.zeros(3, jnp.int32))
    assert np.asarray(z)[:, 0].tolist() == [[-2.0, 0.0, 0.0, 1.5], [0.0] * 4, [0.0] * 4]
    heavy = sampling.replace(bias_values=jnp.full((3, 2), 7.0))  # the id decides what is padding, not the value
    z = process(jnp.zeros((3, 1, 4)), heavy, None, jnp.zeros((3, 0), jnp.int32), jnp.zeros(3, jnp.int32))
    assert np.asarray(z)[1:, 0].tolist() == [[0.0] * 4, [0.0] * 4]


@pytest.mark.parametrize(
    "wish",
    [
        Wish(1.0, min_tokens=2, stop_ids=(1,)),
        Wish(1.0, logit_bias={0: 2.0}),
        Wish(1.0, repetition_penalty=0.5),
        Wish(1.0, repetition_penalty=2.0),
        Wish(1.0, presence_penalty=-1.0),
        Wish(1.0, frequency_penalty=-0.25),
        Wish(1.0, min_p=0.4),
        Wish(1.0, top_k=1),
        Wish(1.0, top_p=0.2),
        Wish(2.0),
        Wish(0.0, top_k=2),
    ],
    ids=lambda wish: ",".join(f"{k}={v}" for k, v in vars(wish).items() if v != getattr(Wish(1.0), k)),
)
@pytest.mark.parametrize("place", [0, 1])
def test_the_only_row_that_asks_for_something_gets_it_and_its_neighbour_does_not(wish: Wish, place: int) -> None:
    """One token is out, so that min_tokens=2 bans the very next one and no other."""
    logits = np.array([0.5, 2.0, 1.0, -1.0], np.float32)
    wishes = [Wish(1.0), Wish(1.0)]
    wishes[place] = wish
    z = process(
        jnp.broadcast_to(logits, (2, 1, 4)),
        rows(wishes, width=2),
        history_of([{1}] * 2, [[3]] * 2, 4),
        jnp.zeros((2, 0), jnp.int32),
        jnp.ones(2, jnp.int32),
    )
    expected = wish.process(logits, {1}, [3], ())
    assert np.asarray(z)[place, 0].tolist() == expected.tolist() != logits.tolist()
    assert np.asarray(z)[1 - place, 0].tolist() == logits.tolist()


@pytest.mark.parametrize("left_out", TRANSFORMS)
def test_a_transform_that_is_not_compiled_in_does_nothing(left_out: str) -> None:
    uses = {
        "min_tokens": Wish(1.0, min_tokens=5, stop_ids=(1,)),
        "logit_bias": Wish(1.0, logit_bias={1: 3.0}),
        "penalties": Wish(1.0, repetition_penalty=2.0, presence_penalty=1.0),
        "min_p": Wish(1.0, min_p=0.9),
        "top_k": Wish(1.0, top_k=1),
        "top_p": Wish(1.0, top_p=0.1),
    }
    logits = jnp.asarray([[[1.0, 2.0, 3.0, 0.5]]])
    arguments = (
        rows([uses[left_out]]),
        history_of([{1}], [[2]], 4),
        jnp.zeros((1, 0), jnp.int32),
        jnp.asarray([1], jnp.int32),
    )
    kept = tuple(name for name in TRANSFORMS if name != left_out)
    assert np.array_equal(process(logits, *arguments, transforms=kept), logits)
    assert not np.array_equal(process(logits, *arguments), logits)


# Order.


def test_temperature_comes_before_top_p() -> None:
    """Fault F3 of another engine: at T=2 and p=0.8 it keeps three tokens of these, where four are right."""
    probability = np.array([0.5, 0.2, 0.15, 0.07, 0.05, 0.03])
    logits = np.log(probability)
    first_top_p = top_p_set(logits, 0.8)
    first_temperature = top_p_set(logits / 2, 0.8)
    assert (first_top_p.sum(), first_temperature.sum()) == (3, 4)
    assert survivors(process_alone([*logits], Wish(2.0, top_p=0.8))) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("probability", "wish", "expected", "otherwise"),
    [
        # min_p after temperature: 0.2 / 0.5 is below 0.5, its square root above.
        ([0.5, 0.2, 0.2, 0.1], Wish(2.0, min_p=0.5), {0, 1, 2}, {0}),
        # top_p of what top_k left: 4/7 of it is above one half.
        ([0.4, 0.3, 0.2, 0.1], Wish(1.0, top_k=2, top_p=0.5), {0}, {0, 1}),
        # top_p of what min_p left: 5/9 of it is above 0.54.
        ([0.5, 0.22, 0.18, 0.1], Wish(1.0, min_p=0.3, top_p=0.54), {0}, {0, 1}),
    ],
)
def test_truncations_see_what_came_before_them(
    probability: list[float], wish: Wish, expected: set[int], otherwise: set[int]
) -> None:
    assert survivors(process_alone([*np.log(probability)], wish)) == expected != otherwise


@pytest.mark.parametrize(
    ("wish", "expected"),
    [
        (Wish(1.0, logit_bias={0: -3.0}, repetition_penalty=2.0), -4.0),  # (1 - 3) * 2, not 1 / 2 - 3
        (Wish(1.0, repetition_penalty=2.0, presence_penalty=3.0), -2.5),  # 1 / 2 - 3, not (1 - 3) * 2
        (Wish(0.5, presence_penalty=3.0), -4.0),  # (1 - 3) / 0.5, not 1 / 0.5 - 3
        (Wish(0.5, logit_bias={0: 1.0}), 4.0),
        (Wish(1.0, min_tokens=2, stop_ids=(0,), logit_bias={0: 100.0}), -INF),  # a bias does not lift the ban
    ],
)
def test_adjustments_come_in_the_order_of_the_contract(wish: Wish, expected: float) -> None:
    assert process_alone([1.0, 0.0], wish, output=(0,))[0] == expected


# Greedy and sampled rows side by side.


def test_greedy_rows_do_not_feel_the_temperature_or_noise_of_their_neighbours() -> None:
    """Fault F4 of another engine: a greedy row's sentinel temperature divided, and so inverted, its logits."""
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.standard_normal((6, 2, 12)) * 3, jnp.float32)
    noise = jnp.asarray(rng.gumbel(size=(6, 2, 12)) * 10, jnp.float32)
    nothing, produced = jnp.zeros((6, 1), jnp.int32), jnp.zeros(6, jnp.int32)
    mixed = rows([Wish(), Wish(0.7), Wish(top_k=3), Wish(1e-3), Wish(top_p=0.2, min_p=0.5), Wish(1e6)])
    z = process(logits, mixed, None, nothing, produced)
    drawn = np.asarray(draw(z, noise, mixed))
    greedy = [0, 2, 4]
    assert np.array_equal(drawn[greedy], np.argmax(np.asarray(logits), axis=-1)[greedy])
    assert np.array_equal(np.asarray(z)[0], np.asarray(logits)[0])  # not a bit of it is divided
    tempered = np.asarray(logits)[1] / np.float32(0.7)
    assert np.array_equal(drawn[1], np.argmax(tempered + np.asarray(noise)[1], axis=-1))
    assert not np.array_equal(drawn[1], np.argmax(tempered, axis=-1))  # the noise of this seed matters
    assert np.array_equal(drawn[5], np.argmax(np.asarray(noise)[5], axis=-1))


@pytest.mark.parametrize("temperature", [1e-6, 1e-3, 1e6])
def test_a_temperature_that_is_accepted_draws_a_token(temperature: float) -> None:
    logits = jnp.asarray([[[-80.0, 80.0, 79.0, 0.0]]])
    sampling = rows([Wish(temperature, top_p=0.9, min_p=0.1)])
    z = process(logits, sampling, None, jnp.zeros((1, 0), jnp.int32), jnp.zeros(1, jnp.int32))
    expected = {1} if temperature < 1 else {0, 1, 2, 3}
    assert survivors(np.asarray(z)[0, 0]) == expected
    assert int(draw(z, jnp.zeros_like(z), sampling)[0, 0]) == 1


# The draw.


def test_a_draw_is_the_first_of_the_largest() -> None:
    rng = np.random.default_rng(1)
    z = rng.integers(-3, 4, (4, 50, 6)).astype(np.float32)
    z[rng.random(z.shape) < 0.2] = -INF
    z[..., 0] = np.maximum(z[..., 0], -3)  # at least one token stays
    noise = rng.integers(-3, 4, z.shape).astype(np.float32)
    sampling = rows([Wish(), Wish(1.0), Wish(), Wish(0.3)])
    expected = np.stack([np.argmax(z[b] + (noise[b] if b % 2 else 0), axis=-1) for b in range(4)])
    ties = np.sum(z[0] == z[0].max(axis=-1, keepdims=True), axis=-1) > 1
    assert ties.sum() > 10
    got = draw(jnp.asarray(z), jnp.asarray(noise), sampling)
    assert got.dtype == jnp.int32 and np.array_equal(got, expected)


@pytest.mark.parametrize("bad", [[1.0, np.nan, 2.0], [np.nan] * 3, [-INF] * 3, [1.0, INF, 2.0]], ids=str)
@pytest.mark.parametrize(
    "wish",
    [
        Wish(),
        Wish(0.7),
        Wish(top_k=1),
        Wish(1.0, top_p=0.5),
        Wish(1.0, min_p=0.5),
        Wish(1.0, top_k=2, top_p=0.9, min_p=0.1),
    ],
    ids=["greedy", "sampled", "top_k", "top_p", "min_p", "all"],
)
def test_logits_without_a_finite_maximum_draw_the_id_past_the_vocabulary(bad: list[float], wish: Wish) -> None:
    z = jnp.asarray(process_alone(bad, wish))[None, None]
    assert int(draw(z, jnp.zeros((1, 1, 3)), rows([wish]))[0, 0]) == 3


def test_what_ends_a_row() -> None:
    drawn = jnp.asarray([[0, 1, 2, 3, 4]] * 4, jnp.int32)
    sampling = Sampling.make(4, eos_ids=(1, 3), stop_ids=[[], [4], [], [0, 3]], ignore_eos=[False, False, True, True])
    assert np.asarray(is_stop(drawn, sampling)).tolist() == [
        [False, True, False, True, False],
        [False, True, False, True, True],
        [False] * 5,
        [True, False, False, True, False],
    ]
    assert not np.any(is_stop(drawn, Sampling.make(4)))


def test_log_probability_is_a_log_softmax_of_the_untransformed_logits() -> None:
    rng = np.random.default_rng(2)
    logits = (rng.standard_normal((2, 3, 9)) * 20).astype(np.float32)
    logits[0, 0, 4] = -INF
    chosen = np.array([[8, 0, 3], [1, 1, 7]])
    expected = np.take_along_axis(scipy.special.log_softmax(logits.astype(np.float64), axis=-1), chosen[..., None], -1)
    got = log_probability(jnp.asarray(logits), jnp.asarray(chosen, jnp.int32))
    np.testing.assert_allclose(got, expected[..., 0], rtol=1e-5, atol=1e-5)
    assert log_probability(jnp.asarray(logits[:1, :1]), jnp.asarray([[4]], jnp.int32))[0, 0] == -INF


# Noise.

noise_of = jax.jit(gumbel_noise, static_argnums=2)


def test_the_noise_of_a_token_belongs_to_its_seed_row_and_index_alone() -> None:
    keys = row_keys(7, 3)
    indices = np.array([[5, 6, 900], [0, 5, 6], [2**31 - 1, 1, 5]])
    noise = np.asarray(noise_of(keys, jnp.asarray(indices, jnp.int32), 11))
    root = jax.random.key(7, impl="threefry2x32")
    for b in range(3):
        for t in range(3):
            key = jax.random.fold_in(jax.random.fold_in(root, b), int(indices[b, t]))
            assert np.array_equal(noise[b, t], jax.random.gumbel(key, (11,), jnp.float32))
    # No row, index or seed shares noise with another.
    other = np.asarray(noise_of(row_keys(8, 3), jnp.asarray(indices, jnp.int32), 11))
    assert len({x.tobytes() for x in np.concatenate([noise, other]).reshape(-1, 11)}) == 18


def test_a_row_keeps_its_noise_in_any_batch_and_any_pass() -> None:
    keys = row_keys(3, 5)
    whole = np.asarray(noise_of(keys, jnp.asarray([[10, 11, 12, 13]] * 5, jnp.int32), 6))
    part = np.asarray(noise_of(keys[jnp.asarray([4, 1])], jnp.asarray([[12, 13], [10, 11]], jnp.int32), 6))
    assert np.array_equal(part[0], whole[4, 2:]) and np.array_equal(part[1], whole[1, :2])
    assert np.array_equal(jax.random.key_data(row_keys(3, 2)), jax.random.key_data(keys[:2]))


def test_rows_that_do_not_sample_cost_no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, indices = row_keys(0, 2), jnp.asarray([[1], [2]], jnp.int32)
    assert not np.any(noise_if_sampled(keys, indices, 5, rows([Wish(), Wish()])))
    mixed = noise_if_sampled(keys, indices, 5, rows([Wish(), Wish(0.5)]))
    assert np.array_equal(mixed[1], noise_of(keys, indices, 5)[1]) and not np.any(mixed[0])
    # As other platforms do.
    monkeypatch.setattr("eagle3_jax.decoding.sampling.each_row_on_cpu", lambda function, rows: function(rows))
    assert not np.any(noise_if_sampled(keys, indices, 5, rows([Wish(), Wish()])))
    mixed = noise_if_sampled(keys, indices, 5, rows([Wish(), Wish(0.5)]))
    assert np.array_equal(mixed, noise_of(keys, indices, 5)) and np.all(np.asarray(mixed) != 0)


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param(lambda: jax.random.PRNGKey(0), id="raw key"),
        pytest.param(lambda: jnp.zeros((1, 2), jnp.uint32), id="raw keys"),
        pytest.param(lambda: np.zeros((1, 2), np.uint32), id="raw numpy keys"),
        pytest.param(lambda: jax.random.key(0, impl="rbg"), id="rbg"),
        pytest.param(lambda: jax.random.split(jax.random.key(0, impl="unsafe_rbg"), 1), id="unsafe rbg"),
        pytest.param(lambda: row_keys(0, 2), id="too many"),
        pytest.param(lambda: row_keys(0, 1)[:0], id="none"),
        pytest.param(lambda: row_keys(0, 1)[None], id="two dimensions"),
        pytest.param(lambda: 0, id="a seed"),
        pytest.param(lambda: None, id="nothing"),
        pytest.param(lambda: [0, 1], id="a list"),
    ],
)
def test_keys_of_another_kind_or_number_are_refused(keys: Any) -> None:
    with pytest.raises(Eagle3Error):
        check_keys(keys(), 1)


def test_keys_of_each_row_pass_and_a_scalar_key_is_split() -> None:
    keys = row_keys(5, 3)
    assert np.array_equal(jax.random.key_data(check_keys(keys, 3)), jax.random.key_data(keys))
    root = jax.random.key(9, impl="threefry2x32")
    split = jax.random.key_data(check_keys(root, 3))
    assert np.array_equal(split, jax.random.key_data(jax.random.split(root, 3)))


@pytest.mark.parametrize("seed", [-1, 2**32, 2**63, 2**64])
def test_a_seed_of_which_jax_would_keep_the_low_bits_only_is_refused(seed: int) -> None:
    with pytest.raises(Eagle3Error, match="seed"):
        row_keys(seed, 1)


def test_every_seed_up_to_32_bits_has_keys_of_its_own() -> None:
    data = [np.asarray(jax.random.key_data(row_keys(seed, 1))).tobytes() for seed in (0, 1, 2**31, 2**32 - 1)]
    assert len(set(data)) == 4


# The law: 20,000 draws against the probabilities of the restatement.

LAW_VOCAB, DRAWS, LAW_EOS = 12, 20_000, (11,)
LAW_LOGITS = np.array([2.0, 1.5, 1.5, 1.0, 0.5, 0.0, 0.0, -0.5, -1.0, -1.5, -2.0, 1.0], np.float32)
LAW_PROMPT, LAW_OUTPUT, LAW_DRAFTS = {0, 3, 9}, [1, 1, 4], [4, 5]


@jax.jit
def law_draws(keys: Array, sampling: Sampling, history: History) -> Array:
    """The last row of a pass with two drafts, after three emitted tokens: token index 5 of each request."""
    shape = (DRAWS, 3, LAW_VOCAB)
    drafts = jnp.broadcast_to(jnp.asarray(LAW_DRAFTS, jnp.int32), (DRAWS, 2))
    produced = jnp.full((DRAWS,), len(LAW_OUTPUT), jnp.int32)
    history = jax.tree.map(lambda x: jnp.broadcast_to(x, (DRAWS, LAW_VOCAB)), history)
    z = adjust(jnp.broadcast_to(LAW_LOGITS, shape), sampling, TRANSFORMS, history, drafts, produced)
    z = truncate(temper(z, sampling), sampling, TRANSFORMS)
    indices = jnp.broadcast_to(jnp.arange(3, 6, dtype=jnp.int32), (DRAWS, 3))
    return draw(z, noise_if_sampled(keys, indices, LAW_VOCAB, sampling), sampling)[:, -1]


def chi_square(drawn: np.ndarray, probability: np.ndarray) -> float:
    """p-value of the draws; nothing outside the support may occur at all."""
    counts = np.bincount(drawn, minlength=len(probability))
    support = probability > 0
    assert counts[~support].sum() == 0 and np.all(probability[support] * len(drawn) > 5)
    return float(scipy.stats.chisquare(counts[support], probability[support] * len(drawn)).pvalue)


LAW = {
    "plain": Wish(1.0),
    "cold": Wish(0.7),
    "hot": Wish(1.3),
    "top_k": Wish(1.0, top_k=5),
    "top_p": Wish(1.0, top_p=0.8),
    "min_p": Wish(1.0, min_p=0.2),
    "repetition": Wish(1.0, repetition_penalty=1.7),
    "presence": Wish(1.0, presence_penalty=0.8),
    "frequency": Wish(1.0, frequency_penalty=0.6),
    "min_tokens": Wish(1.0, min_tokens=6, stop_ids=(2,)),
    "logit_bias": Wish(1.0, logit_bias={0: -2.0, 10: 3.0}),
    "all": Wish(1.3, 7, 0.9, 0.05, 1.2, 0.3, -0.2, 6, (2,), True, {6: 1.0}),
}


@pytest.mark.parametrize("name", LAW)
def test_draws_follow_the_softmax_of_the_processed_logits(name: str) -> None:
    seed, wish = list(LAW).index(name), LAW[name]
    sampling = jax.tree.map(lambda x: jnp.repeat(x, DRAWS, axis=0), rows([wish], LAW_EOS, 2))
    history = history_of([LAW_PROMPT], [LAW_OUTPUT], LAW_VOCAB)
    drawn = np.asarray(law_draws(row_keys(seed, DRAWS), sampling, history))
    z = wish.process(LAW_LOGITS, LAW_PROMPT, LAW_OUTPUT + LAW_DRAFTS, LAW_EOS)
    right = scipy.special.softmax(z)
    assert chi_square(drawn, right) > 1e-4
    if name != "plain":  # and the test would notice if the transform had not been there
        plain = scipy.special.softmax(LAW_LOGITS.astype(np.float64))
        counts = np.bincount(drawn, minlength=LAW_VOCAB)
        assert scipy.stats.chisquare(counts, plain * DRAWS).pvalue < 1e-4


@pytest.mark.parametrize("along", ["the tokens of a row", "the rows of a batch"])
def test_successive_draws_follow_the_softmax_and_are_independent(along: str) -> None:
    one_row = along == "the tokens of a row"
    indices = np.arange(DRAWS)[None] if one_row else np.full((DRAWS, 1), 4)
    noise = noise_of(row_keys(1, len(indices)), jnp.asarray(indices, jnp.int32), LAW_VOCAB)
    sampling = jax.tree.map(lambda x: jnp.repeat(x, len(indices), axis=0), rows([Wish(1.0)]))
    drawn = np.asarray(draw(jnp.broadcast_to(LAW_LOGITS, noise.shape), noise, sampling)).reshape(-1)
    assert chi_square(drawn, scipy.special.softmax(LAW_LOGITS.astype(np.float64))) > 1e-4
    pairs = np.zeros((LAW_VOCAB, LAW_VOCAB))
    np.add.at(pairs, (drawn[:-1], drawn[1:]), 1)
    assert scipy.stats.chi2_contingency(pairs).pvalue > 1e-4


# Building the arrays.

NAN = float("nan")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", NAN),
        ("temperature", INF),
        ("temperature", 1e-37),
        ("temperature", "1"),
        ("temperature", None),
        ("temperature", [0.5]),
        ("temperature", [0.5] * 3),
        ("temperature", [[0.5, 0.5]]),
        ("temperature", [[1], [1, 2]]),
        ("temperature", 1j),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_k", 2**31),
        ("top_k", 2**70),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", -0.5),
        ("top_p", NAN),
        ("min_p", -0.01),
        ("min_p", 1.01),
        ("min_p", [0.1, NAN]),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", INF),
        ("presence_penalty", NAN),
        ("presence_penalty", -INF),
        ("frequency_penalty", INF),
        ("frequency_penalty", "0.5"),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 2.0),
        ("max_tokens", 2**31),
        ("min_tokens", -1),
        ("min_tokens", 0.5),
        ("eos_ids", (-1,)),
        ("eos_ids", (2**31,)),
        ("eos_ids", (1.0,)),
        ("eos_ids", ("2",)),
        ("eos_ids", "2"),
        ("eos_ids", 5),
        ("eos_ids", None),
        ("stop_ids", [[1]]),
        ("stop_ids", [[1], [2], [3]]),
        ("stop_ids", [[-1], []]),
        ("stop_ids", [1, [2]]),
        ("stop_ids", ["a", "b"]),
        ("stop_ids", 5),
        ("ignore_eos", 2),
        ("ignore_eos", "no"),
        ("ignore_eos", [True] * 3),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {2**31: 1.0}),
        ("logit_bias", {"1": 1.0}),
        ("logit_bias", {1: NAN}),
        ("logit_bias", {1: -INF}),
        ("logit_bias", {1: 1e39}),
        ("logit_bias", {1: "a"}),
        ("logit_bias", {1: None}),
        ("logit_bias", {1: [1.0, 2.0]}),
        ("logit_bias", [{1: 1.0}]),
        ("logit_bias", 5),
        ("logit_bias", [5, 6]),
    ],
    ids=str,
)
def test_make_refuses(name: str, value: Any) -> None:
    with pytest.raises(Eagle3Error, match=name) as caught:
        Sampling.make(2, **{name: value})
    assert "\n" not in str(caught.value)


def test_make_takes_one_value_for_all_rows_or_one_a_row() -> None:
    s = Sampling.make(
        2,
        temperature=[0.0, 0.5],
        top_k=np.array([3, 0]),
        top_p=(0.5, 1.0),
        min_p=0.25,
        repetition_penalty=2,
        presence_penalty=[-1, 1],
        frequency_penalty=0.5,
        max_tokens=[1, UNLIMITED],
        min_tokens=[0, 4],
        eos_ids=[7, 8],
        stop_ids=[[1, 2, 3], []],
        ignore_eos=[True, False],
        logit_bias=[{}, {4: -1.5, 2: 1}],
    )
    values = {field.name: np.asarray(getattr(s, field.name)).tolist() for field in dataclasses.fields(s)}
    assert values == {
        "temperature": [0.0, 0.5],
        "top_k": [3, 0],
        "top_p": [0.5, 1.0],
        "min_p": [0.25, 0.25],
        "repetition_penalty": [2.0, 2.0],
        "presence_penalty": [-1.0, 1.0],
        "frequency_penalty": [0.5, 0.5],
        "max_tokens": [1, UNLIMITED],
        "min_tokens": [0, 4],
        "eos_ids": [[7, 8], [7, 8]],
        "stop_ids": [[1, 2, 3], [-1, -1, -1]],
        "ignore_eos": [True, False],
        "bias_ids": [[-1, -1], [4, 2]],
        "bias_values": [[0.0, 0.0], [-1.5, 1.0]],
    }
    assert np.asarray(Sampling.make(2, stop_ids=(5, 6)).stop_ids).tolist() == [[5, 6], [5, 6]]


def test_the_arrays_have_one_dtype_whatever_was_given() -> None:
    integers, floats = ("top_k", "max_tokens", "min_tokens"), ("temperature", "top_p", "min_p", "presence_penalty")
    given_ints = Sampling.make(1, temperature=1, top_p=1, min_p=0, presence_penalty=2, logit_bias={1: 2}, ignore_eos=1)
    for sampling in (Sampling.make(1), given_ints):
        assert all(getattr(sampling, name).dtype == jnp.int32 for name in integers)
        assert all(getattr(sampling, name).dtype == jnp.float32 for name in floats)
        assert (sampling.ignore_eos.dtype, sampling.eos_ids.dtype) == (jnp.bool_, jnp.int32)
        assert (sampling.bias_ids.dtype, sampling.bias_values.dtype) == (jnp.int32, jnp.float32)


def test_the_defaults_are_greedy_and_use_no_transform() -> None:
    assert np.asarray(Sampling.make(3).temperature).tolist() == [0.0] * 3
    assert used_transforms(Sampling.make(3)) == set()
    assert used_transforms(Sampling.make(3, temperature=0.7, eos_ids=(1,), stop_ids=(2,), max_tokens=3)) == set()


@pytest.mark.parametrize(
    ("wish", "name"),
    [
        ({"min_tokens": [0, 1]}, "min_tokens"),
        ({"logit_bias": [{}, {0: 1.0}]}, "logit_bias"),
        ({"repetition_penalty": [1.0, 0.9]}, "penalties"),
        ({"presence_penalty": [0.0, -0.1]}, "penalties"),
        ({"frequency_penalty": [0.1, 0.0]}, "penalties"),
        ({"min_p": [0.0, 0.1]}, "min_p"),
        ({"top_k": [1, 0]}, "top_k"),
        ({"top_p": [1.0, 0.99]}, "top_p"),
    ],
    ids=str,
)
def test_a_transform_that_one_row_uses_is_used(wish: dict[str, Any], name: str) -> None:
    assert used_transforms(Sampling.make(2, **wish)) == {name}


def test_unknown_transforms_are_refused_by_name() -> None:
    check_transforms(TRANSFORMS)
    check_transforms(())
    for odd in (1, ["top_k"]):
        with pytest.raises(Eagle3Error, match="unknown transform"):
            check_transforms((odd,))  # pyright: ignore[reportArgumentType]
    with pytest.raises(Eagle3Error, match=r"typical_p, xtc.*min_tokens.*top_p"):
        check_transforms(("top_k", "xtc", "typical_p"))


def test_sampling_values_do_not_retrace() -> None:
    traces = []

    @jax.jit
    def run(logits: Array, sampling: Sampling) -> Array:
        traces.append(1)
        nothing, produced = jnp.zeros((1, 0), jnp.int32), jnp.zeros(1, jnp.int32)
        return truncate(
            temper(adjust(logits, sampling, ("top_k", "top_p"), None, nothing, produced), sampling),
            sampling,
            ("top_k", "top_p"),
        )

    for wish in (Wish(), Wish(0.5, top_k=2), Wish(1.3, top_p=0.4), Wish(top_k=UNLIMITED)):
        run(jnp.asarray([[[1.0, 2.0, 0.0]]]), rows([wish]))
    assert len(traces) == 1
