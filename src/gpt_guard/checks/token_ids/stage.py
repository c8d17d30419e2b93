"""Stage 4: the token ids of each split, before any batch is cut from them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gpt_guard.catalogue import finding
from gpt_guard.checks.runner.base import Need, Stage, Subject
from gpt_guard.checks.token_ids.copies import (
    COMMON_OVERLAP,
    MAX_OVERLAP,
    MAX_REPEATED,
    overlap,
    part_of,
    repetition,
    sampled,
    window_length,
)
from gpt_guard.checks.token_ids.ids import (
    IdStats,
    bad_shape,
    id_stats,
    is_integer,
    not_integers,
    out_of_range,
    runs,
    too_narrow,
    type_name,
    wrapped,
)
from gpt_guard.checks.tokenizer.vocabulary import RESERVED, id_limit, special_id, tokens_of
from gpt_guard.records import CheckResult, Finding, Severity

MIN_RUN = 256
"""Runs up to this are rulers and indentation: the longest are 4 in WikiText-2 and 80 in Python's standard library."""
RUN_SHARE = 0.01
"""Less than one id in a hundred changes no loss that anyone would look at."""


class TokenIdsStage(Stage):
    """Dtype, shape, range, runs, repetition, use of the vocabulary, a decoded sample, overlap between splits.

    `window` is the length, in ids, of the stretches that are compared; by default it follows from the vocabulary.
    `max_overlap` and `max_repeated` are shares of such windows from which the overlap of splits, and the repetition
    within training, fail.
    """

    number = 4
    name = "token-ids"
    title = "Token ids"
    needs = (Need(lambda subject: subject.data or None, lambda subject: _why_none(subject)),)

    def __init__(
        self, *, window: int | None = None, max_overlap: float = MAX_OVERLAP, max_repeated: float = MAX_REPEATED
    ) -> None:
        self.window = window
        self.max_overlap = max_overlap
        self.max_repeated = max_repeated

    def run(self, subject: Subject) -> Iterator[CheckResult]:
        usable: dict[str, Tensor] = {}
        figures: dict[str, IdStats] = {}
        for name, ids in subject.data.items():
            yield (form := self._form(name, ids, subject))
            if form.status == "failed":
                continue
            usable[name], figures[name] = ids, id_stats(ids)
            low = min(stats.low for stats in figures.values())
            high = max(stats.high for stats in figures.values())
            yield self._range(name, ids, figures[name], subject, token_min=low, token_max=high)
            yield self._runs(name, ids, subject)
        if not usable:
            return
        name, ids = next(iter(usable.items()))
        yield self._vocabulary(name, ids, figures[name], subject)
        yield self._sample(name, ids, subject)
        if (n := self._length(ids, subject)) is not None:
            yield self._repetition(name, ids, n)
        if "train" in usable:
            train = usable.pop("train")
            for other, ids in usable.items():
                yield self._overlap(other, ids, train, subject)

    def _form(self, name: str, ids: Tensor, subject: Subject) -> CheckResult:
        title, block_size = f"{name}: form", subject.block_size
        shape = "x".join(str(size) for size in ids.shape) or "a single number"
        measured = f"{type_name(ids)} [{shape}]"
        expected = "integers [N]" + (f", N above block_size {block_size}" if block_size is not None else "")
        found: Finding | None = None
        if not is_integer(ids):
            found = not_integers(name, ids)
        elif (found := bad_shape(name, ids, block_size)) is None:
            vocab_size = max(_sizes(subject), default=0)
            found = too_narrow(name, ids, vocab_size, tokens_of(subject)) or self._short(name, ids, block_size)
        if found is None and ids.dtype not in (torch.int64, torch.int32):
            measured += ", to be cast to int64 in the batch"
        return self.line(title, measured, expected, found)

    def _short(self, name: str, ids: Tensor, block_size: int | None) -> Finding | None:
        least = (block_size or 1) + 1 if ids.dim() == 1 else 1
        if ids.numel() >= least:
            return None
        seen = f"{name} has {ids.numel()} ids; one row of block_size {block_size} and its targets take {least}"
        return finding("GG633", seen, evidence={"ids": ids.numel(), "needed": least}, cause_id=name)

    def _range(self, name: str, ids: Tensor, stats: IdStats, subject: Subject, **facts: Any) -> CheckResult:
        title, measured = f"{name}: range", f"{stats.low} ... {stats.high}"
        size = subject.tokenizer.size if subject.tokenizer is not None else 0
        limit, why = id_limit(subject)
        if not limit:
            unknown = "unknown: neither a model nor a tokenizer tells the vocabulary's size"
            return self.line(title, measured, unknown, **facts)
        expected = f"0 ... {limit - 1} ({why})"
        found = out_of_range(name, ids, stats, limit, why, tokens_of(subject)) or wrapped(name, stats, max(limit, size))
        unnamed = stats.counts[size:].nonzero().flatten() + size if size else stats.counts.new_empty(0)
        special = {one.id for one in (special_id(subject, "eos"), special_id(subject, "pad")) if one is not None}
        strange = [index for index in unnamed.tolist() if index not in special]
        if found is not None or not strange:
            return self.line(title, measured, expected, found, **facts)
        seen = f"{name}: the model has rows for ids {strange[:5]}, but the tokenizer ends at {size - 1}"
        severity = Severity.ERROR
        if len(strange) <= RESERVED:  # a loop may add an end of text or a padding token itself
            severity, measured = Severity.WARNING, f"{measured}, {len(strange)} without a token"
        else:
            expected = f"0 ... {size - 1} (the tokenizer)"
        likely, evidence = ["special", "other_tokenizer"], {"ids": strange[:20]}
        found = finding("GG631", seen, likely=likely, severity=severity, evidence=evidence, cause_id=name)
        return self.line(title, measured, expected, found, **facts)

    def _runs(self, name: str, ids: Tensor, subject: Subject) -> CheckResult:
        title, least = f"{name}: runs", max(MIN_RUN, subject.block_size or 0) + 1
        longest, long = runs(ids, least)
        pad = special_id(subject, "pad")
        if pad is not None and pad.declared:
            long = [run for run in long if run.id != pad.id]
        what = _shown(longest.id, subject)
        measured, expected = f"longest: {longest.length} times {what}", f"below {least} times the same id"
        tail = [run for run in long if run.start + run.length == ids.numel()]
        share = sum(run.length for run in long) / ids.numel()
        if not tail and share < RUN_SHARE:
            return self.line(title, measured, expected)
        worst = max(long, key=lambda run: run.length)
        end = "to the very end" if tail else f"in {len(long)} runs"
        seen = (
            f"{name}: {share:.1%} of the ids are long runs of one id, {end}; the longest is {worst.length} times "
            f"{_shown(worst.id, subject)} from {worst.start} on"
        )
        likely = ["preallocated", "corrupt"] if tail else ["padding"] if len(long) > 2 else ["corrupt"]
        evidence = {"start": worst.start, "length": worst.length, "id": worst.id, "share": share}
        found = finding("GG635", seen, likely=likely, evidence=evidence, cause_id=name)
        return self.line(title, measured, expected, found)

    def _vocabulary(self, name: str, ids: Tensor, stats: IdStats, subject: Subject) -> CheckResult:
        title, size = "vocabulary used", max(_sizes(subject), default=0)
        expected = "more than 2 different ids"
        measured = f"{stats.distinct:,} different ids in {name}"
        if size:
            unseen = max(0, size - stats.distinct) / size
            measured = f"{stats.distinct:,} of {size:,} ids in {name}, {unseen:.1%} never seen"
        few = stats.distinct <= 2 and not (0 < size <= 4 and stats.distinct > 1)
        padded = _every_second_is_zero(ids)
        if stats.total < MIN_RUN or not (few or padded):
            return self.line(title, measured, expected, tokens_used=stats.distinct)
        only = stats.counts.nonzero().flatten().tolist()
        what = f"only {stats.distinct} different: {only}" if few else "every second one is 0"
        likely = ["wrong_tensor"] if few else ["wrong_dtype"]
        evidence = {"distinct": stats.distinct}
        found = finding("GG637", f"{name}: {stats.total} ids, {what}", likely=likely, evidence=evidence, cause_id=name)
        return self.line(title, measured, expected, found, tokens_used=stats.distinct)

    def _sample(self, name: str, ids: Tensor, subject: Subject) -> CheckResult:
        first = ids.reshape(-1)[:64].tolist()
        title, tokenizer = f"{name} decoded", subject.tokenizer
        if tokenizer is None:
            return self.line(title, f"{first[:16]} ... (no tokenizer to decode them with)")
        try:
            text = tokenizer.decode(first)
        except Exception as error:  # ids out of range, or half a character: other lines say so where it is wrong
            return self.skipped(title, f"{type(error).__name__} for {first[:16]}")
        return self.line(title, f"{text[:100]!r} ...", "text that a person can read")

    def _repetition(self, name: str, ids: Tensor, n: int) -> CheckResult:
        title, expected = f"{name}: repetition", f"below {self.max_repeated:.0%} of windows of {n} ids occur again"
        again = repetition(sampled(ids), n)
        measured = f"{again.share:.1%}{part_of(ids)}"
        if again.share < self.max_repeated or not again.windows:
            return self.line(title, measured, expected)
        first, second = ids.reshape(-1).tensor_split(2)
        twice = torch.equal(first, second)
        rest = "; the second half is the first once more" if twice else ""
        seen = f"{name}: {again.share:.1%} of the windows of {n} ids occur more than once{rest}"
        likely = ["appended"] if twice else ["periodic"] if again.share > 0.99 else ["same_document"]
        found = finding("GG636", seen, likely=likely, evidence=again._asdict(), cause_id=name)
        return self.line(title, measured, expected, found)

    def _overlap(self, name: str, ids: Tensor, train: Tensor, subject: Subject) -> CheckResult:
        title = f"{name} in train"
        n = self._length(ids, subject)
        if n is None:
            return self.skipped(title, f"{name} is too short to tell a copy from chance")
        expected = f"below {self.max_overlap:.0%} of windows of {n} ids"
        shared = overlap(sampled(ids), sampled(train), n)
        measured = f"{shared.share:.1%}{part_of(train)}"
        if shared.share < min(COMMON_OVERLAP, self.max_overlap) or shared.first is None:
            return self.line(title, measured, expected)
        fails = shared.share >= self.max_overlap
        whole = ["same_file", "rows_split"] if shared.share > 0.98 else ["rows_split", "duplicates"]
        same = " (the two are equal)" if ids.shape == train.shape and torch.equal(ids.long(), train.long()) else ""
        text = _decoded(sampled(ids)[shared.first : shared.first + n], subject)
        found = finding(
            "GG638",
            f"{shared.share:.1%} of the windows of {n} ids in {name} occur in train{same}; the first reads {text}",
            likely=whole if fails else ["boilerplate", "duplicates"],
            severity=Severity.ERROR if fails else Severity.WARNING,
            evidence={**shared._asdict(), "window": n},
            cause_id=name,
        )
        return self.line(title, measured, expected, found)

    def _length(self, ids: Tensor, subject: Subject) -> int | None:
        """Ids in a window; None where the split is too short for two of them."""
        n = self.window or window_length(ids.numel(), max(_sizes(subject), default=0))
        return n if ids.numel() >= 2 * n else None


