"""The probe: a pair is built in which only one reading of the taps lets the draft predict its target."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import eagle3_jax as e3
from eagle3_jax.checkpoint import drafts
from eagle3_jax.cli import main
from eagle3_jax.training.probe import probe_taps, settle_taps

V, H, LAYERS = 12, 24, 3
IDS = "eagle_aux_hidden_state_layer_ids"
PROMPTS = [[i] for i in range(8)]  # as many as loading probes with: one program serves all tests


def shifted(by: int, scale: float) -> np.ndarray:
    """[V, V]: column i has `scale` at (i + by) mod V."""
    return scale * np.roll(np.eye(V), by, axis=0)


def gated(x: float) -> float:
    """What SwiGLU makes of x in both of its branches."""
    return x * x / (1 + np.exp(-x))


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> e3.Target:
    """A target that counts: after token i comes i + 1.

    Its second layer writes i + 2 into the upper half of the stream, its third wipes that out and decides.
    """
    gate = np.hstack([np.eye(V), np.zeros((V, V))])
    tensors = {"model.embed_tokens.weight": np.hstack([np.eye(V), np.zeros((V, V))])}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    for i in range(LAYERS):
        at, down = f"model.layers.{i}.", np.zeros((H, V))
        # The stream holds one or two ones, which the norms before these MLPs raise to sqrt(H) and sqrt(H / 2).
        if i == 1:
            down[V:] = shifted(2, 1 / gated(np.sqrt(H)))
        if i == 2:
            unit = 1 / gated(np.sqrt(H / 2))
            down[:V], down[V:] = shifted(1, 3 * unit), shifted(2, -unit) + shifted(5, unit)
        for name in "qkvo":
            tensors[f"{at}self_attn.{name}_proj.weight"] = np.zeros((H, H))
        tensors |= {f"{at}mlp.{name}_proj.weight": gate for name in ("gate", "up")}
        tensors[f"{at}mlp.down_proj.weight"] = down
        tensors |= {f"{at}{name}.weight": np.ones(H) for name in ("input_layernorm", "post_attention_layernorm")}
    tensors["model.norm.weight"] = np.ones(H)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": V,
        "hidden_size": H,
        "intermediate_size": V,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "max_position_embeddings": 128,
    }
    folder = tmp_path_factory.mktemp("counting")
    save_file({name: x.astype(np.float32) for name, x in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return e3.load_target(folder)


def write_draft(folder: Path, tap: int, right: bool = True) -> Path:
    """A draft that repeats what its `tap`-th tap has in the upper half of the stream."""
    fc = np.zeros((H, 3 * H))
    if right:
        fc[:V, tap * H + V : (tap + 1) * H] = np.eye(V)
    tensors = {"fc.weight": fc, "norm.weight": np.ones(H), "lm_head.weight": np.eye(V, H)}
    for name in "qkv":
        tensors[f"midlayer.self_attn.{name}_proj.weight"] = np.zeros((H, 2 * H))
    tensors["midlayer.self_attn.o_proj.weight"] = np.zeros((H, H))
    tensors |= {f"midlayer.mlp.{name}_proj.weight": np.zeros((V, H)) for name in ("gate", "up")}
    tensors["midlayer.mlp.down_proj.weight"] = np.zeros((H, V))
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    tensors |= {f"midlayer.{name}.weight": np.ones(H) for name in norms}
    folder.mkdir(exist_ok=True)
    save_file({name: x.astype(np.float32) for name, x in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"num_attention_heads": 2, IDS: [0, 1, 2]}))
    return folder


def test_the_target_counts(counting: e3.Target) -> None:
    ids = jnp.arange(6, dtype=jnp.int32)[None]
    np.testing.assert_array_equal(np.argmax(e3.score(counting, ids).logits[0], axis=-1), np.arange(1, 7))


@pytest.mark.parametrize(("tap", "convention", "taps"), [(1, "output", (1, 2, 3)), (2, "hs", (0, 1, 2))])
def test_a_probe_settles_ids_that_fit_both_readings(
    tap: int, convention: str, taps: tuple[int, ...], counting: e3.Target, tmp_path: Path
) -> None:
    folder = write_draft(tmp_path / "draft", tap)
    read = drafts.load_draft(folder, counting)
    assert read.taps_ambiguous and read.model.config.taps == (0, 1, 2)
    assert any("fit both readings" in warning for warning in read.warnings)
    loaded = e3.load_draft(folder, counting)
    assert (loaded.tap_convention, loaded.model.config.taps) == (convention, taps)
    assert f"100% as {convention}" in loaded.tap_reason and "over 504 tokens" in loaded.tap_reason
    assert loaded.warnings == () and not loaded.taps_ambiguous
    told = e3.load_draft(folder, counting, {"tap_convention": "hs"})
    assert told.model.config.taps == (0, 1, 2) and "given by the caller" in told.tap_reason


def test_verdicts(counting: e3.Target, tmp_path: Path) -> None:
    draft = drafts.load_draft(write_draft(tmp_path / "draft", 1), counting)
    found = probe_taps(draft, PROMPTS)
    assert found.accuracy["output"] == 1.0 and found.accuracy["hs"] is not None and found.accuracy["hs"] < 0.2
    # Row t predicts token t + 2, so that of a prompt of one token the first answer is never a draft.
    assert (found.in_use, found.best, found.tokens) == ("hs", "output", 504)
    assert "load the draft with --draft-set tap_convention=output" in found.verdict
    right = drafts.load_draft(tmp_path / "draft", counting, {"tap_convention": "output"})
    found = probe_taps(right, PROMPTS)
    assert (found.in_use, found.best) == ("output", "output") and "read as they were trained" in found.verdict
    assert found.taps == {"hs": (0, 1, 2), "output": (1, 2, 3)}


def test_a_wiring_fault_is_called_one(counting: e3.Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draft = drafts.load_draft(write_draft(tmp_path / "draft", 1, right=False), counting)
    assert "wiring fault" in settle_taps(draft, PROMPTS).warnings[-1]
    outside = drafts.load_draft(tmp_path / "draft", counting, {"taps": [0, 1, 3]})
    found = probe_taps(outside, PROMPTS)
    assert found.accuracy["output"] is None and "wiring fault" in found.verdict


def test_the_verb(counting: e3.Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, prompts = write_draft(tmp_path / "draft", 1), tmp_path / "prompts.json"
    prompts.write_text(json.dumps(PROMPTS))
    flags = ["--target", str(counting.source), "--draft", str(folder), "--prompts", str(prompts), "--probe"]
    assert main(["evaluate", *flags, "--max-new-tokens", "64", "--draft-set", "tap_convention=hs", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)["probe"]
    assert report["accuracy"]["output"] == 1.0 and report["in_use"] == "hs"
    assert "tap_convention=output" in report["verdict"]


@pytest.mark.parametrize("prompts", [[], [[]], [[1] * 127]])
def test_prompts_that_do_not_do(prompts: list, counting: e3.Target, tmp_path: Path) -> None:
    draft = drafts.load_draft(write_draft(tmp_path / "draft", 1), counting)
    with pytest.raises(e3.Eagle3Error, match="probe"):
        probe_taps(draft, prompts)
