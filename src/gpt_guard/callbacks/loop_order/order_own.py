"""What is noted of one optimizer, and of its backward calls and steps, while its loop is written down."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from gpt_guard.callbacks.loop_order.events import Event, State, gradient_state
from gpt_guard.callbacks.loop_order.order_losses import Term


class Backward(NamedTuple):
    """A backward call: how its loss was averaged, and whether it `shared` the graph of an earlier one of this step.

    `again` where the gradients of both are added up; `inputs` where what the model was called with wanted gradients of
    its own; `weights` changes with every in-place change of the parameters of each optimizer.
    """

    terms: tuple[Term, ...]
    shared: bool
    again: bool
    inputs: bool
    weights: tuple[int, ...]


class Step(NamedTuple):
    """A step: whether its gradients were written by something unseen, and whether they were used before."""

    by_hand: bool
    used: bool


class OwnGradients:
    """One optimizer: its parameters, how its gradients were last seen, and where in the stream its cycle began."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self.ids = {id(tensor) for tensor in tensors}
        self.state: State = gradient_state(tensors)
        self.applied: State = ()
        self.begun = 0
        self.last: Event | None = None
        self.fresh = False
        self.reached = False
        self.loose = False
        self.unscaled = False
        self.steps = 0

    def holds_any(self, ids: set[int]) -> bool:
        """Whether one of its parameters, or their gradients, is among these."""
        return bool(self.ids & ids) or any(id(tensor.grad) in ids for tensor in self.tensors if tensor.grad is not None)

    def look(self) -> State:
        """Take the state of the gradients as it is now; returns the one before."""
        before, self.state = self.state, gradient_state(self.tensors)
        return before


def has_stepped(optimizer: Optimizer) -> bool:
    """Whether an optimizer has ever stepped; True where that cannot be told.

    A torch scheduler marks the step method of the optimizer that it was made for, and the method then marks each call.
    """
    marked = hasattr(optimizer.step, "_wrapped_by_lr_sched")
    return bool(optimizer.state) or not marked or bool(getattr(optimizer, "_opt_called", False))
