"""SmolLM2 in llama.cpp, in float32: the file, and greedy decoding."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

FLOAT32 = 0
"""ggml's type number."""


def write_float32(source: Path, out: Path) -> Path:
    """A GGUF file with the same metadata and every tensor widened to float32."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(out, architecture)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        writer.add_key_value(
            field.name, field.contents(), field.types[0], field.types[-1] if field.types[1:] else None
        )
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def load(path: Path, context: int) -> Any:
    """The model with a float32 cache, on all cores."""
    from llama_cpp import Llama

    return Llama(
        str(path),
        n_ctx=context,
        n_threads=os.cpu_count(),
        n_threads_batch=os.cpu_count(),
        type_k=FLOAT32,
        type_v=FLOAT32,
        verbose=False,
    )


def greedy(model: Any, prompt_ids: Sequence[int], count: int) -> list[int]:
    """The next `count` ids by argmax."""
    model.reset()
    steps = model.generate(list(prompt_ids), temp=0.0, repeat_penalty=1.0)
    return [next(steps) for _ in range(count)]
