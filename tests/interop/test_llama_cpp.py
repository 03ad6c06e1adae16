"""Speculative decoding of the shipped pair writes what llama.cpp writes with the same weights in float32."""

import json
from pathlib import Path

import jax
import pytest

import eagle3_jax as e3
from eagle3_jax.checkpoint.registry import locate

pytest.importorskip("llama_cpp")
from llamacpp import greedy, load, write_float32

pytestmark = pytest.mark.model
NEW = 48


def test_greedy_ids_are_those_of_llama_cpp(fixtures_dir: Path, tmp_path: Path) -> None:
    written = json.loads((fixtures_dir / "real" / "smollm2_135m_dev.json").read_text(encoding="utf-8"))["prompts"]
    peer = load(write_float32(locate("smollm2-135m", "target")[1], tmp_path / "float32.gguf"), context=512)
    target = e3.load_target("smollm2-135m")
    draft = e3.load_draft("smollm2-135m-eagle3", target)
    prompts = [prompt["prompt_ids"] for prompt in written]
    ids, lengths = e3.encode_ids(target, prompts)
    run = jax.jit(e3.speculative_generate, static_argnames=("target_model", "draft_model", "config"))
    out = run(
        target.params,
        draft.params,
        ids,
        lengths,
        e3.row_keys(0, len(prompts)),
        e3.Sampling.make(len(prompts), ignore_eos=True),
        target_model=target.model,
        draft_model=draft.model,
        config=e3.GenerationConfig(max_new_tokens=NEW, speculation=e3.Chain(4)),
    )
    for b, prompt in enumerate(prompts):
        assert out.tokens[b].tolist() == greedy(peer, prompt, NEW), written[b]["name"]
