"""Text to token ids and back: tokenizer, chat template and incremental detokeniser of a checkpoint.

The tokenizer comes from the checkpoint itself: a Hugging Face folder or the metadata of a GGUF file.
`tokenizers` and `jinja2` are imported when first used.
"""

import datetime
import functools
import json
import operator
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eagle3_jax.errors import Eagle3Error
from eagle3_jax.tiktoken import kimi_backend

Message = Mapping[str, str]
"""One chat message: {"role": ..., "content": ...}."""

_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GGUF_SPLITS = {
    "gpt-2": (_GPT2_SPLIT,),
    "smollm": (r"\p{N}", _GPT2_SPLIT),
    "llama-bpe": (_LLAMA3_SPLIT,),
    "qwen2": (_LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}"),),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_SPLIT, r"\p{N}+", r"[0-9][0-9][0-9]"),
}
"""The patterns that cut text into words, applied in turn, by `tokenizer.ggml.pre`."""

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_MOST_CHARACTERS = 2**24
"""Of one text; far more than any context holds. Tokenizers die, not raise, where memory ends."""
_MOST_STEPS, _PRICE_OF_A_CALL = 10**7, 100
"""Loop turns, and calls, of one rendering: a template that would never end is refused after a second or so."""
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """A checkpoint's tokenizer and chat template. Made by `from_folder` and `from_gguf`.

    Attributes:
        eos_ids: ids that end a generation, as the checkpoint names them; may be empty.

    Example:
        >>> tokenizer = Tokenizer.from_folder("Llama-3.2-1B-Instruct")  # doctest: +SKIP
        >>> ids = tokenizer.encode_chat([{"role": "user", "content": "Hi"}])  # doctest: +SKIP
    """

    def __init__(
        self,
        backend: Any,
        where: str,
        *,
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        eos_ids: Sequence[int] = (),
        prefix: Sequence[int] = (),
        suffix: Sequence[int] = (),
    ) -> None:
        self._backend, self._where = backend, where
        self._chat_template, self._special_tokens = chat_template, dict(special_tokens or {})
        self._prefix, self._suffix = list(prefix), list(suffix)
        self.eos_ids = list(dict.fromkeys(eos_ids))

    @classmethod
    def from_folder(cls, path: str | os.PathLike[str]) -> "Tokenizer":
        """Read the tokenizer of a Hugging Face folder.

        `tokenizer.json` is needed, or Kimi's `tiktoken.model`. The chat template is chat_template.jinja, else
        chat_template.json, else the one in tokenizer_config.json. Stop ids are those of generation_config.json, else
        config.json, else the eos_token of tokenizer_config.json.

        Args:
            path: the folder.

        Raises:
            Eagle3Error: neither file, another tokenizer than Kimi's, or a file that is malformed.
        """
        folder = Path(path)
        settings = _read_json(folder / "tokenizer_config.json")
        backend = _folder_backend(folder, settings)
        special = {**_special_tokens(_read_json(folder / "special_tokens_map.json")), **_special_tokens(settings)}
        return cls(
            backend,
            str(folder),
            chat_template=_folder_template(folder, settings),
            special_tokens=special,
            eos_ids=_folder_eos_ids(folder, backend, special),
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], where: str = "GGUF metadata") -> "Tokenizer":
        """Build the byte-level BPE tokenizer that a GGUF file describes.

        Args:
            metadata: the `tokenizer.*` keys; arrays as lists.
            where: the file's name for messages.

        Raises:
            Eagle3Error: another tokenizer model or pre-tokenizer than those known, or malformed metadata.
        """
        fields = _GGUFFields(metadata, where)
        special = {name: fields.text(id_) for name, id_ in fields.special_ids().items()}
        return cls(
            fields.build(),
            where,
            chat_template=fields.optional("tokenizer.chat_template", str),
            special_tokens=special,
            eos_ids=[id_ for kind in ("eos", "eot", "eom") if (id_ := fields.id(kind)) is not None],
            prefix=fields.added("bos", default=fields.pre == "llama-bpe"),
            suffix=fields.added("eos", default=False),
        )

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a model's embedding may have more rows."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a text. Special tokens written out in it are recognised.

        Args:
            text: any text.
            add_special_tokens: add what the checkpoint puts around a text, such as BOS; a rendered chat has
                its own.

        Raises:
            Eagle3Error: not a string, too long for any context, or not valid Unicode (lone surrogates).
        """
        if not isinstance(text, str):
            raise Eagle3Error(f"text to encode is a {type(text).__name__}; a string is needed")
        if len(text) > _MOST_CHARACTERS:
            raise Eagle3Error(f"text of {len(text)} characters; at most {_MOST_CHARACTERS} can be tokenised")
        with _refusing("this text cannot be tokenised"):
            ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids. Bytes that are not UTF-8 become U+FFFD; ids above the vocabulary are left out.

        Args:
            ids: token ids.
            skip_special_tokens: leave special tokens out of the text.

        Raises:
            Eagle3Error: an id that is not an integer in [0, 2**32).
        """
        checked = _check_ids(ids)
        with _refusing("these token ids cannot be decoded"):
            return self._backend.decode(checked, skip_special_tokens=skip_special_tokens)

    def chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """Render messages with the checkpoint's chat template (jinja2, sandboxed).

        Args:
            messages: a non-empty list of {"role": str, "content": str}.
            add_generation_prompt: end with the opening of the assistant's turn.

        Raises:
            Eagle3Error: malformed messages, no template, or a template that fails or refuses them.
        """
        _check_messages(messages)
        template = self._template  # its own errors say more than "refuses these messages"
        template.environment.steps = 0
        with _refusing(f"{self._where}: the chat template refuses these messages"):
            return template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._special_tokens,
            )

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a chat, ready for the assistant's answer. Arguments and errors as `chat`."""
        return self.encode(self.chat(messages))

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` and `encode_chat` can be used."""
        return self._chat_template is not None

    @functools.cached_property
    def _template(self) -> Any:
        if self._chat_template is None:
            raise Eagle3Error(f"{self._where}: has no chat template; give plain text or token ids instead")
        with _refusing(f"{self._where}: the chat template is malformed"):
            return _compile_template(self._chat_template)

    def _shown_token(self, id_: int, skip_special_tokens: bool) -> str | None:
        """The token if `decode` would show it."""
        skipped = skip_special_tokens and id_ in self._special_ids
        return None if skipped else self._backend.id_to_token(id_)

    @functools.cached_property
    def _special_ids(self) -> frozenset[int]:
        added = self._backend.get_added_tokens_decoder()
        return frozenset(id_ for id_, token in added.items() if token.special)


class StreamDecoder:
    """Incremental detokeniser: the pieces it returns add up to the text of all ids.

    Text is held back while its last character may be incomplete.

    Args:
        tokenizer: the tokenizer.
        skip_special_tokens: leave special tokens out of the text.

    Example:
        >>> stream = StreamDecoder(tokenizer)  # doctest: +SKIP
        >>> for ids in batches: print(stream.push(ids), end="")  # doctest: +SKIP
        >>> print(stream.finish())  # doctest: +SKIP
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        # Ids whose text matters still: `_window[:_shown]` has been returned and gives the rest its context
        # (whether a leading space counts), the rest is held back.
        self._window: list[int] = []
        self._shown = 0

    def push(self, ids: Iterable[int]) -> str:
        """Take the next ids and return the text that has become final; may be empty.

        Raises:
            Eagle3Error: as `Tokenizer.decode`.
        """
        return "".join(self._push_one(id_) for id_ in _check_ids(ids))

    def finish(self) -> str:
        """Return what is held back, incomplete characters as U+FFFD, and start afresh."""
        text = self._pending()
        self._window, self._shown = [], 0
        return text

    def _push_one(self, id_: int) -> str:
        token = self._tokenizer._shown_token(id_, self._skip)
        if token is None:
            return ""
        self._window.append(id_)
        # A run of byte tokens decodes as a whole: one bad byte later changes all of it.
        if _BYTE_TOKEN.fullmatch(token):
            return ""
        text = self._pending()
        if not text or text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        del self._window[: self._shown]
        self._shown = len(self._window)
        return text

    def _pending(self) -> str:
        shown = self._tokenizer.decode(self._window[: self._shown], self._skip)
        return self._tokenizer.decode(self._window, self._skip)[len(shown) :]


class _GGUFFields:
    """The `tokenizer.ggml.*` metadata, checked."""

    def __init__(self, metadata: Mapping[str, Any], where: str) -> None:
        self._metadata, self._where = metadata, where
        model = self.optional("tokenizer.ggml.model", str)
        if model != "gpt2":
            raise self._fail(f"tokenizer model {model!r} is not supported; gpt2 (byte-level BPE) is")
        pre = self.optional("tokenizer.ggml.pre", str)
        if pre is None or pre not in _GGUF_SPLITS:
            raise self._fail(f"pre-tokenizer {pre!r} is not supported; {', '.join(_GGUF_SPLITS)} are")
        self.pre = pre
        self._tokens = self._list("tokens", str)
        self._ids = {token: id_ for id_, token in enumerate(self._tokens)}
        if len(self._ids) != len(self._tokens):
            twice = next(token for id_, token in enumerate(self._tokens) if self._ids[token] != id_)
            raise self._fail(f"token {twice!r} appears twice in tokenizer.ggml.tokens")

    def build(self) -> Any:
        """The `tokenizers.Tokenizer`."""
        from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

        merges = [tuple(merge.split(" ")) for merge in self._list("merges", str)]
        if bad := next((merge for merge in merges if len(merge) != 2), None):
            raise self._fail(f"merge {' '.join(bad)!r} is not two tokens with a space between")
        kinds = self._list("token_type", int) if "tokenizer.ggml.token_type" in self._metadata else []
        if kinds and len(kinds) != len(self._tokens):
            raise self._fail(f"{len(kinds)} token types for {len(self._tokens)} tokens")
        # Llama 3 takes a word that is a token as it is, even where its merges would not lead there.
        whole_words = self.pre == "llama-bpe"
        with _refusing(f"{self._where}: not a usable tokenizer"):
            backend = Tokenizer(models.BPE(vocab=self._ids, merges=merges, ignore_merges=whole_words))
            if self.pre == "qwen2":
                backend.normalizer = normalizers.NFC()
            splits = [pre_tokenizers.Split(Regex(p), "isolated") for p in _GGUF_SPLITS[self.pre]]
            to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
            backend.decoder = decoders.ByteLevel()
            for kind, add in ((_CONTROL, backend.add_special_tokens), (_USER_DEFINED, backend.add_tokens)):
                texts = [text for text, own in zip(self._tokens, kinds, strict=False) if own == kind]
                add([AddedToken(text, normalized=False, special=kind == _CONTROL) for text in texts])
        return backend

    def special_ids(self) -> dict[str, int]:
        """Ids by the names that chat templates use, such as bos_token."""
        kinds = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
        found = {f"{name}_token": self.id(kind) for name, kind in kinds.items()}
        return {name: id_ for name, id_ in found.items() if id_ is not None}

    def added(self, kind: str, default: bool) -> list[int]:
        """The id that goes around a text if the file says so, as a list of none or one."""
        flag = self.optional(f"tokenizer.ggml.add_{kind}_token", bool)
        if not (default if flag is None else flag):
            return []
        id_ = self.id(kind)
        if id_ is None:
            raise self._fail(f"tokenizer.ggml.add_{kind}_token is set, but there is no {kind} token id")
        return [id_]

    def id(self, kind: str) -> int | None:
        id_ = self.optional(f"tokenizer.ggml.{kind}_token_id", int)
        if id_ is not None and not 0 <= id_ < len(self._tokens):
            raise self._fail(f"{kind} token id {id_} is outside the vocabulary of {len(self._tokens)}")
        return id_

    def text(self, id_: int) -> str:
        return self._tokens[id_]

    def optional(self, key: str, kind: type) -> Any:
        value = self._metadata.get(key)
        if value is not None and type(value) is not kind:
            raise self._fail(f"{key} is {str(value)[:40]!r}; a {kind.__name__} is needed")
        return value

    def _list(self, name: str, kind: type) -> list[Any]:
        values = self._metadata.get(f"tokenizer.ggml.{name}")
        if not isinstance(values, list) or not values or not all(type(value) is kind for value in values):
            raise self._fail(f"tokenizer.ggml.{name} is missing or not a list of {kind.__name__}")
        return values

    def _fail(self, fault: str) -> Eagle3Error:
        return Eagle3Error(f"{self._where}: {fault}")


@contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Turn whatever a foreign library raises into one line."""
    try:
        yield
    except Eagle3Error:
        raise
    except BaseException as error:
        # A panic of a Rust extension is no Exception, so that nobody catches it by accident.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        lines = str(error).splitlines()
        raise Eagle3Error(f"{what}: {lines[0] if lines else type(error).__name__}") from error


def _check_ids(ids: Iterable[int]) -> list[int]:
    try:
        checked = [operator.index(id_) for id_ in ids]
    except TypeError as error:
        raise Eagle3Error("token ids must be a list of integers") from error
    if bad := [id_ for id_ in checked if not 0 <= id_ < 2**32]:
        raise Eagle3Error(f"token id {bad[0]} is out of range; ids are in [0, 2**32)")
    return checked


def _check_messages(messages: Any) -> None:
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise Eagle3Error('messages must be a non-empty list of {"role": ..., "content": ...}')
    for number, message in enumerate(messages, 1):
        good = isinstance(message, Mapping) and set(message) == {"role", "content"}
        if not good or not all(isinstance(value, str) for value in message.values()):
            raise Eagle3Error(f'message {number} is not {{"role": string, "content": string}}')


def _compile_template(source: str) -> Any:
    """jinja2 as Hugging Face sets it up for chat templates, with an end to every rendering."""
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox

    class GenerationBlock(jinja2.ext.Extension):
        """Renders {% generation %}, which only marks the assistant's words for training, as its contents."""

        tags = {"generation"}  # noqa: RUF012 - jinja2's own protocol

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
        """Counts loop turns and calls, since each template may ask for any number of them."""

        steps = 0

        def spend(self, items: Iterable[Any], price: int = 1) -> list[Any]:
            items = list(items)
            self.steps += price * len(items)
            if self.steps > _MOST_STEPS:
                raise jinja2.TemplateError(f"no end after {_MOST_STEPS} steps")
            return items

        def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
            self.spend((obj,), _PRICE_OF_A_CALL)
            return super().call(context, obj, *args, **kwargs)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent, **options)

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = tojson
    environment.filters["_spend"] = environment.spend
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    tree = environment.parse(source)
    for loop in tree.find_all(jinja2.nodes.For):
        loop.iter = jinja2.nodes.Filter(loop.iter, "_spend", [], [], None, None, lineno=loop.lineno)
    return environment.from_string(tree)


def _read_json(file: Path) -> dict[str, Any]:
    """A JSON object, empty if there is no such file."""
    if not os.path.isfile(file):
        return {}
    with _refusing(f"{file}: not valid JSON"):
        value = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise Eagle3Error(f"{file}: holds no JSON object; {{...}} is needed")
    return value


def _folder_backend(folder: Path, settings: Mapping[str, Any]) -> Any:
    import tokenizers

    fast, ranks = folder / "tokenizer.json", folder / "tiktoken.model"
    if not os.path.isfile(fast) and not os.path.isfile(ranks):
        raise Eagle3Error(f"{folder}: no tokenizer.json; give a folder with a fast tokenizer's files")
    if not os.path.isfile(fast):
        with _refusing(f"{ranks}: not a usable tokenizer"):
            return kimi_backend(ranks, settings)
    with _refusing(f"{fast}: not a usable tokenizer"):
        backend = tokenizers.Tokenizer.from_str(fast.read_text(encoding="utf-8"))
        # Training leftovers in some files: they would silently cut or pad prompts.
        backend.no_truncation()
        backend.no_padding()
    return backend


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name; the files spell them as text or as {"content": text}."""
    contents = {}
    for name in _SPECIAL_NAMES:
        value = settings.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            contents[name] = value
    return contents


def _folder_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if os.path.isfile(file):
        with _refusing(f"{file}: cannot be read"):
            return file.read_text(encoding="utf-8")
    template = _read_json(folder / "chat_template.json").get("chat_template", settings.get("chat_template"))
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[-1].get("template") if named else None
        if template is None:
            raise Eagle3Error(f"{folder}: none of its chat templates is named default")
    if template is not None and not isinstance(template, str):
        raise Eagle3Error(f"{folder}: chat_template is not text; a jinja2 template is needed")
    return template


def _folder_eos_ids(folder: Path, backend: Any, special: Mapping[str, str]) -> list[int]:
    for name in ("generation_config.json", "config.json"):
        ids = _read_json(folder / name).get("eos_token_id")
        if ids is None:
            continue
        ids = ids if isinstance(ids, list) else [ids]
        if not all(type(id_) is int and 0 <= id_ < 2**31 for id_ in ids):
            raise Eagle3Error(f"{folder / name}: eos_token_id is {str(ids)[:40]}; token ids are needed")
        return ids
    id_ = backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
    return [] if id_ is None else [id_]
