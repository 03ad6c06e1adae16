"""Generate text with a target, and with a draft where there is one."""

import argparse
import dataclasses
import json
import logging
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from eagle3_jax.commands.caches import add_cache_arguments
from eagle3_jax.commands.options import (
    add_draft_arguments,
    add_json_argument,
    add_target_arguments,
    check_speculation,
    chosen_speculation,
    load_pair,
)
from eagle3_jax.commands.request import (
    Request,
    add_prompt_arguments,
    add_sampling_arguments,
    make_request,
    read_prompts,
)
from eagle3_jax.errors import Eagle3Error

if TYPE_CHECKING:
    from eagle3_jax.checkpoint.drafts import Draft
    from eagle3_jax.checkpoint.targets import Target
    from eagle3_jax.decoding.loop import Generation

log = logging.getLogger(__name__)

ROUNDS_PER_CALL = 2
"""Rounds between two looks at the tokens while text is shown; a call costs about a millisecond."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `generate`."""
    add_target_arguments(parser)
    add_draft_arguments(parser)
    add_prompt_arguments(parser)
    add_sampling_arguments(parser)
    add_cache_arguments(parser)
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Generate, then print the texts or the JSON object."""
    check_speculation(args)
    prompts = read_prompts(args)
    target, draft = load_pair(args)
    request = make_request(args, prompts, target, draft)
    alone = len(request.lengths) == 1 and target.tokenizer is not None
    show = _Printer(target.tokenizer) if alone and not args.json else None
    timed = run_timed(target, draft, request, show)
    if args.json:
        print(json.dumps(_report(args, target, draft, request, timed)))
        return 0
    if show is not None:
        show.finish()
    else:
        outputs = _outputs(target, request, timed.generation)
        print("\n\n".join(str(o["token_ids"]) if o["text"] is None else o["text"] for o in outputs))
    log.info("%s", _summary(timed))
    return 0


@dataclasses.dataclass(frozen=True)
class Timed:
    """A finished generation (NumPy leaves) and where its time went, in seconds."""

    generation: "Generation"
    compile_seconds: float
    prefill_seconds: float
    decode_seconds: float

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens after each row's first, by decoding time; None if there are none."""
        count = int((self.generation.lengths - 1).clip(0).sum())
        return count / self.decode_seconds if count else None


def run_timed(
    target: "Target", draft: "Draft | None", request: Request, show: Callable[[list[int]], None] | None = None
) -> Timed:
    """Compile, then prefill and decode against the clock.

    Args:
        target: the model. draft: its drafter, or None for plain decoding.
        request: what to generate.
        show: called with the first row's tokens so far, after prefill and then every few rounds.

    Raises:
        Eagle3Error: a row's logits have no finite maximum.
    """
    import jax.numpy as jnp

    from eagle3_jax.decoding.loop import jitted_prefill, jitted_rounds, stream
    from eagle3_jax.decoding.state import abstract_state

    setup, params = _setup(target, draft, request)
    clock = _Clock()
    # `stream` finds both programs in the caches of jax.jit. The second waits until the first token is shown.
    prefill = jitted_prefill.lower(setup, params, *request.arrays)
    prefill.compile()
    compile_seconds = clock.lap()
    generations = stream(
        *params,
        *request.arrays,
        target_model=target.model,
        draft_model=draft.model if draft else None,
        config=request.config,
        rounds_per_call=ROUNDS_PER_CALL if show else request.config.max_new_tokens,
    )
    generation = next(generations)
    prefill_seconds = clock.lap()
    if show:
        show(_first_row(generation))
    state = abstract_state(prefill.out_info, params)
    jitted_rounds.lower(setup, params, request.sampling, state, jnp.int32(1)).compile()
    compile_seconds += clock.lap()
    for generation in generations:
        if show:
            show(_first_row(generation))
    decode_seconds = clock.lap()
    _check_finished(generation)
    return Timed(generation, compile_seconds, prefill_seconds, decode_seconds)


class _Clock:
    def __init__(self) -> None:
        self._then = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap."""
        then, self._then = self._then, time.perf_counter()
        return self._then - then


def _setup(target: "Target", draft: "Draft | None", request: Request) -> tuple[Any, tuple[Any, Any]]:
    """The static side and the weights of the programs that `stream` runs."""
    from eagle3_jax.decoding.loop import Setup, make_drafter

    drafter = make_drafter(draft.model if draft else None, target.model, request.config)
    return Setup(target.model, drafter, request.config), (target.params, draft.params if draft else ())


def _first_row(generation: "Generation") -> list[int]:
    return generation.tokens[0, : generation.lengths[0]].tolist()


def _check_finished(generation: "Generation") -> None:
    from eagle3_jax.decoding.loop import ERROR

    for row, finish in enumerate(generation.finish_reason.tolist()):
        if finish == ERROR:
            raise Eagle3Error(
                f"prompt {row}: the logits have no finite maximum after {generation.lengths[row]} tokens; "
                "the weights or the activations' dtype are at fault"
            )


class _Printer:
    """Prints the text of a growing list of tokens."""

    def __init__(self, tokenizer: Any) -> None:
        from eagle3_jax.text import StreamDecoder

        self._decoder, self._seen = StreamDecoder(tokenizer), 0

    def __call__(self, tokens: list[int]) -> None:
        """Print what the tokens add."""
        text = self._decoder.push(tokens[self._seen :])
        self._seen = len(tokens)
        sys.stdout.write(text)
        sys.stdout.flush()

    def finish(self) -> None:
        """Print what is held back, and end the line."""
        print(self._decoder.finish())


def _outputs(target: "Target", request: Request, generation: "Generation") -> list[dict[str, Any]]:
    from eagle3_jax.decoding.loop import STOP

    outputs = []
    for row, prompt in enumerate(request.prompt_ids()):
        ids = generation.tokens[row, : generation.lengths[row]].tolist()
        outputs.append(
            {
                "prompt_ids": prompt,
                "token_ids": ids,
                "text": target.tokenizer.decode(ids) if target.tokenizer else None,
                "finish_reason": "stop" if generation.finish_reason[row] == STOP else "length",
            }
        )
    return outputs


def _report(
    args: argparse.Namespace, target: "Target", draft: "Draft | None", request: Request, timed: Timed
) -> dict[str, Any]:
    from eagle3_jax.decoding.stats import acceptance

    return {
        "target": target.name,
        "draft": draft.name if draft else None,
        "speculation": chosen_speculation(args, draft) if draft else None,
        "outputs": _outputs(target, request, timed.generation),
        "stats": {
            "compile_seconds": timed.compile_seconds,
            "prefill_seconds": timed.prefill_seconds,
            "decode_seconds": timed.decode_seconds,
            "tokens_per_second": timed.tokens_per_second,
            **acceptance(timed.generation.stats),
        },
    }


def _summary(timed: Timed) -> str:
    from eagle3_jax.decoding.stats import acceptance

    parts = [f"{int(timed.generation.lengths.sum())} tokens", f"prefill {timed.prefill_seconds:.2f} s"]
    if timed.tokens_per_second:
        parts.append(f"{timed.tokens_per_second:.1f} tokens/s")
    length = acceptance(timed.generation.stats)["mean_acceptance_length"]
    if length:
        parts.append(f"{length:.2f} tokens a round")
    return ", ".join(parts)
