"""Tokenizers of any make behind one small face: encode, decode, size, and the tokens in order of id."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from gpt_guard.checkpoint.fingerprint import token_list
from gpt_guard.errors import GuardUsageError


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
        said = next((getattr(self.raw, name) for name in ("vocab_size", "n_vocab") if hasattr(self.raw, name)), None)
        return said if isinstance(said, int) else len(self.raw) if hasattr(self.raw, "__len__") else 0

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
