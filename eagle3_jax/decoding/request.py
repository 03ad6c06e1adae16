"""What a run compiles, and the checks a request passes before it runs."""

import dataclasses
import re

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import Array

from eagle3_jax.cache.paged import check_cache_format, check_page_size
from eagle3_jax.config import DecoderConfig, Eagle3Config
from eagle3_jax.decoding.sampling import TRANSFORMS, Sampling, check_transforms, used_transforms
from eagle3_jax.errors import Eagle3Error


@dataclasses.dataclass(frozen=True)
class Chain:
    """Draft a chain of `length` tokens a round.

    Raises:
        Eagle3Error: a length that is not an integer from 1 to 64.
    """

    length: int

    def __post_init__(self) -> None:
        """Refuse an impossible length."""
        if type(self.length) is not int or not 1 <= self.length <= 64:
            raise Eagle3Error(f"a chain's length is {self.length!r}; an integer from 1 to 64 is needed")


def parse_speculation(text: str) -> Chain:
    """Read a speculation setting such as "chain:4".

    Raises:
        Eagle3Error: anything else.
    """
    match = re.fullmatch(r"chain:([1-9][0-9]?)", text)
    if match is None or int(match[1]) > 64:
        raise Eagle3Error(
            f"speculation {text[:40]!r} is not understood; use chain:K with K from 1 to 64, e.g. chain:4"
        )
    return Chain(int(match[1]))


@dataclasses.dataclass(frozen=True)
class GenerationConfig:
    """What is compiled into a run: static and hashable. What varies by request is in `Sampling`.

    Attributes:
        max_new_tokens: capacity of the result; `Sampling.max_tokens` may ask for less.
        speculation: how many drafts a round.
        transforms: sampling transforms in the program. Those left out must not be asked for.
        return_logprobs: also return each token's log-probability.
        prefill_chunk: prompt tokens of one prefill pass.
        block_size: tokens of a cache block, the unit of the block table that target and draft share.
        page_size, draft_page_size: tokens that the target's and the draft's attention gather as one unit; None is
            a block. Each divides the block size: pages are views of the blocks, so that kernels which want other
            page sizes, such as 1 for latent attention and 16 or 64 for a draft's, share one table.
        pad_id: fills `Generation.tokens` after a row's end.
        cache_format, draft_cache_format: how the target's and the draft's cache keep numbers; None is as the model
            computes, "fp8" is e4m3fn. The target's decides about the text, for plain and speculative decoding alike.
        cache_scales, draft_cache_scales: of FP8 caches, one a layer; () is 1 for each. Numbers from 2**-6 to 448
            times the scale keep four binary digits.

    Raises:
        Eagle3Error: a size below 1, pages that do not fill a block, an unknown transform or format, or scales that
            are not positive.
    """

    max_new_tokens: int = 128
    speculation: Chain = Chain(4)
    transforms: tuple[str, ...] = TRANSFORMS
    return_logprobs: bool = False
    prefill_chunk: int = 256
    block_size: int = 32
    pad_id: int = 0
    page_size: int | None = None
    draft_page_size: int | None = None
    cache_format: str | None = None
    draft_cache_format: str | None = None
    cache_scales: tuple[float, ...] = ()
    draft_cache_scales: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Refuse impossible sizes and unknown transforms."""
        for name in ("max_new_tokens", "prefill_chunk", "block_size"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= 2**24:
                raise Eagle3Error(f"{name} is {value!r:.80}; an integer from 1 to 2**24 is needed")
        for name in ("page_size", "draft_page_size"):
            if getattr(self, name) is not None:
                check_page_size(name, getattr(self, name), self.block_size)
        for part in ("cache", "draft_cache"):
            check_cache_format(f"{part}_format", getattr(self, f"{part}_format"), getattr(self, f"{part}_scales"))
        if not isinstance(self.speculation, Chain) or not isinstance(self.transforms, tuple):
            raise Eagle3Error("speculation must be a Chain and transforms a tuple of names")
        if type(self.return_logprobs) is not bool:
            raise Eagle3Error(f"return_logprobs is {self.return_logprobs!r:.80}; True or False is needed")
        if type(self.pad_id) is not int or not -(2**31) <= self.pad_id < 2**31:
            raise Eagle3Error(f"pad_id is {self.pad_id!r:.80}; an integer that int32 can hold is needed")
        check_transforms(self.transforms)


def check_pair(draft: Eagle3Config, target: DecoderConfig) -> None:
    """Check that a draft can read a target's features and speaks its vocabulary.

    Raises:
        Eagle3Error: another width or vocabulary, or taps the target does not have.
    """
    if draft.target_hidden_size != target.hidden_size or draft.vocab_size != target.vocab_size:
        raise Eagle3Error(
            f"the draft is for a target of width {draft.target_hidden_size} and {draft.vocab_size} ids; "
            f"this one has width {target.hidden_size} and {target.vocab_size} ids"
        )
    if max(draft.taps) > target.num_layers:
        raise Eagle3Error(f"the draft taps hidden states {draft.taps}; the target has {target.num_layers} layers")


def check_request(
    token_ids: Array, lengths: Array, sampling: Sampling, model: DecoderConfig, config: GenerationConfig
) -> None:
    """Check shapes always, and values where they are concrete (they are not under `jax.jit`).

    Raises:
        Eagle3Error: shapes that do not fit each other, an empty prompt, one that fills the context, an id outside
            the vocabulary, or a transform asked for but not compiled in.
    """
    if not isinstance(config, GenerationConfig) or not isinstance(sampling, Sampling):
        raise Eagle3Error("config must be a GenerationConfig and sampling come from Sampling.make")
    if not all(hasattr(x, "dtype") and hasattr(x, "shape") for x in (token_ids, lengths)):
        raise Eagle3Error("prompts and lengths must be arrays; make them with encode or encode_ids")
    if len(token_ids.shape) != 2 or lengths.shape != token_ids.shape[:1] or 0 in token_ids.shape:
        raise Eagle3Error(f"prompts have shape {token_ids.shape}, lengths {lengths.shape}; [B, P] and [B] are needed")
    if token_ids.dtype != jnp.int32 or lengths.dtype != jnp.int32:
        raise Eagle3Error(f"prompts are {token_ids.dtype}, lengths {lengths.dtype}; int32 is needed")
    if sampling.temperature.shape != lengths.shape:
        raise Eagle3Error(f"sampling has shape {sampling.temperature.shape}; there are {lengths.shape[0]} rows")
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
    for name in ("eos_ids", "stop_ids", "bias_ids"):
        if np.any(np.asarray(getattr(sampling, name)) >= model.vocab_size):
            raise Eagle3Error(f"{name} hold ids of {model.vocab_size} or more, which the target's vocabulary lacks")
    missing = sorted(used_transforms(sampling) - set(config.transforms))
    if missing:
        raise Eagle3Error(f"sampling asks for {', '.join(missing)}; add them to GenerationConfig.transforms")
