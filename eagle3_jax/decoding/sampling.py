"""From logits to a token: the one sampler of plain decoding, drafting and verification.

The token at index i of a row is argmax(z_i + g_i), where z_i are the transformed logits and
g_i = gumbel(fold_in(row key, i)) (arXiv 2408.07978 calls the shared noise a Gumbel coupling). The noise belongs
to the index, so a row's tokens do not depend on its neighbours, on the draft or on how the row was computed.

Dimension letters: B rows, T consecutive tokens to draw, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array, lax

from eagle3_jax.errors import Eagle3Error
from eagle3_jax.sharding import each_row_on_cpu, in_step

UNLIMITED = 2**31 - 1
ADJUSTMENTS = ("min_tokens", "logit_bias", "penalties")
TRUNCATIONS = ("min_p", "top_k", "top_p")
TRANSFORMS = ADJUSTMENTS + TRUNCATIONS
"""Transforms that `GenerationConfig.transforms` may leave out of the program; temperature is always in."""


@struct.dataclass
class Sampling:
    """What each row asks of the sampler; every value is traced, so no value causes a recompilation.

    Attributes:
        temperature: float32 [B]; 0 is greedy.
        top_k: int32 [B]; 0 is off. top_p: float32 [B]; 1 is off. min_p: float32 [B]; 0 is off.
        repetition_penalty: float32 [B], over prompt and output (arXiv 1909.05858); 1 is off.
        presence_penalty, frequency_penalty: float32 [B], over the output; 0 is off.
        max_tokens: int32 [B], most tokens to emit. min_tokens: int32 [B], no stop before that many.
        eos_ids: int32 [B, E]; stop_ids: int32 [B, S]; padded with -1. Each ends the row when drawn.
        ignore_eos: bool [B]: `eos_ids` do not end the row; `stop_ids` still do.
        bias_ids: int32 [B, N], padded with -1; bias_values: float32 [B, N], added to those logits.
    """

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    repetition_penalty: Array
    presence_penalty: Array
    frequency_penalty: Array
    max_tokens: Array
    min_tokens: Array
    eos_ids: Array
    stop_ids: Array
    ignore_eos: Array
    bias_ids: Array
    bias_values: Array

    @classmethod
    def make(
        cls,
        batch: int,
        *,
        temperature: float | Sequence[float] = 0.0,
        top_k: int | Sequence[int] = 0,
        top_p: float | Sequence[float] = 1.0,
        min_p: float | Sequence[float] = 0.0,
        repetition_penalty: float | Sequence[float] = 1.0,
        presence_penalty: float | Sequence[float] = 0.0,
        frequency_penalty: float | Sequence[float] = 0.0,
        max_tokens: int | Sequence[int] = UNLIMITED,
        min_tokens: int | Sequence[int] = 0,
        eos_ids: Sequence[int] = (),
        stop_ids: Sequence[int] | Sequence[Sequence[int]] = (),
        ignore_eos: bool | Sequence[bool] = False,
        logit_bias: dict[int, float] | Sequence[dict[int, float]] | None = None,
    ) -> "Sampling":
        """Build the arrays from numbers; a scalar holds for every row, a sequence has one entry a row.

        Example:
            >>> Sampling.make(2, temperature=[0.0, 0.7], top_p=0.9, eos_ids=(2,)).top_k.shape
            (2,)

        Raises:
            Eagle3Error: a value out of its range, or a sequence of another length than `batch`.
        """
        _check_batch(batch)

        def column(name: str, value: Any, dtype: Any, low: float, high: float) -> Array:
            array = _as_numbers(name, value, "biu" if dtype is np.bool_ else "iuf")
            if array.ndim > 1 or (array.ndim == 1 and len(array) != batch):
                raise Eagle3Error(f"{name} has shape {array.shape}; give one number or {batch}, one a row")
            if dtype is not np.float32 and array.dtype.kind == "f":
                raise Eagle3Error(f"{name} is {value!r:.80}; a whole number is needed")
            if not np.all((array >= low) & (array <= high)):
                raise Eagle3Error(f"{name} is {value!r:.80}; it must lie in [{low:g}, {high:g}]")
            return jnp.asarray(np.broadcast_to(array, (batch,)), dtype)

        def table(name: str, rows: list[list[Any]]) -> Array:
            for i in (i for row in rows for i in row):
                if not is_whole(i) or not 0 <= i < 2**31:
                    raise Eagle3Error(f"{name} holds {i!r:.80}; token ids from 0 are needed")
            width = max((len(row) for row in rows), default=0)
            padded = np.full((batch, width), -1, np.int32)
            for i, row in enumerate(rows):
                padded[i, : len(row)] = row
            return jnp.asarray(padded)

        biases = _by_row("logit_bias", logit_bias or {}, batch, dict)
        bias_ids = table("logit_bias ids", [list(row) for row in biases])
        values = np.zeros(bias_ids.shape, np.float64)
        for i, row in enumerate(biases):
            given = _as_numbers("logit_bias values", list(row.values()))
            if given.shape != (len(row),):
                raise Eagle3Error(f"logit_bias is {row!r:.80}; one number a token id is needed")
            values[i, : len(row)] = given
        if not np.all(np.abs(values) <= 1e30):
            raise Eagle3Error("logit_bias holds a value that is not finite; ban a token with -1000, say")
        tiny, huge = 1e-6, 1e6
        hot = _as_numbers("temperature", temperature)
        if np.any((hot > 0) & (hot < tiny)):
            raise Eagle3Error(f"temperature is {temperature!r:.80}; use 0 for greedy, or at least {tiny:g}")
        return cls(
            temperature=column("temperature", hot, np.float32, 0.0, huge),
            top_k=column("top_k", top_k, np.int32, 0, UNLIMITED),
            top_p=column("top_p", top_p, np.float32, tiny, 1.0),
            min_p=column("min_p", min_p, np.float32, 0.0, 1.0),
            repetition_penalty=column("repetition_penalty", repetition_penalty, np.float32, tiny, huge),
            presence_penalty=column("presence_penalty", presence_penalty, np.float32, -huge, huge),
            frequency_penalty=column("frequency_penalty", frequency_penalty, np.float32, -huge, huge),
            max_tokens=column("max_tokens", max_tokens, np.int32, 1, UNLIMITED),
            min_tokens=column("min_tokens", min_tokens, np.int32, 0, UNLIMITED),
            eos_ids=table("eos_ids", _by_row("eos_ids", eos_ids, batch, int)),
            stop_ids=table("stop_ids", _by_row("stop_ids", stop_ids, batch, int)),
            ignore_eos=column("ignore_eos", ignore_eos, np.bool_, 0, 1),
            bias_ids=bias_ids,
            bias_values=jnp.asarray(values, jnp.float32),
        )


def is_whole(value: Any) -> bool:
    """Whether a value is an integer, and no boolean."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _check_batch(batch: Any) -> None:
    if not is_whole(batch) or batch < 1:
        raise Eagle3Error(f"batch is {batch!r:.80}; a positive integer is needed")


