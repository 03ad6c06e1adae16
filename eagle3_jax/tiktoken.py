"""Kimi's tokenizer from its rank file, without tiktoken and without running the folder's Python class.

A rank file lists byte strings, and two neighbours in a word merge if their union is listed, those of the lowest rank
first. How text is cut into words stands in the class alone, so only the class that is known is read.
"""

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle3_jax.errors import Eagle3Error

_CLASS = "TikTokenTokenizer"
_CODE = f"tokenization_kimi.{_CLASS}"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_BEFORE, _AFTER = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_SPLIT = "|".join(
    (
        r"[\p{Han}]+",
        f"{_BEFORE}{_UPPER}*{_LOWER}+{_AFTER}",
        f"{_BEFORE}{_UPPER}+{_LOWER}*{_AFTER}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""Kimi's words, from the tokenization_kimi.py of Kimi-K2; K2.5 has the same."""
_NUM_ADDED = 256
"""Ids after the ranks that are tokens of their own, named by tokenizer_config.json or else by their number."""
_LONGEST = 1024
"""Bytes of a token; Kimi's longest has 256. Deriving merges costs the square."""


def kimi_backend(file: Path, settings: Mapping[str, Any]) -> Any:
    """Build Kimi's tokenizer: the ids are those of tiktoken with the same ranks.

    Kimi's class cuts runs of more than 25,000 characters without a space, and texts of more than 400,000, before it
    splits them into words; here they stay whole.

    Args:
        file: tiktoken.model, lines of a token in base64 and its rank.
        settings: tokenizer_config.json, which names the class and the tokens after the ranks.

    Returns:
        A `tokenizers.Tokenizer`, byte-level BPE.

    Raises:
        Eagle3Error: another class; a malformed or incomplete file; or added tokens that do not fit it.

    Example:
        >>> kimi_backend(folder / "tiktoken.model", settings).encode("Hello world").ids  # doctest: +SKIP
        [19180, 2695]
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    _check_class(file, settings)
    letters = _letters()
    tokens = [token.decode("latin-1").translate(letters) for token in _read_ranks(file)]
    ids = {token: id_ for id_, token in enumerate(tokens)}
    added = _added_tokens(file, settings, ids)
    # Whichever two neighbours make a token, they make it at the token's rank.
    merges = [
        (left, right)
        for token in tokens
        for cut in range(1, len(token))
        if (left := token[:cut]) in ids and (right := token[cut:]) in ids
    ]
    # tiktoken takes a word that is a token as it is, even where merges would not lead there.
    backend = Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=True))
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_SPLIT), "isolated"), to_bytes])
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(text, normalized=False, special=special) for text, special in added])
    return backend


def _check_class(file: Path, settings: Mapping[str, Any]) -> None:
    code = settings.get("auto_map")
    code = code.get("AutoTokenizer") if isinstance(code, dict) else None
    code = code[0] if isinstance(code, list) and code else code
    # A folder that was saved anew names the repository before the code: "owner/name--module.Class".
    known = str(code).rpartition("--")[2] == _CODE if code is not None else settings.get("tokenizer_class") == _CLASS
    if not known:
        found = settings.get("tokenizer_class") if code is None else code
        raise Eagle3Error(
            f"{file}: tokenizer_config.json names the class {found!r:.80}; only Kimi's {_CODE} is supported without a "
            "tokenizer.json"
        )


def _letters() -> dict[int, int]:
    """The character that stands for each byte in byte-level vocabularies: itself, or one from 256 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(256)) - set(shown))
    return {byte: byte for byte in shown} | {byte: 256 + number for number, byte in enumerate(hidden)}


def _read_ranks(file: Path) -> list[bytes]:
    """The tokens by rank."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        if not line:
            continue
        try:
            encoded, rank = line.split(b" ")
            token, place = base64.b64decode(encoded, validate=True), int(rank)
        except ValueError as error:
            raise Eagle3Error(f"{file}: line {number} is not a token in base64 and its rank") from error
        if not 0 < len(token) <= _LONGEST:
            raise Eagle3Error(
                f"{file}: line {number} holds a token of {len(token)} bytes; 1 to {_LONGEST} are possible"
            )
        if token in ranks:
            raise Eagle3Error(f"{file}: line {number} repeats the token of rank {ranks[token]}")
        ranks[token] = place
    tokens = {rank: token for token, rank in ranks.items()}
    if absent := [rank for rank in range(len(ranks)) if rank not in tokens]:
        raise Eagle3Error(
            f"{file}: no token has rank {absent[0]}; {len(ranks)} tokens must have the ranks 0 to {len(ranks) - 1}"
        )
    if lost := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise Eagle3Error(f"{file}: no token is the single byte 0x{lost[0]:02x}; all 256 are needed")
    return [tokens[rank] for rank in range(len(ranks))]


def _added_tokens(file: Path, settings: Mapping[str, Any], ids: Mapping[str, int]) -> list[tuple[str, bool]]:
    """Text of the tokens after the ranks, in order of their ids, and whether each is special."""
    where = file.with_name("tokenizer_config.json")
    named = settings.get("added_tokens_decoder")
    if not isinstance(named, dict) or not named:
        raise Eagle3Error(
            f"{where}: added_tokens_decoder is missing or no object; it names the tokens after the ranks"
        )
    first = len(ids)
    added = {str(id_): (f"<|reserved_token_{id_}|>", False) for id_ in range(first, first + _NUM_ADDED)}
    for id_, entry in named.items():
        if id_ not in added:
            raise Eagle3Error(
                f"{where}: added token id {id_:.20} is not one of the {_NUM_ADDED} from {first} on, "
                f"which follow the {first} tokens of {file.name}"
            )
        text, special = (entry.get("content"), entry.get("special")) if isinstance(entry, dict) else (None, None)
        if not isinstance(text, str) or not text or not isinstance(special, bool):
            raise Eagle3Error(f'{where}: added token {id_} is not {{"content": text, "special": true or false, ...}}')
        added[id_] = text, special
    texts = [text for text, _ in added.values()]
    if twice := [text for text in texts if text in ids or texts.count(text) > 1]:
        raise Eagle3Error(f"{where}: added token {twice[0]!r:.80} is a token already; each needs a text of its own")
    return list(added.values())
