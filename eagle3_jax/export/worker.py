"""The process that loads the ROCm compiler: reads job.json in a folder, writes report.json there."""

import ctypes
import dataclasses
import importlib.metadata
import json
import platform
import re
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from eagle3_jax.errors import Eagle3Error
from eagle3_jax.export.chips import CHIPS
from eagle3_jax.export.elf import AMDGPU, Elf
from eagle3_jax.export.hlo import Module, Shape, counted, hlo_dtype
from eagle3_jax.export.programs import Parts, Program, abstract_target, abstract_weights, lower
from eagle3_jax.export.toolchain import PACKAGE
from eagle3_jax.models.moe import tile_height
from eagle3_jax.quant.formats import NARROW_FORMATS
from eagle3_jax.quant.weight import Weight, named_weights
from eagle3_jax.sharding import DATA, MODEL, check_mesh

_LARGEST = 12
_MATRIX_INSTRUCTION = re.compile(r"call [^\n]*@(llvm\.amdgcn\.(?:mfma|smfmac)[\w.]*)")


def main(folder: Path) -> None:
    """Compile the job of a folder."""
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    program, chip = Program.of(job["program"]), CHIPS[job["chip"]]
    # Kept until the end of the process, under the names by which the compiler asks for them.
    stubs = [ctypes.CDLL(path, ctypes.RTLD_GLOBAL) for path in job["stubs"]]
    data, model = program.mesh
    topology = topologies.get_topology_desc(
        platform="rocm",
        topology_name=chip.isa,
        topology=f"1x1x{data * model}",
        target_config=chip.target_config(),
    )
    devices = np.array(topology.devices).reshape(data, model)
    mesh = check_mesh(Mesh(devices, (DATA, MODEL)))
    lowered = lower(program, mesh)
    start = time.perf_counter()
    compiled = lowered.stage.compile(compiler_options=job["options"] or None)
    seconds = {**lowered.seconds, "compile": time.perf_counter() - start}
    objects = code_objects(folder / "kernels")
    if not objects or any(o["elf_machine"] != AMDGPU or o["mach"] != chip.mach for o in objects):
        raise Eagle3Error(f"{len(objects)} code objects, not all of them for {chip.isa}")
    module = Module(compiled.as_text() or "")
    report = {
        "program": job["program"],
        "chip": {"isa": chip.isa, "spec": f"XLA's {chip.spec}"},
        "options": job["options"],
        "versions": {
            "jax": jax.__version__,
            "jaxlib": importlib.metadata.version("jaxlib"),
            PACKAGE: job["version"],
            "python": platform.python_version(),
        },
        "seconds": {name: round(value, 2) for name, value in seconds.items()},
        "stablehlo_sha256": lowered.sha256(),
        **_findings(module, lowered.parts),
        "bytes_per_device": _bytes(compiled.memory_analysis(), lowered.parts, program),
        "all_layers": _all_layers(lowered.parts, program, mesh),
        "experts": _experts(lowered.parts, program),
        "matrix_instructions": counted(*(o["matrix_instructions"] for o in objects)),
        "code_objects": objects,
    }
    (folder / "report.json").write_text(json.dumps(report), encoding="utf-8")
    del stubs


def code_objects(folder: Path) -> list[dict[str, Any]]:
    """The code objects that the compiler left in a folder, those together that differ in their kernels' names only."""
    found = []
    for path in folder.glob("*.hsaco"):
        elf = Elf(path)
        optimised = path.with_name(f"{path.stem}_opt.ll").read_text(encoding="utf-8", errors="replace")
        found.append(
            {
                "kernels": [name.removesuffix(".kd") for name in elf.symbols() if name.endswith(".kd")],
                "elf_machine": elf.machine,
                "mach": elf.flags & 0xFF,
                "target": re.match(r"[\w:+-]*", elf.find(b"amdgcn-"))[0],  # pyright: ignore[reportOptionalSubscript]
                "matrix_instructions": counted(_MATRIX_INSTRUCTION.findall(optimised)),
            }
        )
    return grouped(found)