def _as_numbers(name: str, value: Any, kinds: str = "iuf") -> np.ndarray:
    try:
        array = np.asarray(value)
    except (ValueError, TypeError):
        array = np.asarray("ragged")
    if array.size and array.dtype.kind not in kinds:
        raise Eagle3Error(f"{name} is {value!r:.80}; numbers are needed")
    return array


def _by_row(name: str, value: Any, batch: int, item: type) -> list[Any]:
    """One entry a row: `value` for all rows if it is a dict or a flat list of ints, else its own entries."""
    if item is dict and isinstance(value, dict):
        return [value] * batch
    if not isinstance(value, list | tuple | np.ndarray):
        raise Eagle3Error(f"{name} is {value!r:.80}; a sequence is needed")
    if item is int and not any(isinstance(i, list | tuple | np.ndarray) for i in value):
        return [list(value)] * batch
    kind = dict if item is dict else (list, tuple, np.ndarray)
    if len(value) != batch or not all(isinstance(row, kind) for row in value):
        raise Eagle3Error(f"{name} is {value!r:.80}; give one for all rows or {batch}, one a row")
    return list(value)


@struct.dataclass
class History:
    """Which tokens a row has seen, for the penalties.

    Attributes:
        in_prompt: bool [B, V]. output_counts: int32 [B, V].
    """

    in_prompt: Array
    output_counts: Array


