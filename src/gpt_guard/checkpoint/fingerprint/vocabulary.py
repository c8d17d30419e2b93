"""The digest of a tokenizer: which token stands for which id."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from gpt_guard.errors import GuardUsageError

MAX_TOKENIZER_BYTES = 256 * 2**20
"""A tokenizer file larger than this is not read; the largest public vocabularies (256k tokens) take some 35 MB."""

Vocabulary = list[str] | list[tuple[int, str]]
_STRINGS = TypeAdapter(list[str])


def tokenizer_digest(tokenizer: Any) -> str:
    """Return the SHA-256, in hex, of the tokens in the order of their ids.

    The digest is that of `json.dumps(tokens, ensure_ascii=False, separators=(",", ":"))` in UTF-8, with the tokens as
    `token_list` gives them, so that `["a", "b"]`, `{"chars": ["a", "b"]}`, a file that holds it and an object with
    `stoi == {"a": 0, "b": 1}` all have the same one. Ids with gaps are digested as `[id, token]` pairs. Merges,
    normalizers and special-token flags are not part of it: give a `tokenizer.json` as a data file to cover those.
    Raises GuardUsageError for something that shows no vocabulary.
    """
    text = json.dumps(_vocabulary(tokenizer), ensure_ascii=False, separators=(",", ":"))
    # A lone surrogate is legal in a Python string and in JSON; it must not make a tokenizer impossible to name.
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def token_list(tokenizer: Any) -> list[str] | None:
    """Return the tokens by id, or None where the ids are not 0, 1, 2, ... without a gap.

    Understood are `.chars`, a list of tokens, `{"chars": [...]}`, a path to a JSON file of one of these or of the
    Hugging Face kind, `get_vocab()`, `stoi`, `itos`, `vocab`, sentencepiece's `id_to_piece` and tiktoken's ranks.
    Raises GuardUsageError for anything else.
    """
    tokens = _vocabulary(tokenizer)
    return [token for token in tokens if isinstance(token, str)] if not tokens or isinstance(tokens[0], str) else None


def _vocabulary(tokenizer: Any) -> Vocabulary:
    if isinstance(tokenizer, (str, os.PathLike)):
        tokenizer = _read(Path(tokenizer))
    if isinstance(tokenizer, Mapping):
        return _from_mapping(tokenizer)
    if isinstance(tokenizer, Sequence):
        return _strings(tokenizer)
    for attribute in ("chars", "get_vocab", "stoi", "itos", "vocab"):
        value = getattr(tokenizer, attribute, None)
        if attribute == "get_vocab" and callable(value):
            value = value()
        if isinstance(value, (Mapping, Sequence)):
            return _from_mapping(value) if isinstance(value, Mapping) else _strings(list(value))
    if callable(getattr(tokenizer, "id_to_piece", None)) and callable(getattr(tokenizer, "get_piece_size", None)):
        return [str(tokenizer.id_to_piece(index)) for index in range(tokenizer.get_piece_size())]
    ranks = getattr(tokenizer, "_mergeable_ranks", None)  # tiktoken shows its ids in no public attribute
    if isinstance(ranks, Mapping):
        return _by_id({**ranks, **getattr(tokenizer, "_special_tokens", {})})
    raise GuardUsageError(
        f"a {type(tokenizer).__name__} shows no vocabulary: give an object with .chars, get_vocab(), stoi, itos or "
        "vocab, a list of tokens, or the path of a JSON file that holds one"
    )


def _from_mapping(mapping: Mapping[Any, Any]) -> Vocabulary:
    for key in ("chars", "stoi", "itos", "vocab"):
        value = mapping.get(key)
        if isinstance(value, Mapping):
            return _by_id(value)
        if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
            return _strings(value)
    inner = mapping.get("model")
    if isinstance(inner, Mapping) and "vocab" in inner:
        return _from_mapping(inner)
    return _by_id(mapping)


def _by_id(mapping: Mapping[Any, Any]) -> Vocabulary:
    """Order token -> id, or id -> token, by id."""
    if all(_is_id(value) for value in mapping.values()):
        pairs = sorted((int(index), _text(token)) for token, index in mapping.items())
    elif all(_is_id(key) for key in mapping):
        pairs = sorted((int(index), _text(token)) for index, token in mapping.items())
    else:
        raise GuardUsageError(
            "this mapping is no vocabulary: expected tokens to ids, ids to tokens, or {'chars': [...]}; "
            f"its keys are {', '.join(map(repr, list(mapping)[:5]))}"
        )
    gapless = [index for index, _ in pairs] == list(range(len(pairs)))
    return [token for _, token in pairs] if gapless else pairs


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _text(token: Any) -> str:
    # Byte-level vocabularies hold byte strings that are no valid UTF-8; Latin-1 maps each byte to one character.
    return token.decode("latin-1") if isinstance(token, bytes) else str(token)


def _strings(tokens: Sequence[Any]) -> list[str]:
    try:
        return _STRINGS.validate_python([_text(token) if isinstance(token, bytes) else token for token in tokens])
    except ValidationError as error:
        first = error.errors()[0]
        raise GuardUsageError(
            f"a vocabulary is a list of strings, but number {first['loc'][0]} is {first['input']!r}"
        ) from None


def _read(path: Path) -> Any:
    try:
        if path.stat().st_size > MAX_TOKENIZER_BYTES:
            raise GuardUsageError(f"{path} is larger than {MAX_TOKENIZER_BYTES} bytes: not a tokenizer's JSON file")
        return json.loads(path.read_bytes())
    except OSError as error:
        raise GuardUsageError(f"cannot read the tokenizer file {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise GuardUsageError(f'{path} holds no JSON ({error}); expected {{"chars": [...]}}') from error
