"""Prompt sets."""

import json
from pathlib import Path

import pytest
from loading import FIXTURES

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
