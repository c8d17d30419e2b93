"""Read from the autograd graph what made a tensor bad: its nodes still hold what went in and came out.

Works on the graph as it stands, without running anything again, so it costs nothing until something has failed. It
knows only operations that keep the tensor that tells (log its input, softmax its result), and is silent otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpt_guard.hooks.autograd_graph.nodes import name_of, nodes, signed
from gpt_guard.hooks.watch import Watch

_MOST_NODES = 400
_MOST_FOR_HALF = 5000
# Scores, scale, mask and the product they come from stand no further than this behind a softmax.
_BEHIND_SOFTMAX = 8


class Operation(NamedTuple):
    """An operation in words a user knows, what its tensors show, and the catalogue key of the cause that fits."""

    name: str
    shows: str
    cause: str


def explain(tensor: Tensor) -> Operation | None:
    """The nearest operation behind `tensor` that took finite values to non-finite ones; None if none can be proven.

    Reads tensors exactly: only after a failure. Under no_grad, and after `backward()` has freed the graph, there is
    nothing to read.
    """
    softmax: Operation | None = None
    left = _BEHIND_SOFTMAX
    for node in islice(nodes(tensor), _MOST_NODES):
        rule = _RULES.get(name_of(node))
        try:
            found = rule(node) if rule is not None else None
        except RuntimeError:
            return softmax  # freed: backward() has been here
        if found is not None and found.name != "softmax":
            # A product that overflowed explains the softmax after it better than a mask does.
            return found if softmax is None or found.cause == "overflow_half" else softmax
        softmax = softmax or found
        left -= softmax is not None
        if left == 0:
            break
    return softmax


class Labels(NamedTuple):
    """Targets of a loss that leaves one label out: how many there are, how many of them teach anything."""

    labels: int
    supervised: int
    ignore_index: int


def labels_of(loss: Tensor) -> Labels | None:
    """The targets of the first cross entropy (or NLL loss) under a loss, kept by autograd until backward() frees them.

    None if there is none in the graph, or its tensors have been freed. Reads the targets.
    """
    for node in nodes(loss):
        if not node.name().startswith("NllLoss"):
            continue
        try:
            target, ignored = node._saved_target, signed(node._saved_ignore_index)
        except RuntimeError:
            return None
        return Labels(target.numel(), int((target != ignored).sum()), ignored)
    return None


def no_half(watch: Watch, tensor: Tensor | None) -> bool:
    """True if neither the model, the operations behind `tensor`, autocast as it is now nor a scaler speak of float16.

    Where readings come late and there is no graph to ask, an autocast that was on cannot be excluded: False.
    """
    if tensor is None or watch.scaling or not (watch.immediate or tensor.grad_fn):
        return False
    kind = tensor.device.type
    if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is torch.float16:
        return False
    held = (tensor, *watch.model.parameters(), *watch.model.buffers())
    made = (each for node in islice(nodes(tensor), _MOST_FOR_HALF) for each in getattr(node, "_input_metadata", ()))
    return not any(each.dtype is torch.float16 for each in (*held, *made))


def _saved(node: Any, name: str) -> Tensor | None:
    value = getattr(node, f"_saved_{name}", None)
    return value.detach() if isinstance(value, Tensor) else None


def _count(where: Tensor) -> int:
    return int(where.sum())


def _many(count: int, noun: str) -> str:
    """A count with its noun, such as "1 zero" or "2 zeros"."""
    return f"{count} {noun}{'s' if count != 1 else ''}"


def _finite(values: Tensor | None) -> bool:
    return values is not None and bool(torch.isfinite(values).all())


def _log(node: Any) -> Operation | None:
    values = _saved(node, "self")
    if values is None or not _finite(values):
        return None
    if zeros := _count(values == 0):
        return Operation("log", f"log of {_many(zeros, 'zero')}", "log_of_zero")
    if negative := _count(values < 0):
        lowest = f"lowest {float(values.min()):.4g}"
        return Operation("log", f"log of {_many(negative, 'negative number')} ({lowest})", "negative_root")
    return None


def _root(node: Any) -> Operation | None:
    result = _saved(node, "result")
    if result is None:
        return None
    if negative := _count(result.isnan()):
        return Operation("sqrt", f"sqrt of {_many(negative, 'negative number')}", "negative_root")
    if zeros := _count(result.isinf()):
        return Operation("rsqrt", f"1 / sqrt of {_many(zeros, 'zero')}", "log_or_div_zero")
    return None


def _division(node: Any) -> Operation | None:
    divisor = _saved(node, "other")
    if divisor is None or not _finite(divisor):
        return None
    zeros = _count(divisor == 0)
    return Operation("division", f"division by {_many(zeros, 'zero')}", "log_or_div_zero") if zeros else None


def _exp(node: Any) -> Operation | None:
    result = _saved(node, "result")
    over = 0 if result is None else _count(result == math.inf)
    return Operation("exp", f"exp overflowed in {_many(over, 'element')}", "exp_overflow") if over else None


def _softmax(node: Any) -> Operation | None:
    result = _saved(node, "result")
    if result is None or not result.isnan().any():
        return None
    rows = _count(result.isnan().any(signed(node._saved_dim)))
    return Operation("softmax", f"softmax gave NaN in {_many(rows, 'row')}", "all_masked_row")


def _spread(node: Any) -> Operation | None:
    result = _saved(node, "result")
    lost = 0 if result is None else _count(result.isnan())
    return Operation("std", f"std over a single element, {_many(lost, 'time')}", "zero_std") if lost else None


def _mean(node: Any) -> Operation | None:
    if getattr(node, "_saved_self_sym_numel", None) != 0:
        return None
    return Operation("mean", "a mean over no elements", "log_or_div_zero")


def _power(node: Any) -> Operation | None:
    base = _saved(node, "self")
    exponent = getattr(node, "_saved_exponent", None)
    if base is None or not _finite(base) or not isinstance(exponent, (int, float)):
        return None
    if exponent < 0 and (zeros := _count(base == 0)):
        return Operation("pow", f"{_many(zeros, 'zero')} to the power of {exponent:g}", "log_or_div_zero")
    if exponent != int(exponent) and (negative := _count(base < 0)):
        return Operation("pow", f"{_many(negative, 'negative number')} to the power of {exponent:g}", "negative_root")
    return None


def _cross_entropy(node: Any) -> Operation | None:
    target = _saved(node, "target")
    if target is None or target.numel() == 0:
        return None
    ignored = signed(node._saved_ignore_index)
    if bool((target == ignored).all()):
        return Operation(
            "cross entropy",
            f"0 of {target.numel()} target positions are supervised (all are {ignored})",
            "all_labels_ignored",
        )
    return None


def _with_target(node: Any) -> Operation | None:
    target = _saved(node, "target")
    if target is None or _finite(target):
        return None
    bad = _count(~torch.isfinite(target))
    verb = "is" if bad == 1 else "are"
    return Operation("loss", f"{bad} of {_many(target.numel(), 'target')} {verb} NaN or infinite", "bad_target")


def _matmul(node: Any) -> Operation | None:
    left, right = _operands(node)
    if left is None or right is None or left.dtype is not torch.float16 or not (_finite(left) and _finite(right)):
        return None
    product = left.float() @ right.float()
    largest = float(product.abs().max())
    limit = torch.finfo(torch.float16).max
    if largest <= limit:
        return None
    return Operation("matmul", f"a matrix product reached {largest:.4g}, float16 ends at {limit:g}", "overflow_half")


def _operands(node: Any) -> tuple[Tensor | None, Tensor | None]:
    for names in (("mat1", "mat2"), ("self", "mat2")):
        found = _saved(node, names[0]), _saved(node, names[1])
        if found[0] is not None:
            return found
    return None, None


_RULES: dict[str, Callable[[Any], Operation | None]] = {
    "Log": _log,
    "Log2": _log,
    "Log10": _log,
    "Sqrt": _root,
    "Rsqrt": _root,
    "Div": _division,
    "Exp": _exp,
    "Softmax": _softmax,
    "LogSoftmax": _softmax,
    "Std": _spread,
    "StdMean": _spread,
    "Mean": _mean,
    "Pow": _power,
    "NllLoss": _cross_entropy,
    "NllLoss2D": _cross_entropy,
    "MseLoss": _with_target,
    "L1Loss": _with_target,
    "SmoothL1Loss": _with_target,
    "HuberLoss": _with_target,
    "BinaryCrossEntropy": _with_target,
    "BinaryCrossEntropyWithLogits": _with_target,
    "Mm": _matmul,
    "Addmm": _matmul,
    "Bmm": _matmul,
}
