"""Tokenizers of any make: their tokens by id, their size, and their own encode and decode."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from char_tokenizer import CharTokenizer as UsersTokenizer
from gpt_guard.checks.tokenizer.tokenizers import CharTokenizer, OwnTokenizer, adapt


class Words:
    """As Hugging Face's: get_vocab, an Encoding, special tokens that it adds unless told not to."""

    def __init__(self, vocabulary: dict[str, int]) -> None:
        self.vocabulary = vocabulary

    def get_vocab(self) -> dict[str, int]:
        return self.vocabulary

    def encode(self, text: str, add_special_tokens: bool = True) -> Any:
        ids = [self.vocabulary[word] for word in text.split()]
        return SimpleNamespace(ids=[0, *ids] if add_special_tokens else ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        words = {index: word for word, index in self.vocabulary.items()}
        return " ".join(words[index] for index in ids if index or not skip_special_tokens)


@pytest.mark.parametrize("given", [["a", "b"], ("a", "b"), {"chars": ["a", "b"]}], ids=["list", "tuple", "dict"])
def test_lists_of_characters(given: Any) -> None:
    tokenizer = adapt(given)
    assert isinstance(tokenizer, CharTokenizer)
    assert tokenizer.encode("abba") == [0, 1, 1, 0]
    assert tokenizer.decode([1, 0]) == "ba"
    assert (tokenizer.tokens, tokenizer.size) == (["a", "b"], 2)
    assert adapt(tokenizer) is tokenizer


def test_unknown_characters_and_ids_are_errors_not_silence() -> None:
    tokenizer = adapt(["a", "b"])
    with pytest.raises(KeyError, match="c"):
        tokenizer.encode("abc")
    with pytest.raises(IndexError):
        tokenizer.decode([2])


def test_a_users_own_object_is_asked_by_its_own_methods() -> None:
    own = UsersTokenizer.from_text("hello")
    tokenizer = adapt(own)
    assert isinstance(tokenizer, OwnTokenizer)
    assert tokenizer.raw is own
    assert tokenizer.tokens == ["e", "h", "l", "o"]
    assert tokenizer.decode(tokenizer.encode("hole")) == "hole"


def test_special_tokens_are_left_out_both_ways() -> None:
    tokenizer = adapt(Words({"<s>": 0, "one": 1, "two": 2}))
    assert tokenizer.encode("two one") == [2, 1]
    assert tokenizer.decode([0, 2]) == "<s> two"
    assert tokenizer.size == 3


def test_a_tokens_place_is_its_id_even_where_ids_have_gaps() -> None:
    tokenizer = adapt(Words({"a": 0, "d": 3}))
    assert tokenizer.tokens == ["a", "<no token 1>", "<no token 2>", "d"]
    assert tokenizer.size == 4


@pytest.mark.parametrize(
    ("table", "tokens"),
    [
        ({"itos": {0: "x", 1: "y"}}, ["x", "y"]),
        ({"stoi": {"y": 1, "x": 0}}, ["x", "y"]),
        ({"itos": ["x", "y"]}, ["x", "y"]),
        ({"vocab": {"x": 0, "y": 1}}, ["x", "y"]),
    ],
)
def test_hand_written_tables(table: dict[str, Any], tokens: list[str]) -> None:
    own = SimpleNamespace(encode=lambda text: [0], decode=lambda ids: "x", **table)
    assert adapt(own).tokens == tokens


def test_the_size_where_no_tokens_are_shown() -> None:
    methods = {"encode": lambda text: [0], "decode": lambda ids: "x"}
    assert adapt(SimpleNamespace(**methods, n_vocab=50257)).size == 50257
    assert adapt(SimpleNamespace(**methods)).size == 0
    assert adapt(SimpleNamespace(**methods)).tokens == []


@pytest.mark.parametrize("given", [3, None, "tokenizer.json", {"chars": 5}, {"merges": []}, [1, 2], object()])
def test_anything_else_is_refused_with_what_is_accepted(given: Any) -> None:
    with pytest.raises(TypeError, match="chars"):
        adapt(given)