def row_keys(seed: int, batch: int) -> Array:
    """One threefry key a row, [B]: row b of seed s is fold_in(key(s), b).

    Raises:
        Eagle3Error: a seed outside [0, 2**32), of which JAX would keep the low bits only.
    """
    _check_batch(batch)
    if not is_whole(seed) or not 0 <= seed < 2**32:
        raise Eagle3Error(f"seed is {seed!r:.80}; an integer in [0, 2**32) is needed")
    return jax.vmap(jax.random.fold_in, (None, 0))(
        jax.random.key(seed, impl="threefry2x32"), jnp.arange(batch, dtype=jnp.uint32)
    )


def check_keys(keys: Array, batch: int) -> Array:
    """Keys of each row [B]; a scalar key is split by row, so the rows' order matters then.

    Raises:
        Eagle3Error: not a typed threefry key, or another number of keys than rows.
    """
    if not hasattr(keys, "dtype") or not jnp.issubdtype(keys.dtype, jax.dtypes.prng_key):
        raise Eagle3Error("keys are not typed random keys; make them with row_keys(seed, batch)")
    if "fry" not in str(jax.random.key_impl(keys)):
        raise Eagle3Error(f"keys use {jax.random.key_impl(keys)}; only threefry2x32 keys give repeatable text")
    if keys.ndim == 0:
        return jax.random.split(keys, batch)
    if keys.shape != (batch,):
        raise Eagle3Error(f"keys have shape {keys.shape}; one key a row, [{batch}], is needed")
    return keys


def gumbel_noise(keys: Array, indices: Array, vocab_size: int) -> Array:
    """Noise of the tokens at `indices` of each row: keys [B], int32 [B, T] -> float32 [B, T, V]."""

    def one(key: Array, index: Array) -> Array:
        return jax.random.gumbel(jax.random.fold_in(key, index), (vocab_size,), jnp.float32)

    return jax.vmap(jax.vmap(one, (None, 0)))(keys, indices)


def noise_if_sampled(keys: Array, indices: Array, vocab_size: int, sampling: Sampling) -> Array:
    """`gumbel_noise`, or zeros when every row is greedy; on CPU also for each row that is."""

    def noise(rows: tuple[Array, Array, Array]) -> Array:
        keys, indices, temperature = rows
        return lax.cond(
            in_step(jnp.any(temperature > 0)),
            lambda: gumbel_noise(keys, indices, vocab_size),
            lambda: jnp.zeros((*indices.shape, vocab_size), jnp.float32),
        )

    return each_row_on_cpu(noise, (keys, indices, sampling.temperature))


def noise_of(noise: Array, ids: Array, sampling: Sampling) -> Array:
    """A draft's tokens' part of the noise: [B, V] and the target's ids of them, int32 [Vd] -> [B, Vd].

    Zeros when every row is greedy: on a mesh, the parts of the vocabulary lie apart.
    """
    return lax.cond(
        in_step(jnp.any(sampling.temperature > 0)),
        lambda: jnp.take(noise, ids, axis=1, mode="clip"),
        lambda: jnp.zeros((noise.shape[0], ids.shape[0]), noise.dtype),
    )


def adjust(
    logits: Array,
    sampling: Sampling,
    transforms: tuple[str, ...],
    history: History | None,
    drafts: Array,
    produced: Array,
) -> Array:
    """The transforms before temperature, on every row of a verify pass.

    Args:
        logits: float32 [B, T, V].
        sampling: the rows' wishes.
        transforms: names compiled in, of `TRANSFORMS`.
        history: tokens before row 0; needed with "penalties".
        drafts: int32 [B, T-1]; row i counts drafts 0 .. i-1 as output.
        produced: int32 [B], output tokens before row 0.
    """
    active = jnp.array(False)
    if "min_tokens" in transforms:
        active |= jnp.any(sampling.min_tokens > produced)
    if "logit_bias" in transforms:
        active |= jnp.any(sampling.bias_ids >= 0)
    if "penalties" in transforms:
        active |= jnp.any(sampling.repetition_penalty != 1)
        active |= jnp.any((sampling.presence_penalty != 0) | (sampling.frequency_penalty != 0))

    def apply(logits: Array) -> Array:
        if "min_tokens" in transforms:
            logits = _mask_stops(logits, sampling, produced)
        if "logit_bias" in transforms:
            logits = _add_bias(logits, sampling)
        if "penalties" in transforms and history is not None:
            logits = _penalise(logits, sampling, history, drafts)
        return logits

    return lax.cond(in_step(active), apply, lambda logits: logits, logits)


