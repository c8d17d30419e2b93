"""A tokenizer whose tokens are single characters."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path


class CharTokenizer:
    """Characters to ids and back; the id of a character is its place in `chars`.

    Raises ValueError when `chars` is empty, or holds something other than distinct single characters.
    """

    def __init__(self, chars: Sequence[str]) -> None:
        if not chars or any(not isinstance(char, str) or len(char) != 1 for char in chars):
            raise ValueError("a character vocabulary is a non-empty list of single characters")
        if len(set(chars)) != len(chars):
            twice = next(char for char in chars if chars.count(char) > 1)
            raise ValueError(f"character {twice!r} stands more than once in the vocabulary; ids would not be unique")
        self.chars = list(chars)
        self._ids = {char: index for index, char in enumerate(self.chars)}

    @classmethod
    def from_text(cls, text: str) -> CharTokenizer:
        """The vocabulary of a text: its characters, sorted, so that the same text always gives the same ids."""
        return cls(sorted(set(text)))

    @classmethod
    def load(cls, path: Path) -> CharTokenizer:
        """Read what `save` wrote. Raises ValueError naming the file when it is something else."""
        try:
            return cls(json.loads(path.read_text(encoding="utf-8"))["chars"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f'{path} is not a character tokenizer ({{"chars": [...]}}): {error}') from error

    def save(self, path: Path) -> None:
        """Write `{"chars": [...]}` as UTF-8 JSON."""
        path.write_text(json.dumps({"chars": self.chars}, ensure_ascii=False), encoding="utf-8")

    def __len__(self) -> int:
        return len(self.chars)

    def encode(self, text: str) -> list[int]:
        """Ids of a text. Raises ValueError naming the first character that the vocabulary does not have."""
        try:
            return [self._ids[char] for char in text]
        except KeyError as error:
            char = error.args[0]
            raise ValueError(
                f"character {char!r} at position {text.index(char)} is not among the {len(self)} of this tokenizer; "
                f"leave it out of the text, or build the tokenizer from a text that has it"
            ) from None

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids. Raises IndexError for an id that does not exist."""
        return "".join(self.chars[index] for index in ids)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the characters as compact JSON: equal if and only if every id means the same character."""
        text = json.dumps(self.chars, ensure_ascii=False, separators=(",", ":"))
        return hashlib.sha256(text.encode("utf-8")).hexdigest()

    def explain_mismatch(self, fingerprint: str, path: Path) -> str:
        """Say how this vocabulary differs from the one with that fingerprint, whose characters `path` may hold."""
        said = f"belongs to another tokenizer: fingerprint {fingerprint}, this one's is {self.fingerprint}"
        try:
            other = CharTokenizer.load(path)
        except (OSError, ValueError):
            return said
        if other.fingerprint != fingerprint:
            return said
        for index, (theirs, mine) in enumerate(zip(other.chars, self.chars, strict=False)):
            if mine != theirs:
                return f"{said}; the first id that differs is {index}: {theirs!r} there, {mine!r} here"
        return f"{said}; it has {len(other)} characters, this one {len(self)}"
