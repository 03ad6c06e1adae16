"""What a run compiles, and the checks a request passes before it runs."""

import dataclasses

import jax
import numpy as np
from jax import Array

from eagle3_jax.config import LlamaConfig
from eagle3_jax.decoding.sampling import TRANSFORMS, Sampling, check_transforms, used_transforms
from eagle3_jax.errors import Eagle3Error


@dataclasses.dataclass(frozen=True)
class Chain:
    """Draft a chain of `length` tokens a round.

    Raises:
        Eagle3Error: a length below 1.
    """

    length: int

    def __post_init__(self) -> None:
        """Refuse an impossible length."""
        if self.length < 1:
            raise Eagle3Error(f"a chain of {self.length} drafts nothing; use a length of at least 1")


def parse_speculation(text: str) -> Chain:
    """Read a speculation setting such as "chain:4".

    Raises:
        Eagle3Error: anything else.
    """
    kind, _, length = text.partition(":")
    if kind != "chain" or not length.isdecimal() or not 1 <= int(length) <= 64:
        raise Eagle3Error(f"speculation {text!r} is not understood; use chain:K with K from 1 to 64, e.g. chain:4")
    return Chain(int(length))


@dataclasses.dataclass(frozen=True)
class GenerationConfig:
    """What is compiled into a run: static and hashable. What varies by request is in `Sampling`.

    Attributes:
        max_new_tokens: capacity of the result; `Sampling.max_tokens` may ask for less.
        speculation: how many drafts a round.
        transforms: sampling transforms in the program. Those left out must not be asked for.
        return_logprobs: also return each token's log-probability.
        prefill_chunk: prompt tokens of one prefill pass.
        block_size: tokens of a cache block.
        pad_id: fills `Generation.tokens` after a row's end.

    Raises:
        Eagle3Error: a size below 1 or an unknown transform.
    """

    max_new_tokens: int = 128
    speculation: Chain = Chain(4)
    transforms: tuple[str, ...] = TRANSFORMS
    return_logprobs: bool = False
    prefill_chunk: int = 256
    block_size: int = 32
    pad_id: int = 0

    def __post_init__(self) -> None:
        """Refuse impossible sizes and unknown transforms."""
        for name in ("max_new_tokens", "prefill_chunk", "block_size"):
            if getattr(self, name) < 1:
                raise Eagle3Error(f"{name} is {getattr(self, name)}; at least 1 is needed")
        check_transforms(self.transforms)


def check_request(
    token_ids: Array, lengths: Array, sampling: Sampling, model: LlamaConfig, config: GenerationConfig
) -> None:
    """Check shapes always, and values where they are concrete (they are not under `jax.jit`).

    Raises:
        Eagle3Error: shapes that do not fit each other, an empty prompt, one that fills the context, an id outside
            the vocabulary, or a transform asked for but not compiled in.
    """
    if token_ids.ndim != 2 or lengths.shape != token_ids.shape[:1]:
        raise Eagle3Error(f"prompts have shape {token_ids.shape} and lengths {lengths.shape}; [B, P] and [B] fit")
    if sampling.temperature.shape != lengths.shape:
        raise Eagle3Error(f"sampling is for {sampling.temperature.shape[0]} rows; there are {lengths.shape[0]}")
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((token_ids, lengths, sampling))):
        return
    ids, counts = np.asarray(token_ids), np.asarray(lengths)
    if np.any(counts < 1) or np.any(counts > ids.shape[1]):
        raise Eagle3Error(f"prompt lengths {counts.tolist()} must lie in [1, {ids.shape[1]}]")
    if np.max(counts) >= model.max_position:
        raise Eagle3Error(
            f"a prompt of {np.max(counts)} tokens leaves no room in the context of {model.max_position}; shorten it"
        )
    real = np.arange(ids.shape[1]) < counts[:, None]
    if np.any((ids < 0) & real) or np.any((ids >= model.vocab_size) & real):
        raise Eagle3Error(f"prompts hold token ids outside [0, {model.vocab_size})")
    missing = sorted(used_transforms(sampling) - set(config.transforms))
    if missing:
        raise Eagle3Error(f"sampling asks for {', '.join(missing)}; add them to GenerationConfig.transforms")
