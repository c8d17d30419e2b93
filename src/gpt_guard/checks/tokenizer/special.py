"""Which ids stand for no text: end of sequence, padding and other special tokens; and how many rows the model has."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from torch import nn

from gpt_guard.checkpoint.fingerprint import unwrap
from gpt_guard.checks.runner.base import Subject
from gpt_guard.checks.tokenizer.tokenizers import Tokenizer

NAMES = {
    "eos": ("<|endoftext|>", "</s>", "<eos>", "<EOS>", "[EOS]", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>"),
    "pad": ("<pad>", "<PAD>", "[PAD]", "<|pad|>", "<|padding|>"),
}
"""How public tokenizers name the two."""
_SPECIAL = re.compile(r"(^|_)(eos|bos|eot|pad|padding|sep|cls|mask|endoftext|end_of_text)(_|$)")
"""How tokenizers of one's own call the attributes that hold such an id."""
RESERVED = 4
"""Rows that a loop may add to the model itself: padding, beginning and end of text, unknown."""
LIBRARIES = ("tokenizers", "transformers", "sentencepiece", "tiktoken")
"""Packages whose tokenizers say in their own documentation what they normalise."""


class SpecialId(NamedTuple):
    """An id and who said so; `declared` is False where it may be no more than a default of a config class."""

    id: int
    source: str
    declared: bool


def special_id(subject: Subject, kind: Literal["eos", "pad"]) -> SpecialId | None:
    """The id of a special token, as far as anything tells; None if nothing does, or if it is an ordinary character."""
    given = subject.eos_id if kind == "eos" else subject.pad_id
    if given is not None:
        return SpecialId(given, f"{kind}_id", True)
    for found in _candidates(subject, kind):
        if _plausible(found.id, subject):
            return found
    return None


def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids that encode does not make out of text: control tokens of the common libraries, and `eos_id` and the like."""
    raw = tokenizer.raw
    ids: set[int] = set(_integers(getattr(raw, "all_special_ids", ())))
    own = {**vars(type(raw)), **getattr(raw, "__dict__", {})}
    ids |= set(_integers(value for name, value in own.items() if _SPECIAL.search(name.lower())))
    table = getattr(raw, "_special_tokens", None)  # tiktoken has no public name for it
    if isinstance(table, Mapping):
        ids |= set(_integers(table.values()))
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


def token_embedding(model: nn.Module | None) -> tuple[str, nn.Embedding] | None:
    """The table that token ids index, by name; None where more than one could be it.

    Hugging Face models tell. Elsewhere tables whose names speak of positions or types of segments are left out.
    """
    if model is None:
        return None
    inner = unwrap(model)
    told = getattr(inner, "get_input_embeddings", None)
    tables = {name: module for name, module in inner.named_modules() if isinstance(module, nn.Embedding)}
    if callable(told):
        try:
            table = told()
        except Exception:  # the base class of transformers raises for a model that does not implement it
            table = None
        tables = {name: module for name, module in tables.items() if module is table} or tables
    mine = [(name, module) for name, module in tables.items() if not _other_table(name)]
    return mine[0] if len(mine) == 1 else None


def model_rows(subject: Subject) -> tuple[int, str] | None:
    """How many ids the model takes and where that is written; None where only the tokenizer was there to tell."""
    source = subject.sources.get("vocab_size", "vocab_size")
    sizes = []
    if (found := token_embedding(subject.model)) is not None:
        sizes.append((found[1].num_embeddings, f"{found[0]} has {found[1].num_embeddings} rows"))
    if subject.vocab_size is not None and source != "the tokenizer":
        sizes.append((subject.vocab_size, f"{source} is {subject.vocab_size}"))
    return min(sizes, default=None)


def _candidates(subject: Subject, kind: Literal["eos", "pad"]) -> Iterable[SpecialId]:
    name = f"{kind}_token_id"
    if subject.tokenizer is not None:
        told = _ids(getattr(subject.tokenizer.raw, name, None))
        yield from (SpecialId(index, f"the tokenizer's {name}", True) for index in told)
        for token in NAMES[kind]:
            if token in subject.tokenizer.tokens:
                yield SpecialId(subject.tokenizer.tokens.index(token), f"the token {token}", True)
    config = subject.config
    value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
    yield from (SpecialId(index, f"config.{name}", False) for index in _ids(value))
    table = token_embedding(subject.model)
    if kind == "pad" and table is not None and table[1].padding_idx is not None:
        yield SpecialId(int(table[1].padding_idx), f"padding_idx of {table[0]}", False)


def _plausible(index: int, subject: Subject) -> bool:
    # Config classes have defaults (2, 50256) that mean nothing where the vocabulary is one's own.
    if index < 0 or (subject.vocab_size is not None and index >= subject.vocab_size):
        return False
    tokens = subject.tokenizer.tokens if subject.tokenizer is not None else ()
    return index >= len(tokens) or len(tokens[index]) != 1


def _ids(value: Any) -> list[int]:
    """One id or a list of them; None where nothing is told."""
    return [] if value is None else list(_integers(value if isinstance(value, (list, tuple)) else [value]))


def _integers(values: Iterable[Any]) -> list[int]:
    return [value for value in values if isinstance(value, int) and not isinstance(value, bool)]


def _other_table(name: str) -> bool:
    last = name.rpartition(".")[2].lower()
    return "pos" in last or last == "wpe" or "type" in last or "segment" in last
