"""Write a program as StableHLO that any platform of a list can run, through `jax.export`."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax import export

from eagle3_jax.checkpoint.files import atomic_file
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.export.programs import Program, build
from eagle3_jax.sharding import abstract_mesh

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


def export_program(program: Program, platforms: Sequence[str], path: str | os.PathLike[str]) -> None:
    """Write a program for some platforms; `jax.export.deserialize` reads it.

    The program takes and gives arrays without the trees around them, in the order of `jax.tree.leaves` of what
    `eagle3_jax.export.programs.build` lists as arguments and of what its function gives. No weights are in the file.

    Args:
        program: the program, for one device. platforms: some of `PLATFORMS`. path: the file.

    Raises:
        Eagle3Error: another platform, several devices, `flatbuffers` is not installed, or the file cannot be written.

    Example:
        >>> export_program(Program("round", "smollm2-135m"), ["cpu", "rocm"], "round.jax")  # doctest: +SKIP
    """
    if not platforms or (odd := sorted(set(platforms) - set(PLATFORMS))):
        raise Eagle3Error(f"platform {(odd or [''])[0]!r:.40} is not known; use {', '.join(PLATFORMS)}")
    if program.mesh != (1, 1):
        raise Eagle3Error("a portable program is for one device; leave the mesh away")
    parts = build(program, abstract_mesh(1, 1))
    leaves, structure = jax.tree.flatten(parts.arguments)

    def flat(*leaves: Any) -> list[Any]:
        return jax.tree.leaves(parts.function(*jax.tree.unflatten(structure, leaves)))

    # Without shardings: they would tie the program to a mesh.
    plain = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    exported = export.export(jax.jit(flat), platforms=list(platforms))(*plain)
    try:
        data = exported.serialize()
    except ImportError as error:
        raise Eagle3Error("jax.export needs flatbuffers; run: pip install eagle3-jax[export]") from error
    with atomic_file(Path(path)) as file:
        file.write(data)
