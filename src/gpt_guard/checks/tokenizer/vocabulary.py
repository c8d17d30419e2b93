"""The vocabulary of a subject: how many ids the model has rows for, and which of them end a sequence or pad it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from torch import nn

from gpt_guard.checkpoint.fingerprint import unwrap
from gpt_guard.checks.runner.base import Subject
from gpt_guard.checks.tokenizer.tokenizers import integers

NAMES = {
    "eos": ("<|endoftext|>", "</s>", "<eos>", "<EOS>", "[EOS]", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>"),
    "pad": ("<pad>", "<PAD>", "[PAD]", "<|pad|>", "<|padding|>"),
}
"""How public tokenizers name the two."""
RESERVED = 4
"""Rows that a loop may add to the model itself: padding, beginning and end of text, unknown."""


class SpecialId(NamedTuple):
    """An id and where it was found; `declared` is False where it may be no more than a default of a config class."""

    id: int
    source: str
    declared: bool


def special_id(subject: Subject, kind: Literal["eos", "pad"]) -> SpecialId | None:
    """The id of a special token, as far as anything tells; None if nothing does, or if it is an ordinary character."""
    given = subject.eos_id if kind == "eos" else subject.pad_id
    if given is not None:
        return SpecialId(given, f"{kind}_id", True)
    return next((found for found in _candidates(subject, kind) if _plausible(found.id, subject)), None)


def token_embedding(model: nn.Module | None) -> tuple[str, nn.Embedding] | None:
    """The table that token ids index, by name; None where more than one could be it.

    Hugging Face models tell. Elsewhere tables whose names speak of positions or types of segments are left out.
    """
    if model is None:
        return None
    inner = unwrap(model)
    own = getattr(inner, "get_input_embeddings", None)
    tables = {name: module for name, module in inner.named_modules() if isinstance(module, nn.Embedding)}
    if callable(own):
        try:
            table = own()
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


def tokens_of(subject: Subject) -> Sequence[str]:
    """The tokens in order of id; none where there is no tokenizer, or it shows none."""
    return subject.tokenizer.tokens if subject.tokenizer is not None else ()


def id_limit(subject: Subject) -> tuple[int, str]:
    """The first id that is too large, and why: by the model, else by the tokenizer; 0 where neither tells."""
    size = subject.tokenizer.size if subject.tokenizer is not None else 0
    return model_rows(subject) or ((size, f"the tokenizer has {size} ids") if size else (0, "no id is negative"))


def _candidates(subject: Subject, kind: Literal["eos", "pad"]) -> Iterable[SpecialId]:
    entry = f"{kind}_token_id"
    if subject.tokenizer is not None:
        own = _ids(getattr(subject.tokenizer.raw, entry, None))
        yield from (SpecialId(index, f"the tokenizer's {entry}", True) for index in own)
        tokens = subject.tokenizer.tokens
        yield from (SpecialId(tokens.index(name), f"the token {name}", True) for name in NAMES[kind] if name in tokens)
    config = subject.config
    value = config.get(entry) if isinstance(config, Mapping) else getattr(config, entry, None)
    yield from (SpecialId(index, f"config.{entry}", False) for index in _ids(value))
    table = token_embedding(subject.model)
    if kind == "pad" and table is not None and table[1].padding_idx is not None:
        yield SpecialId(int(table[1].padding_idx), f"padding_idx of {table[0]}", False)


def _plausible(index: int, subject: Subject) -> bool:
    # Config classes have defaults (2, 50256) that mean nothing where the vocabulary is one's own.
    if index < 0 or (subject.vocab_size is not None and index >= subject.vocab_size):
        return False
    tokens = tokens_of(subject)
    return index >= len(tokens) or len(tokens[index]) != 1


def _ids(value: Any) -> list[int]:
    """One id or a list of them as a list; empty for None."""
    return [] if value is None else list(integers(value if isinstance(value, (list, tuple)) else [value]))


def _other_table(name: str) -> bool:
    last = name.rpartition(".")[2].lower()
    return "pos" in last or last == "wpe" or "type" in last or "segment" in last
