"""Stage 5: the batches as the loop gives them to the model, above all whether the targets are shifted by one."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby, islice, pairwise
from typing import Any

import torch
from torch import Tensor

from gpt_guard.catalogue import finding
from gpt_guard.checks.batches.form import bad_batch_shape, bad_device, bad_dtype, ignored_index, shape, too_large
from gpt_guard.checks.batches.origin import judge_places, last_target, places, runs_at_the_ends, same_rows
from gpt_guard.checks.batches.targets import (
    Batch,
    end_left_out,
    hardly_any,
    loss_ignores,
    loss_shifts,
    not_shifted,
    padding_targets,
    supervised,
)
from gpt_guard.checks.runner.base import Need, Stage, Subject
from gpt_guard.checks.token_ids.ids import id_stats, out_of_range, type_name
from gpt_guard.checks.tokenizer.tokenizers import Tokenizer
from gpt_guard.checks.tokenizer.vocabulary import id_limit, special_id, tokens_of
from gpt_guard.records import CheckResult, Finding, Severity

DRAWN = 4
"""Batches that are drawn: enough to see one that comes back, and to meet most kinds of rows."""
MOST_DRAWN, ENOUGH_ROWS, SECONDS = 16, 64, 2.0
"""More are drawn where they are small, for their rows' places; no more where drawing them takes longer than this."""
SHOWN = 24
MIN_IDS = 16
"""Two batches of fewer ids may be equal by chance where the vocabulary is small."""
FORM = ("device", "shape", "dtype", "range")
"""The lines that say whether a model can be called with the batch, in their order."""
UNUSABLE = "the given one cannot be used"
BATCH_AS_GIVEN = Need[Batch](lambda subject: subject.batch, "no batch was given, and there is no data to cut one from")


