"""Programs from configs alone: what is lowered, and the hash that says whether a report is still of it."""

import dataclasses
import hashlib
import json
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax import export
from jax.sharding import AxisType, Mesh

from eagle3_jax.checkpoint.names import abstract_params
from eagle3_jax.decoding.drafters import NoDrafter
from eagle3_jax.decoding.loop import Setup, jitted_prefill
from eagle3_jax.decoding.request import GenerationConfig
from eagle3_jax.decoding.sampling import Sampling
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.export.portable import export_program
from eagle3_jax.export.programs import Program, abstract_draft, abstract_target, build, lower
from eagle3_jax.export.rocm import _reason, compile_for_chip, is_fresh
from eagle3_jax.quant.weight import named_weights
from eagle3_jax.sharding import abstract_mesh

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A target's folder with its config and nothing else."""
    place = tmp_path_factory.mktemp("target")
    (place / "config.json").write_text(json.dumps(CONFIG))
    return str(place)


@pytest.fixture(scope="module")
def program(folder: str) -> Program:
    settings = {"draft_vocab_size": 28, "taps": [0, 1, 3]}
    return Program(
        "round", folder, "new", settings, batch=2, prompt=8, max_new_tokens=8, dtype="float32", speculation="chain:1"
    )


def test_the_stablehlo_is_the_same_on_a_mesh_of_devices_and_without_one(program: Program) -> None:
    devices = np.array(jax.devices()[:1]).reshape(1, 1)
    mesh = Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    placed = lower(program, mesh, "cpu").stage.as_text()
    assert lower(program, None, "cpu").sha256() == hashlib.sha256(placed.encode()).hexdigest()


def test_a_report_is_fresh_until_its_program_changes(program: Program) -> None:
    fields = json.loads(json.dumps(dataclasses.asdict(program)))
    report = {"program": fields, "stablehlo_sha256": lower(program).sha256()}
    assert is_fresh(report)
    assert not is_fresh({**report, "program": {**fields, "draft_format": "fp8_channel"}})
    with pytest.raises(Eagle3Error, match="not a report"):
        is_fresh({"program": fields})
    with pytest.raises(Eagle3Error, match="a program has no field 'colour'"):
        is_fresh({**report, "program": {**fields, "colour": "red"}})


def test_what_a_round_carries_is_donated_and_the_pools_are_the_caches(program: Program) -> None:
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    parts = build(program, mesh)
    assert parts.donated == 2
    shapes = [pool.shape for pool in jax.tree.leaves(parts.pools)]
    # 2 rows of one block of 32 slots; keys and values of 2 heads a layer, and of the draft's layer.
    assert shapes == [(64, 2, 16)] * 4
    assert build(dataclasses.replace(program, what="prefill"), mesh).donated is None


def test_on_a_mesh_the_pools_lie_as_the_loop_lays_them(program: Program) -> None:
    parts = build(dataclasses.replace(program, mesh=(2, 2)), abstract_mesh(2, 2))
    places = [(pool.shape, pool.sharding.shard_shape(pool.shape)) for pool in jax.tree.leaves(parts.pools)]
    # Rows over "data", heads over "model"; keys and values of a head side by side.
    assert places == [((64, 2, 16), (32, 1, 16))] * 4
    head = parts.target_params["head"]["weight"].value
    assert head.sharding.shard_shape(head.shape) == (20, 24)


def test_narrow_formats_go_to_all_matrices_but_the_kept(program: Program) -> None:
    narrow = dataclasses.replace(program, target_format="fp8_block", draft_format="fp8_channel")
    target = abstract_target(dataclasses.replace(narrow, target_kept=("embed", "head", ".*attention.*")))
    formats = {path: weight.format for path, weight in named_weights(abstract_params(target)).items()}
    assert {path for path, name in formats.items() if name == "fp8_block"} == {
        f"layers_{i}/mlp/{name}/weight" for i in range(3) for name in ("gate", "up", "down")
    }
    assert formats["layers_0/attention/q/weight"] == "f32"
    draft = named_weights(abstract_params(abstract_draft(narrow, target)))
    assert draft["fc/weight"].format == draft["head/weight"].format == "f32"
    assert draft["mlp/up/weight"].value.dtype == jnp.float8_e4m3fn
    assert draft["mlp/up/weight"].activations == "fp8_token"


def test_the_layout_is_that_of_all_plain_matrices(program: Program) -> None:
    turned = dataclasses.replace(program, layout="nk", draft_format="fp8_channel")
    target = abstract_target(turned)
    weights = named_weights(abstract_params(target)) | named_weights(abstract_params(abstract_draft(turned, target)))
    assert {weight.layout for weight in weights.values()} == {"n", "nk"}
    assert weights["layers_0/mlp/up/weight"].value.shape == (32, 24)


