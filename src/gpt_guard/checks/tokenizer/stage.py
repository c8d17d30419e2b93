"""Stage 3: the tokenizer by itself, against the model, and against the checkpoint by what its ids mean."""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from gpt_guard.catalogue import finding
from gpt_guard.checkpoint.fingerprint import Difference, file_digest, token_list, tokenizer_digest
from gpt_guard.checkpoint.fingerprint.record import SHORT, tokenizer_finding
from gpt_guard.checkpoint.read import take_apart
from gpt_guard.checkpoint.reporter import Reporter
from gpt_guard.checks.runner.base import Need, Stage, Subject
from gpt_guard.checks.tokenizer.roundtrip import decode_part, roundtrip, sample_of, unknown_character
from gpt_guard.checks.tokenizer.tokenizers import Tokenizer, is_character_list, special_ids
from gpt_guard.checks.tokenizer.vocabulary import RESERVED, model_rows
from gpt_guard.errors import CheckpointError, GuardUsageError
from gpt_guard.records import CheckResult, Finding, Severity

ENDS = 5
SAMPLE = 2000
"""Ids that are decoded and encoded again, and characters of a text: enough to meet every common token."""
PADDED_TO = 8
"""Vocabularies are rounded up to a multiple of this, or of 64 or 128, so that matrices fit tensor cores."""
_ZERO_WIDTH = frozenset("\u200b\u200c\u200d\u2060\u180e\u00ad")
_JOINERS = frozenset("\u200c\u200d")
"""Arabic, Indic and emoji text needs these two."""
_CONTENTS = ("chars", "itos", "stoi", "vocab", "vocabulary", "tokenizer")
_SHA256 = re.compile("[0-9a-f]{64}")
_SAME = "decode(encode(text)) == text"


TOKENIZER = Need[Tokenizer](
    lambda subject: subject.tokenizer,
    lambda subject: "its file cannot be used" if "tokenizer" in subject.unusable else "no tokenizer was given",
)


