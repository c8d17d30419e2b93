"""Call a model whatever it returns: logits, `(logits, loss)`, or an object or dict with `.logits` and `.loss`.

And what it means where it raises.
"""

from __future__ import annotations

import inspect
import linecache
import math
import os
import traceback
from collections.abc import Mapping
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt_guard.catalogue import finding
from gpt_guard.checkpoint.fingerprint import unwrap
from gpt_guard.checks.runner.base import LossFunction
from gpt_guard.hooks.isolation.preserve import quiet
from gpt_guard.records import Finding, SourceLine

TARGET_NAMES = ("targets", "labels", "target", "label", "y", "target_ids", "tgt", "targets_ids", "next_ids")
"""Names under which hand-written and library models take their targets."""
_ROWS = 4
_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_STDLIB = os.path.dirname(os.path.abspath(os.__file__)) + os.sep

_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("memory", ("out of memory", "not enough memory", "can't allocate")),
    ("device", ("same device", "found at least two devices", "expected all tensors", "cuda:0 and cpu")),
    ("range", ("index out of range", "out of bounds", "device-side assert", "indexselect")),
    ("in_place", ("inplace operation", "backward through the graph a second time")),
    ("no_graph", ("does not require grad", "no grad_fn")),
    ("dtype", ("dtype", "scalar type", "tensor of type", "not implemented for")),
    ("shape", ("shape", "size", "dimension", "mat1 and mat2", "view", "broadcast")),
    ("call", ("positional argument", "keyword argument", "not callable", "no attribute", "no logits were found")),
)
"""What torch and Python write in the messages of these errors (torch 2.13), the surest first."""


class Output(NamedTuple):
    """What a model gave: logits `[B, T, V]` as far as the model keeps that order, and its own loss, if any."""

    logits: Tensor
    loss: Tensor | None


class UnknownOutput(TypeError):
    """The model returned something in which no logits can be found."""


def call(model: nn.Module, x: Tensor, y: Tensor | None = None) -> Output:
    """Call the model on token ids `[B, T]`, with targets by name or as the second argument, where it takes them.

    Without targets some models (nanoGPT) compute the logits of the last position alone; such a model is called again
    with targets, so that logits are there for every position. Raises UnknownOutput if there are no logits in what it
    returns; errors of the model itself pass through.
    """
    if y is not None:
        return _call_with_targets(model, x, y)
    output = unpack(model(x))
    if _last_position_only(output.logits, x) and takes_targets(model):
        return Output(_call_with_targets(model, x, x).logits, None)
    return output


def takes_targets(model: nn.Module) -> bool:
    """True where the model's forward takes targets beside the token ids."""
    parameters = _parameters(model)
    return any(name in parameters for name in TARGET_NAMES) or _second_is_required(parameters)


def shifts_inside(model: nn.Module, x: Tensor, vocab_size: int | None = None) -> bool:
    """True where the model compares position t with target t + 1 itself, as Hugging Face's `labels` do.

    Found by measuring: such a loss depends on the last target of the rows, and not on the first. Ignored ids, label
    smoothing and added terms do not blur that. The ids are drawn at random, below `vocab_size` or else among those in
    `x`, in rows `[4, T]` with the length, dtype and device of `x`. Reads the device; three forwards without gradient in
    eval mode (modes restored). False where there is no loss of the model's own, where its logits are all alike, and
    where the call fails: that is for the checks of the call.
    """
    if x.dim() != 2 or x.size(1) < 3 or not takes_targets(model):
        return False
    ids = torch.arange(vocab_size) if vocab_size is not None else x.detach().cpu().unique()
    if ids.numel() < 2:
        return False
    try:
        with quiet(model):
            return _leaves_out_the_first_target(model, *_drawn(x, ids))
    except Exception:
        return False