def grouped(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Code objects of the same machine, target and kinds of matrix instructions as one entry, with their number.

    Example:
        >>> grouped([{"kernels": [name], "mach": 79, "matrix_instructions": {}} for name in "ba"])
        [{'objects': 2, 'kernels': ['a', 'b'], 'mach': 79, 'matrix_instructions': {}}]
    """
    kinds: dict[Any, list[dict[str, Any]]] = {}
    for entry in objects:
        same = {name: value for name, value in entry.items() if name not in ("kernels", "matrix_instructions")}
        kinds.setdefault((*sorted(same.items()), *sorted(entry["matrix_instructions"])), []).append(entry)
    return [
        {
            "objects": len(members),
            **members[0],
            "kernels": sorted(name for entry in members for name in entry["kernels"]),
            "matrix_instructions": counted(*(entry["matrix_instructions"] for entry in members)),
        }
        for _, members in sorted(kinds.items(), key=lambda item: -len(item[1]))
    ]


def _findings(module: Module, parts: Parts) -> dict[str, Any]:
    pools = {_shard(x) for x in jax.tree.leaves(parts.pools)}
    weights = [*named_weights(parts.target_params).values(), *named_weights(parts.draft_params).values()]
    matrices = [weight for weight in weights if weight.layout != "n"]
    stored = {_shard(weight.value) for weight in matrices}
    stacks = [shape for shape in stored if len(shape[1]) > 2]
    experts = [(dtype, dims) for dtype, (_, *rest) in stacks for dims in ((1, *rest), tuple(rest))]
    return {
        "collectives": module.collectives(),
        "library_calls": module.library_calls(),
        "aliases": module.aliases,
        "copies": {
            "pools": module.copies(pools),
            "weights": module.copies(stored),
            "experts": module.copies(experts, slices=True),
        },
        "widened": module.widened(shape for weight in matrices for shape in _matrix_shapes(weight)),
        "largest": module.largest(_LARGEST),
    }


def _bytes(stats: Any, parts: Parts, program: Program) -> dict[str, int]:
    weights = (parts.target_params, parts.draft_params)
    pools = _tree_bytes(parts.pools)
    # A whole generation makes its own pools, which XLA then counts as temporaries.
    inside = pools if program.what == "generate" else 0
    return {
        "weights": _tree_bytes(weights),
        "pools": pools,
        "temporaries": stats.temp_size_in_bytes - inside,
        "arguments": stats.argument_size_in_bytes,
        "outputs": stats.output_size_in_bytes,
        "aliased": stats.alias_size_in_bytes,
    }


def _all_layers(parts: Parts, program: Program, mesh: Mesh) -> dict[str, int]:
    """Bytes on one device of what a shortened model has in all its layers, from shapes alone."""
    target = abstract_target(dataclasses.replace(program, layers=None))
    layers, compiled = target.config.num_layers, parts.setup.target.config.num_layers
    (*pools, draft_pools), weights = parts.pools, abstract_weights(target, mesh)
    return {
        "layers": layers,
        "weights": _tree_bytes((weights, parts.draft_params)),
        # Every layer's are the same.
        "pools": _tree_bytes(pools) // compiled * layers + _tree_bytes(draft_pools),
    }


def _experts(parts: Parts, program: Program) -> dict[str, float]:
    """Rows that an expert multiplies at a time, and at most how many times as many rows as were sent to experts."""
    moe = getattr(parts.setup.target.config, "moe", None)
    if moe is None or program.what != "round":
        return {}
    assignments = program.batch * (parts.setup.drafts + 1) * moe.top_k
    height = tile_height(assignments, moe.num_experts)
    return {"rows": height, "most_products": round(1 + moe.num_experts * (height - 1) / assignments, 3)}


def _tree_bytes(tree: Any) -> int:
    """Bytes on one device."""
    return sum(int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _shard(x: Any) -> Shape:
    return hlo_dtype(x.dtype), tuple(x.sharding.shard_shape(x.shape))


def _matrix_shapes(weight: Weight) -> list[tuple[float, tuple[int, ...]]]:
    """Bits of an element and dimensions on one device of a matrix, and of each matrix of a stack."""
    value, pack = weight.value, NARROW_FORMATS[weight.format].pack if weight.format in NARROW_FORMATS else 1
    *front, last = value.sharding.shard_shape(value.shape)  # pyright: ignore[reportAttributeAccessIssue]
    bits, dims = value.dtype.itemsize * 8 / pack, (*front, last * pack)
    return [(bits, dims), (bits, dims[1:])] if len(dims) > 2 else [(bits, dims)]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
