"""From a symptom in a person's own words to its ordered causes, read once from guides/symptoms/*.toml."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from importlib import resources

from gpt_guard.records import Record

ORDER = (
    "loss-does-not-fall",
    "nan",
    "overfitting",
    "underfitting",
    "repetition",
    "chaos",
    "ignores-prompt",
    "checkpoint-load",
    "slow",
)
"""In the order in which they are met: training, then generation, then files and time."""

_NOT = re.compile(r"\b(does|do|did|is|has|wo|ca|can)n['\u2019]?t\b|\b(never|cannot|no longer|stops|refuses to)\b")


class SymptomCause(Record):
    """One possible cause, the test that tells it from the others, the commands that run it, and its codes."""

    text: str
    test: str
    run: tuple[str, ...]
    codes: tuple[str, ...] = ()


class Symptom(Record):
    """What a person sees, what to try first, and the causes, likeliest first.

    `phrases` are what people say: words, or beginnings of words, that must all occur.
    """

    key: str
    title: str
    first: str
    phrases: tuple[str, ...]
    causes: tuple[SymptomCause, ...]


@cache
def symptoms() -> dict[str, Symptom]:
    """All symptoms by key, in order."""
    folder = resources.files("gpt_guard.catalogue").joinpath("guides", "symptoms")
    found = [
        Symptom.model_validate(tomllib.loads(source.read_text(encoding="utf-8")))
        for source in folder.iterdir()
        if source.name.endswith(".toml")
    ]
    return {symptom.key: symptom for symptom in sorted(found, key=lambda symptom: ORDER.index(symptom.key))}


def match(text: str) -> tuple[Symptom, ...]:
    """The symptoms that a text speaks of: usually one, several where it fits them equally well, none if it fits none.

    A key or a title is taken as it is. Otherwise the phrase with most words decides, of which each must begin a word
    of the text, in any order: "my loss doesn't fall" has "loss not fall" and "loss" beside it.
    """
    known = symptoms()
    words = _words(text)
    exact = [each for each in known.values() if words in (_words(each.key), _words(each.title))]
    if exact:
        return tuple(exact)
    scores = {key: max((_score(phrase, words) for phrase in each.phrases), default=0) for key, each in known.items()}
    best = max(scores.values())
    return tuple(known[key] for key, score in scores.items() if best and score == best)


def _words(text: str) -> tuple[str, ...]:
    plain = _NOT.sub(" not ", text.lower())
    return tuple(re.findall(r"[a-z]+|=", plain.replace("_", " ").replace("-", " ")))


def _score(phrase: str, words: tuple[str, ...]) -> int:
    """The number of the phrase's words if the text has them all, each as often as the phrase; else 0."""
    left = list(words)
    asked = _words(phrase)
    for word in asked:
        found = next((other for other in left if other == word or (len(word) > 3 and other.startswith(word))), None)
        if found is None:
            return 0
        left.remove(found)
    return len(asked)
