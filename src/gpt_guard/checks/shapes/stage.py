"""Stage 6: what forward takes and returns."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import suppress

from torch import Tensor, nn

from gpt_guard.catalogue import finding
from gpt_guard.checks.runner.base import VOCABULARY, Need, Stage, Subject
from gpt_guard.checks.runner.forward import UnknownOutput, call, project_loss, raised, takes_targets
from gpt_guard.checks.runner.perturb import probe_ids
from gpt_guard.checks.shapes.foreign_device import CannotFollow, stays_behind
from gpt_guard.hooks.isolation.preserve import quiet
from gpt_guard.records import CheckResult
from gpt_guard.records.render import number

_PADDED = 128
"""A vocabulary is often padded to a multiple of 64 or 128 for the matrix units: that many rows more are no mistake."""
_LONGEST_ON_CPU = 2048
_LONGEST_ELSEWHERE = 16384
"""Longer rows are not run: attention in full takes minutes, or more memory than there is."""
_LARGE = 10**10
"""Parameters times positions above which one row must do: some ten seconds on two cores."""
_FROM_BATCH = "the length of the batch's rows"


MODEL_OR_WHY = Need[nn.Module](lambda subject: subject.model, lambda subject: subject.sources.get("model", "no model"))


class ShapesStage(Stage):
    """Logits [B, T, V], the vocabulary, one finite loss, block_size, short rows, and tensors on the wrong device.

    All in eval mode and without gradient.
    """

    number = 6
    name = "shapes"
    title = "Forward: shapes, sizes, devices"
    needs = (MODEL_OR_WHY, VOCABULARY)

    def run(self, subject: Subject) -> Iterator[CheckResult]:
        """One line per question. An exception in the first forward ends the stage: nothing else can be asked."""
        model = MODEL_OR_WHY(subject)
        with quiet(model):
            length = _length_that_works(model, subject)
            logits = yield from self._layout(model, subject, length)
            if logits is None:
                return
            yield self._dtype(logits)
            yield self._vocabulary(logits, subject)
            if (loss := self._loss(model, subject, length)) is not None:
                yield loss
            yield from self._block_size(model, subject)
            yield self._short(model, subject, length)
        yield self._device(model, probe_ids(subject, length=length))

    def _layout(self, model: nn.Module, subject: Subject, whole: int) -> Generator[CheckResult, None, Tensor | None]:
        title, expected = "logits", "[B, T, V]"
        widths = {module.embedding_dim for module in model.modules() if isinstance(module, nn.Embedding)}
        rows, length = distinct_sizes(whole, subject.vocab_size, widths)
        x = probe_ids(subject, rows, length)
        try:
            logits = call(model, x).logits
        except UnknownOutput as error:
            yield self.line(title, "not found", expected, finding("GG640", str(error), likely=["predictions"]))
            return None
        letters, cause = layout_of(logits, rows, length, subject.vocab_size, widths)
        measured = f"{list(logits.shape)} is {letters}"
        if not cause:
            yield self.line(title, f"{measured} for ids {list(x.shape)}", expected)
            return logits
        seen = f"For ids {list(x.shape)} the model returns {list(logits.shape)}, which is {letters}."
        yield self.line(title, measured, expected, finding("GG640", seen, likely=[cause]))
        return None

    def _dtype(self, logits: Tensor) -> CheckResult:
        name, found = str(logits.dtype).removeprefix("torch."), None
        if not logits.is_floating_point():
            cause = "complex" if logits.is_complex() else "argmax"
            found = finding("GG646", f"The logits are {name}.", likely=[cause])
        return self.line("dtype of the logits", name, "floating point", found)

    def _vocabulary(self, logits: Tensor, subject: Subject) -> CheckResult:
        title, scores = "vocabulary", logits.size(-1)
        sizes = {}
        if subject.vocab_size is not None:
            sizes[subject.sources.get("vocab_size", "vocab_size")] = subject.vocab_size
        if subject.tokenizer is not None and subject.tokenizer.size > 0:
            sizes["the tokenizer"] = subject.tokenizer.size
        if not sizes:
            return self.line(title, f"{scores} scores per position")
        source, needed = max(sizes.items(), key=lambda item: item[1])
        expected = f"{needed}, by {source}"
        if scores >= needed:
            spare = f", {scores - needed} more than needed" if scores > needed else ""
            padding = " (padding)" if 0 < scores - needed < _PADDED else ""
            return self.line(title, f"{scores} scores per position{spare}{padding}", expected)
        seen = f"The logits have {scores} scores per position; {needed} ids are in use, by {source}."
        likely = "special" if source == "the tokenizer" and needed - scores < 16 else "config"
        return self.line(title, scores, expected, finding("GG641", seen, likely=[likely]))

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
            return self.line(title, list(loss.shape), expected, finding("GG642", seen, likely=["unreduced"]))
        if bool(loss.isfinite().all()):
            return self.line(title, number(float(loss)), expected)
        if bool((y == subject.ignore_index).all()):
            likely = ["all_ignored"]
        else:
            likely = ["log_of_zero"] if bool(call(model, x).logits.isfinite().all()) else ["logits"]
        seen = f"The loss is {number(float(loss))} before the first step."
        return self.line(title, number(float(loss)), expected, finding("GG642", seen, likely=likely))

    def _block_size(self, model: nn.Module, subject: Subject) -> Iterator[CheckResult]:
        """Rows of block_size tokens, and on the CPU of one more."""
        title, size = "block_size", subject.block_size
        if size is None:
            yield self.skipped(title, "no block_size is known")
            return
        device = next((parameter.device.type for parameter in model.parameters()), "cpu")
        if size > (_LONGEST_ON_CPU if device == "cpu" else _LONGEST_ELSEWHERE):
            yield self.skipped(title, f"{size} tokens are too many to run here")
            return
        source = subject.sources.get("block_size", "block_size")
        # Two rows: what goes wrong with a single one is asked for by itself.
        large = size * sum(parameter.numel() for parameter in model.parameters()) > _LARGE
        rows, expected = 1 if large else 2, f"{size} positions, by {source}"
        try:
            shape = tuple(call(model, probe_ids(subject, rows, size)).logits.shape)
        except Exception as error:
            refused = raised(error, f"the model called with {size} tokens")
            found = finding("GG643", refused.seen, likely=_too_short(str(error)), where=refused.where)
            yield self.line(title, f"{type(error).__name__} at {size} tokens", expected, found)
        else:
            if shape[:2] == (rows, size):
                yield self.line(title, f"{size} tokens give {size} positions", expected)
            else:
                seen = f"{rows} rows of {size} tokens give logits {list(shape)}."
                yield self.line(title, list(shape), expected, finding("GG643", seen, likely=["cropped"]))
        # On an accelerator an index out of range ends the process's use of the device: no exception can be caught.
        if device == "cpu" and source != _FROM_BATCH:
            yield self._beyond(model, probe_ids(subject, rows, size + 1))

    def _beyond(self, model: nn.Module, x: Tensor) -> CheckResult:
        title, expected = "one token more", "refused, or handled"
        try:
            length = call(model, x).logits.shape[1]
        except Exception as error:
            return self.line(title, f"refused with {type(error).__name__}", expected)
        if length == x.size(1):
            return self.line(title, "handled: positions have no table of this size", expected)
        return self.line(title, f"handled: cropped to {length}", expected)

    def _short(self, model: nn.Module, subject: Subject, length: int) -> CheckResult:
        title = "one row of one token" if subject.causal else "one row"
        x = probe_ids(subject, 1, 1 if subject.causal else length)
        try:
            logits = call(model, x).logits
        except Exception as error:
            refused = raised(error, f"the model called with ids {list(x.shape)}")
            found = finding("GG644", refused.seen, likely=_too_rigid(refused.seen), where=refused.where)
            return self.line(title, type(error).__name__, "logits [1, T, V]", found)
        right = logits.dim() == 3 and logits.shape[:2] == x.shape
        if right and bool(logits.isfinite().all()):
            return self.line(title, list(logits.shape), "logits [1, T, V], finite")
        seen = f"For ids {list(x.shape)} the logits are {list(logits.shape)}{', and not finite' if right else ''}."
        longer = logits.dim() == 3 and logits.size(1) > x.size(1)
        found = finding("GG644", seen, likely=["statistics" if right else "fixed_length" if longer else "squeezed"])
        return self.line(title, list(logits.shape), "logits [1, T, V], finite", found)

    def _device(self, model: nn.Module, x: Tensor) -> CheckResult:
        title, expected = "tensors made inside", "on the input's device"
        own = {parameter.device.type for parameter in model.parameters()}
        if own - {"cpu"}:
            return self.line(title, f"forward ran on {', '.join(sorted(own))}", expected)
        try:
            found = stays_behind(model, x)
        except CannotFollow as error:
            return self.skipped(title, f"not asked: forward cannot be followed without computing ({error})")
        if found is None:
            return self.line(title, "all move with the model", expected)
        # A note: on the CPU, where this model is, nothing is wrong yet.
        return self.line(title, "some stay on the CPU", expected, found)


def layout_of(logits: Tensor, rows: int, length: int, vocab: int | None, widths: set[int]) -> tuple[str, str]:
    """The layout in letters ("[B, V, T]"), and the cause key of GG640; the cause is empty where it is [B, T, V].

    Read off sizes that differ; `widths` are the model's own widths, which a missing head would leave. Without `vocab`
    whatever stands in the last place is taken for it.
    """
    shape = tuple(logits.shape)
    match shape:
        case (b, t, v) if (b, t) == (rows, length):
            no_head = vocab is not None and v != vocab and v in widths
            return ("[B, T, C]", "no_head") if no_head else ("[B, T, V]", "")
        case (b, 1, v) if (b, v) == (rows, vocab):
            return "[B, 1, V], the last position only", "last_only"
        case (v, b, t) if (v, b, t) == (vocab, rows, length):
            return "[V, B, T]", "class_first"
        case (t, b, v) if (t, b) == (length, rows):
            return f"[T, B, {'V' if v == vocab else '?'}]", "time_first"
        case (b, v, t) if (b, t) == (rows, length):
            return f"[B, {'V' if v == vocab else '?'}, T]", "class_first"
        case (b, t, _) if b == rows:
            return f"[B, {t}, ?], with T {length}", "last_only" if t == 1 else "cropped"
        case (b, t) if (b, t) == (rows, length):
            return "[B, T]", "predictions"
        case (t, v) if (t, v) == (length, vocab):
            return "[T, V]", "squeezed"
        case (n, v) if n == rows * length:
            return f"[B * T, {'V' if v == vocab else '?'}]", "flattened"
        case (b, v) if b == rows:
            return "[B, V], one position only" if v == vocab else str(list(shape)), "last_only"
    return str(list(shape)), "predictions"


def distinct_sizes(length: int, vocab: int | None, taken: set[int]) -> tuple[int, int]:
    """A number of rows and a length no longer than `length`, different from each other and from V and widths."""
    avoid = taken | ({vocab} if vocab is not None else set())
    chosen = next((each for each in range(length, 3, -1) if each not in avoid), length)
    rows = next(each for each in (3, 2, 5) if each != chosen and each not in avoid | {1})
    return rows, chosen


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


def _too_short(message: str) -> list[str]:
    text = message.lower()
    return ["positions"] if "index out of range" in text else ["mask"] if "size" in text else ["config"]
