"""NaN or infinity in one pass: was it a parameter, which module made it first, or was it the backward alone?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gpt_guard.catalogue import finding
from gpt_guard.checks.gradients.backward import Pass, Task
from gpt_guard.hooks.autograd_graph.reach import uses
from gpt_guard.hooks.tensors import readable
from gpt_guard.records import Finding
from gpt_guard.records.render import number


def nonfinite_finding(model: nn.Module, task: Task, first: Pass) -> Finding:
    """The one finding that says where a non-finite loss or gradient comes from. Runs the forward once more; reads."""
    if (bad := bad_parameter(model)) is not None:
        return finding(
            "GG105", f"Parameter `{bad}` holds NaN or infinity.", parameter=bad, module=bad.rpartition(".")[0]
        )
    if math.isfinite(first.loss):
        name = _first_backward(model, task, first.nonfinite)
        seen = f"The loss is {number(first.loss)}, and the gradient of {len(first.nonfinite)} of {len(first.norms)} "
        return finding("GG104", f"{seen}parameters is NaN or infinite.", parameter=name, module=name.rpartition(".")[0])
    with torch.no_grad(), _first_bad_output(model) as bad_outputs:
        task.loss(model)
    if bad_outputs:
        path = bad_outputs[0]
        seen = (
            f"The loss is {number(first.loss)}; the first module that returned NaN or +inf is `{path or 'the model'}`."
        )
        return finding("GG101", seen, module=path, module_class=type(model.get_submodule(path)).__name__)
    ignored = (task.y == task.ignore_index).all()
    likely = ["all_labels_ignored"] if ignored else []
    return finding("GG102", f"The loss is {number(first.loss)}; every module returned finite values.", likely=likely)


def bad_parameter(model: nn.Module) -> str | None:
    """The first parameter that holds NaN or infinity."""
    return next((name for name, parameter in model.named_parameters() if not _is_finite(parameter)), None)


def _is_finite(tensor: Tensor) -> bool:
    values = readable(tensor)
    return values is None or bool(torch.isfinite(values).all())


def _first_backward(model: nn.Module, task: Task, names: list[str]) -> str:
    """The one whose gradient is computed first: the operations nearest to the loss have the highest numbers."""
    with torch.enable_grad():
        order = uses(task.loss(model))
    parameters = dict(model.named_parameters())
    return max(names, key=lambda name: max(order.get(id(parameters[name]), [-1])))


@contextmanager
def _first_bad_output(model: nn.Module) -> Iterator[list[str]]:
    """Paths of modules in the order in which they returned something bad; -inf alone is what a mask looks like."""
    bad: list[str] = []

    def watch(path: str) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            tensors = output if isinstance(output, (tuple, list)) else [output]
            floats = [t for t in tensors if isinstance(t, Tensor) and t.is_floating_point() and t.numel()]
            if any(bool((t.isnan() | t.isposinf()).any()) for t in floats):
                bad.append(path)

        return hook

    handles = [module.register_forward_hook(watch(path)) for path, module in model.named_modules() if path]
    try:
        yield bad
    finally:
        for handle in handles:
            handle.remove()
