"""The command line, in-process on tiny models."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loading import DRAFTS, FIXTURES, TARGETS, expected
from training import selfchats

from eagle3_jax import cli
from eagle3_jax.commands import generate, verify
from eagle3_jax.commands.request import Prompts, make_request
from eagle3_jax.decoding.verify import LosslessReport, RowReport
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.training import data

ROOT = Path(__file__).resolve().parents[1]
TARGET, DRAFT = TARGETS / "llama_tied", DRAFTS / "a_safeailab"
PAIR = ("--target", str(TARGET), "--draft", str(DRAFT))
STATS = (
    "compile_seconds prefill_seconds decode_seconds tokens_per_second rounds mean_acceptance_length "
    "acceptance_rate acceptance_per_position"
).split()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command line and returns its exit code, stdout and stderr."""

    def call(*argv: object) -> tuple[int, str, str]:
        code = cli.main([str(word) for word in argv])
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def ids(tmp_path: Path) -> Path:
    """The fixture's two prompts as a --prompt-ids file."""
    return _json_file(tmp_path / "ids.json", expected(TARGET)["greedy_prompt_ids"].tolist())


def _json_file(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def _said(err: str) -> list[str]:
    """The lines of stderr, but for those in which a loader says how it read a draft's taps."""
    return [line for line in err.splitlines() if "taps hs[" not in line and "no ids in the config" not in line]


def _subprocess(code: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, text=True, timeout=300, check=False, **options)


def test_help_lists_the_verbs_and_imports_no_jax() -> None:
    code = "import sys; from eagle3_jax.cli import main; print(main(['--help']), 'jax' in sys.modules)"
    done = _subprocess(code, capture_output=True)
    verbs = [verb.__name__.rpartition(".")[2] for verb in cli.VERBS]
    assert all(f"    {verb} " in done.stdout for verb in verbs), done.stdout
    assert done.stdout.splitlines()[-1] == "0 False"


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_has_help(run: Any, verb: Any) -> None:
    code, out, err = run(verb.__name__.rpartition(".")[2], "--help")
    assert (code, err) == (0, "")
    assert "--target" in out and "--compilation-cache" in out


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_flag_is_described(verb: Any) -> None:
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    bare = [a.dest for a in parser._actions if len((a.help or "").partition("(default")[0].split()) < 2]
    assert set(bare) <= {"speculation"}


def test_generate_json_is_the_contract(run: Any, ids: Path) -> None:
    code, out, err = run("generate", *PAIR, "--prompt-ids", ids, "--max-new-tokens", 24, "--json")
    assert (code, _said(err)) == (0, []) and "taps hs[2, 3, 4]" in err
    report = json.loads(out)
    assert list(report) == ["target", "draft", "speculation", "outputs", "stats"]
    assert [report[key] for key in ("target", "draft", "speculation")] == [TARGET.name, DRAFT.name, "chain:4"]
    assert list(report["stats"]) == STATS
    reference = expected(TARGET)
    for row, output in enumerate(report["outputs"]):
        assert list(output) == ["prompt_ids", "token_ids", "text", "finish_reason"]
        assert output["prompt_ids"] == reference["greedy_prompt_ids"][row].tolist()
        assert output["token_ids"] == reference["greedy_ids"][row].tolist()
        assert output["finish_reason"] == "length"
    stats = report["stats"]
    assert len(stats["acceptance_per_position"]) == 4
    assert 0 < stats["rounds"] <= 2 * 23
    assert stats["mean_acceptance_length"] == pytest.approx(2 * 23 / stats["rounds"])


def test_plain_json_has_no_draft_and_the_same_tokens(run: Any, ids: Path) -> None:
    argv = ["generate", "--target", TARGET, "--prompt-ids", ids, "--max-new-tokens", 24, "--json"]
    code, out, _ = run(*argv, "--no-draft")
    report = json.loads(out)
    assert code == 0
    assert report["draft"] is report["speculation"] is report["stats"]["acceptance_rate"] is None
    assert [o["token_ids"] for o in report["outputs"]] == expected(TARGET)["greedy_ids"].tolist()
    code, again, err = run(*argv)
    assert (code, json.loads(again)["outputs"]) == (0, report["outputs"])
    assert "no draft" not in again and "none is registered" in err


def test_the_registered_draft_is_the_default(monkeypatch: pytest.MonkeyPatch, run: Any, ids: Path) -> None:
    from eagle3_jax.checkpoint import registry

    entry = registry.Entry(DRAFT.name, "draft", {"target": str(TARGET), "speculation": "chain:2"})
    monkeypatch.setattr(registry, "entries", lambda kind=None: {} if kind == "target" else {DRAFT.name: entry})
    monkeypatch.setattr(registry.Entry, "path", lambda self: DRAFT)
    argv = ["generate", "--target", TARGET, "--prompt-ids", ids, "--max-new-tokens", 24, "--json"]
    for more, speculation in (([], "chain:2"), (["--speculation", "chain:4"], "chain:4")):
        code, out, err = run(*argv, *more)
        assert code == 0, err
        assert json.loads(out)["speculation"] == speculation and f"draft: {DRAFT.name}" in err
        assert len(json.loads(out)["stats"]["acceptance_per_position"]) == int(speculation[-1])


def test_sampled_tokens_depend_on_the_seed_and_not_on_the_draft(run: Any, ids: Path) -> None:
    def tokens(*more: object) -> list[list[int]]:
        argv = ["--prompt-ids", ids, "--max-new-tokens", 20, "--temperature", 0.9, "--json"]
        code, out, err = run("generate", "--target", TARGET, *argv, *more)
        assert code == 0, err
        return [output["token_ids"] for output in json.loads(out)["outputs"]]

    plain = tokens("--no-draft", "--seed", 3)
    assert plain == tokens("--draft", DRAFT, "--seed", 3)
    assert plain != tokens("--no-draft", "--seed", 4)


def test_a_stop_id_ends_the_row_and_is_kept(run: Any, ids: Path) -> None:
    greedy = expected(TARGET)["greedy_ids"].tolist()
    stop = next(token for token in greedy[0][5:] if token not in greedy[0][:5])
    code, out, _ = run("generate", *PAIR, "--prompt-ids", ids, "--max-new-tokens", 24, "--stop-id", stop, "--json")
    first = json.loads(out)["outputs"][0]
    assert (code, first["finish_reason"]) == (0, "stop")
    assert first["token_ids"] == greedy[0][: greedy[0].index(stop) + 1]


def test_ids_are_printed_where_there_is_no_tokenizer(run: Any, ids: Path) -> None:
    code, out, err = run("generate", *PAIR, "--prompt-ids", ids, "--max-new-tokens", 24)
    assert code == 0
    rows = [json.loads(line) for line in out.splitlines() if line]
    assert rows == expected(TARGET)["greedy_ids"].tolist()
    assert len(_said(err)) == 1 and "tokens a round" in err


def test_a_row_without_finite_logits_is_an_error() -> None:
    class Broken:
        finish_reason, lengths = np.array([2, 3]), np.array([4, 1])

    with pytest.raises(Eagle3Error, match="prompt 1: the logits have no finite maximum after 1 tokens"):
        generate._check_finished(Broken())  # type: ignore[arg-type]


def test_nearby_lengths_share_a_program() -> None:
    parser = cli.make_parser()
    target = __import__("loading").target("llama_tied")

    def config(*more: str) -> Any:
        argv = ["generate", *PAIR, "--prompt-ids", "x", *more]
        return make_request(parser.parse_args(argv), Prompts(ids=[[1, 2]]), target).config

    assert config("--max-new-tokens", "5") == config("--max-new-tokens", "128", "--temperature", "1")
    assert config("--max-new-tokens", "100000").max_new_tokens == target.model.config.max_position
    assert config("--top-p", "0.9").transforms == ("top_p",)


def test_score_writes_what_the_fixture_has(run: Any, tmp_path: Path) -> None:
    reference, out = expected(TARGET), tmp_path / "scores.npz"
    rows = [reference["input_ids"][0].tolist(), reference["input_ids"][1, :7].tolist()]
    prompts = _json_file(tmp_path / "rows.json", rows)
    assert run("score", "--target", TARGET, "--prompt-ids", prompts, "--out", out) == (0, "", "")
    with np.load(out) as scores:
        assert sorted(scores) == ["hidden_states", "lengths", "logits"]
        assert scores["lengths"].tolist() == [24, 7]
        for name, axes in (("logits", 0), ("hidden_states", 1)):
            want = reference["hs" if axes else name].copy()
            want[..., 1, 7:, :] = 0
            np.testing.assert_allclose(scores[name], want, atol=2e-4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.json", "scores.npz"]


def test_verify_passes_on_a_true_pair(run: Any, ids: Path) -> None:
    argv = ["verify", *PAIR, "--prompt-ids", ids, "--max-new-tokens", 20, "--temperature", 0.8]
    code, out, err = run(*argv)
    assert (code, out, _said(err)) == (0, "prompt 0: equal\nprompt 1: equal\n", [])
    code, out, _ = run(*argv, "--json")
    report = json.loads(out)
    assert (code, report["ok"], report["equal"], len(report["rows"])) == (0, True, True, 2)
    assert (report["draft"], report["tolerance"]) == (DRAFT.name, 1e-3)


@pytest.mark.parametrize("excused", [False, True])
def test_verify_says_where_runs_part(monkeypatch: pytest.MonkeyPatch, run: Any, ids: Path, excused: bool) -> None:
    rows = [RowReport(0, True), RowReport(1, False, 7, 11, 12, 4e-4 if excused else 0.25, excused)]
    monkeypatch.setattr(verify, "load_draft_pair", lambda args: (__import__("loading").target("llama_tied"),) * 2)
    monkeypatch.setattr("eagle3_jax.decoding.verify.verify_lossless", lambda *given: LosslessReport(rows, 1e-3))
    code, out, _ = run("verify", *PAIR, "--prompt-ids", ids)
    assert code == (0 if excused else 1)
    assert "prompt 1: token 7 is 12, plain decoding gives 11, decision margin" in out
    assert ("within rounding (below 0.001)" in out) == excused


def test_distill_hands_its_flags_on(monkeypatch: pytest.MonkeyPatch, run: Any, tmp_path: Path) -> None:
    from eagle3_jax.training import distill

    calls: list[Any] = []
    monkeypatch.setattr(distill, "distill", lambda *given, **named: calls.append((*given, named)) or 7)
    turns = _json_file(tmp_path / "turns.json", [[1, 2], [3]])
    code, out, err = run(
        *("distill", "--target", TARGET, "--out", tmp_path / "chats", "--prompt-ids", turns, "--json"),
        *("--chats", 2, "--temperatures", "0,0.5", "--min-p", 0.1),
    )
    assert (code, err) == (0, "")
    assert json.loads(out) == {"target": TARGET.name, "out": str(tmp_path / "chats"), "chats": 7}
    config = distill.DistillConfig(chats=2, temperatures=(0.0, 0.5), min_p=0.1)
    assert calls[0][1:] == (str(tmp_path / "chats"), config, [[1, 2], [3]], {"openings": None})


def test_train_then_evaluate(run: Any, tmp_path: Path) -> None:
    shard, folder = tmp_path / "chats.npz", tmp_path / "run"
    data.write_shard(shard, selfchats.chats()[:20])
    code, out, _ = run(
        *("train", "--target", TARGET, "--data", shard, "--out", folder, "--json", "--steps", 2, "--batch-size", 2),
        *("--row-length", 64, "--draft-vocab-size", 48, "--taps", "1,3,5", "--freeze-head", "--no-drop-uncovered"),
        *("--mesh", "2,1", "--plot", tmp_path / "curve.png"),
    )
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    report = json.loads(out)
    assert (code, report) == (0, {"target": TARGET.name, "draft": str(folder / "draft"), "steps": 2})
    config = json.loads((folder / "train.json").read_text())["config"]
    assert (config["taps"], config["freeze_head"], config["drop_uncovered"]) == ([1, 3, 5], True, False)
    code, _, err = run(
        *("train", "--target", TARGET, "--data", shard, "--out", tmp_path / "more", "--start", folder / "draft"),
        *("--row-length", 64, "--draft-vocab-size", 48, "--taps", "1,3,5", "--steps", 1, "--no-answers-only"),
        *("--dtype", "bfloat16"),
    )
    first, more = (json.loads((part / "train.json").read_text()) for part in (folder, tmp_path / "more"))
    assert code == 0 and (first["start"], len(more["start"]), more["config"]["answers_only"]) == (None, 16, False), err
    prompts = _json_file(tmp_path / "prompts.json", [[1, 2, 3], [4, 5]])
    code, out, err = run(
        *("evaluate", "--target", TARGET, "--draft", folder / "draft", "--prompts", prompts, "--json"),
        *("--data", shard, "--row-length", 64, "--speculation", "chain:2", "--max-new-tokens", 8),
    )
    assert code == 0, err
    report = json.loads(out)
    assert list(report) == ["target", "draft", "prompts", "decoding", "text", "held_out"]
    (cell,) = report["decoding"]
    assert (cell["chain"], cell["prompts"], cell["temperature"], cell["context"]) == (2, 2, 0.0, None)
    assert len(cell["acceptance_per_position"]) == 2
    assert len(report["held_out"]["accuracy"]) == 3


BAD = [
    "",
    "fly",
    "generate",
    "generate --target {target} --no-draft",
    "generate --target {target} --no-draft --prompt-ids {ids} --fast",
    "generate --target {target} --no-draft --prompt-ids {ids} --temp 1",
    "generate --target {target} --no-draft --prompt-ids {ids} --prompt hello",
    "generate --target {target} --no-draft --draft {draft} --prompt-ids {ids}",
    "generate --target nowhere --no-draft --prompt-ids {ids}",
    "generate --target '' --no-draft --prompt-ids {ids}",
    "generate --target smollm2-135m-eagle3 --no-draft --prompt-ids {ids}",
    "generate --target {ids} --no-draft --prompt-ids {ids}",
    "generate --target {tmp} --no-draft --prompt-ids {ids}",
    "generate --target {draft} --no-draft --prompt-ids {ids}",
    "generate --target {target} --draft nowhere --prompt-ids {ids}",
    "generate --target {target} --draft {target} --prompt-ids {ids}",
    "generate --target {target} --draft {foreign} --prompt-ids {ids}",
    "generate --target {target} --draft {draft} --draft-set taps --prompt-ids {ids}",
    "generate --target {target} --draft {draft} --draft-set colour=red --prompt-ids {ids}",
    "generate --target {target} --draft {draft} --draft-set rope_theta=red --prompt-ids {ids}",
    "generate --target {target} --no-draft --draft-set rope_theta=1 --prompt-ids {ids}",
    "generate --target {target} --no-draft --speculation chain:2 --prompt-ids {ids}",
    "generate --target {target} --draft {draft} --speculation chain:0 --prompt-ids {ids}",
    "generate --target {target} --draft {draft} --speculation chain --prompt-ids {ids}",
    "generate --target {target} --draft {draft} --speculation '' --prompt-ids {ids}",
    "generate --target {target} --no-draft --dtype int3 --prompt-ids {ids}",
    "generate --target {target} --no-draft --prompt hello",
    "generate --target {target} --no-draft --messages {ids}",
    "generate --target {target} --no-draft --messages {tmp}/missing.json",
    "generate --target {target} --no-draft --prompt-ids {tmp}/missing.json",
    "generate --target {target} --no-draft --prompt-ids {tmp}",
    "generate --target {target} --no-draft --prompt-ids {tmp}/binary.json",
    "generate --target {target} --no-draft --prompt-ids {tmp}/cut.json",
    "generate --target {target} --no-draft --prompt-ids {tmp}/object.json",
    "generate --target {target} --no-draft --prompt-ids {tmp}/flat.json",
    "generate --target {target} --no-draft --prompt-ids {tmp}/empty.json",
    "generate --target {target} --no-draft --prompt-ids {tmp}/hollow.json",
    "generate --target {target} --no-draft --prompt-ids {tmp}/broken.json",
    "generate --target {target} --no-draft --prompt-ids {tmp}/truth.json",
    "generate --target {target} --no-draft --prompt-ids {tmp}/negative.json",
    "generate --target {target} --no-draft --prompt-ids {tmp}/foreign.json",
    "generate --target {target} --no-draft --prompt-ids {tmp}/long.json",
    "generate --target {target} --no-draft --prompt-ids {ids} --max-new-tokens 0",
    "generate --target {target} --no-draft --prompt-ids {ids} --max-new-tokens -3",
    "generate --target {target} --no-draft --prompt-ids {ids} --max-new-tokens 1e3",
    "generate --target {target} --no-draft --prompt-ids {ids} --temperature -1",
    "generate --target {target} --no-draft --prompt-ids {ids} --temperature nan",
    "generate --target {target} --no-draft --prompt-ids {ids} --temperature inf",
    "generate --target {target} --no-draft --prompt-ids {ids} --temperature warm",
    "generate --target {target} --no-draft --prompt-ids {ids} --top-k -1",
    "generate --target {target} --no-draft --prompt-ids {ids} --top-k 99999999999999999999",
    "generate --target {target} --no-draft --prompt-ids {ids} --top-p 0",
    "generate --target {target} --no-draft --prompt-ids {ids} --top-p 1.1",
    "generate --target {target} --no-draft --prompt-ids {ids} --min-p 2",
    "generate --target {target} --no-draft --prompt-ids {ids} --repetition-penalty 0",
    "generate --target {target} --no-draft --prompt-ids {ids} --seed -1",
    "generate --target {target} --no-draft --prompt-ids {ids} --seed 4294967296",
    "generate --target {target} --no-draft --prompt-ids {ids} --stop-id -1",
    "generate --target {target} --no-draft --prompt-ids {ids} --compilation-cache {ids}",
    "generate --target {target} --no-draft --prompt-ids {ids} --stop-id 96",
    "generate --target {target} --no-draft --prompt-ids {ids} --compilation-cache ''",
    "generate --target {target} --no-draft --prompt-ids {ids} --compilation-cache ~nobody-here/x",
    "generate --target {target} --draft {draft} --draft-set rope_theta=1 --prompt-ids {ids}",
    "score --target {target} --prompt-ids {ids}",
    "score --target {target} --prompt-ids {ids} --out /dev/null",
    "score --target {target} --prompt-ids {ids} --out {tmp}/nowhere/x.npz",
    "score --target {target} --prompt-ids {ids} --out {tmp}",
    "score --target {target} --prompt-ids {ids} --out ''",
    "score --target {target} --prompt-ids {tmp}/long.json --out {tmp}/x.npz",
    "verify --target {target} --draft {draft} --prompt-ids {ids} --no-draft",
    "verify --target {target} --draft {draft}",
    "distill --target {target}",
    "distill --target {target} --out {tmp}/chats",
    "distill --target {target} --out {tmp}/chats --chats 0",
    "distill --target {target} --out {tmp}/chats --min-p 5",
    "distill --target {target} --out {tmp}/chats --temperatures=-1",
    "distill --target {target} --out {tmp}/chats --seed -1",
    "distill --target {target} --out ''",
    "distill --target {target} --out {ids}",
    "distill --target {target} --out {tmp}/chats --temperatures 0,warm",
    "distill --target {target} --out {tmp}/chats --min-p nan",
    "train --target {target} --data {tmp}/missing.npz --out {tmp}/run",
    "train --target {target} --data {ids} --out {tmp}/run",
    "train --target {target} --data {tmp} --out {tmp}/run",
    "train --target {target} --data {ids} --out {tmp}/run --steps 0",
    "train --target {target} --data {ids} --out {tmp}/run --mesh 2",
    "train --target {target} --data {ids} --out {tmp}/run --plot {tmp}/nowhere/x.png",
    "train --target {target} --data {ids} --out {tmp}/run --optimizer sgd",
    "train --target {target} --data {ids} --out {tmp}/run --taps 1,x",
    "train --target {target} --data {ids} --out {tmp}/run --learning-rate inf",
    "train --target {target} --data {ids} --out {tmp}/run --ttt-steps 0",
    "train --target {target} --data {ids} --out {tmp}/run --ttt-steps 1000",
    "train --target {target} --data {ids} --out {tmp}/run --batch-size 1000000000",
    "train --target {target} --data {ids} --out {tmp}/run --steps 1000000000000",
    "train --target {target} --data {ids} --out {tmp}/run --intermediate-size -5",
    "train --target {target} --data {ids} --out {tmp}/run --seed -1",
    "train --target {target} --data {ids} --out {tmp}/run --clip 0",
    "train --target {target} --data {ids} --out {tmp}/run --rope-theta 0",
    "train --target {target} --data {ids} --out {tmp}/run --features {ids}",
    "train --target {target} --data {ids} --out {ids}",
    "evaluate --target {target} --draft {draft} --prompts {tmp}/missing.json",
    "evaluate --target {target} --draft {draft} --prompts {ids} --speculation chain:99",
    "evaluate --target {target} --draft {draft} --prompts {ids} --temperature 0,nan",
    "evaluate --target {target} --draft {draft} --prompts {ids} --limit 0",
    "bench --target {target} --draft {draft} --repeats 0",
    "bench --target {target} --draft {draft} --concurrency 1,0",
    "bench --target {target} --draft {draft} --concurrency none",
    "bench --target {target} --draft {draft} --prompts nowhere",
    "bench --target {target} --draft {draft} --prompts {tmp}/flat.json",
    "bench --target {target} --draft {draft} --prompts {ids} --speculation chain:2,chain:x",
    "bench --target {target} --draft {draft} --prompts dev",
    "bench --target {target} --draft {draft} --prompts {ids} --out {tmp}",
]
FILES: dict[str, Any] = {
    "object": {"prompts": [[1]]},
    "flat": [1, 2, 3],
    "empty": [],
    "hollow": [[1], []],
    "broken": [[1, 2.5]],
    "truth": [[True]],
    "negative": [[1, -1]],
    "foreign": [[96]],
    "long": [[1] * 1024],
}


@pytest.mark.parametrize("line", BAD)
def test_bad_input_is_one_line_and_exit_code_2(run: Any, ids: Path, tmp_path: Path, line: str) -> None:
    import shlex

    for name, value in FILES.items():
        _json_file(tmp_path / f"{name}.json", value)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "cut.json").write_text("[[1, 2")
    names = {"target": TARGET, "draft": DRAFT, "foreign": DRAFTS / "c_eagle31", "ids": ids, "tmp": tmp_path}
    before = sorted(tmp_path.iterdir())
    code, out, err = run(*(word.format(**names) for word in shlex.split(line)))
    assert (code, out) == (2, ""), err
    (error,) = _said(err)
    assert error.startswith("eagle3-jax: error: ") and len(error) > 40
    assert sorted(tmp_path.iterdir()) == before


def test_a_newline_in_a_name_stays_on_one_line(run: Any, ids: Path) -> None:
    code, _, err = run("generate", "--target", "a\nb", "--no-draft", "--prompt-ids", ids)
    assert (code, err.count("\n")) == (2, 1)


def test_a_refusal_stays_short_whatever_it_quotes(run: Any, ids: Path) -> None:
    code, _, err = run("generate", "--target", TARGET, "--no-draft", "--prompt-ids", ids, "--seed", "9" * 10**5)
    assert (code, len(err) < 1000) == (2, True)


def test_closed_streams_are_no_error(monkeypatch: pytest.MonkeyPatch, ids: Path, tmp_path: Path) -> None:
    argv = ["score", "--target", str(TARGET), "--prompt-ids", str(ids), "--out", str(tmp_path / "x.npz")]
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert cli.main(argv) == 0


@pytest.mark.parametrize("after", [0.3, 1.5])
def test_an_interrupted_process_ends_quietly(ids: Path, after: float) -> None:
    argv = ["score", "--target", str(TARGET), "--prompt-ids", str(ids), "--out", "/tmp/never.npz"]
    code = (
        "import sys, threading, os, signal, time\n"
        "from eagle3_jax import cli\n"
        "from eagle3_jax.commands import score\n"
        "score.run = lambda args: time.sleep(60)\n"
        f"threading.Timer({after}, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"sys.argv[1:] = {argv!r}\n"
        "sys.exit(cli.main())"
    )
    done = _subprocess(code, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (cli.INTERRUPTED, "", "")


@pytest.mark.parametrize(
    ("error", "code", "lines"),
    [
        (KeyboardInterrupt(), 130, 0),
        (MemoryError(), 2, 1),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory"), 2, 1),
        (OSError(28, "No space left on device"), 2, 1),
    ],
)
def test_interruptions_reach_the_shell_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, run: Any, ids: Path, error: BaseException, code: int, lines: int
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(generate, "run_timed", fail)
    found, out, err = run("generate", *PAIR, "--prompt-ids", ids)
    assert (found, out, len(_said(err))) == (code, "", lines)


def test_a_closed_pipe_is_quiet() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    code = (
        "import sys; from eagle3_jax import cli; from eagle3_jax.commands import score; "
        "score.run = lambda args: print('text') or 0; "
        "sys.exit(cli.main('score --target x --prompt-ids x --out x --no-compilation-cache'.split()))"
    )
    done = _subprocess(code, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (cli.CLOSED_PIPE, "")


def test_compiled_programs_are_kept_by_default(tmp_path: Path, ids: Path) -> None:
    code = "import sys; from eagle3_jax.cli import main; sys.exit(main(sys.argv[1:]))"
    environment = {k: v for k, v in os.environ.items() if "CACHE" not in k} | {"XDG_CACHE_HOME": str(tmp_path)}
    argv = ["score", "--target", str(TARGET), "--prompt-ids", str(ids), "--out", str(tmp_path / "x.npz")]
    for more, folder in (
        ([], tmp_path / "eagle3_jax" / "xla"),
        (["--compilation-cache", f"{tmp_path}/own"], tmp_path / "own"),
    ):
        command = [sys.executable, "-c", code, *argv, *more]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert any("score" in path.name for path in folder.iterdir())


@pytest.mark.model
def test_streamed_text_is_the_text_of_the_json(run: Any, tmp_path: Path) -> None:
    fixture = json.loads((FIXTURES / "real" / "smollm2_135m_dev.json").read_text(encoding="utf-8"))
    prompt = next(p for p in fixture["prompts"] if p["name"] == "short_question")
    messages = _json_file(tmp_path / "chat.json", prompt["messages"])
    argv = ["generate", "--target", "smollm2-135m", "--no-draft", "--max-new-tokens", 96]
    code, streamed, _ = run(*argv, "--messages", messages)
    assert code == 0
    code, out, _ = run(*argv, "--prompt", prompt["messages"][0]["content"], "--json")
    output = json.loads(out)["outputs"][0]
    assert streamed == output["text"] + "\n"
    assert output["prompt_ids"] == prompt["prompt_ids"]
    assert output["token_ids"] == prompt["output_ids"]
    assert output["finish_reason"] == prompt["finish_reason"] == "stop"
