"""The loop's events while steps are inspected: which calls, in which order, for which optimizer, from which line.

What calls do not show, the version counters of the gradients do.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from enum import StrEnum
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from gpt_guard.callbacks.loop_order.calls import ClipCall
from gpt_guard.callbacks.loop_order.loss_addends import Addend, Factor, addends, same_graph
from gpt_guard.hooks.frames import user_line
from gpt_guard.hooks.optimizer import innermost
from gpt_guard.hooks.tensors import walk
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import SourceLine

State = tuple[tuple[int, int], ...]
_NONE = (0, -1)
_MOST_EVENTS = 512


class Kind(StrEnum):
    """What a loop does around a step; the value is the name that findings use."""

    ZERO_GRAD = "zero_grad"
    CLEARED = "gradients cleared by hand"
    FORWARD = "forward"
    BACKWARD = "backward"
    UNSCALE = "unscale_"
    CLIP = "clip"
    STEP = "step"
    SKIP = "step left out by the scaler"
    OTHER_STEP = "step of another optimizer"
    SCHEDULER = "scheduler.step"


class LoopEvent(NamedTuple):
    """One call. `optimizers` are the watched ones whose parameters it concerns; `detail` depends on the kind."""

    kind: Kind
    optimizers: frozenset[int] = frozenset()
    where: SourceLine | None = None
    detail: Any = None


class Clip(NamedTuple):
    """A call of `clip_grad_norm_` or `clip_grad_value_`: how many tensors it was given, how many had a gradient.

    `scaled` where the gradients carried a GradScaler's scale; `used` where a step had used all of them already.
    """

    how: str
    tensors: int
    with_grad: int
    limit: float
    scaled: bool = False
    used: bool = False


class Scheduled(NamedTuple):
    """A call of `scheduler.step()`: its class, and whether its optimizer has made a step yet.

    `foreign` where it drives an optimizer that is not watched but holds parameters of a watched one.
    """

    name: str
    stepped: bool
    foreign: bool = False


class Backward(NamedTuple):
    """A backward call: how its loss was averaged, and whether it `shared` the graph of an earlier one of this step.

    `again` where the gradients of both are added up; `inputs` where what the model was called with wanted gradients of
    its own; `weights` changes with every in-place change of the parameters of each optimizer.
    """

    addends: tuple[Addend, ...]
    shared: bool
    again: bool
    inputs: bool
    weights: tuple[int, ...]


class StepTaken(NamedTuple):
    """A step: whether its gradients were written by something unknown, and whether they were used before."""

    by_hand: bool
    used: bool


_NO_LOSS = Backward((), shared=False, again=False, inputs=False, weights=())


class OwnGradients:
    """One optimizer: its parameters, how its gradients were last seen, and the events of its cycle so far.

    `events` is None for a cycle with more of them than are kept; `last` is the step at the end of the cycle before.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        self.take(tensors)
        self.events: list[LoopEvent] | None = []
        self.last: LoopEvent | None = None
        self.step: LoopEvent | None = None
        self.fresh = False
        self.reached = False
        self.loose = False
        self.unscaled = False
        self.steps = 0

    def take(self, tensors: list[Tensor]) -> None:
        """Go on with these parameters: of what was done to their gradients before, nothing is known."""
        self.tensors = tensors
        self.ids = {id(tensor) for tensor in tensors}
        self.state: State = gradient_state(tensors)
        self.applied: State = ()

    def holds_any(self, ids: set[int]) -> bool:
        """Whether one of its parameters, or their gradients, is among these."""
        return bool(self.ids & ids) or any(id(tensor.grad) in ids for tensor in self.tensors if tensor.grad is not None)

    def look(self) -> State:
        """Take the state of the gradients as it is now; returns the one before."""
        before, self.state = self.state, gradient_state(self.tensors)
        return before


