"""Tokenizers of any make behind one small face: encode, decode, size, the tokens in order of id, and special ids."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from gpt_guard.checkpoint.fingerprint import token_list
from gpt_guard.errors import GuardUsageError

LIBRARIES = ("tokenizers", "transformers", "sentencepiece", "tiktoken")
"""Packages whose tokenizers say in their own documentation what they normalise."""
_SPECIAL = re.compile(r"(^|_)(eos|bos|eot|pad|padding|sep|cls|mask|endoftext|end_of_text)(_|$)")
"""How tokenizers of one's own call the attributes that hold the id of a special token."""


class Tokenizer(Protocol):
    """What the checks need of a tokenizer."""

    @property
    def tokens(self) -> Sequence[str]:
        """All tokens, `tokens[id]` being that of an id; empty where the tokenizer shows none."""

    @property
    def size(self) -> int:
        """Number of ids, 0 where it cannot be known."""

    @property
    def raw(self) -> Any:
        """The tokenizer as the user gave it."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text, special tokens left out; may raise for what it does not know."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids."""


class CharTokenizer:
    """A list of characters, one id each; an unknown character is a KeyError."""

    def __init__(self, chars: Sequence[str], raw: Any = None) -> None:
        self.tokens = list(chars)
        self.raw = list(chars) if raw is None else raw
        self._ids = {char: index for index, char in enumerate(chars)}

    @property
    def size(self) -> int:
        """Number of ids."""
        return len(self.tokens)

    def encode(self, text: str) -> list[int]:
        """Ids of a text. Raises KeyError for a character that has none."""
        return [self._ids[char] for char in text]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids. Raises IndexError for an id that does not exist."""
        return "".join(self.tokens[index] for index in ids)


class OwnTokenizer:
    """A tokenizer object of the user's, with `encode` and `decode`; its own methods are what gets checked.

    Where its methods offer them, special tokens are not added and nothing is cleaned up: both would make a lossless
    tokenizer look lossy.
    """

    def __init__(self, raw: Any, tokens: Sequence[str]) -> None:
        self.raw = raw
        self.tokens = list(tokens)
        self._encode_options = _offered(raw.encode, {"add_special_tokens": False})
        quiet = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        self._decode_options = _offered(raw.decode, quiet)

    @property
    def size(self) -> int:
        """Number of ids, as the tokens show it, or as the tokenizer says."""
        if self.tokens:
            return len(self.tokens)
        size = next((getattr(self.raw, name) for name in ("vocab_size", "n_vocab") if hasattr(self.raw, name)), None)
        return size if isinstance(size, int) else len(self.raw) if hasattr(self.raw, "__len__") else 0

    def encode(self, text: str) -> list[int]:
        """Ids as the user's `encode` gives them; a Hugging Face `Encoding` is unpacked."""
        encoded = self.raw.encode(text, **self._encode_options)
        return [int(index) for index in getattr(encoded, "ids", encoded)]

    def decode(self, ids: Sequence[int]) -> str:
        """Text as the user's `decode` gives it."""
        return str(self.raw.decode([int(index) for index in ids], **self._decode_options))


def adapt(tokenizer: Any) -> Tokenizer:
    """Wrap a list of characters, `{"chars": [...]}`, or an object with `encode` and `decode`.

    Raises TypeError for anything else, saying what is accepted.
    """
    if isinstance(tokenizer, (CharTokenizer, OwnTokenizer)):
        return tokenizer
    if isinstance(tokenizer, Mapping) and _is_char_list(tokenizer.get("chars")):
        return CharTokenizer(tokenizer["chars"], raw=tokenizer)
    if _is_char_list(tokenizer):
        return CharTokenizer(tokenizer)
    if callable(getattr(tokenizer, "encode", None)) and callable(getattr(tokenizer, "decode", None)):
        return OwnTokenizer(tokenizer, _tokens_of(tokenizer))
    raise TypeError(
        f"a tokenizer of type {type(tokenizer).__name__} is not understood: give a list of characters, "
        f'{{"chars": [...]}}, or an object with encode(text) and decode(ids)'
    )


def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids that encode does not make out of text: control tokens of the common libraries, and `eos_id` and the like."""
    raw = tokenizer.raw
    ids: set[int] = set(integers(getattr(raw, "all_special_ids", ())))
    own = {**vars(type(raw)), **getattr(raw, "__dict__", {})}
    ids |= set(integers(value for name, value in own.items() if _SPECIAL.search(name.lower())))
    table = getattr(raw, "_special_tokens", None)  # tiktoken has no public name for it
    if isinstance(table, Mapping):
        ids |= set(integers(table.values()))
    added = getattr(raw, "get_added_tokens_decoder", None)
    if callable(added):
        ids |= {index for index, token in added().items() if getattr(token, "special", False)}
    if callable(getattr(raw, "is_control", None)):
        ids |= {index for index in range(tokenizer.size) if raw.is_control(index) or raw.is_unknown(index)}
    return frozenset(ids)


def from_library(tokenizer: Tokenizer) -> bool:
    """True for a tokenizer object of a known library, or of a class derived from one."""
    return any(kind.__module__.partition(".")[0] in LIBRARIES for kind in type(tokenizer.raw).__mro__)


def is_character_list(tokens: Sequence[str]) -> bool:
    """True where tokens are characters, but for a few special ones."""
    return bool(tokens) and sum(len(token) == 1 for token in tokens) >= 0.8 * len(tokens)


def integers(values: Iterable[Any]) -> list[int]:
    """Those of the values that are integers; True and False are none."""
    return [value for value in values if isinstance(value, int) and not isinstance(value, bool)]


def _is_char_list(value: Any) -> bool:
    # A plain string is a sequence of characters, too, but as a tokenizer it is more likely a path.
    return (
        isinstance(value, Sequence) and not isinstance(value, (str, bytes)) and all(isinstance(c, str) for c in value)
    )


def _tokens_of(tokenizer: Any) -> list[str]:
    try:
        known = token_list(tokenizer)
    except GuardUsageError:
        return []
    return known if known is not None else _with_gaps(tokenizer)


def _with_gaps(tokenizer: Any) -> list[str]:
    """Ids that no token has are named, so that a token's place in the list stays its id."""
    table = tokenizer.get_vocab() if callable(getattr(tokenizer, "get_vocab", None)) else getattr(tokenizer, "stoi", {})
    by_id = {index: str(token) for token, index in dict(table).items() if isinstance(index, int) and index >= 0}
    return [by_id.get(index, f"<no token {index}>") for index in range(max(by_id, default=-1) + 1)]


def _offered(method: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """Those options that a method takes by name."""
    try:
        taken = inspect.signature(method).parameters
    except (TypeError, ValueError):  # a method written in C may not tell
        return {}
    return {name: value for name, value in options.items() if name in taken}
