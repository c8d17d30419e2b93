"""Stage 6: what forward takes and returns."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import suppress

from torch import Tensor, nn

from gpt_guard.catalogue import finding
from gpt_guard.checks.runner.base import Stage, Subject
from gpt_guard.checks.runner.forward import UnknownOutput, call, project_loss, raised, takes_targets
from gpt_guard.checks.runner.perturb import probe_ids, vocabulary
from gpt_guard.checks.shapes.block_size import block_size_lines
from gpt_guard.checks.shapes.foreign_device import Elsewhere, run_elsewhere
from gpt_guard.checks.shapes.logit_shape import distinct_sizes, layout_of, widths_of
from gpt_guard.hooks.isolation.eval_no_grad import quiet
from gpt_guard.records import CheckResult, Finding
from gpt_guard.records.render import number

_PADDED = 128
"""A vocabulary is often padded to a multiple of 64 or 128 for the matrix units: that many rows more are no mistake."""


class ShapesStage(Stage):
    """Logits [B, T, V], the vocabulary, one finite loss, block_size, short rows, and tensors on the wrong device.

    All in eval mode and without gradient.
    """

    number = 6
    name = "shapes"
    title = "Forward: shapes, sizes, devices"

    def missing(self, subject: Subject) -> str | None:
        """A model, and ids to call it with."""
        if subject.model is None:
            return subject.sources.get("model", "no model")
        return "neither a batch nor vocab_size tells which ids the model takes" if vocabulary(subject) is None else None

    def run(self, subject: Subject) -> Iterator[CheckResult]:
        """One line per question. An exception in the first forward ends the stage: nothing else can be asked."""
        model = subject.model
        if model is None:
            return
        with quiet(model):
            length = _length_that_works(model, subject)
            logits = yield from self._layout(model, subject, length)
            if logits is None:
                return
            yield self._dtype(logits)
            yield self._vocabulary(logits, subject)
            if (loss := self._loss(model, subject, length)) is not None:
                yield loss
            yield from block_size_lines(self, model, subject)
            yield self._short(model, subject, length)
        yield self._device(model, probe_ids(subject, length=length))

    def _layout(self, model: nn.Module, subject: Subject, whole: int) -> Generator[CheckResult, None, Tensor | None]:
        title, expected = "logits", "[B, T, V]"
        rows, length = distinct_sizes(whole, subject.vocab_size, widths_of(model))
        x = probe_ids(subject, rows, length)
        try:
            logits = call(model, x).logits
        except UnknownOutput as error:
            yield self.failed(title, "not found", expected, finding("GG640", str(error), likely=["predictions"]))
            return None
        found = layout_of(logits, rows, length, subject.vocab_size, widths_of(model))
        measured = f"{list(logits.shape)} is {found.letters}"
        if not found.cause:
            yield self.passed(title, f"{measured} for ids {list(x.shape)}", expected)
            return logits
        seen = f"For ids {list(x.shape)} the model returns {list(logits.shape)}, which is {found.letters}."
        yield self.failed(title, measured, expected, finding("GG640", seen, likely=[found.cause]))
        return None

    def _dtype(self, logits: Tensor) -> CheckResult:
        name = str(logits.dtype).removeprefix("torch.")
        if logits.is_floating_point():
            return self.passed("dtype of the logits", name, "floating point")
        seen = f"The logits are {name}."
        cause = "complex" if logits.is_complex() else "argmax"
        return self.failed("dtype of the logits", name, "floating point", finding("GG646", seen, likely=[cause]))

    def _vocabulary(self, logits: Tensor, subject: Subject) -> CheckResult:
        title, scores = "vocabulary", logits.size(-1)
        sizes = {}
        if subject.vocab_size is not None:
            sizes[subject.sources.get("vocab_size", "vocab_size")] = subject.vocab_size
        if subject.tokenizer is not None and subject.tokenizer.size > 0:
            sizes["the tokenizer"] = subject.tokenizer.size
        if not sizes:
            return self.passed(title, f"{scores} scores per position", "")
        source, needed = max(sizes.items(), key=lambda item: item[1])
        expected = f"{needed}, by {source}"
        if scores >= needed:
            spare = f", {scores - needed} more than needed" if scores > needed else ""
            padding = " (padding)" if 0 < scores - needed < _PADDED else ""
            return self.passed(title, f"{scores} scores per position{spare}{padding}", expected)
        seen = f"The logits have {scores} scores per position; {needed} ids are in use, by {source}."
        likely = "special" if source == "the tokenizer" and needed - scores < 16 else "config"
        return self.failed(title, scores, expected, finding("GG641", seen, likely=[likely]))

    def _loss(self, model: nn.Module, subject: Subject, length: int) -> CheckResult | None:
        if subject.inputs is None or (subject.loss_fn is None and not takes_targets(model)):
            return None
        x, y = subject.inputs
        x, y = x[:4, :length], y[:4, :length]
        loss = project_loss(model, x, y, subject.loss_fn)
        if loss is None:
            return self.skipped("loss", "the model takes targets and returns no loss as a tensor")
        title, expected = "loss", "one finite number"
        if loss.numel() != 1:
            seen = f"The loss has shape {list(loss.shape)} for targets {list(y.shape)}."
            return self.failed(title, list(loss.shape), expected, finding("GG642", seen, likely=["unreduced"]))
        if bool(loss.isfinite().all()):
            return self.passed(title, number(float(loss)), expected)
        if bool((y == subject.ignore_index).all()):
            likely = ["all_ignored"]
        else:
            likely = ["log_of_zero"] if bool(call(model, x).logits.isfinite().all()) else ["logits"]
        seen = f"The loss is {number(float(loss))} before the first step."
        return self.failed(title, number(float(loss)), expected, finding("GG642", seen, likely=likely))

    def _short(self, model: nn.Module, subject: Subject, length: int) -> CheckResult:
        title = "one row of one token" if subject.causal else "one row"
        x = probe_ids(subject, 1, 1 if subject.causal else length)
        try:
            logits = call(model, x).logits
        except Exception as error:
            told = raised(error, f"the model called with ids {list(x.shape)}")
            found = finding("GG644", told.seen, likely=_too_rigid(told.seen), where=told.where)
            return self.failed(title, type(error).__name__, "logits [1, T, V]", found)
        if logits.dim() == 3 and logits.shape[:2] == x.shape and bool(logits.isfinite().all()):
            return self.passed(title, list(logits.shape), "logits [1, T, V], finite")
        finite = logits.dim() == 3 and logits.shape[:2] == x.shape
        seen = f"For ids {list(x.shape)} the logits are {list(logits.shape)}{', and not finite' if finite else ''}."
        longer = logits.dim() == 3 and logits.size(1) > x.size(1)
        found = finding("GG644", seen, likely=["statistics" if finite else "fixed_length" if longer else "squeezed"])
        return self.failed(title, list(logits.shape), "logits [1, T, V], finite", found)

    def _device(self, model: nn.Module, x: Tensor) -> CheckResult:
        title, expected = "tensors made inside", "on the input's device"
        own = {parameter.device.type for parameter in model.parameters()}
        if own - {"cpu"}:
            return self.passed(title, f"forward ran on {', '.join(sorted(own))}", expected)
        found = run_elsewhere(model, x)
        if found.ran:
            return self.passed(title, "all move with the model", expected)
        if not found.mismatch:
            return self.skipped(title, f"not asked: forward cannot be followed without computing ({found.why_not})")
        # A note: on the CPU, where this model is, nothing is wrong yet.
        return self.passed(title, "some stay on the CPU", expected, notes=[_stays(found)])


def _stays(found: Elsewhere) -> Finding:
    line = found.where.text if found.where is not None else ""
    plain = [name for name in found.plain if f"self.{name.rpartition('.')[2]}" in line]
    likely = "attribute" if plain else "hard_coded" if "cpu" in line else "factory"
    seen = f"With the model on another device forward would stop: {found.mismatch}"
    if plain:
        seen += f" `{plain[0]}` is a plain attribute, which model.to(device) leaves behind."
    return finding("GG645", seen, likely=[likely], where=found.where)


def _length_that_works(model: nn.Module, subject: Subject) -> int:
    """The length to ask with: where block_size itself fails, a shorter one, so that its own line can say so.

    Raises what the model raised if no length works.
    """
    whole = probe_ids(subject).size(1)
    try:
        _try(model, subject, whole)
    except Exception:
        for length in (16, 8, 4, 2):
            if length < whole:
                with suppress(Exception):
                    _try(model, subject, length)
                    return length
        raise
    return whole


def _try(model: nn.Module, subject: Subject, length: int) -> None:
    with suppress(UnknownOutput):  # what it returns is judged by the line for logits
        call(model, probe_ids(subject, length=length))


def _too_rigid(message: str) -> list[str]:
    text = message.lower()
    if "invalid for input of size" in text:
        return ["fixed_batch"]
    return ["fixed_length"] if "size of tensor" in text or "must match" in text else ["squeezed"]
