"""Chat templates that mean harm, or are merely broken: one line each, and soon."""

import json
from pathlib import Path

import pytest
from loading import TARGETS, edited
from tokenizers import Tokenizer as Backend
from tokenizers import models

from eagle3_jax.errors import Eagle3Error
from eagle3_jax.text import Tokenizer

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


def with_template(folder: Path, template: object) -> Tokenizer:
    edited(TARGETS / "llama_tied", folder)
    (folder / "tokenizer.json").write_text(Backend(models.WordLevel({"hi": 0}, unk_token="hi")).to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return Tokenizer.from_folder(folder)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
)
def test_a_template_without_end_is_refused(tmp_path: Path, template: str) -> None:
    tokenizer = with_template(tmp_path, template)
    for _ in range(2):
        with pytest.raises(Eagle3Error, match="no end after"):
            tokenizer.chat(CHAT)


def test_counting_changes_no_loop(tmp_path: Path) -> None:
    template = (
        "{% for m in messages if m.role != 'system' %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}"
        "{% for k, v in m.items() %}{{ k }}={{ v }};{% else %}never{% endfor %}{% endfor %}"
        "{% for x in nothing %}never{% else %}!{% endfor %}"
        "{% for n in [[1, [2]]] recursive %}{{ loop(n) if n is iterable else n }}{% endfor %}"
    )
    text = with_template(tmp_path, template).chat(CHAT)
    assert text == "1/2Falserole=user;content=hi;2/2Truerole=assistant;content=ho;!12"


def test_a_chat_longer_than_any_context_is_not_tokenised(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, "{% for i in range(3000) %}{{ '%10000d' % 1 }}{% endfor %}")
    with pytest.raises(Eagle3Error, match="30000000 characters"):
        tokenizer.encode_chat(CHAT)


@pytest.mark.parametrize(
    "template", [[{"name": ["x"], "template": "a"}], [{"name": "default"}], ["default"], {"a": 1}, 5]
)
def test_a_list_of_templates_must_have_a_default(tmp_path: Path, template: object) -> None:
    with pytest.raises(Eagle3Error, match=r"default|not text"):
        with_template(tmp_path, template)