class TokenizerStage(Stage):
    """Size, duplicates, both ends, round trips, unknown and invisible characters, the model's and checkpoint's own."""

    number = 3
    name = "tokenizer"
    title = "Tokenizer"
    needs = (TOKENIZER,)

    def run(self, subject: Subject) -> Iterator[CheckResult]:
        tokenizer = TOKENIZER(subject)
        yield self._size(tokenizer)
        if tokenizer.tokens:
            yield self._distinct(tokenizer.tokens)
            yield self._ends(tokenizer.tokens)
            yield self._invisible(tokenizer)
        yield self._sample(tokenizer, subject.text)
        if subject.data:
            yield self._decoded(tokenizer, subject)
        yield self._unknown(tokenizer)
        if (rows := model_rows(subject)) is not None and tokenizer.size:
            yield self._model(tokenizer.size, *rows)
        yield self._checkpoint(tokenizer, subject)

    def _size(self, tokenizer: Tokenizer) -> CheckResult:
        title, expected = "size", "2 tokens or more"
        if tokenizer.size >= 2:
            return self.line(title, f"{tokenizer.size:,} tokens", expected, tokenizer_size=tokenizer.size)
        if not tokenizer.tokens and tokenizer.size == 0:
            return self.skipped(title, f"a {type(tokenizer.raw).__name__} does not tell how many tokens it has")
        seen = f"the vocabulary has {tokenizer.size} tokens: {tokenizer.tokens!r}"
        found = finding("GG625", seen, likely=["empty_text"], evidence={"size": tokenizer.size})
        return self.line(title, f"{tokenizer.size} tokens", expected, found, tokenizer_size=tokenizer.size)

    def _distinct(self, tokens: Sequence[str]) -> CheckResult:
        title, expected = "distinct", "each token once"
        twice = [token for token, count in Counter(tokens).items() if count > 1]
        if not twice:
            return self.line(title, f"{len(tokens):,} different tokens", expected)
        places = {token: [i for i, other in enumerate(tokens) if other == token] for token in twice[:ENDS]}
        listed = "; ".join(f"{token!r} at ids {', '.join(map(str, ids[:ENDS]))}" for token, ids in places.items())
        more = f" and {len(twice) - ENDS} more" if len(twice) > ENDS else ""
        special = all(len(token) > 1 for token in twice) and is_character_list(tokens)
        found = finding(
            "GG620",
            f"{listed}{more}",
            likely=["special" if special else "list"],
            evidence={"duplicates": {ascii(token): ids for token, ids in places.items()}},
        )
        return self.line(title, f"{len(tokens) - len(twice):,} of {len(tokens):,} tokens", expected, found)

    def _ends(self, tokens: Sequence[str]) -> CheckResult:
        # Escaped: the two ends are where blanks, marks and letters that look like others stand.
        first = ", ".join(ascii(token[:20]) for token in tokens[:ENDS])
        last = ", ".join(ascii(token[:20]) for token in tokens[-ENDS:])
        return self.line("both ends", first if len(tokens) <= ENDS else f"{first} ... {last}")

    def _invisible(self, tokenizer: Tokenizer) -> CheckResult:
        title = "invisible characters"
        # Byte-level tables spell each byte as a character: those are bytes, not characters of a text.
        found = invisible(tokenizer.tokens) if is_character_list(tokenizer.tokens) else []
        if not found:
            return self.line(title, "none")
        strange = [one for one in found if one.cause]
        listed = ", ".join(map(str, (strange or found)[:ENDS]))
        more = f" and {len(found) - ENDS} more" if len(found) > ENDS else ""
        notes = []
        if strange:
            causes = [one.cause for one in strange if one.cause]
            evidence: dict[str, Any] = {"characters": {str(one.id): ascii(one.char) for one in found}}
            notes = [finding("GG623", ", ".join(map(str, strange)), likely=causes, evidence=evidence)]
        return self.line(title, f"{listed}{more}", "", notes)

    def _sample(self, tokenizer: Tokenizer, text: str | None) -> CheckResult:
        title = "round trip"
        sample = sample_of(tokenizer, text)
        if sample is None:
            return self.skipped(title, "no text was given that it could be asked with")
        part, what = sample[0][:SAMPLE], sample[1]
        if not is_character_list(tokenizer.tokens):
            try:
                tokenizer.encode(part)
            except Exception as error:
                return self.line(title, f"{what} is refused ({type(error).__name__}), not damaged", _SAME)
        return self._trip(tokenizer, title, part, what)

    def _decoded(self, tokenizer: Tokenizer, subject: Subject) -> CheckResult:
        name, ids = next(iter(subject.data.items()))
        title = f"round trip of {name} data"
        parts = _usable(ids, tokenizer)
        count = sum(map(len, parts))
        if not count:
            return self.skipped(title, "holds no ids that this tokenizer could decode")
        what = f"{count} decoded ids of {name}"
        try:
            texts = [decode_part(tokenizer, part) for part in parts]
        except Exception as error:  # the user's own code may raise anything
            seen = f"decoding {count} ids of {name}: {type(error).__name__}: {str(error)[:200]}"
            found = finding("GG621", seen, likely=["raised", "tables"], evidence={"ids": parts[0][:20]})
            return self.line(title, type(error).__name__, _SAME, found)
        # One at a time: where two parts meet they would make words that the text does not have.
        return max((self._trip(tokenizer, title, text, what) for text in texts), key=_worst)

    def _trip(self, tokenizer: Tokenizer, title: str, text: str, what: str) -> CheckResult:
        found = roundtrip(tokenizer, text, what)
        measured = "another text comes back"
        if found is None:
            measured = f"unchanged ({what})"
        elif found.severity is Severity.INFO:
            measured = f"{what}: changed only as this tokenizer does by design"
        return self.line(title, measured, _SAME, found)

    def _unknown(self, tokenizer: Tokenizer) -> CheckResult:
        measured, found = unknown_character(tokenizer)
        return self.line("unknown character", measured, "KeyError, bytes, or a token of its own; not silence", found)

    def _model(self, size: int, rows: int, where: str) -> CheckResult:
        title, expected = "against the model", f"at most {rows:,} ids ({where})"
        if size > rows:
            seen = f"the tokenizer has {size} ids, but {where}: ids {rows} ... {size - 1} have no row"
            likely = ["off_by_one", "added"] if size == rows + 1 else ["hard_coded", "added"]
            found = finding("GG624", seen, likely=likely, evidence={"tokenizer": size, "model": rows})
            return self.line(title, f"{size:,} ids", expected, found)
        notes: list[Finding] = []
        if rows % PADDED_TO and rows - size > RESERVED:
            seen = f"the tokenizer has {size} ids, and {where}: {rows - size} rows belong to no token"
            notes = [finding("GG626", seen, evidence={"tokenizer": size, "model": rows})]
        unused = f", {rows - size} rows unused" if rows > size else ""
        return self.line(title, f"{size:,} ids{unused}", expected, notes)

    def _checkpoint(self, tokenizer: Tokenizer, subject: Subject) -> CheckResult:
        title = "fingerprint"
        try:
            ours = tokenizer_digest(tokenizer.tokens or tokenizer.raw)
        except GuardUsageError as error:
            return self.skipped(title, str(error))
        theirs, chars = recorded(subject)
        tokens = list(tokenizer.tokens) or None
        if theirs is None:
            known = "no checkpoint" if subject.payload is None else "a checkpoint that carries none"
            return self.line(title, f"{ours[:SHORT]}, to compare with {known}", tokenizer_fingerprint=ours)
        expected = f"{theirs[:SHORT]}, as in the checkpoint"
        if theirs in _digests(ours, tokens, subject) or (chars is not None and chars == tokens):
            return self.line(title, ours[:SHORT], expected, tokenizer_fingerprint=ours)
        where = f"the checkpoint {subject.paths['checkpoint']}" if "checkpoint" in subject.paths else "the checkpoint"
        difference = Difference(part="tokenizer", ours=ours, theirs=theirs)
        found = tokenizer_finding(difference, where, chars, tokens)
        return self.line(title, ours[:SHORT], expected, found, tokenizer_fingerprint=ours)


