"""Text to ids and back: is it the same text, and if not, what happened to it."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Any

from gpt_guard.catalogue import finding
from gpt_guard.checks.tokenizer.tokenizers import Tokenizer, from_library, is_character_list
from gpt_guard.records import Finding, Severity

RARE = ("\U00013000", "\ua66e", "\u058d")
"""Letters and signs that hardly a vocabulary has, and that no normalisation removes: one is put to the tokenizer."""
UNKNOWN = ("<unk>", "[UNK]", "<|unk|>", "\u2047", "\ufffd")
"""How tokenizers write what they do not know; the sign is sentencepiece's."""
MAX_UTF8 = 4
"""Bytes of the longest character in UTF-8."""
_CONTEXT = 20


def roundtrip(tokenizer: Tokenizer, text: str, what: str) -> Finding | None:
    """GG621 where `decode(encode(text))` is not `text`, or raises; None where it is.

    What a tokenizer of a known library documents (case, accents, blanks) is only severity info. An exception counts:
    leave out of `text` what the vocabulary does not have, since that KeyError is right.
    """
    try:
        ids = tokenizer.encode(text)
        back = tokenizer.decode(ids)
    except Exception as error:  # the user's own code may raise anything
        # Escaped in the evidence here and below: a lone surrogate, which a broken tokenizer makes, is no valid JSON.
        doing = f"{type(error).__name__}: {str(error)[:200]}"
        seen = f"{what} cannot be encoded and decoded: {doing}"
        return finding(
            "GG621", seen, likely=["raised", "tables"], evidence={"exception": doing, "sample": ascii(text[:200])}
        )
    if back == text:
        return None
    at = next((i for i, (a, b) in enumerate(zip(text, back, strict=False)) if a != b), min(len(text), len(back)))
    start = max(0, at - _CONTEXT // 2)
    before, after = text[start : start + _CONTEXT], back[start : start + _CONTEXT]
    seen = (
        f"{what}: {len(text)} characters became {len(back)}; they part at character {at}: {before!r} became {after!r}"
    )
    kind = _change(text, back)
    quiet = from_library(tokenizer) and (kind in ("normalised", "joined") or _has_unknown(text, back))
    return finding(
        "GG621",
        seen,
        likely=[kind],
        severity=Severity.INFO if quiet else Severity.ERROR,
        evidence={"text": ascii(before), "decoded": ascii(after), "at": at, "ids": ids[:_CONTEXT]},
    )


def decode_part(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Text of a stretch of ids, shortened to whole characters and, where tokens are longer than those, to whole words.

    Raises what `decode` raises.
    """
    text = _decode_cut(tokenizer, ids)
    if is_character_list(tokenizer.tokens):
        return text
    blanks = [index for index, char in enumerate(text) if char.isspace()]
    # A part of a word is encoded in another way than within the whole word, if it can be encoded at all.
    return text[blanks[0] : blanks[-1]].strip() if len(blanks) > 1 else text


def _decode_cut(tokenizer: Tokenizer, ids: list[int]) -> str:
    for front in range(MAX_UTF8):
        for back in range(MAX_UTF8):
            try:
                return tokenizer.decode(ids[front : len(ids) - back])
            except UnicodeDecodeError:
                continue
    return tokenizer.decode(ids)


def sample_of(tokenizer: Tokenizer, text: str | None) -> tuple[str, str] | None:
    """A text to send round, and what it is: the user's own, else all characters of the vocabulary.

    From a text, characters are left out that a character list does not have. None for a vocabulary of longer tokens
    and no text: it is asked with decoded data.
    """
    if not is_character_list(tokenizer.tokens):
        # Only in a list of characters is every other character unknown; bytes and merges encode more than they list.
        return None if text is None else (text, "the text")
    characters = [token for token in tokenizer.tokens if len(token) == 1]
    if text is None:
        return "".join(characters), "all characters of the vocabulary"
    known = set(characters)
    kept = "".join(char for char in text if char in known)
    missing = set(text) - known
    left_out = f", without {len(missing)} characters that the vocabulary does not have" if missing else ""
    return (kept, f"the text{left_out}") if kept else None


def unknown_character(tokenizer: Tokenizer) -> tuple[str, Finding | None]:
    """What happens to a character that the vocabulary does not have, in words, and GG622 where it happens silently.

    Dropped, or turned into an ordinary one. An exception is right, and so is a token that is declared for it (`<unk>`),
    or a lossless encoding in bytes.
    """
    known = next((token for token in tokenizer.tokens if len(token) == 1 and token.isalnum()), "a")
    probe = next(char for char in RARE if char not in tokenizer.tokens)
    text = f"{known}{probe}{known}"
    try:
        ids = tokenizer.encode(text)
    except Exception as error:
        return f"{probe!a} raises {type(error).__name__}", None
    try:
        back = tokenizer.decode(ids)
    except Exception as error:
        seen = f"{probe!r} is encoded as {ids}, which decode refuses: {type(error).__name__}: {str(error)[:200]}"
        return f"{probe!a} gives ids that cannot be decoded", finding("GG622", seen, likely=["replaced"])
    left = back.replace(known, "").strip()
    if left == probe:
        return f"{probe!a} is encoded without loss", None
    if _is_declared(left, tokenizer):
        return f"{probe!a} becomes {left!r}, the token for what is unknown", None
    likely = ["replaced" if left else "dropped"]
    if from_library(tokenizer):
        likely.insert(0, "no_unknown")
    lost = "became another" if left else "is gone"
    seen = f"{text!r} is encoded as {ids[:8]} and decoded as {back!r}: {probe!r} {lost}"
    evidence: dict[str, Any] = {"text": text, "ids": ids[:8], "decoded": ascii(back)}
    measured = f"{probe!a} {f'becomes {left!r}' if left else 'is dropped'}"
    return measured, finding("GG622", seen, likely=likely, evidence=evidence)


def _change(text: str, back: str) -> str:
    """The key of the cause that the difference points to."""
    if text in back:
        return "added"
    if _without_blanks(text) == _without_blanks(back):
        return "joined" if len(back) > len(text) or len(text.split()) > len(back.split()) else "normalised"
    if _soft(text) == _soft(back):
        return "normalised"
    if len(text) == len(back):
        differing = {b for a, b in zip(text, back, strict=True) if a != b}
        return "replaced" if len(differing) == 1 else "tables"
    return "dropped" if _is_subsequence(back, text) else "replaced" if _has_unknown(text, back) else "tables"


def _has_unknown(text: str, back: str) -> bool:
    """True where `back` is the text, but for a token for what is unknown."""
    return any(_is_subsequence(_soft(back.replace(sign, "")), _soft(text)) for sign in UNKNOWN if sign in back)


def _is_subsequence(short: Sequence[str], long: Sequence[str]) -> bool:
    rest = iter(long)
    return all(char in rest for char in short)


def _without_blanks(text: str) -> str:
    return "".join(text.split())


def _soft(text: str) -> str:
    """What normalisers leave alone: no case, no accents, no compatibility forms, no blanks."""
    apart = unicodedata.normalize("NFKD", text).casefold()
    return _without_blanks("".join(char for char in apart if not unicodedata.combining(char)))


def _is_declared(token: str, tokenizer: Tokenizer) -> bool:
    if "unk" in token.lower() or token == "\u2047":  # sentencepiece writes its unknown token as that sign
        return True
    raw = tokenizer.raw
    texts = [getattr(raw, name, None) for name in ("unk_token", "unknown_token", "unk", "unk_char")]
    ids = [getattr(raw, name, None) for name in ("unk_id", "unk_token_id", "unk_index")]
    named = [tokenizer.tokens[i] for i in ids if isinstance(i, int) and 0 <= i < len(tokenizer.tokens)]
    return bool(token) and token in [*texts, *named]
