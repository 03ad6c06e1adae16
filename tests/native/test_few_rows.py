"""The native kernel: right, the same alone and among others, and out of the way where it is not wanted."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from kernel import arrays, kernel  # noqa: F401 - a fixture
from loading import TARGETS, draft, expected, target

from eagle3_jax.checkpoint.drafts import Draft, save_draft
from eagle3_jax.cli import main, make_parser
from eagle3_jax.commands.options import load_draft
from eagle3_jax.decoding.loop import generate, speculative_generate
from eagle3_jax.decoding.request import Chain, GenerationConfig
from eagle3_jax.decoding.sampling import Sampling, row_keys
from eagle3_jax.models import few_queries
from eagle3_jax.models.attention import causal_attention
from eagle3_jax.models.eagle3 import shared_weights
from eagle3_jax.models.layers import apply, positions_of
from eagle3_jax.native import build
from eagle3_jax.native.weights import in_bfloat16
from eagle3_jax.quant import few_rows
from eagle3_jax.quant.weight import named_weights

SHAPES = [(1, 1), (7, 5), (16, 16), (33, 17), (8, 300), (576, 192), (100, 5000), (31, 4111), (2000, 64)]


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 16])
def test_products_are_right_and_a_row_has_the_bits_it_has_alone(rows: int) -> None:
    product = jax.jit(few_rows.product)
    for width, outputs in SHAPES:
        x, w = arrays((rows, width), (width, outputs))
        y = np.asarray(product(x, w))
        exact = x.astype(np.float64) @ w.astype(np.float64)
        bound = 1e-6 * np.abs(x).astype(np.float64) @ np.abs(w)
        assert np.all(np.abs(y - exact) <= bound)
        alone = np.concatenate([product(x[m : m + 1], w) for m in range(rows)])
        np.testing.assert_array_equal(y, alone)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("rows", [1, 3, 16, 40])
def test_a_matrix_in_bfloat16_gives_the_bits_of_the_same_numbers_in_float32(rows: int) -> None:
    product = jax.jit(few_rows.product)
    for width, outputs in SHAPES:
        x, w = arrays((rows, width), (width, outputs))
        half = jnp.asarray(w, jnp.bfloat16)
        np.testing.assert_array_equal(product(x, half), product(x, half.astype(jnp.float32)))


@pytest.mark.usefixtures("kernel")
def test_a_draft_in_bfloat16_is_one_whose_numbers_that_holds() -> None:
    model, params = tiny.draft()
    exact = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32) if x.dtype == jnp.float32 else x, params)
    exact["fc"] = params["fc"]
    before = Draft("tiny", model, exact, "given", "as built", (), None)  # pyright: ignore[reportArgumentType]
    after = in_bfloat16(before)
    formats = {name: weight.format for name, weight in named_weights(after.params).items()}
    assert formats.pop("fc/weight") == "f32"
    matrices = {name for name, weight in named_weights(exact).items() if weight.value.ndim == 2} - {"fc/weight"}
    assert {name for name, format in formats.items() if format == "bf16"} == matrices
    target = tiny.target()[1]
    features = jnp.asarray(arrays((1, 6, 72))[0])
    ids = jnp.arange(6, dtype=jnp.int32)[None]

    def logits(draft: Draft) -> np.ndarray:
        shared = shared_weights(target)
        g = apply(draft.model, draft.params, features, shared, method="fuse")
        y, _ = apply(draft.model, draft.params, g, ids, positions_of(ids), causal_attention, (None,), shared)
        return np.asarray(apply(draft.model, draft.params, y, shared, method="logits"))

    np.testing.assert_array_equal(logits(after), logits(before))


@pytest.mark.usefixtures("kernel")
def test_leading_dimensions_gradients_and_maps() -> None:
    x, w = arrays((2, 3, 5), (5, 4))
    np.testing.assert_allclose(few_rows.product(x, w), x @ w, rtol=1e-5, atol=1e-6)
    by_x, by_w = jax.grad(lambda x, w: jnp.sum(few_rows.product(x, w) ** 2), (0, 1))(x, w)
    np.testing.assert_allclose(by_x, 2 * (x @ w) @ w.T, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(by_w, 2 * x.reshape(-1, 5).T @ (x @ w).reshape(-1, 4), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(jax.vmap(few_rows.product, (0, None))(x, w), x @ w, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("kernel")
def test_it_takes_a_few_float32_rows_and_nothing_else() -> None:
    w = jnp.ones((8, 4))
    assert few_rows.fits(jnp.ones((4, 4, 8)), w) and not few_rows.fits(jnp.ones((1, 17, 8)), w)
    assert not few_rows.fits(jnp.ones((1, 8), jnp.bfloat16), w) and not few_rows.fits(jnp.ones((0, 8)), w)
    half = w.astype(jnp.bfloat16)
    assert few_rows.fits(jnp.ones((128, 8)), half) and not few_rows.fits(jnp.ones((129, 8)), half)
    assert not few_rows.fits(jnp.ones((1, 8)), w.astype(jnp.float16)) and not few_rows.fits(w[:, :0].T, w[:0])


@pytest.mark.usefixtures("kernel")
def test_a_program_for_another_device_has_nothing_of_it() -> None:
    traced = jax.jit(lambda x, w: few_rows.product(x, w)).trace(*arrays((2, 8), (8, 4)))
    assert few_rows.TARGET in traced.lower(lowering_platforms=("cpu",)).as_text()
    for platform in ("cuda", "rocm", "tpu"):
        assert few_rows.TARGET not in traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.usefixtures("kernel")
def test_decoding_with_it_gives_the_same_text() -> None:
    (model, params), (draft_model, draft_params) = tiny.target(), tiny.draft()
    ids, lengths = tiny.prompts(3, width=12)
    given = (ids, lengths, row_keys(3, 3), Sampling.make(3, temperature=[0.0, 0.7, 1.2]))
    config = GenerationConfig(max_new_tokens=20, speculation=Chain(3))

    def texts() -> list[np.ndarray]:
        # New functions, for what has been traced before keeps its products.
        plain = jax.jit(lambda *given: generate(params, *given, model=model, config=config))
        models: dict[str, Any] = {"target_model": model, "draft_model": draft_model, "config": config}
        drafted = jax.jit(lambda *given: speculative_generate(params, draft_params, *given, **models))
        for run in (plain, drafted):
            text = run.lower(*given).as_text()
            assert all((name in text) is few_rows.in_use() for name in (few_rows.TARGET, few_queries.TARGET))
        return [np.asarray(run(*given).tokens) for run in (plain, drafted)]

    ours = texts()
    build.use_native_kernels(False)
    for got, wanted in zip(ours, texts(), strict=True):
        np.testing.assert_array_equal(got, wanted)
    np.testing.assert_array_equal(*ours)


def refused(caplog: pytest.LogCaptureFixture) -> str:
    with caplog.at_level(logging.DEBUG, "eagle3_jax"):
        assert not build.use_native_kernels()
    assert not few_rows.in_use()
    return caplog.messages[-1]


def test_where_it_cannot_be_had_the_log_says_why(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    build._register.cache_clear()
    assert "one CPU device, not" in refused(caplog)
    monkeypatch.setattr(few_rows, "suited", lambda: True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no C++ compiler no-such-compiler" in refused(caplog)
    script = tmp_path / "compiler.sh"
    script.write_text("echo In file included from a.h: >&2\necho a.h:1: error: no such thing >&2\nexit 1\n")
    monkeypatch.setenv("CXX", f"sh {script}")
    assert f"sh {script} cannot build them: a.h:1: error: no such thing" in refused(caplog)
    assert not list(tmp_path.rglob("*.so"))
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "cannot be kept" in refused(caplog)


@pytest.mark.usefixtures("kernel")
def test_the_command_line_uses_it_while_a_verb_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    seen = []

    def distill(args: Any) -> int:
        seen.append(few_rows.in_use())
        return 0

    monkeypatch.setattr("eagle3_jax.commands.distill.run", distill)
    line = ["distill", "--target", "anything", "--out", str(tmp_path)]
    assert main(line) == 0 and main([*line, "--no-native"]) == 0
    assert seen == [True, False] and few_rows.in_use()
    build.use_native_kernels(False)
    assert main(line) == 0 and seen.pop() and not few_rows.in_use()
    build.use_native_kernels()
    monkeypatch.setattr("eagle3_jax.commands.inspect.run", distill)
    assert main(["inspect", "anything"]) == 0 and seen == [True, False, False]
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("kernel")
def test_a_verb_with_it_writes_what_it_writes_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, one = TARGETS / "llama_tied", target("llama_tied")
    save_draft(draft("a_safeailab"), tmp_path / "draft", dtype="bfloat16")
    args = make_parser().parse_args(["generate", "--target", str(folder), "--prompt", "x"])
    formats = {
        weight.format for weight in named_weights(load_draft(args, str(tmp_path / "draft"), one).params).values()
    }
    assert formats >= {"bf16"}
    (tmp_path / "ids.json").write_text(json.dumps(expected(folder)["greedy_prompt_ids"].tolist()))
    line = ["generate", "--target", str(folder), "--draft", str(tmp_path / "draft"), "--json", "--max-new-tokens", "8"]
    line += ["--prompt-ids", str(tmp_path / "ids.json")]
    written = []
    for flags in ([], ["--no-native"]):
        assert main([*line, *flags]) == 0
        report = json.loads(capsys.readouterr().out)
        report.pop("stats")
        written.append(report)
    assert written[0] == written[1]


def test_a_library_that_cannot_be_loaded_is_built_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "compiler.sh"
    script.write_text('for last; do :; done\necho whole > "$last"\n')

    def load(path: str) -> Path:
        if not Path(path).stat().st_size:
            raise OSError("file too short")
        return Path(path)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "ctypes", SimpleNamespace(CDLL=load))
    path = build._library(["sh", str(script)])
    assert isinstance(path, Path)
    path.write_bytes(b"")
    assert build._library(["sh", str(script)]) == path and path.read_text() == "whole\n"
