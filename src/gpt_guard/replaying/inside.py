"""A forward that calls `backward()` itself, up to the loss or the gradient that was bad."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from gpt_guard.hooks.tensors import describe, walk
from gpt_guard.replaying.bench import Bench, Seen
from gpt_guard.replaying.target import Enough, Target
from gpt_guard.replaying.text import figures


def inside_again(bench: Bench, target: Target) -> Seen:
    """Run the forward until a `backward()` in it begins with a bad loss, or has left a bad gradient."""
    parameter = dict(bench.model.named_parameters(remove_duplicate=False)).get(target.parameter)
    last: list[Tensor] = []

    def begins(losses: Any) -> None:
        # A loss is bad before its backward; what an earlier one has left is there by now.
        with _disable_current_modes(), torch.no_grad():
            _note(parameter.grad if parameter is not None else None)
            if target.kind == "loss":
                for _, loss in walk(losses):
                    _note(loss)

    def _note(tensor: Tensor | None) -> None:
        if tensor is not None:
            last[:] = [tensor]
            if describe(tensor) is not None:
                raise Enough

    stopped = False
    operation = None
    with bench.traced(bench.starts, begins) as trace:
        try:
            try:
                bench.call()
            finally:
                # At the end, and before a step that must not be made again.
                begins(())
        except Enough:
            stopped = True
        if stopped:
            with _disable_current_modes():
                if parameter is not None and parameter.grad is last[0]:
                    operation = trace.origin_of_gradient(parameter)
                else:
                    operation = trace.origin(last[0])
    if stopped:
        return Seen(True, f"{target} is non-finite again", operation)
    shown = figures(last[0]) if last else "not made"
    return Seen(False, f"{target} is {shown} when the forward, which calls backward() itself, is run again.")