def _mask_stops(logits: Array, sampling: Sampling, produced: Array) -> Array:
    vocab = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    eos = jnp.any(sampling.eos_ids[..., None] == vocab, axis=1) & ~sampling.ignore_eos[:, None]
    stops = eos | jnp.any(sampling.stop_ids[..., None] == vocab, axis=1)
    index = produced[:, None] + jnp.arange(logits.shape[1], dtype=jnp.int32)
    early = index < sampling.min_tokens[:, None]
    return jnp.where(early[..., None] & stops[:, None], -jnp.inf, logits)


def _add_bias(logits: Array, sampling: Sampling) -> Array:
    vocab_size = logits.shape[-1]
    ids = jnp.where(sampling.bias_ids < 0, vocab_size, sampling.bias_ids)
    row = jnp.arange(ids.shape[0], dtype=jnp.int32)[:, None]
    bias = jnp.zeros((ids.shape[0], vocab_size), jnp.float32).at[row, ids].add(sampling.bias_values, mode="drop")
    return logits + bias[:, None]


def _penalise(logits: Array, sampling: Sampling, history: History, drafts: Array) -> Array:
    vocab = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    drafted = jnp.cumsum(drafts[..., None] == vocab, axis=1, dtype=jnp.int32)
    drafted = jnp.concatenate([jnp.zeros_like(history.output_counts)[:, None], drafted], axis=1)
    counts = history.output_counts[:, None] + drafted
    in_output = counts > 0
    seen = in_output | history.in_prompt[:, None]
    repetition = sampling.repetition_penalty[:, None, None]
    penalised = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen, penalised, logits)
    logits = logits - sampling.presence_penalty[:, None, None] * in_output.astype(jnp.float32)
    return logits - sampling.frequency_penalty[:, None, None] * counts.astype(jnp.float32)


def temper(logits: Array, sampling: Sampling) -> Array:
    """Divide sampled rows by their temperature; greedy rows stay: float32 [B, T, V]."""
    temperature = jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)
    return logits / temperature[:, None, None]


def truncate(z: Array, sampling: Sampling, transforms: tuple[str, ...], slack: float = 0.0) -> Array:
    """Send the tokens outside min_p, then top_k, then top_p to -inf; ties at a cut stay in.

    Args:
        z: float32 [B, T, V], tempered logits (any vocabulary: the draft's too).
        sampling: the rows' wishes. transforms: names compiled in, of `TRANSFORMS`.
        slack: widens (positive) or narrows (negative) each cut, in logits, and in probability for top_p. Only
            for measuring how near a decision is to a cut.
    """
    active = jnp.array(False)
    if "min_p" in transforms:
        active |= jnp.any(sampling.min_p > 0)
    if "top_k" in transforms:
        active |= jnp.any(sampling.top_k > 0)
    if "top_p" in transforms:
        active |= jnp.any(sampling.top_p < 1)

    def apply(z: Array) -> Array:
        if "min_p" in transforms:
            floor = jnp.max(z, axis=-1, keepdims=True) + jnp.log(sampling.min_p)[:, None, None]
            z = jnp.where(z >= floor - slack, z, -jnp.inf)
        if "top_k" in transforms:
            z = _top_k(z, sampling.top_k, slack)
        if "top_p" in transforms:
            z = _top_p(z, sampling.top_p, slack)
        return z

    return lax.cond(in_step(active), apply, lambda z: z, z)


