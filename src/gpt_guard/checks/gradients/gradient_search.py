"""Which trainable parameters never get a gradient, or only zeros, however often and on whatever input one looks.

One pass is not enough to say so. At step 0 a zero-initialised projection (the B of LoRA, the last layer of a residual
branch) makes the gradients before it exactly zero, and a router sends no token to some of its experts. So the model
is trained for a few steps, and then given other inputs and other weights; what is left after that is not an accident.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from gpt_guard.checks.gradients.backward import Pass, Task, run_backward, trainable
from gpt_guard.checks.gradients.calls import Calls
from gpt_guard.hooks.isolation.preserve import preserved

STEPS = 6
"""Each step frees one more zero-initialised factor in a row: B of LoRA, an output projection, the head before it."""
TOKENS = 256
"""Tokens of a trial on other inputs."""
PATIENCE = {"one of several": 24, "alone": 6}
"""Trials in a row that reach nothing new, for parameters of a ModuleList and for others. 64 experts, each token going
to one by its id alone, of 23 ids, were all reached in each of 300 runs."""
_STEP = 1e-3


@dataclass
class Search:
    """The first pass, what is without a gradient after all passes, and what only later passes reached."""

    first: Pass
    missing: list[str]
    zero: list[str]
    late: list[str]
    calls: Calls
    reached: set[str]


def search(model: nn.Module, task: Task, vocab_size: int | None) -> Search:
    """Look for gradients; the model's tensors, modes and the random state are as before afterwards.

    A model in eval mode is put in training mode as a whole, as a loop would do; otherwise each module keeps its mode.
    Reads the device. Errors of the model in the first pass go through.
    """
    with preserved(model):
        if not model.training:
            model.train()
        first = run_backward(model, task)
        found = Search(first, first.missing, first.zero, [], first.calls, _with_gradient(first))
        if first.has_graph and not first.nonfinite:
            for one in _later(model, task, vocab_size, found):
                _note(found, one)
    return found


def _later(model: nn.Module, task: Task, vocab_size: int | None, found: Search) -> Iterator[Pass]:
    """More passes, as long as there is something left to find."""
    task = _fewer_rows(task)
    for _ in range(STEPS):
        if not found.zero:  # no step puts into the graph what is not in it
            break
        _descend(model)
        yield run_backward(model, task)
    left, vain = _left(found), 0
    while left and vain < PATIENCE["one of several" if _one_of_several(left) else "alone"]:
        _shake(model, found.reached)
        one = _try_other(model, _more_rows(task), vocab_size) or _try_other(model, task, vocab_size)
        if one is not None:
            yield one
        vain = 0 if _left(found) < left else vain + 1
        left = _left(found)


def _left(found: Search) -> set[str]:
    return {*found.missing, *found.zero}


def _one_of_several(names: set[str]) -> bool:
    return any(part.isdecimal() for name in names for part in name.split("."))


def _try_other(model: nn.Module, task: Task, vocab_size: int | None) -> Pass | None:
    """A pass on random ids; None for a model that refuses them, or so many rows: it has had its chance."""
    with suppress(Exception):
        return run_backward(model, replace(task, x=_other(task.x, vocab_size)))
    return None


def _more_rows(task: Task) -> Task:
    """The batch several times over, up to about 256 tokens, so that few of many experts are left out by chance."""
    times = max(1, TOKENS // max(1, task.x.numel()))
    if times == 1 or task.y.shape[:1] != task.x.shape[:1]:
        return task
    return replace(task, x=torch.cat([task.x] * times), y=torch.cat([task.y] * times))


def _fewer_rows(task: Task) -> Task:
    """The rows with the most targets that count, as many as give about 256 tokens: a large model has to wait less."""
    rows = max(1, TOKENS // max(1, task.x[0].numel()))
    if task.x.size(0) <= rows or task.y.shape[:1] != task.x.shape[:1]:
        return task
    counted = (task.y != task.ignore_index).flatten(1).sum(1)
    chosen = counted.argsort(descending=True, stable=True)[:rows]
    return replace(task, x=task.x[chosen], y=task.y[chosen])


def _note(found: Search, one: Pass) -> None:
    if one.nonfinite or not math.isfinite(one.loss):
        return
    found.calls.merge(one.calls)
    reached = _with_gradient(one)
    found.late += [name for name in (*found.missing, *found.zero) if name in reached]
    seen = {name for name, norm in one.norms.items() if norm is not None}
    found.reached |= reached
    # What had no gradient and now has zeros is in the graph: it is called, and multiplied by zero.
    found.zero = [name for name in found.zero if name not in reached]
    found.zero += [name for name in found.missing if name in seen - reached]
    found.missing = [name for name in found.missing if name not in seen]


def _with_gradient(one: Pass) -> set[str]:
    return {name for name, norm in one.norms.items() if norm}


@torch.no_grad()
def _descend(model: nn.Module) -> None:
    """Move each element by the sign of its gradient, which is Adam's first step; works for any layout and dtype."""
    for parameter in trainable(model).values():
        if parameter.grad is not None:
            parameter.sub_(_STEP * parameter.grad.to_dense().sign())


@torch.no_grad()
def _shake(model: nn.Module, reached: set[str]) -> None:
    """Other weights of the same size for what has a gradient: elements in another order, constant ones with noise.

    The rest stays as it is: noise would bring to life what is zero for good.
    """
    for name, parameter in trainable(model).items():
        if name in reached and parameter.is_floating_point():
            flat = parameter.detach().flatten()
            mixed = flat[torch.randperm(flat.numel(), device=flat.device)].view_as(parameter)
            still = bool((flat == flat[0]).all())
            parameter.copy_(mixed + 0.02 * torch.randn_like(mixed) if still else mixed)


def _other(x: Tensor, vocab_size: int | None) -> Tensor:
    if x.is_floating_point():
        return torch.randn_like(x)
    size = vocab_size or int(x.max()) + 1
    return torch.randint(size, x.shape, device=x.device).to(x.dtype)