def _drawn(x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets, and other targets at every place."""
    draw = torch.Generator().manual_seed(0)
    shape = (_ROWS, x.size(1))
    rows, y, step = (torch.randint(low, ids.numel(), shape, generator=draw) for low in (0, 0, 1))
    drawn = ids[torch.stack([rows, y, (y + step) % ids.numel()])].to(device=x.device, dtype=x.dtype)
    return drawn[0], drawn[1], drawn[2]


def _leaves_out_the_first_target(model: nn.Module, x: Tensor, y: Tensor, other: Tensor) -> bool:
    first, last = torch.cat([other[:, :1], y[:, 1:]], 1), torch.cat([y[:, :-1], other[:, -1:]], 1)
    # Changes of several rows may cancel out by chance, those of half of them hardly as well.
    some = torch.cat([first[: _ROWS // 2], y[_ROWS // 2 :]])
    # A loss of the last position alone leaves the first target out as well, and all others between.
    between = torch.cat([y[:, :1], other[:, 1:-1], y[:, -1:]], 1)
    asked = (y, first, some, between, last)
    (logits, loss), *changed, by_between, by_last = (call(model, x, targets) for targets in asked)
    losses = [output.loss for output in (*changed, by_last)]
    if loss is None or loss.dim() or logits.shape[:2] != x.shape:
        return False
    loss = loss.float()
    if by_between.loss is None or bool(by_between.loss.float() == loss):
        return False
    *by_first, by_end = (math.inf if each is None else float((each.float() - loss).abs()) for each in losses)
    rounding = 4 * torch.finfo(torch.float32).eps * float(loss.abs())
    if by_end <= rounding or not all(change <= max(rounding, 0.01 * by_end) for change in by_first):
        return False
    # A loss that skips the first position does not depend on its target either.
    scores = logits.float()
    following = F.cross_entropy(scores[:, :-1].flatten(0, 1), y[:, 1:].flatten().long())
    skipping = F.cross_entropy(scores[:, 1:].flatten(0, 1), y[:, 1:].flatten().long())
    return bool(torch.isclose(loss, following) or not torch.isclose(loss, skipping, rtol=1e-6))


def unpack(output: Any) -> Output:
    """Find logits and loss in what a model returned: a 0-dim tensor is a loss, the one of most dimensions the logits.

    A loss that was not reduced to a scalar is found, too (one value per row or per position): its shape is for the
    checks to judge.
    """
    if isinstance(output, Tensor):
        return Output(output, None)
    if isinstance(output, Mapping) or hasattr(output, "logits"):
        logits, loss = (_part(output, name) for name in ("logits", "loss"))
        if isinstance(logits, Tensor):
            return Output(logits, loss if isinstance(loss, Tensor) else None)
    if isinstance(output, (tuple, list)):
        tensors = [part for part in output if isinstance(part, Tensor) and part.is_floating_point()]
        logits = max(tensors, key=Tensor.dim, default=None)  # of several with as many dimensions, the first
        if logits is not None and logits.dim() >= 2:
            return Output(logits, _loss_among([part for part in tensors if part is not logits], logits))
    raise UnknownOutput(
        f"the model returned {type(output).__name__}, in which no logits were found. Return logits [B, T, V], "
        f"(logits, loss), or an object or dict with `logits` and `loss`; or wrap the model in a module that does."
    )


def project_loss(model: nn.Module, x: Tensor, y: Tensor, loss_fn: LossFunction | None) -> Tensor | None:
    """`loss_fn(logits, y)`, else the model's own; None without either.

    A model whose loss is computed outside is not given the targets: they may hold labels that its own would refuse.
    """
    return loss_fn(call(model, x).logits, y) if loss_fn is not None else call(model, x, y).loss


def loss_of(
    model: nn.Module, x: Tensor, y: Tensor, loss_fn: LossFunction | None = None, ignore_index: int = -100
) -> Tensor:
    """The loss as this project computes it: `loss_fn(logits, y)`, else the model's own, else cross entropy."""
    output = call(model, x, y)
    if loss_fn is not None:
        return loss_fn(output.logits, y)
    if output.loss is not None:
        return output.loss
    return F.cross_entropy(output.logits.flatten(0, -2).float(), y.flatten().long(), ignore_index=ignore_index)


def _part(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def _call_with_targets(model: nn.Module, x: Tensor, y: Tensor) -> Output:
    parameters = _parameters(model)
    for name in TARGET_NAMES:
        if name in parameters:
            return unpack(model(x, **{name: y}))
    return unpack(model(x, y) if _second_is_required(parameters) else model(x))


def _parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    """Of the user's own module: a wrapper (`torch.compile`, DDP, adapters) shows `*args, **kwargs` alone."""
    model = unwrap(model)
    parameters = inspect.signature(model.forward).parameters
    collecting = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    inside = list(model.children())
    if len(inside) == 1 and all(each.kind in collecting for each in parameters.values()):
        return _parameters(inside[0])
    return parameters


def _second_is_required(parameters: Mapping[str, inspect.Parameter]) -> bool:
    """A second argument that has no default can only be the targets, unless its name says that it is a mask."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [each for each in parameters.values() if each.kind in kinds and each.default is each.empty]
    return len(required) == 2 and "mask" not in required[1].name and "pos" not in required[1].name


def _last_position_only(logits: Tensor, x: Tensor) -> bool:
    if x.dim() != 2 or x.size(1) == 1:
        return False
    # [B, V] of a model that drops the position is the same thing; a flat [B * T, V] is not.
    return (logits.dim() == 3 and logits.size(1) == 1) or (logits.dim() == 2 and logits.size(0) == x.size(0))


def _loss_among(rest: list[Tensor], logits: Tensor) -> Tensor | None:
    scalar = next((part for part in rest if part.dim() == 0), None)
    positions = logits.shape[:-1]
    unreduced = ((1,), tuple(positions), (positions.numel(),), (positions[0],))
    return scalar if scalar is not None else next((part for part in rest if tuple(part.shape) in unreduced), None)


def in_form_of(fresh: nn.Module, model: nn.Module) -> nn.Module:
    """Cast and move parameters and buffers of `fresh`, each to what the one of the same name is in `model`.

    In place; a tensor whose name the other model does not have follows its first parameter.
    """
    like: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    first = next((p for p in model.parameters() if p.is_floating_point()), None)
    with torch.no_grad():
        for name, tensor in (*fresh.named_parameters(), *fresh.named_buffers()):
            other = like.get(name, first)
            if other is None or tensor.is_meta or other.is_meta:
                continue
            dtype = other.dtype if tensor.is_floating_point() and other.is_floating_point() else tensor.dtype
            tensor.data = tensor.data.to(device=other.device, dtype=dtype)
    return fresh


def logits_of(model: nn.Module, x: Tensor) -> Tensor:
    """The logits `[B, T, V]` on ids `[B, T]`; a model that takes targets gets the ids for them, since some need any."""
    return call(model, x, x if takes_targets(model) else None).logits.detach()


def plain_device(tensor: Tensor) -> Tensor:
    """The tensor on the CPU, without its graph; tensors of two devices can then be compared."""
    return tensor.detach().cpu()


def raised(error: BaseException, doing: str) -> Finding:
    """GG610 for an exception that came out of a check; the traceback's innermost line of the user's is its place."""
    message = " ".join(str(error).split())
    where = user_line(error.__traceback__)
    # The project raised by itself where its own line is the last of the traceback; otherwise torch refused its call.
    if where is None:
        likely = ["check", *_likely(message)]
    elif _innermost(error.__traceback__) == (where.file, where.line) and isinstance(
        error, (ValueError, AssertionError)
    ):
        likely = ["own_error", *_likely(message)]
    else:
        likely = _likely(message) or ["call"]
    seen = f"{doing}: {type(error).__name__}: {message[:400]}"
    evidence = {"exception": type(error).__name__, "message": message[:2000]}
    return finding("GG610", seen, likely=likely, where=where, evidence=evidence, cause_id=doing)


def user_line(trace: TracebackType | None) -> SourceLine | None:
    """The innermost line of a traceback outside of torch, the standard library and gpt_guard, or None."""
    for frame in reversed(traceback.extract_tb(trace)):
        foreign = frame.filename.startswith((_OURS, _TORCH, "<frozen"))
        in_library = frame.filename.startswith(_STDLIB) and "site-packages" not in frame.filename
        if not foreign and not in_library:
            line = frame.lineno or 0
            text = linecache.getline(frame.filename, line).strip()
            return SourceLine(file=frame.filename, line=line, function=frame.name, text=text)
    return None


def _innermost(trace: TracebackType | None) -> tuple[str, int]:
    frames = traceback.extract_tb(trace)
    return (frames[-1].filename, frames[-1].lineno or 0) if frames else ("", 0)


def _likely(message: str) -> list[str]:
    text = message.lower()
    return [key for key, signs in _SIGNS if any(sign in text for sign in signs)]