def _top_k(z: Array, top_k: Array, slack: float) -> Array:
    k = jnp.where(top_k > 0, top_k, z.shape[-1])[:, None]
    ordered = _ordered_bits(z)
    cut = _largest_cut(lambda cut: jnp.sum(ordered >= cut[..., None], axis=-1, dtype=jnp.int32) >= k, z.shape[:-1])
    lowest = jnp.min(jnp.where(ordered >= cut[..., None], z, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(z >= lowest - slack, z, -jnp.inf)


def _top_p(z: Array, top_p: Array, slack: float) -> Array:
    weights = jnp.exp(z - jnp.max(z, axis=-1, keepdims=True))
    share = jnp.where(top_p < 1, jnp.clip(top_p + slack, 0.0, 1.0), 2.0)[:, None]
    wanted = share * jnp.sum(weights, axis=-1)
    ordered = _ordered_bits(z)
    cut = _largest_cut(
        lambda cut: jnp.sum(jnp.where(ordered >= cut[..., None], weights, 0.0), axis=-1) >= wanted,
        z.shape[:-1],
    )
    return jnp.where(ordered >= cut[..., None], z, -jnp.inf)


def _ordered_bits(z: Array) -> Array:
    """uint32 whose order is the floats' order."""
    # -0 and 0 are equal, so they must not be two steps of the order.
    bits = lax.bitcast_convert_type(jnp.where(z == 0, 0.0, z), jnp.uint32)
    negative = bits >> 31 == 1
    return jnp.where(negative, ~bits, bits | jnp.uint32(1 << 31))


def _largest_cut(enough: Any, shape: tuple[int, ...]) -> Array:
    """The largest uint32 for which the falling predicate `enough` holds, bit by bit; 0 if for none.

    A sort of the vocabulary costs thirty times as much on CPU.
    """

    def body(i: Array, cut: Array) -> Array:
        higher = cut | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        return jnp.where(enough(higher), higher, cut)

    return lax.fori_loop(0, 32, body, jnp.zeros(shape, jnp.uint32))


def draw(z: Array, noise: Array, sampling: Sampling) -> Array:
    """The drawn token ids: argmax(z + noise), or argmax(z) on greedy rows: [B, T, V] -> int32 [B, T].

    Where no finite maximum exists (a NaN, say) the id is V.
    """
    sampled = (sampling.temperature > 0)[:, None, None]
    scores = jnp.where(sampled, z + noise, z)
    best = jnp.max(scores, axis=-1, keepdims=True)
    vocab_size = z.shape[-1]
    ids = jnp.arange(vocab_size, dtype=jnp.int32)
    first = jnp.min(jnp.where(scores == best, ids, vocab_size), axis=-1)
    return jnp.where(jnp.isfinite(best[..., 0]), first, vocab_size)


def is_stop(tokens: Array, sampling: Sampling) -> Array:
    """Whether each drawn token ends its row: int32 [B, T] -> bool [B, T]."""
    eos = jnp.any(tokens[..., None] == sampling.eos_ids[:, None], axis=-1) & ~sampling.ignore_eos[:, None]
    return eos | jnp.any(tokens[..., None] == sampling.stop_ids[:, None], axis=-1)


def log_probability(logits: Array, tokens: Array) -> Array:
    """Log-probability of tokens [B, T] under untransformed logits [B, T, V]: float32 [B, T]."""
    chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1, mode="clip")[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)


def check_transforms(transforms: tuple[str, ...]) -> None:
    """Refuse unknown names.

    Raises:
        Eagle3Error: a name outside `TRANSFORMS`.
    """
    if unknown := sorted(str(name) for name in transforms if name not in TRANSFORMS):
        raise Eagle3Error(f"unknown transform(s) {', '.join(unknown)}; known are {', '.join(TRANSFORMS)}")


def used_transforms(sampling: Sampling) -> set[str]:
    """Names of the transforms that some row of concrete (not traced) values uses."""
    s = jax.tree.map(np.asarray, sampling)
    penalised = (s.repetition_penalty != 1) | (s.presence_penalty != 0) | (s.frequency_penalty != 0)
    used = {
        "min_tokens": np.any(s.min_tokens > 0),
        "logit_bias": np.any(s.bias_ids >= 0),
        "penalties": np.any(penalised),
        "min_p": np.any(s.min_p > 0),
        "top_k": np.any(s.top_k > 0),
        "top_p": np.any(s.top_p < 1),
    }
    return {name for name, value in used.items() if value}