class BatchesStage(Stage):
    """Shape, dtype, device, range, shift, both sides decoded, the same batch again, and which targets count.

    The targets must be shifted by one, or by nothing where the model or `loss_fn` shifts them itself, which is
    measured. A batch that was cut from the data by these checks says nothing about the loop's own shift.
    """

    number = 5
    name = "batches"
    title = "Batches"
    needs = (BATCH_AS_GIVEN,)

    def run(self, subject: Subject) -> Iterator[CheckResult]:
        x, y = BATCH_AS_GIVEN(subject)
        # Each needs the one before: a tensor without values has no ids to compare, a float none to count.
        for check in (self._device, self._shape, self._dtype):
            yield (result := check(subject, x, y))
            if result.status == "failed":
                return
        ignore, note = ignored_index(subject, x, y)
        yield (ranges := self._range(subject, x, y, ignore, note))
        expected, why = self._expected(subject)
        drawn = self._drawn(subject)
        yield self._shift(subject, x, y, drawn, ignore, expected, why)
        yield self._decoded(subject, x, y, ignore, expected)
        yield self._again(drawn)
        yield from self._origin(subject, drawn, ignore, expected)
        batches = [(x, y), *(batch for batch in drawn if batch[0].dim() == 2 and batch[0].shape == batch[1].shape)]
        yield self._supervised(batches, ignore)
        yield self._end(subject, batches, ignore, expected)
        if ranges.status == "passed":
            if special_id(subject, "pad") is None:
                yield self._undeclared_padding(subject, drawn, ignore)
                return
            yield self._padding(subject, batches, ignore, expected)

    def _device(self, subject: Subject, x: Tensor, y: Tensor) -> CheckResult:
        title = "device"
        measured = str(x.device) if x.device == y.device else f"x {x.device}, y {y.device}"
        first = next(iter(subject.model.parameters()), None) if subject.model is not None else None
        expected = "the same for x and y" if first is None else f"{first.device}, the model's"
        found = bad_device(subject, x, y)
        if found is not None and found.severity is not Severity.ERROR:
            return self.line(title, f"{measured}, to be moved by the loop", expected)
        return self.line(title, measured, expected, found)

    def _shape(self, subject: Subject, x: Tensor, y: Tensor) -> CheckResult:
        block_size = subject.block_size
        expected = "[B, T] both" + (f", T up to {block_size}" if block_size is not None else "")
        found = bad_batch_shape(x, y, block_size, subject.ignore_index)
        return self.line("shape", f"x {shape(x)}, y {shape(y)}", expected, found, batch_shape=shape(x))

    def _dtype(self, subject: Subject, x: Tensor, y: Tensor) -> CheckResult:
        measured = type_name(x) if x.dtype == y.dtype else f"x {type_name(x)}, y {type_name(y)}"
        return self.line("dtype", measured, "int64, or what the model casts itself", bad_dtype(subject, x, y))

    def _range(self, subject: Subject, x: Tensor, y: Tensor, ignore: int, note: Finding | None) -> CheckResult:
        stats = id_stats(x)
        facts: dict[str, Any] = {} if subject.data else {"token_min": stats.low, "token_max": stats.high}
        low, high = id_stats(y)[1:3]
        measured = f"x {stats.low} ... {stats.high}, y {low} ... {high}"
        limit, why = id_limit(subject)
        expected = f"0 ... {limit - 1} ({why}), targets also {ignore}" if limit else f"targets below 0 only {ignore}"
        outside = out_of_range("x", x, stats, limit or stats.high + 1, why, tokens_of(subject))
        beyond = too_large(y, limit, why) if limit else None
        return self.line("range", measured, expected, (outside, note, beyond), **facts)

    def _shift(
        self, subject: Subject, x: Tensor, y: Tensor, drawn: list[Batch], ignore: int, expected: int, why: str
    ) -> CheckResult:
        title = "shift"
        if "batch" in subject.sources and subject.batches is None:
            return self.skipped(title, f"the batch is {subject.sources['batch']}; give your own (batch=, batches=)")
        if not subject.causal:
            return self.skipped(title, "causal=False: an encoder's targets stand where its inputs do")
        if x is y and subject.model is None:
            return self.skipped(title, "x and y are one tensor; whether the model shifts cannot be seen without it")
        found, problem = not_shifted(x, y, expected, ignore, model_known=subject.model is not None)
        for other in drawn if problem is None else ():  # some batches may be made in another way than the first
            if other[0].dim() == 2 and other[0].shape == other[1].shape:
                again, problem = not_shifted(*other, expected, ignore, model_known=subject.model is not None)
                if problem is not None:
                    found = again
                    break
        if found.positions == 0:
            return self.skipped(title, "too few targets count to tell")
        fit = f" ({found.share:.1%} of {found.positions:,} targets)"
        measured = f"none fits{fit}" if found.shift is None else f"{found.shift}{fit}"
        return self.line(title, measured, f"{expected}{why}", problem, shift=found.shift)

    def _expected(self, subject: Subject) -> tuple[int, str]:
        """The shift that the batch must have, and why where it is 0."""
        size, inputs = subject.vocab_size, subject.inputs
        if subject.loss_fn is not None:
            # A loss function of one's own is what the loop uses, whatever the model would do.
            inside = loss_shifts(subject.loss_fn, size or 16, subject.device if inputs is None else inputs[0].device)
            return (0, ": loss_fn shifts") if inside else (1, "")
        return (0, ": the model shifts inside") if subject.shifts_inside else (1, "")

    def _decoded(self, subject: Subject, x: Tensor, y: Tensor, ignore: int, shift: int) -> CheckResult:
        before, after = x[0, :SHOWN].tolist(), y[0, :SHOWN].tolist()
        expected = "the same text, one token on" if shift and subject.causal else "the same text"
        return self.line("decoded", f"{_text(subject, before, ignore)} -> {_text(subject, after, ignore)}", expected)

    def _drawn(self, subject: Subject) -> list[Batch]:
        drawn: list[Batch] = []
        begin = time.monotonic()
        for batch in islice(subject.batches(), MOST_DRAWN) if subject.batches is not None else ():
            drawn.append(batch)
            rows = sum(x.size(0) for x, _ in drawn if x.dim())
            if len(drawn) >= DRAWN and (rows >= ENOUGH_ROWS or time.monotonic() - begin > SECONDS):
                break
        return drawn

    def _origin(self, subject: Subject, drawn: list[Batch], ignore: int, shift: int) -> Iterator[CheckResult]:
        """Where the rows lie in the data, and the last target, which the shift within a row cannot show."""
        titles = ("rows in the data", "last target")
        same = [batch for batch in drawn if batch[0].dim() == 2 and batch[0].shape == batch[1].shape]
        if not same or not subject.causal:
            for title in titles:
                yield self.skipped(title, "give batches= to draw some" if subject.causal else "causal=False")
            return
        found = places(same, subject.data)
        if found is None:
            yield self.skipped(titles[0], "no training ids to look them up in, or rows too short to be told apart")
        else:
            wrong = list(judge_places(found))
            measured = f"{found.share('train'):.0%} of {found.rows} rows lie in train"
            yield self.line(titles[0], measured, "all over the training ids", wrong)
        if shift != 1:
            yield self.skipped(titles[1], "it is shifted inside: the last input has no target")
            return
        wrong_last = last_target(same, found, subject.data, ignore)
        measured = "another id" if wrong_last else "the id that follows" if found else "no roll, no constant"
        yield self.line(titles[1], measured, "the id that follows the row", wrong_last)

    def _again(self, drawn: list[Batch]) -> CheckResult:
        title, expected = "another batch each time", "different batches, different rows"
        if len(drawn) < 2:
            return self.skipped(title, "only one batch there is" if drawn else "give batches= to draw several")
        pairs = [same_batch(one, other) for one, other in pairwise(drawn)]
        repeated = [_one_row(x) for x, _ in drawn]
        reordered = same_rows(drawn) if not any(pairs) and not all(repeated) else None
        if reordered is not None:
            return self.line(title, "the same rows once more", expected, reordered)
        if not any(pairs) and not all(repeated):
            return self.line(title, f"{len(drawn)} different ones", expected)
        if any(pairs):
            measured = f"{sum(pairs)} of {len(pairs)} are the one before once more"
            likely = ["fresh_iterator", "reseeded", "drawn_once"] if all(pairs) else ["workers"]
        else:
            measured, likely = "all rows of each batch are equal", ["one_start"]
        first = drawn[0][0]
        found = finding("GG605", f"{measured}; {len(drawn)} batches of {shape(first)} were drawn", likely=likely)
        return self.line(title, measured, expected, found)

    def _supervised(self, batches: list[Batch], ignore: int) -> CheckResult:
        seen = supervised(batches, ignore)
        share = seen.targets / seen.of
        measured, expected = f"{share:.1%}, in {seen.rows} of {seen.of_rows} rows", "one or more in each row"
        found = hardly_any(seen, ignore)
        return self.line("targets that count", measured, expected, found, supervised_share=share)

    def _end(self, subject: Subject, batches: list[Batch], ignore: int, shift: int) -> CheckResult:
        title, eos = "end of sequence", special_id(subject, "eos")
        if not subject.causal:
            return self.skipped(title, "causal=False: an encoder does not end a sequence")
        if eos is None:
            return self.skipped(title, "no end-of-sequence id is known (eos_id=...)")
        counted, left_out = end_left_out(batches, eos, shift, ignore)
        measured, expected = f"id {eos.id} is a target {counted} times", "a target wherever the text before it is"
        if counted or not left_out:
            return self.line(title, measured if counted else f"id {eos.id} ends no text in these rows", expected)
        seen = f"id {eos.id} ({eos.source}) follows a target that counts {left_out} times, and is never one itself"
        pad = special_id(subject, "pad")
        likely = ["mask_short", "template"] if pad is not None and pad.id != eos.id else ["pad_is_eos", "mask_short"]
        found = finding("GG607", seen, likely=likely, evidence={"eos_id": eos.id, "left_out": left_out})
        return self.line(title, measured, expected, found)

    def _undeclared_padding(self, subject: Subject, drawn: list[Batch], ignore: int) -> CheckResult:
        """No id is known for padding: rows that end, or begin, in a run of one id that is not so in the text."""
        title, expected = "padding", "no run of one id that the text does not have"
        same = [batch for batch in drawn if batch[0].dim() == 2 and batch[0].shape == batch[1].shape]
        found = places(same, subject.data) if same and subject.causal else None
        if found is None:
            return self.skipped(title, "no padding id is known (pad_id=...)")
        inside = found.starts["train"] >= 0
        run = None if float(inside.float().mean()) > 0.5 else runs_at_the_ends(same, ignore)
        if run is None:
            return self.line(title, "no padding id is known; the rows are as in the text", expected)
        index, rows, mean = run
        seen = (
            f"{rows} of {found.rows} rows end or begin in a run of id {index}, {mean:.1f} targets long on average, "
            f"which all count, and the training ids do not have such rows"
        )
        wrong = finding("GG608", seen, likely=["padded_rows"], evidence={"pad_id": index, "rows": rows})
        return self.line(title, f"id {index} in {rows} rows", expected, wrong)

    def _padding(self, subject: Subject, batches: list[Batch], ignore: int, shift: int) -> CheckResult:
        title, pad, eos = "padding", special_id(subject, "pad"), special_id(subject, "eos")
        if pad is None:
            return self.skipped(title, "no padding id is known (pad_id=...)")
        if pad.id == ignore:
            return self.line(title, f"id {pad.id} is ignored by the loss", "no target")
        places = [(x, y, padding_targets(x, y, pad, eos, shift)) for x, y in batches]
        count = sum(int(where.sum()) for _, _, where in places)
        measured, expected = f"id {pad.id} is a target {count} times", "never a target"
        if not count:
            return self.line(title, measured, expected)
        worst = max(places, key=lambda each: int(each[2].sum()))
        if loss_ignores(subject, *worst, shift):
            return self.line(title, f"{measured}, which the loss leaves out by itself", expected)
        total = sum(y.numel() for _, y in batches)
        seen = f"{count} of {total} targets are padding (id {pad.id}, {pad.source})"
        found = finding("GG608", seen, evidence={"pad_id": pad.id, "targets": count, "share": count / total})
        return self.line(title, measured, expected, found)


