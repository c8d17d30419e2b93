"""What a recognised form of loss means for training: fine, wrong and why, or only worth knowing."""

from __future__ import annotations

from torch import Tensor

from gpt_guard.catalogue import finding
from gpt_guard.checks.initial_loss.loss_forms import Form
from gpt_guard.checks.runner.base import Subject
from gpt_guard.checks.tokenizer.vocabulary import special_id
from gpt_guard.records import Finding, Severity

_FLATTENED = ("targets_transposed", "logits_transposed", "viewed")
_REDUCED = ("sum", "sum_over_time", "sum_over_batch", "all_positions")
_UNITS = ("bits", "accumulation", "factor", "perplexity")


def judge_form(form: Form | None, subject: Subject) -> tuple[list[Finding], list[Finding]]:
    """The findings that fail the loss, and those that are only worth knowing."""
    if form is None:
        seen = "The loss is none of the known functions of the returned logits and the targets."
        return [], [finding("GG656", seen, likely=["own_loss"])]
    seen = f"The loss is {form.words}, for every set of targets that was tried."
    wrong: list[Finding] = []
    notes: list[Finding] = []
    if form.key in ("softmax_twice", "probability"):
        likely = ["in_loss"] if form.key == "softmax_twice" else ["log"]
        wrong.append(finding("GG652", seen, likely=likely))
    elif form.key in _FLATTENED:
        wrong.append(finding("GG654", seen, likely=[form.key]))
    elif form.key in _REDUCED:
        wrong.append(finding("GG655", seen, likely=[form.key]))
    elif form.key in _UNITS:
        severity = Severity.WARNING if form.key == "perplexity" else Severity.INFO
        notes.append(finding("GG659", seen, likely=[form.key], severity=severity))
    elif form.key == "ignored":
        told = _left_out(form, subject)
        if told is not None:
            (wrong if told.severity is Severity.ERROR else notes).append(told)
    if (paired := _pairing(form, subject)) is not None:
        wrong.append(paired)
    return wrong, notes


def _left_out(form: Form, subject: Subject) -> Finding | None:
    left_out, pad = int(form.value), special_id(subject, "pad")
    if pad is not None and pad.id == left_out:
        return None
    tokens = subject.tokenizer.tokens if subject.tokenizer is not None else ()
    token = f", the token {tokens[left_out]!r}" if left_out < len(tokens) else ""
    seen = f"Targets of {left_out}{token} are left out of the loss."
    # A character, or another id than the known padding, is an ordinary token: it will never be learned.
    sure = pad is not None or (left_out < len(tokens) and len(tokens[left_out]) == 1)
    severity = Severity.ERROR if sure else Severity.WARNING
    return finding("GG657", seen, likely=["ignore_index"], severity=severity)


def _pairing(form: Form, subject: Subject) -> Finding | None:
    if not subject.causal:
        return None  # an encoder's targets stand where they are
    own = batch_shift(subject)
    if own is None:
        if form.key != "shift":
            return None
        return finding("GG653", f"The loss pairs {form.words}.", likely=["backward" if form.shift < 0 else "roll"])
    total = own + form.shift
    if total == 1:
        return None
    likely = "backward" if form.shift < 0 else {0: "no_shift", 2: "double_shift"}.get(total, "roll")
    seen = (
        f"In the batch y is x shifted by {own}, and the loss shifts by {form.shift} more: position t is compared with "
        f"token t{total:+d}."
    )
    return finding("GG653", seen, likely=[likely])


def batch_shift(subject: Subject) -> int | None:
    """By how many positions y is ahead of x, of 0, 1, 2 and -1; None where the batch does not tell."""
    if subject.batch is None:
        return None
    x, y = subject.batch
    if x.shape != y.shape or x.dim() != 2 or x.size(1) < 4:
        return None
    fits = [shift for shift in (1, 0, 2, -1) if _matches(x, y, shift, subject.ignore_index)]
    return fits[0] if len(fits) == 1 else None


def _matches(x: Tensor, y: Tensor, shift: int, ignore_index: int) -> bool:
    length = x.size(1)
    ahead, targets = x[:, max(0, shift) : length + min(0, shift)], y[:, max(0, -shift) : length - max(0, shift)]
    counted = targets != ignore_index
    return bool(counted.any()) and bool((ahead == targets)[counted].all())
