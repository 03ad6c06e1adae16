"""Kimi's tokenizer from its rank file.

fixtures/kimi_tokenizer has a small vocabulary in Kimi's files, and in encoded.json texts with the ids that tiktoken
0.14.0 gives them under Kimi's pattern.
"""

import base64
import itertools
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loading import FIXTURES, TARGETS, edited

from eagle3_jax.checkpoint.target_files import save_target_folder
from eagle3_jax.checkpoint.targets import load_target, save_target_orbax
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.text import StreamDecoder, Tokenizer

KIMI = FIXTURES / "kimi_tokenizer"
CONFIG = json.loads((KIMI / "tokenizer_config.json").read_text())
LINES = (KIMI / "tiktoken.model").read_bytes().splitlines()
TOKENS = [base64.b64decode(line.split()[0]) for line in LINES]
FIRST = len(TOKENS)


@pytest.fixture(scope="module")
def kimi() -> Tokenizer:
    return Tokenizer.from_folder(KIMI)


def merged(word: bytes, ranks: dict[bytes, int]) -> list[int]:
    """The rule itself: join the first neighbours whose union has the lowest rank, while any union has one."""
    if word in ranks:
        return [ranks[word]]
    parts = [bytes([byte]) for byte in word]
    while True:
        unions = [(ranks[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ranks]
        if not unions:
            return [ranks[part] for part in parts]
        at = min(unions)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def test_ids_are_tiktokens(kimi: Tokenizer) -> None:
    for text, ids in json.loads((KIMI / "encoded.json").read_text()):
        assert kimi.encode(text) == ids, text
        assert kimi.decode(ids, skip_special_tokens=False) == text
        stream = StreamDecoder(kimi, skip_special_tokens=False)
        assert "".join([*(stream.push([id_]) for id_ in ids), stream.finish()]) == text


@pytest.mark.parametrize(
    "words",
    [
        ["中文", "English", "混合"],
        ["汉字", "abc"],
        ["北京市", " Pascal"],
        ["日本語", "のテキスト"],
        ["々〇〻⺀"],
        ["123", "456", "7", "a"],
        ["I'LL", " don't", " HTMLParser", " camel", "Case"],
        ["a", "  ", " b", " \n\n", " !?\n", "c"],
    ],
)
def test_words_are_cut_as_kimi_cuts_them(kimi: Tokenizer, words: list[str]) -> None:
    text, cutter = "".join(words), kimi._backend.pre_tokenizer
    assert [text[start:end] for _, (start, end) in cutter.pre_tokenize_str(text)] == words


LETTERS = ["a", "b", "中", "丮"]
"""Two of each kind of word; the latter share their first bytes."""


@st.composite
def vocabularies(draw: st.DrawFn) -> list[bytes]:
    """All bytes and some longer tokens, whole characters or not, in any order."""
    texts = st.lists(st.sampled_from(LETTERS), min_size=1, max_size=5).map(lambda letters: "".join(letters).encode())
    cut = st.tuples(texts, st.integers(0, 2), st.integers(0, 2)).map(lambda t: t[0][t[1] : len(t[0]) - t[2]])
    longer = draw(st.lists(cut.filter(lambda token: len(token) > 1), max_size=25, unique=True))
    tokens = [bytes([byte]) for byte in range(256)] + longer
    random.Random(draw(st.integers(0, 2**32))).shuffle(tokens)
    return tokens


@settings(deadline=None, max_examples=60)
@given(vocabularies(), st.lists(st.text("ab", max_size=20) | st.text("中丮", max_size=10), min_size=1, max_size=8))
def test_any_ranks_merge_by_the_rule(place: Path, tokens: list[bytes], words: list[str]) -> None:
    """Also where a longer token has the lower rank, or no merges lead to it."""
    write(place, ranks=lines(tokens), added={str(len(tokens)): {"content": "[BOS]", "special": True}})
    tokenizer, ranks = Tokenizer.from_folder(place), {token: rank for rank, token in enumerate(tokens)}
    for word in words:
        assert tokenizer.encode(word) == merged(word.encode(), ranks)


def test_every_id_decodes_and_has_its_text(kimi: Tokenizer) -> None:
    assert kimi.vocab_size == FIRST + 256
    for id_, token in enumerate(TOKENS):
        assert kimi.decode([id_]) == token.decode("utf-8", "replace")
    named = {int(id_): entry for id_, entry in CONFIG["added_tokens_decoder"].items()}
    for id_ in range(FIRST, FIRST + 256):
        text = named[id_]["content"] if id_ in named else f"<|reserved_token_{id_}|>"
        assert kimi.encode(f"a{text}b")[1:-1] == [id_]
        assert kimi.decode([id_], skip_special_tokens=False) == text
        assert kimi.decode([id_]) == ("" if id_ in named and named[id_]["special"] else text)


def lines(tokens: list[bytes]) -> bytes:
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))


