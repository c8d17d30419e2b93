"""Writes the loop's events down while steps are inspected, with what the gradients' version counters say about them."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from gpt_guard.callbacks.loop_order.events import (
    Clip,
    Event,
    Events,
    Kind,
    Scheduled,
    cleared,
    versions,
)
from gpt_guard.callbacks.loop_order.order_calls import ClipCall
from gpt_guard.callbacks.loop_order.order_losses import Factor, Term, same_graph, terms
from gpt_guard.callbacks.loop_order.order_own import Backward, OwnGradients, Step, has_stepped
from gpt_guard.hooks.frames import user_line
from gpt_guard.hooks.optimizer import innermost
from gpt_guard.hooks.tensors import walk
from gpt_guard.hooks.watch import Watch


class _Pending(NamedTuple):
    """What was seen of a loss before its backward: its terms, the number of its last operation, and its graph."""

    terms: tuple[Term, ...]
    number: int | None
    shared: bool
    again: bool


_NOTHING = _Pending((), None, shared=False, again=False)


class Recorder:
    """Told of each call in an inspected step; holds no tensor but the parameters; numbers go through the ledger.

    `values` are the numbers that the host has read for it, by name.
    """

    prefix = "loop_order."

    def __init__(self, watch: Watch) -> None:
        self.events = Events()
        self.values: dict[str, float] = {}
        self._watch = watch
        self._own = [OwnGradients(list(watch.held_by(index).values())) for index in range(len(watch.optimizers))]
        self._thread: int | None = None
        self._inputs = False
        self._graphs: dict[int, set[int]] = {}
        self._before_clearing: set[int] = set()
        self._pending = _NOTHING
        self._put = 0

    def cycle(self, index: int) -> tuple[Event | None, list[Event]]:
        """The last step of an optimizer, if it was seen, and all events since; none where some are no longer kept."""
        own = self._own[index]
        return own.last, self.events.since(own.begun) or []

    def _elsewhere(self) -> bool:
        """Whether this runs in another thread than the loop, or inside of a probe of gpt_guard's own."""
        other = self._thread is not None and self._thread != threading.get_ident()
        return other or self._watch.inspection.functions.muted

    def _note(self, kind: Kind, optimizers: Iterable[int] = (), detail: Any = None) -> Event:
        event = Event(kind, frozenset(optimizers), user_line(), detail)
        self.events.note(event)
        return event

    def _holding(self, ids: set[int]) -> list[int]:
        """The optimizers all of whose parameters are among these."""
        return [index for index, own in enumerate(self._own) if own.ids and own.ids <= ids]

    # Calls that a tap tells of.

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
        """Any optimizer begins a step; ours are told of in another way."""
        if not self._elsewhere() and all(own is not optimizer for own in self._watch.optimizers):
            self._note(Kind.OTHER_STEP)

    # The moments of the loop.

    def forward_begins(self) -> None:
        """The model is called."""
        self._thread = threading.get_ident() if self._thread is None else self._thread
        if self._watch.evaluation:
            self._note(Kind.EVALUATION)
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
        number = None if loss.grad_fn is None else loss.grad_fn._sequence_nr()
        shared = same_graph(loss, set(self._graphs))
        again = shared and same_graph(loss, set(self._graphs) - self._before_clearing)
        self._pending = _Pending(tuple(self._kept(terms(loss))), number, shared, again)

    def _zeroed_since(self, own: OwnGradients, index: int) -> bool:
        """Whether a zero_grad() was seen since the last backward, or since the step."""
        for event in reversed(self.events.since(own.begun) or []):
            if event.kind in (Kind.ZERO_GRAD, Kind.CLEARED) and index in event.optimizers:
                return True
            if event.kind is Kind.BACKWARD and index in event.optimizers:
                return False
        return False

    def _kept(self, found: list[Term]) -> Iterable[Term]:
        """The terms with what lies on the device replaced by the names under which the host will read it."""
        for term in found:
            factors = tuple(Factor(self._name(factor.value), factor.power) for factor in term.factors)
            yield Term(term.kind, term.mean, self._name(term.count), factors)

    def _name(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        self._put += 1
        name = f"{self.prefix}{self._put}"
        self._watch.ledger.put(name, value)
        return name

    def backward_ended(self) -> None:
        """Gradients are in place: which of them did this backward write?"""
        found, number, shared, again = self._pending
        self._pending = _NOTHING
        touched, written = [], set()
        for index, own in enumerate(self._own):
            before = own.look()
            changed = {id(t) for t, old, new in zip(own.tensors, before, own.state, strict=True) if old != new}
            if changed:
                touched.append(index)
                written |= changed
                own.fresh, own.loose = True, False
        kept = (earlier for made, earlier in self._graphs.items() if made not in self._before_clearing)
        again = again and any(written & earlier for earlier in kept)
        if number is not None:
            self._graphs[number] = written
        weights = tuple(versions(own.tensors) for own in self._own)
        self._note(Kind.BACKWARD, touched, Backward(found, shared, again, self._inputs, weights))

    def step_begins(self, index: int) -> None:
        """The optimizer is about to step."""
        own = self._own[index]
        before = own.look()
        closure = self._watch.closure
        used = own.reached and not (own.fresh or closure) and own.state == own.applied
        used = used and any(version >= 0 for _, version in own.state)
        by_hand = own.fresh and before != own.state and not (own.loose or self._watch.scaling)
        own.last = self._note(Kind.STEP, [index], Step(by_hand, used))

    def step_ended(self, index: int) -> None:
        """The optimizer has stepped: its next cycle begins, with this step as its first event."""
        own = self._own[index]
        own.look()
        own.applied = own.state
        own.steps += 1
        own.reached = own.fresh
        self._turn(own)

    def skipped(self, index: int) -> None:
        """A GradScaler has left the step out."""
        own = self._own[index]
        own.last, own.reached = self._note(Kind.SKIP, [index]), False
        self._turn(own)

    def _turn(self, own: OwnGradients) -> None:
        own.begun = self.events.count
        own.fresh = own.unscaled = own.loose = False
        self._graphs.clear()
        self._before_clearing.clear()

    def mode_changed(self, training: bool) -> None:
        """`.train()` or `.eval()` was called on the model."""
        if not self._elsewhere():
            self._note(Kind.MODE, detail=training)
