"""How far a text is from the corpus: entropy of its characters, words the corpus never has, pairs it never has."""

from __future__ import annotations

import math
import re
from collections import Counter

import torch
from torch import Tensor

_WORD = re.compile(r"[^\W\d_]+")
_FEWEST_WORDS = 20


def char_entropy(text: str) -> float:
    """Bits per character, by the frequencies of the characters in the text; 0 for an empty one."""
    counts, total = Counter(text), len(text)
    return -sum(c / total * math.log2(c / total) for c in counts.values()) if total else 0.0


def words(text: str) -> list[str]:
    """The runs of letters in a text, in lower case, without the first and last one, which may be cut."""
    return [word.lower() for word in _WORD.findall(text)][1:-1]


def unknown_words(text: str, known: set[str]) -> float | None:
    """The share of words that are not known; None where there are too few to tell."""
    found = words(text)
    return sum(word not in known for word in found) / len(found) if len(found) >= _FEWEST_WORDS else None


class Pairs:
    """The pairs of neighbouring tokens in a corpus."""

    def __init__(self, ids: Tensor, vocab_size: int) -> None:
        self._vocab = vocab_size
        self._seen = torch.unique(self._codes(ids.long()))

    def unseen(self, rows: Tensor) -> float | None:
        """The share of pairs in rows `[B, T]` that the corpus never has; None where there is no pair."""
        codes = self._codes(rows.long())
        if codes.numel() == 0:
            return None
        return 1.0 - float(torch.isin(codes, self._seen).float().mean())

    def _codes(self, ids: Tensor) -> Tensor:
        return (ids[..., :-1] * self._vocab + ids[..., 1:]).flatten()