class BatchFormStage(BatchesStage):
    """The stage as far as those lines."""

    def run(self, subject: Subject) -> Iterator[CheckResult]:
        for line in super().run(subject):
            yield line
            if line.title == FORM[-1]:
                return


def unusable(lines: Iterable[CheckResult]) -> list[CheckResult]:
    """Those lines that tell that a model cannot be called with the batch.

    One on another device can, for the checks move it; one without values (on the meta device) is all that fails there.
    """
    failed = [line for line in lines if line.stage == BatchesStage.name and line.status == "failed"]
    return [line for line in failed if line.title in (*FORM[1:], BatchesStage.title) or "meta" in line.measured]


def without_batch(subject: Subject) -> Subject:
    """The subject for the stages that follow: they ask with ids of their own, or say that there is no batch.

    An id out of range would otherwise fail each of them, and on a CUDA device end all work in this process.
    """
    return replace(subject, batch=None, batches=None, sources={**subject.sources, "batch": UNUSABLE})


def same_batch(one: Batch, other: Batch) -> bool:
    """True where both have the same ids and targets; constant ids say nothing, nor do a few."""
    if one[0].numel() < MIN_IDS:
        return False
    same = all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(one, other, strict=True))
    return same and not bool((one[0] == one[0].reshape(-1)[0]).all())


def _one_row(x: Tensor) -> bool:
    """True where a batch is one row over and over."""
    return x.dim() == 2 and x.size(0) > 1 and bool((x == x[:1]).all()) and not bool((x == x[0, 0]).all())


def _text(subject: Subject, ids: list[int], ignore: int) -> str:
    """Decoded, with a dot for each target that does not count."""
    if subject.tokenizer is None:
        return str(["." if index == ignore else index for index in ids[:12]]).replace("'", "")
    parts = [
        "\N{MIDDLE DOT}" * len(list(part)) if ignored else _words(subject.tokenizer, list(part))
        for ignored, part in groupby(ids, lambda index: index == ignore)
    ]
    return repr("".join(parts))


def _words(tokenizer: Tokenizer, ids: list[int]) -> str:
    try:
        return tokenizer.decode(ids)
    except Exception:  # a part of a character, or an id without a token
        return f"<{' '.join(map(str, ids[:8]))}>"