class LoopRecorder:
    """Notes each call in an inspected step; holds no tensor but the parameters; numbers go through the ledger.

    `values` are the numbers that the host has read for it, by name.
    """

    prefix = "loop_order."

    def __init__(self, watch: Watch) -> None:
        self.values: dict[str, float] = {}
        self._watch = watch
        self._own = [OwnGradients(list(watch.held_by(index).values())) for index in range(len(watch.optimizers))]
        self._thread: int | None = None
        self._inputs = False
        self._graphs: dict[int, set[int]] = {}
        self._before_clearing: set[int] = set()
        self._pending, self._number = _NO_LOSS, -1
        self._put = 0

    def renew(self) -> None:
        """The optimizers hold other tensors: the cycles in which they got them are not judged."""
        for index, own in enumerate(self._own):
            own.take(list(self._watch.held_by(index).values()))
            own.events = None

    def cycle(self, index: int) -> tuple[LoopEvent | None, list[LoopEvent]]:
        """The last step of an optimizer, if it was seen, and all events since; none where some are no longer kept."""
        own = self._own[index]
        return own.last, own.events or []

    def _elsewhere(self) -> bool:
        """Whether this runs in another thread than the loop, or inside of a probe of gpt_guard's own."""
        other = self._thread is not None and self._thread != threading.get_ident()
        return other or self._watch.inspection.functions.muted

    def _note(self, kind: Kind, optimizers: Iterable[int] = (), detail: Any = None) -> LoopEvent:
        event = LoopEvent(kind, frozenset(optimizers), user_line(), detail)
        for own in self._own:
            if own.events is not None:
                own.events.append(event)
                if len(own.events) > _MOST_EVENTS:
                    own.events = None
        return event

    def _holding(self, ids: set[int]) -> list[int]:
        """The optimizers all of whose parameters are among these."""
        return [index for index, own in enumerate(self._own) if own.ids and own.ids <= ids]

    # Calls that LoopCalls tells of.

    def zeroed(self, owner: Optimizer | nn.Module) -> None:
        """`zero_grad()` of an optimizer or module begins; noted if it clears all that one of ours holds."""
        if self._elsewhere():
            return
        if isinstance(owner, Optimizer):
            ids = {id(each) for group in owner.param_groups for each in group["params"]}
        else:
            ids = {id(each) for each in owner.parameters()}
        if held := self._holding(ids):
            self._note(Kind.ZERO_GRAD, held)
            self._before_clearing |= set(self._graphs)
            for index in held:
                self._own[index].loose = True

    def clipped(self, call: ClipCall) -> None:
        """Gradients were clipped."""
        if self._elsewhere():
            return
        ids = {id(each) for each in (*call.parameters, *call.gradients)}
        own = [index for index, each in enumerate(self._own) if each.holds_any(ids)]
        ours = [self._own[index] for index in own]
        with_grad = len(call.gradients)
        if ours and with_grad and call.limit <= 0.0:
            # What has no gradient left after this is explained by it.
            self._watch.ledger.put("clipped_away", 1.0)
        used = bool(ours and with_grad) and not any(each.fresh for each in ours) and all(each.steps for each in ours)
        scaled = self._watch.scaling and not any(each.unscaled for each in ours)
        clip = Clip(call.how, call.tensors, with_grad, call.limit, scaled=scaled, used=used)
        self._note(Kind.CLIP, own, clip)
        for each in ours:
            each.look()

    def scheduled(self, scheduler: Any) -> None:
        """`scheduler.step()` begins."""
        if self._elsewhere():
            return
        driven = innermost(getattr(scheduler, "optimizer", None))
        index = next((place for place, own in enumerate(self._watch.optimizers) if own is driven), None)
        name = type(scheduler).__name__
        if index is not None:
            stepped = self._own[index].steps > 0 or has_stepped(driven)
            self._note(Kind.SCHEDULER, [index], Scheduled(name, stepped))
        elif isinstance(driven, Optimizer):
            ids = {id(each) for group in driven.param_groups for each in group["params"]}
            shared = [place for place, own in enumerate(self._own) if own.ids & ids]
            if shared:
                self._note(Kind.SCHEDULER, shared, Scheduled(name, has_stepped(driven), foreign=True))

    def unscaled(self, optimizer: Any) -> None:
        """`scaler.unscale_()` begins."""
        inner = innermost(optimizer)
        for index, own in enumerate(self._watch.optimizers):
            if own is inner:
                self._note(Kind.UNSCALE, [index])
                self._own[index].unscaled = self._own[index].loose = True

    def other_step(self, optimizer: Optimizer) -> None:
        """Any optimizer begins a step; ours come by `step_begins`."""
        if not self._elsewhere() and all(own is not optimizer for own in self._watch.optimizers):
            self._note(Kind.OTHER_STEP)

    # The moments of the loop.

    def forward_begins(self) -> None:
        """The model is called."""
        self._thread = threading.get_ident() if self._thread is None else self._thread
        if self._watch.evaluation:
            return
        self._inputs = any(tensor.requires_grad for _, tensor in walk(self._watch.tap.inputs))
        self._note(Kind.FORWARD)

    def backward_begins(self, loss: Tensor) -> None:
        """Look at the graph while it is there."""
        for index, own in enumerate(self._own):
            if cleared(own.look(), own.state):
                if not self._zeroed_since(own, index):
                    self._note(Kind.CLEARED, [index])
                self._before_clearing |= set(self._graphs)
        shared = same_graph(loss, set(self._graphs))
        again = shared and same_graph(loss, set(self._graphs) - self._before_clearing)
        self._pending = Backward(tuple(self._kept(addends(loss))), shared, again, self._inputs, ())
        self._number = -1 if loss.grad_fn is None else loss.grad_fn._sequence_nr()

    def _zeroed_since(self, own: OwnGradients, index: int) -> bool:
        """Whether a zero_grad() was seen since the last backward, or since the step."""
        for event in reversed(own.events or []):
            if event.kind in (Kind.ZERO_GRAD, Kind.CLEARED) and index in event.optimizers:
                return True
            if event.kind is Kind.BACKWARD and index in event.optimizers:
                return False
        return False

    def _kept(self, found: list[Addend]) -> Iterable[Addend]:
        """The addends with what lies on the device replaced by the names under which the host will read it."""
        for each in found:
            factors = tuple(Factor(self._name(factor.value), factor.power) for factor in each.factors)
            yield Addend(each.kind, each.mean, self._name(each.count), factors)

    def _name(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        self._put += 1
        name = f"{self.prefix}{self._put}"
        self._watch.ledger.put(name, value)
        return name

    def backward_ended(self) -> None:
        """Gradients are in place: which of them did this backward write?"""
        made, self._pending = self._pending, _NO_LOSS
        touched, written = [], set()
        for index, own in enumerate(self._own):
            before = own.look()
            changed = {id(t) for t, old, new in zip(own.tensors, before, own.state, strict=True) if old != new}
            if changed:
                touched.append(index)
                written |= changed
                own.fresh, own.loose = True, False
        kept = (earlier for number, earlier in self._graphs.items() if number not in self._before_clearing)
        again = made.again and any(written & earlier for earlier in kept)
        if self._number >= 0:
            self._graphs[self._number] = written
        weights = tuple(versions(own.tensors) for own in self._own)
        self._note(Kind.BACKWARD, touched, made._replace(again=again, weights=weights))
        self._number = -1

    def step_begins(self, index: int) -> None:
        """The optimizer is about to step."""
        own = self._own[index]
        before = own.look()
        closure = self._watch.closure
        used = own.reached and not (own.fresh or closure) and own.state == own.applied
        used = used and any(version >= 0 for _, version in own.state)
        by_hand = own.fresh and before != own.state and not (own.loose or self._watch.scaling)
        own.step = self._note(Kind.STEP, [index], StepTaken(by_hand, used))

    def step_ended(self, index: int) -> None:
        """The optimizer has stepped: its next cycle begins, with this step as its first event."""
        own = self._own[index]
        own.look()
        own.last, own.applied = own.step, own.state
        own.steps += 1
        own.reached = own.fresh
        self._turn(own)

    def skipped(self, index: int) -> None:
        """A GradScaler has left the step out."""
        own = self._own[index]
        own.last, own.reached = self._note(Kind.SKIP, [index]), False
        self._turn(own)

    def _turn(self, own: OwnGradients) -> None:
        own.events = []
        own.fresh = own.unscaled = own.loose = False
        self._graphs.clear()
        self._before_clearing.clear()


def gradient_state(parameters: Iterable[Tensor]) -> State:
    """Identity and version of each gradient, without a look at a value; version -1 where there is none."""
    grads = [parameter.grad for parameter in parameters]
    return tuple(_NONE if grad is None else (id(grad), grad._version) for grad in grads)


def versions(parameters: Iterable[Tensor]) -> int:
    """A number that grows with every in-place change of these parameters."""
    return sum(parameter._version for parameter in parameters if not parameter.is_inference())


def cleared(before: State, now: State) -> bool:
    """Whether gradients that were there are gone; a `zero_grad(set_to_none=False)` is not seen this way."""
    there = [(old, new) for old, new in zip(before, now, strict=True) if old[1] >= 0]
    return bool(there) and all(new[1] < 0 for _, new in there)


def has_stepped(optimizer: Optimizer) -> bool:
    """Whether an optimizer has ever stepped; True where that is not known.

    A torch scheduler marks the step method of the optimizer that it was made for, and the method then marks each call.
    """
    marked = hasattr(optimizer.step, "_wrapped_by_lr_sched")
    return bool(optimizer.state) or not marked or bool(getattr(optimizer, "_opt_called", False))
