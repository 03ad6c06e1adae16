"""Two processes, each with half of the mesh, give the tokens of one."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from loading import DRAFTS, TARGETS, edited, put
from xla import quick_flags

from eagle3_jax.api import encode_ids
from eagle3_jax.checkpoint.drafts import load_draft
from eagle3_jax.checkpoint.targets import load_target
from eagle3_jax.decoding.loop import stream
from eagle3_jax.decoding.request import Chain, GenerationConfig
from eagle3_jax.decoding.sampling import Sampling, row_keys
from eagle3_jax.sharding import make_mesh

LAYERS = 2
ROWS = [[5, 17, 80, 3], [9] * 11, [60, 61], [2, 3, 5, 7, 11, 13]]


def tokens_of(folder: str, mesh: jax.sharding.Mesh | None) -> list[list[int]]:
    """What the shortened target of a folder writes with a draft, loaded onto the mesh."""
    target = load_target(folder, mesh=mesh)
    draft = load_draft(DRAFTS / "d_fullvocab", target, {"taps": [0, 1, LAYERS]})
    config = GenerationConfig(max_new_tokens=10, speculation=Chain(2), transforms=(), prefill_chunk=8, block_size=8)
    sampling = Sampling.make(len(ROWS), temperature=[0.0, 0.7, 0.0, 2.0], max_tokens=[10, 4, 7, 10])
    ids, lengths = encode_ids(target, ROWS, bucket_sizes=[12])
    models = {"target_model": target.model, "draft_model": draft.model, "config": config}
    arrays = (ids, lengths, row_keys(0, len(ROWS)), sampling)
    *_, last = stream(target.params, draft.params, *arrays, **models, rounds_per_call=3)
    return [row[:length].tolist() for row, length in zip(last.tokens, last.lengths, strict=True)]


def one_of_two(address: str, process: int, folder: str) -> None:
    """A process of the run: prints the tokens as JSON."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, num_processes=2, process_id=process)
    assert (jax.process_count(), len(jax.devices()), len(jax.local_devices())) == (2, 4, 2)
    print(json.dumps(tokens_of(folder, make_mesh(2, 2))))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of two layers."""

    def shorten(tensors: dict[str, np.ndarray]) -> None:
        for name in [name for name in tensors if ".layers." in name and int(name.split(".")[2]) >= LAYERS]:
            del tensors[name]

    return edited(TARGETS / "llama_tied", tmp_path_factory.mktemp("target"), shorten, put("num_hidden_layers", LAYERS))


def test_two_processes_write_what_one_writes(folder: Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    flags = " ".join(["--xla_force_host_platform_device_count=2", *quick_flags()])
    settings = {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": str(Path(__file__).parents[1])}
    started = [
        subprocess.Popen(
            [sys.executable, __file__, address, str(process), str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=settings,
        )
        for process in range(2)
    ]
    try:
        alone = tokens_of(str(folder), None)
        outputs = [process.communicate(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], outputs
    assert [json.loads(out.splitlines()[-1]) for out, _ in outputs] == [alone, alone]
    assert [len(row) for row in alone] == [10, 4, 7, 10]


if __name__ == "__main__":
    one_of_two(sys.argv[1], int(sys.argv[2]), sys.argv[3])