def _why_none(subject: Subject) -> str:
    unusable = [kind for kind in subject.unusable if kind not in ("tokenizer", "checkpoint")]
    return "the files cannot be used" if unusable else "no token ids were given (data=...)"


def _sizes(subject: Subject) -> Iterator[int]:
    """What the tokenizer and the model say the size of the vocabulary is."""
    if subject.vocab_size is not None:
        yield subject.vocab_size
    if subject.tokenizer is not None and subject.tokenizer.size:
        yield subject.tokenizer.size


def _every_second_is_zero(ids: Tensor) -> bool:
    """True for int64 that was read as int32: the upper half of each small number is 0. Reads the first 2^20 ids."""
    flat = ids.reshape(-1)[: 2**20].long()
    odd, even = flat[1::2], flat[::2]
    return bool((odd == 0).all() != (even == 0).all()) and odd.numel() > 0


def _shown(index: int, subject: Subject) -> str:
    tokens = tokens_of(subject)
    return f"{tokens[index]!a} (id {index})" if 0 <= index < len(tokens) else f"id {index}"


def _decoded(ids: Tensor, subject: Subject) -> str:
    sample = ids[:100].tolist()
    try:
        return repr(subject.tokenizer.decode(sample)[:100]) if subject.tokenizer is not None else str(sample[:16])
    except Exception:  # what decode cannot do is the tokenizer stage's to say
        return str(sample[:16])
