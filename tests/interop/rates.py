"""Tokens a second of llama.cpp and of this library, the same weights in float32, prompt by prompt in turns.

    python tests/interop/rates.py [--speculation chain:1] [--repeats 3]

Prints one JSON object. Both decode greedily past end tokens; the time includes the prompt.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
from llamacpp import greedy, load, write_float32

import eagle3_jax as e3
from eagle3_jax.bench.runner import machine
from eagle3_jax.bench.workloads import load_workload
from eagle3_jax.checkpoint.registry import locate
from eagle3_jax.commands.request import encode_workload
from eagle3_jax.decoding.batches import unpad_rows
from eagle3_jax.decoding.request import parse_speculation
from eagle3_jax.native.weights import in_bfloat16

NEW = 96


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speculation", default="chain:1", type=parse_speculation)
    parser.add_argument("--repeats", default=3, type=int)
    args = parser.parse_args()
    native = e3.use_native_kernels()
    target = e3.load_target("smollm2-135m")
    draft = e3.load_draft("smollm2-135m-eagle3", target)
    draft = in_bfloat16(draft) if native else draft
    prompts = unpad_rows(*encode_workload(load_workload("dev"), target))
    batches = [e3.encode_ids(target, [prompt]) for prompt in prompts]
    sampling = e3.Sampling.make(1, ignore_eos=True)
    config = e3.GenerationConfig(max_new_tokens=NEW, speculation=args.speculation, transforms=())
    run_plain = jax.jit(e3.generate, static_argnames=("model", "config"))
    run_drafted = jax.jit(e3.speculative_generate, static_argnames=("target_model", "draft_model", "config"))
    models = {"target_model": target.model, "draft_model": draft.model}

    def given(row: int) -> tuple:
        return *batches[row], e3.row_keys(0, 1), sampling

    with tempfile.TemporaryDirectory() as folder:
        peer = load(write_float32(locate("smollm2-135m", "target")[1], Path(folder) / "float32.gguf"), context=512)
        runs: dict[str, Callable[[int], object]] = {
            "llama.cpp": lambda row: greedy(peer, prompts[row], NEW),
            "plain": lambda row: run_plain(target.params, *given(row), model=target.model, config=config),
            "speculative": lambda row: run_drafted(target.params, draft.params, *given(row), **models, config=config),
        }
        for run in runs.values():
            for row in range(len(prompts)):
                jax.block_until_ready(run(row))
        turns = []
        for _ in range(args.repeats):
            seconds = dict.fromkeys(runs, 0.0)
            for row in range(len(prompts)):
                for name, run in runs.items():
                    seconds[name] += _seconds(partial(run, row))
            turns.append({name: NEW * len(prompts) / total for name, total in seconds.items()})
    print(
        json.dumps(
            {
                "machine": machine(),
                "tokens_per_second": {name: statistics.median(turn[name] for turn in turns) for name in runs},
                "speculative_to_llama.cpp": [turn["speculative"] / turn["llama.cpp"] for turn in turns],
                "speculative_to_plain": [turn["speculative"] / turn["plain"] for turn in turns],
            },
            indent=1,
        )
    )


def _seconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
