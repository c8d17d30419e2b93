"""Shape, dtype, device and range of a batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gpt_guard.catalogue import finding
from gpt_guard.checks.batches.targets import own_loss, time_first
from gpt_guard.checks.environment.stage import same_device
from gpt_guard.checks.runner.base import Subject
from gpt_guard.checks.runner.forward import loss_of
from gpt_guard.checks.token_ids.ids import is_integer, type_name
from gpt_guard.records import Finding, Severity

INDEX_TYPES = (torch.int64, torch.int32)
"""What an embedding takes."""


def shape(tensor: Tensor) -> list[int]:
    """The shape as numbers."""
    return list(tensor.shape)


def bad_batch_shape(x: Tensor, y: Tensor, block_size: int | None, ignore_index: int = -100) -> Finding | None:
    """GG600 unless x and y are `[B, T]` both, with T up to block_size."""
    seen = f"x is {shape(x)}, y is {shape(y)}"
    likely: list[str] | None = None
    if 0 in (x.numel(), y.numel()):
        likely = ["empty"]
    elif x.dim() == 1:
        likely = ["no_batch"]
    elif x.dim() != 2 or y.dim() == 3:
        likely = ["one_hot"]
    elif y.dim() == 1 and y.size(0) == x.size(0):
        likely = ["class_labels"]
    elif x.shape != y.shape:
        likely = ["unequal"]
    elif is_integer(x) and is_integer(y) and time_first(x, y, ignore_index):
        seen += ", and the targets are shifted along the first dimension"
        likely = ["time_first"]
    elif block_size is not None and x.size(1) > block_size:
        seen += f", and block_size is {block_size}"
        likely = ["time_first"] if x.size(0) == block_size else ["too_long"]
    if likely is None:
        return None
    return finding("GG600", seen, likely=likely, evidence={"x": shape(x), "y": shape(y), "block_size": block_size})


def bad_dtype(subject: Subject, x: Tensor, y: Tensor) -> Finding | None:
    """GG601 for types that an embedding or the loss does not take; a model that casts inside is believed.

    Runs one forward without gradient where the types alone do not decide.
    """
    fine = x.dtype in INDEX_TYPES and y.dtype == torch.int64
    # Where neither the model nor loss_fn has a loss, the loop computes it, and casts integer targets if need be.
    if fine or (is_integer(x) and is_integer(y) and _takes(subject)):
        return None
    if subject.model is None and x.dtype in INDEX_TYPES and is_integer(y):
        return None
    likely = ["narrow"]
    if torch.bool in (x.dtype, y.dtype):
        likely = ["mask"]
    elif not (is_integer(x) and is_integer(y)):
        likely = ["float"]
    seen = f"x is {type_name(x)}, y is {type_name(y)}"
    return finding("GG601", seen, likely=likely, evidence={"x": type_name(x), "y": type_name(y)})


def bad_device(subject: Subject, x: Tensor, y: Tensor) -> Finding | None:
    """GG602: an error where x, y and the model cannot meet.

    A batch on the CPU for a model elsewhere is only severity info: every DataLoader gives such, and loops move them.
    """
    first = next(iter(subject.model.parameters()), None) if subject.model is not None else None
    wanted = first.device if first is not None else x.device
    devices = {"x": str(x.device), "y": str(y.device), "model": str(wanted)}
    seen = ", ".join(f"{name} is on {device}" for name, device in devices.items())
    likely, severity = "other_device", Severity.INFO if x.device.type == "cpu" else Severity.ERROR
    if "meta" in (x.device.type, y.device.type) and wanted.type != "meta":
        likely, severity = "meta", Severity.ERROR
    elif not same_device(x.device, y.device):
        likely, severity = "one_part", Severity.ERROR
    elif same_device(x.device, wanted):
        return None
    return finding("GG602", seen, likely=[likely], severity=severity, evidence=devices)


def ignored_index(subject: Subject, x: Tensor, y: Tensor) -> tuple[int, Finding | None]:
    """The number that marks targets to ignore, and GG604 for negative targets that the loss does not know.

    nanoGPT's loss ignores -1 where torch's default is -100: another single negative number is believed if the
    project's own loss takes it. On an accelerator that is not tried, since a wrong target would end the process.
    """
    negative = y[y < 0].unique().tolist()
    strange = [value for value in negative if value != subject.ignore_index]
    if not strange:
        return subject.ignore_index, None
    seen = f"y holds {', '.join(map(str, strange[:5]))} ({int((y < 0).sum())} of {y.numel()} targets are negative)"
    fields: dict[str, Any] = {"evidence": {"negative": strange[:20], "ignore_index": subject.ignore_index}}
    if len(negative) == 1:
        can_be_asked = subject.inputs is not None and subject.inputs[0].device.type == "cpu" and _has_loss(subject)
        if can_be_asked and _takes(subject):
            return int(strange[0]), None
        if not can_be_asked and strange[0] in (-1, -100):
            seen += f"; whether your loss ignores {strange[0]} cannot be seen from here"
            note = finding("GG604", seen, likely=["ignore_index"], severity=Severity.WARNING, **fields)
            return int(strange[0]), note
    likely = ["ignore_index", "wrapped"] if len(strange) == 1 else ["wrapped", "ignore_index"]
    return subject.ignore_index, finding(
        "GG604", f"{seen}; ignore_index is {subject.ignore_index}", likely=likely, **fields
    )


def too_large(y: Tensor, limit: int, why: str) -> Finding | None:
    """GG604 for targets that the logits have no column for."""
    high = int(y.max())
    if high < limit:
        return None
    count = int((y >= limit).sum())
    seen = f"targets go up to {high}, and {why}: {count} of {y.numel()} are outside"
    return finding("GG604", seen, likely=["too_large"], evidence={"max": high, "limit": limit, "outside": count})


def _has_loss(subject: Subject) -> bool:
    """True where the project's own loss can be called: `loss_fn`, or a model that returns one."""
    if subject.model is None or subject.inputs is None:
        return False
    x = subject.inputs[0].long()
    return subject.loss_fn is not None or own_loss(subject, x, x)[1] is not None


def _takes(subject: Subject) -> bool:
    """True where the project's forward and loss take the batch as it is and the loss is finite."""
    if subject.model is None or subject.inputs is None:
        return False
    x, y = subject.inputs
    if x.device.type != "cpu" and not _harmless(x, y, subject):
        return False
    subject.model.eval()
    try:
        with torch.no_grad():
            loss = loss_of(subject.model, x, y, subject.loss_fn, subject.ignore_index)
    except Exception:  # whatever it raises, it does not take this batch
        return False
    return bool(loss.isfinite().all())


def _harmless(x: Tensor, y: Tensor, subject: Subject) -> bool:
    """True where no id can trip a device-side assert, after which nothing on the device works any more."""
    limit = subject.vocab_size or 0
    labels = y[y != subject.ignore_index].long()
    return all(not part.numel() or bool((part.min() >= 0) & (part.max() < limit)) for part in (x.long(), labels))
