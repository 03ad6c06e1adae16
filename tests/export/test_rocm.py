"""The real compiler of AMD's wheel, for a chip that is not here. What it makes is looked at, never run."""

import dataclasses
import json
from typing import Any

import pytest

from eagle3_jax import cli
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.export.programs import Program
from eagle3_jax.export.rocm import NOTE, compile_for_chip, gemm_tile, is_fresh
from eagle3_jax.export.toolchain import prepare

UNREACHABLE = "from versions: none"
"""What pip says where it reaches no package index, or one without the wheel for this system."""
LOOP = Program(
    "generate",
    "smollm2-135m",
    draft="new",
    draft_settings={"draft_vocab_size": 8192, "taps": (0, 1, 2)},
    layers=2,
    batch=2,
    prompt=64,
    max_new_tokens=64,
)
"""SmolLM2's loop with a draft, with two of its thirty layers: the others compile to the same kernels."""


@pytest.fixture(scope="module", autouse=True)
def _compiler() -> None:
    try:
        prepare()
    except Eagle3Error as error:
        if UNREACHABLE not in str(error):
            raise
        pytest.skip(f"NOTHING WAS COMPILED FOR AMD: {error}")


@pytest.fixture(scope="module")
def loop() -> dict[str, Any]:
    return compile_for_chip(LOOP)


def test_the_loop_compiles_to_code_objects_of_the_chip(loop: dict[str, Any]) -> None:
    objects = loop["code_objects"]
    # EM_AMDGPU and EF_AMDGPU_MACH_AMDGCN_GFX950, as LLVM's AMDGPU usage guide numbers them.
    assert {(entry["elf_machine"], entry["mach"]) for entry in objects} == {(224, 0x4F)}
    assert all("gfx950:sramecc+:xnack-" in entry["target"] for entry in objects)
    kernels = [name for entry in objects for name in entry["kernels"]]
    assert len(kernels) > 50 and any(name.startswith("gemm_fusion") for name in kernels)


def test_the_loop_copies_no_pool_and_calls_no_library(loop: dict[str, Any]) -> None:
    assert loop["copies"] == {"pools": {}, "weights": {}, "experts": {}}
    assert loop["library_calls"] == {} and loop["collectives"] == {}


def test_the_bytes_are_those_of_the_shapes(loop: dict[str, Any]) -> None:
    h, kv, mlp, vocab, drafts, taps = 576, 192, 1536, 49152, 8192, 3
    attention, feed_forward = 2 * h * h + 2 * h * kv, 3 * h * mlp
    target = vocab * h * 2 + 2 * (2 * (attention + feed_forward) + 4 * 2 * h) + 4 * h
    # A draft's queries, keys and values read the embedding too; norms and target_ids have four bytes.
    draft = 2 * (taps * h * h + attention + h * (h + 2 * kv) + feed_forward + h * drafts) + 4 * 4 * h + 4 * drafts
    sizes = loop["bytes_per_device"]
    assert sizes["weights"] == target + draft
    # Two rows of 128 tokens; keys and values of 3 heads of 64 in two layers and the draft's.
    assert sizes["pools"] == 3 * 2 * 128 * 2 * kv * 2
    assert 0 < sizes["temporaries"] < 0.2 * sizes["weights"]


def test_the_report_says_what_it_is_of(loop: dict[str, Any]) -> None:
    assert loop["note"] == NOTE and "not executed" in NOTE
    assert loop["chip"]["spec"] == "XLA's MI350X"
    assert loop["versions"]["jax-rocm7-pjrt"] == loop["versions"]["jax"]
    assert is_fresh(json.loads(json.dumps(loop)))


def test_the_chips_differ_in_the_8_bit_floats_that_their_matrix_instructions_take() -> None:
    """One prefill under a forced tile: e4m3fn has a matrix instruction on gfx950 and none on gfx942."""
    program = dataclasses.replace(LOOP, what="prefill", draft=None, draft_settings={}, layers=1)
    program = dataclasses.replace(program, batch=1, target_format="fp8_channel")
    newer, older = (compile_for_chip(program, chip, gemm_tile(64, 64, 64)) for chip in ("gfx950", "gfx942"))
    assert any("f8f6f4" in name for name in newer["matrix_instructions"])
    assert older["matrix_instructions"] and not any("f8f6f4" in name for name in older["matrix_instructions"])
    assert {entry["mach"] for entry in older["code_objects"]} == {0x4C}


def test_experts_in_fp8_on_four_cards_are_multiplied_where_they_lie() -> None:
    """A round of a layer of Qwen3-30B-A3B: no expert is cut out of its stack, and no matrix gathered or widened."""
    program = Program("round", "qwen3-30b-a3b", batch=160, target_format="fp8_block", layers=1, mesh=(1, 4))
    report = compile_for_chip(program)
    assert report["copies"] == {"pools": {}, "weights": {}, "experts": {}} and report["widened"] == {}
    assert not {"all-gather", "all-to-all", "collective-permute"} & set(report["collectives"])
    # 160 tokens go to 8 of 128 experts each: tiles of 4 rows, padded by at most 3 in each expert.
    assert report["experts"] == {"rows": 4, "most_products": 1.3}
    h, width, experts, layers = 2048, 128, 128, 48
    sizes, whole = report["bytes_per_device"], report["all_layers"]
    # A layer on a card: codes of a byte, a float32 scale for 128 x 128 of them; whole: the router and four norms.
    codes = (h * width * (32 + 4 + 4) + 32 * width * h + experts * 3 * h * 768) // 4
    assert whole["layers"] == layers
    a_layer = codes + codes // 128**2 * 4 + 2 * h * experts + 4 * (2 * h + 2 * width)
    assert whole["weights"] - sizes["weights"] == (layers - 1) * a_layer
    # Rows of 256 tokens; keys and values of one head of 128 a layer on each card.
    cached = 160 * 256 * 2 * width * 2
    assert whole["pools"] - sizes["pools"] == (layers - 1) * cached


def test_the_command_line_refuses_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--target-chip", "gfx950", "--target", "smollm2-135m", "--topology", "1x1"]
    assert cli.main(["export", *flags]) == 2
    said = "argument --topology: '1x1' is not 3 whole numbers, joined by 'x'"
    assert capsys.readouterr().err == f"eagle3-jax: error: {said} (see eagle3-jax export --help)\n"