def test_fewer_layers_than_the_config_names(program: Program) -> None:
    assert abstract_target(dataclasses.replace(program, layers=1)).config.num_layers == 1
    with pytest.raises(Eagle3Error, match=r"4 layers: .* has 3"):
        abstract_target(dataclasses.replace(program, layers=4))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"what": "train"}, "'train' cannot be exported; what is one of prefill, round, generate"),
        ({"batch": 0}, "sizes from 1 are needed"),
        ({"layout": "nn"}, "layout 'nn' is not known"),
        ({"dtype": "int8"}, "int8"),
        ({"max_new_tokens": 121}, "129 tokens pass the target's context of 128"),
        ({"draft_settings": {"colour": 1}}, "a new draft has no setting 'colour'"),
        ({"draft_settings": {"taps": 5}}, "taps are 5; a list"),
        ({"draft_settings": {"draft_vocab_size": float("nan")}}, "draft_vocab_size is nan; a positive integer"),
        ({"draft_settings": {"draft_vocab_size": 10**6}}, "cannot have 1000000 of the target's"),
        ({"draft_settings": {"rope_theta": "x"}}, "rope_theta is 'x'"),
        ({"draft_settings": {"fc_norm": 1}}, "fc_norm is 1; true or false"),
        ({"target_format": "fp8_channel", "target_kept": ("[",)}, "target_kept '\\[' is no regular expression"),
        ({"draft_settings": {"taps": [0, 4]}}, "taps .* must ascend within 0 .. 3"),
        ({"target_format": "mxfp4"}, "takes 24 inputs, which mxfp4 cannot group"),
        ({"draft_format": "bf16"}, "draft format bf16 is wide"),
        ({"target_format": "fp7"}, "'fp7' is not known"),
    ],
)
def test_what_is_no_program_is_refused(program: Program, changes: dict, message: str) -> None:
    with pytest.raises(Eagle3Error, match=message):
        lower(dataclasses.replace(program, **changes))


@pytest.mark.parametrize(
    ("stderr", "code", "message"),
    [
        ("W1130 chatter\nTraceback\neagle3_jax.errors.Eagle3Error: too wide\n", 1, "too wide"),
        ("jax.errors.JaxRuntimeError: INTERNAL: no such GEMM\n\tsuspected place\n", 1, "INTERNAL: no such GEMM"),
        ("stand-in called: hipInit\n*** aborted\n", -6, "the compiler asked a GPU for hipInit, and there is none"),
        ("F1130 check failed: x\n", -6, "the compiler ended with code -6"),
    ],
)
def test_why_a_compilation_failed_is_one_line(stderr: str, code: int, message: str) -> None:
    assert _reason(subprocess.CompletedProcess([], code, "", stderr)) == message


def test_an_unknown_chip_is_refused(program: Program) -> None:
    with pytest.raises(Eagle3Error, match="chip 'gfx1' is not known; known chips are gfx950, gfx942"):
        compile_for_chip(program, "gfx1")


def test_a_portable_program_gives_the_tokens_of_prefill(folder: str, tmp_path: Path) -> None:
    program = Program("prefill", folder, layers=1, batch=2, prompt=8, max_new_tokens=8, dtype="float32", layout="kn")
    export_program(program, ["cpu", "rocm"], tmp_path / "prefill.jax")
    exported = export.deserialize(bytearray((tmp_path / "prefill.jax").read_bytes()))
    assert exported.platforms == ("cpu", "rocm")
    _, whole = tiny.target()
    # The embedding lies the other way round, as a loader of an untied target keeps it.
    embed = whole["embed"]["weight"]
    params = {name: whole[name] for name in ("layers_0", "final_norm", "head")}
    params["embed"] = {"weight": embed.replace(value=embed.value.T, layout="nk")}
    setup = Setup(abstract_target(program), NoDrafter(), GenerationConfig(max_new_tokens=8, transforms=()))
    sampling = Sampling.make(2, eos_ids=(36, 37, 38, 39))
    arguments = ((params, ()), *tiny.prompts(2, 8), jax.random.split(jax.random.key(3), 2), sampling)
    tokens = exported.call(*jax.tree.leaves(arguments))[0]
    np.testing.assert_array_equal(tokens, jitted_prefill(setup, *arguments).tokens)
    assert np.asarray(tokens)[:, 0].any()


def test_portable_refusals(folder: str, tmp_path: Path) -> None:
    program = Program("generate", folder, mesh=(1, 2))
    with pytest.raises(Eagle3Error, match="platform 'abacus' is not known"):
        export_program(program, ["cpu", "abacus"], tmp_path / "x")
    with pytest.raises(Eagle3Error, match="for one device"):
        export_program(program, ["cpu"], tmp_path / "x")