def write(folder: Path, ranks: bytes | None = None, added: Any = None, **changes: Any) -> Path:
    """Kimi's files with something changed; None takes a field out."""
    (folder / "tiktoken.model").write_bytes((KIMI / "tiktoken.model").read_bytes() if ranks is None else ranks)
    fields = CONFIG | ({} if added is None else {"added_tokens_decoder": added}) | changes
    kept = {name: value for name, value in fields.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(kept))
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that each example writes anew."""
    return tmp_path_factory.mktemp("kimi")


def changed(number: int, line: bytes) -> bytes:
    """The rank file with one line, counted from 1, put in place of another."""
    return b"\n".join([*LINES[: number - 1], line, *LINES[number:]])


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no base64": ({"ranks": changed(7, b"a*b= 6")}, "line 7 is not"),
    "padding cut off": ({"ranks": changed(7, b"JQ 6")}, "line 7 is not"),
    "no rank": ({"ranks": changed(7, LINES[6].split()[0])}, "line 7 is not"),
    "rank is no number": ({"ranks": changed(7, b"JQ== six")}, "line 7 is not"),
    "rank of endless digits": ({"ranks": changed(7, b"JQ== " + b"9" * 5000)}, "line 7 is not"),
    "three fields": ({"ranks": changed(7, LINES[6] + b" 1")}, "line 7 is not"),
    "token of no bytes": ({"ranks": changed(7, b" 6")}, "line 7 holds a token of 0 bytes"),
    "token of too many": ({"ranks": changed(300, b"QUFB" * 400 + b" 299")}, "1200 bytes"),
    "token twice": ({"ranks": changed(300, LINES[6].split()[0] + b" 299")}, "line 300 repeats the token of rank 6"),
    "rank twice": ({"ranks": changed(300, LINES[299].split()[0] + b" 6")}, "no token has rank 299"),
    "gap": ({"ranks": b"\n".join([*LINES[:299], *LINES[300:]])}, "no token has rank 299"),
    "negative": ({"ranks": changed(1, LINES[0].split()[0] + b" -1")}, "no token has rank 0"),
    "byte without token": ({"ranks": changed(1, b"eHl6eHl6 0")}, "single byte 0x21"),
    "empty": ({"ranks": b""}, "single byte 0x00"),
    "pointer to the file": ({"ranks": b"version https://git-lfs.github.com/spec/v1\nsize 3\n"}, "line 1 is not"),
    "cut between lines": ({"ranks": b"\n".join(LINES[:-1])}, f"{FIRST + 255} is not one of the 256"),
    "cut in a line": ({"ranks": b"\n".join(LINES)[:-2]}, f"no token has rank {FIRST - 1}"),
    "added id of a rank": ({"added": {"5": {"content": "x", "special": True}}}, "id 5 is not one of"),
    "added id is text": ({"added": {"x": {"content": "x", "special": True}}}, "id x is not one of"),
    "no added tokens": ({"added": {}}, "added_tokens_decoder"),
    "added tokens are a list": ({"added": [1]}, "added_tokens_decoder"),
    "added token is text": ({"added": {str(FIRST): "[BOS]"}}, f"added token {FIRST} is not"),
    "added token without text": ({"added": {str(FIRST): {"content": "", "special": True}}}, f"{FIRST} is not"),
    "added token of no kind": ({"added": {str(FIRST): {"content": "[BOS]"}}}, f"{FIRST} is not"),
    "added text is a token": ({"added": {str(FIRST): {"content": "he", "special": True}}}, "'he'"),
    "added text is reserved": (
        {"added": {str(FIRST): {"content": f"<|reserved_token_{FIRST + 9}|>", "special": True}}},
        "a token already",
    ),
    "another class": ({"auto_map": None, "tokenizer_class": "QWenTokenizer"}, "'QWenTokenizer'"),
    "no class": ({"auto_map": None, "tokenizer_class": None}, "None"),
    "another class of the name": ({"auto_map": {"AutoTokenizer": ["tokenization_x.TikTokenTokenizer", None]}}, "_x."),
    "code of another kind": ({"auto_map": {"AutoTokenizer": []}}, "[]"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_refused(case: str, tmp_path: Path) -> None:
    changes, named = BAD[case]
    with pytest.raises(Eagle3Error) as error:
        Tokenizer.from_folder(write(tmp_path, **changes))
    assert named in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 400
    assert str(error.value).startswith(str(tmp_path))


@pytest.mark.parametrize(
    "changes",
    [
        {"ranks": b"\r\n".join(reversed(LINES)) + b"\n\n"},
        {"auto_map": {"AutoTokenizer": "owner/name--tokenization_kimi.TikTokenTokenizer"}},
        {"auto_map": None},
    ],
)
def test_spellings_that_say_the_same_are_read(changes: dict[str, Any], kimi: Tokenizer, tmp_path: Path) -> None:
    text = "The 中文 then <|im_end|>"
    assert Tokenizer.from_folder(write(tmp_path, **changes)).encode(text) == kimi.encode(text)


def test_targets_have_it_and_keep_it(kimi: Tokenizer, tmp_path: Path) -> None:
    folder = write(edited(TARGETS / "deepseek_v3_kimi", tmp_path / "hf"))
    template = "{% for m in messages %}<|im_user|>{{ m.content }}<|im_end|>{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    loaded = load_target(folder)
    save_target_orbax(loaded, tmp_path / "orbax")
    save_target_folder(loaded, tmp_path / "again")
    shutil.rmtree(folder)
    for target in (loaded, load_target(tmp_path / "orbax"), load_target(tmp_path / "again")):
        assert target.tokenizer is not None
        ids = target.tokenizer.encode_chat([{"role": "user", "content": "the 中文"}])
        assert ids == [FIRST + 3, *kimi.encode("the 中文"), FIRST + 2]


def test_a_target_with_another_class_is_refused(tmp_path: Path) -> None:
    folder = write(edited(TARGETS / "deepseek_v3_kimi", tmp_path), auto_map=None, tokenizer_class="Other")
    with pytest.raises(Eagle3Error, match=r"tiktoken\.model: .* the class 'Other'"):
        load_target(folder)


def test_a_fast_tokenizer_comes_first(kimi: Tokenizer, tmp_path: Path) -> None:
    write(tmp_path, ranks=b"")
    kimi._backend.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.from_folder(tmp_path).encode("the 中文") == kimi.encode("the 中文")