def recorded(subject: Subject) -> tuple[str | None, list[str] | None]:
    """Fingerprint and tokens of the tokenizer that the checkpoint was made with, as far as it carries them.

    Beside our own entries, `chars`, `stoi`, `itos` and `vocab` are read, as hand-written training scripts save them.
    """
    if subject.payload is None:
        return None, None
    try:
        stored = take_apart(Path("checkpoint"), subject.payload, Reporter(lambda finding: None))
    except CheckpointError:  # what holds no weights is for the stage that loads it
        return None, None
    digest, chars = stored.stamp.parts.get("tokenizer"), stored.stamp.tokenizer_chars
    if digest is not None and not _SHA256.fullmatch(digest):
        digest = None  # a name or a digest of another kind, which nothing here could be compared with
    for key in _CONTENTS:
        if chars is None and isinstance(stored.extra.get(key), (dict, list, tuple)):
            try:
                chars = token_list(stored.extra[key])
            except GuardUsageError:  # an entry of that name which is no vocabulary
                chars = None
    if digest is None and chars is not None:
        digest = tokenizer_digest(chars)
    elif digest is not None and chars is not None and tokenizer_digest(chars) != digest:
        chars = None  # the list beside the digest is not the one that was digested: show neither
    return digest, chars


def _worst(result: CheckResult) -> int:
    return 2 if result.status == "failed" else len(result.findings)


def _digests(ours: str, tokens: list[str] | None, subject: Subject) -> set[str]:
    """Our digest of the tokenizer in use, and those that a script of one's own records: of its file, text or JSON."""
    known = {ours}
    path = subject.paths.get("tokenizer")
    if path is not None and path.is_file():
        known.add(file_digest(path))
    if tokens is not None:
        texts = ("".join(tokens), json.dumps(tokens), json.dumps(tokens, ensure_ascii=False))
        known |= {sha256(text.encode("utf-8", "surrogatepass")).hexdigest() for text in texts}
    return known


def _usable(ids: Tensor, tokenizer: Tokenizer) -> list[list[int]]:
    """Ids from the front, the middle and the end of a split, without special ones and those out of range."""
    if ids.is_floating_point() or ids.is_complex() or ids.numel() == 0:
        return []
    flat, part = ids.reshape(-1), SAMPLE // 3
    starts = sorted({0, max(0, flat.numel() // 2 - part // 2), max(0, flat.numel() - part)})
    if flat.numel() <= SAMPLE:
        starts, part = [0], SAMPLE
    special = special_ids(tokenizer)
    parts = [flat[start : start + part].tolist() for start in starts]
    top = tokenizer.size or max(map(max, parts)) + 1
    return [kept for part_ids in parts if (kept := [i for i in part_ids if 0 <= i < top and i not in special])]


class Invisible(NamedTuple):
    """A character that nobody sees; `cause` is what it most likely comes from, None where it may well be meant."""

    id: int
    char: str
    name: str
    cause: str | None

    def __str__(self) -> str:
        return f"{self.char!a} {self.name} (id {self.id})"


def invisible(tokens: Iterable[str]) -> list[Invisible]:
    """All tokens of one character that cannot be seen, with their ids, in order; blanks, tabs and newlines left out."""
    single = [(index, token) for index, token in enumerate(tokens) if len(token) == 1 and token not in " \n\t"]
    return [Invisible(index, char, *kind) for index, char in single if (kind := _kind(char)) is not None]


def _kind(char: str) -> tuple[str, str | None] | None:
    """Name and cause; None for a character that can be seen."""
    category = unicodedata.category(char)
    known: dict[str, tuple[str, str | None]] = {
        "\r": ("carriage return", "line_ends"),
        "\ufeff": ("byte order mark", "bom"),
        "\ufffd": ("replacement character", "damaged"),
        "\u00a0": ("no-break space", None),
    }
    if char in known:
        return known[char]
    if char in _ZERO_WIDTH:
        return unicodedata.name(char, "zero width").lower(), None if char in _JOINERS else "zero_width"
    if category == "Cf":
        return unicodedata.name(char, "format character").lower(), "zero_width"
    if category in ("Cc", "Cs", "Co", "Cn"):
        # Vertical tab, form feed and the like have no names of their own.
        return {"Cc": "control character", "Cs": "lone surrogate"}.get(category, "unassigned"), "control"
    if category in ("Zs", "Zl", "Zp"):
        return unicodedata.name(char).lower(), None
    if category in ("Mn", "Me"):
        return unicodedata.name(char, "combining mark").lower(), None
    return None
