"""Follows non-finite values from operation to operation, from where they were made to where they are met."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from gpt_guard.hooks.tensors import walk
from gpt_guard.records import OperationSeen
from gpt_guard.replaying.explain import Leaves, deliberate, explained
from gpt_guard.replaying.failed_operation import FailedOperation
from gpt_guard.replaying.memory import Bad, Maker, Memory, NonFiniteOrigin
from gpt_guard.replaying.operations import EMPTY, HIDES, Op, scalars, single, tensors, word_for
from gpt_guard.replaying.ownership import Read, Result, Whose, whose
from gpt_guard.replaying.places import (
    ForwardOperation,
    GraphNodes,
    ModuleStack,
    OperationPlace,
    current_node,
    place_of,
    user_frame,
)
from gpt_guard.replaying.rules_backward import DEFINED_AT_ZERO, WHERE_UNSELECTED, hazard
from gpt_guard.replaying.values import flags

_INF = float("inf")
# What a backward begins with is no part of the forward before it.
_STARTS = ("ones_like", "detach")


class Before(NamedTuple):
    """What an operation was given, measured before it ran; `node` is that of the backward it belongs to, if any."""

    op: Op
    bound: dict[str, Any]
    reads: list[Read]
    given: set[int]
    written: list[Tensor]
    place: OperationPlace
    stands: str
    node: Any
    forward: ForwardOperation | None


def _testable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _may_be_mask(tensor: Tensor) -> bool:
    """Whether -inf is a mask: not if a tensor that was computed holds nothing else, as one that has overflowed does."""
    found = flags(tensor)
    if found is None:
        return False
    # A single infinity is the start value of a search.
    single = tensor.dim() == 0 and not tensor.requires_grad
    return single or (found.only_neg_inf and not (tensor.requires_grad and bool((tensor.detach() == -_INF).all())))


def _put(given: Any, tensor: Tensor, values: Tensor) -> Any:
    """An argument with a tensor, or one in its list, replaced."""
    if isinstance(given, (list, tuple)):
        return [values if each is tensor else each for each in given]
    return values if given is tensor else given


class Follower:
    """Sees each operation before and after it runs. Nothing here is called while a mode sees operations."""

    def __init__(self, model: nn.Module, given: Mapping[str, Tensor] | None = None) -> None:
        self.modules = ModuleStack(model)
        self.origins: list[NonFiniteOrigin] = []
        self._masks: dict[tuple[str, str, int, str | None], NonFiniteOrigin] = {}
        self._memory = Memory()
        self._last: tuple[NonFiniteOrigin, ...] = ()
        self._nodes = GraphNodes()
        self._leaves = Leaves(model, given)

    def before(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Before:
        """Read the inputs; those that the operation writes to are copied, since afterwards they are gone."""
        frame, stands = user_frame()
        node = current_node() if stands != "forward" else None
        forward = self._nodes.of(node) if node is not None else None
        node = node if stands == "backward" else None
        place = place_of(frame, self.modules)
        bound = op.bind(args, kwargs)
        reads: list[Read] = []
        given: set[int] = set()
        written = [tensor for name in op.writes for tensor in tensors(bound.get(name))]
        for name, value in bound.items():
            for tensor in tensors(value):
                if (key := self._memory.key(tensor)) is not None:
                    given.add(key)
                if name not in op.overwrites:
                    reads.append(self._read(op, bound, name, tensor, place))
        return Before(op, bound, reads, given, written, place, stands, node, forward)

    def _read(self, op: Op, bound: dict[str, Any], name: str, tensor: Tensor, place: OperationPlace) -> Read:
        found = self._bad(tensor, place) if _testable(tensor) else None
        values = tensor
        if name in op.writes and _testable(tensor):
            values = tensor.detach().clone()
            bound[name] = _put(bound[name], tensor, values)
        return Read(name, tensor, values, found, self._memory.maker(tensor))

    def _bad(self, tensor: Tensor, place: OperationPlace | None) -> Bad | None:
        found = self._memory.bad(tensor)
        if found is None or found.origins:
            return found
        return found._replace(origins=(self._leaf(tensor, found.flags.nan, place),))

    def _leaf(self, tensor: Tensor, nan: bool, place: OperationPlace | None) -> NonFiniteOrigin:
        kind, _, whole = self._leaves.name(tensor)
        mask = kind != "parameter" and not nan and _may_be_mask(whole)
        return self._from_outside(tensor, self._leaves.seen(tensor, place), deliberate=mask)

    def _from_outside(self, tensor: Tensor, seen: OperationSeen, *, deliberate: bool = False) -> NonFiniteOrigin:
        origin = NonFiniteOrigin(seen, deliberate=deliberate)
        self._memory.blame(tensor, origin)
        self.origins.append(origin)
        return origin

    def after(self, before: Before, out: Any) -> None:
        """Test what was written, and record whose the non-finite values in it are."""
        op, bound = before.op, before.bound
        makers = tuple(read.maker for read in before.reads if read.maker is not None)
        maker = Maker(op.base, tuple(scalars(bound).values()), makers)
        # A backward makes nodes too, where it is to be differentiated once more.
        if self._nodes.free():
            self._nodes.note(ForwardOperation(op.base, self._place_of(before), maker, hazard(op.base, bound)))
        made: list[NonFiniteOrigin] = []
        if before.stands == "forward" and op.base not in _STARTS:
            self._last = self._seen_through(before, out)
        for position, tensor in enumerate(self._written(before, out)):
            if (key := self._memory.key(tensor)) is None:
                continue
            origins, owner = self._of(before, position, tensor, made) if _testable(tensor) else Whose(())
            if before.stands == "forward" and _testable(tensor) and op.base not in _STARTS:
                self._last = origins
            self._memory.wrote(tensor, origins, maker, born=key not in before.given, owner=owner)
        self.origins += made

    def unmeasured(self, op: Op, out: Any, why: str) -> None:
        """What was written by an operation that could not be measured is not known, and not said to be a constant's."""
        seen = OperationSeen(name=word_for(op.base), aten=op.aten, shows=f"its values could not be measured ({why})")
        for tensor in tensors(out):
            if self._memory.key(tensor) is not None:
                self._memory.wrote(tensor, (NonFiniteOrigin(seen, deliberate=True),), None, born=True)

    def _seen_through(self, before: Before, out: Any) -> tuple[NonFiniteOrigin, ...]:
        """Whose bad values a view shows; none if it shows only good ones, or is no view."""
        for tensor in tensors(out):
            if _testable(tensor) and self._memory.key(tensor) in before.given:
                found = self._memory.bad(tensor)
                return found.origins if found is not None else ()
        return ()

    def _written(self, before: Before, out: Any) -> list[Tensor]:
        """The tensors that the operation wrote: new ones, and arguments written in place; no views."""
        new = [tensor for tensor in tensors(out) if self._memory.key(tensor) not in before.given]
        return list({id(tensor): tensor for tensor in (*new, *before.written)}.values())

    def _of(self, before: Before, position: int, tensor: Tensor, made: list[NonFiniteOrigin]) -> Whose:
        found = flags(tensor)
        if found is None:
            self._hide(before)
            return Whose(())

        def make() -> NonFiniteOrigin:
            if not made:
                made.append(self._made_by(before, position, Result(tensor, found)))
            return made[0]

        reads = before.reads
        if not any(read.bad for read in reads):
            # What was written past torch, as by numpy or a kernel of one's own, shows only now.
            reads = [self._again(read, before.place) for read in reads]
        owners = whose(before.op, before.bound, reads, Result(tensor, found), make)
        for origin in owners.origins:
            origin.idle = origin in made and before.op.base in EMPTY
            if origin not in made:
                self._meet(before, origin, tensor)
        return owners

    def _made_by(self, before: Before, position: int, result: Result) -> NonFiniteOrigin:
        """The origin that an operation is whose result is bad by its own doing."""
        node = before.node
        op, bound = single(before.op, before.bound, position)
        case = FailedOperation(
            op=op,
            bound=bound,
            reads=before.reads,
            result=result,
            position=position if op is before.op else 0,
            place=self._place_of(before, exact=True),
            phase="forward" if before.stands == "forward" else "backward",
            node=node.name() if node is not None else None,
            forward=before.forward,
        )
        on_purpose, cause = deliberate(case)
        line = case.place.line
        same = (op.base, line.file if line else "", line.line if line else 0, cause)
        # A mask is made anew in each layer and at each position: one answer for a line is enough.
        if on_purpose and (known := self._masks.get(same)) is not None:
            return known
        number = node._sequence_nr() if node is not None else None
        origin = NonFiniteOrigin(explained(case), deliberate=on_purpose, cause=cause, node=number)
        if on_purpose:
            self._masks[same] = origin
        return origin

    def _place_of(self, before: Before, *, exact: bool = False) -> OperationPlace:
        """Of a derivative, the line of its forward; the line that called backward() where that is not known.

        `exact` also looks for a method that was called in place of its module, which reads the variables of frames.
        """
        place, forward = before.place, before.forward
        if before.stands == "backward":
            return forward.place if forward is not None else place
        if place.module is None and before.stands == "inside" and forward is not None:
            return place._replace(module=forward.place.module, module_class=forward.place.module_class)
        if exact and place.module is None and (method := self.modules.method())[0] is not None:
            return place._replace(module=method[0], module_class=method[1])
        return place

    def _again(self, read: Read, place: OperationPlace) -> Read:
        kinds = flags(read.values) if _testable(read.values) else None
        if kinds is None:
            return read
        if self._leaves.name(read.tensor)[0] == "constant" and self._memory.maker(read.tensor) is not None:
            origin = self._from_outside(read.tensor, self._leaves.written_past_torch(read.tensor, place))
        else:
            origin = self._leaf(read.tensor, kinds.nan, place)
        return read._replace(bad=Bad(kinds, (origin,)))

    def _hide(self, before: Before) -> None:
        """A selection took bad values and let none through."""
        if before.op.base not in HIDES:
            return
        for read in before.reads:
            for origin in read.bad.origins if read.bad is not None and not read.bad.deliberate else ():
                if before.stands == "forward":
                    origin.hidden = origin.hidden or before.place.line
                origin.idle = True

    def _meet(self, before: Before, origin: NonFiniteOrigin, result: Tensor) -> None:
        """A gradient of 0 times the infinite derivative of the same node tells of a branch that was not taken."""
        node = before.node
        if origin.node is None or node is None or origin.node != node._sequence_nr() or before.op.base != "mul":
            return
        if origin.seen.name in DEFINED_AT_ZERO:
            return
        nan = result.detach().isnan()
        finite = [read.values.detach() for read in before.reads if read.bad is None]
        if bool(nan.any()) and any(bool((values == 0).expand_as(nan)[nan].all()) for values in finite):
            origin.put_first(WHERE_UNSELECTED)

    def first(self) -> NonFiniteOrigin | None:
        """The origin of what the model returned, of the last result of the forward, or of a gradient; else the first.

        The first in time alone would blame values that are gone: those count only if nothing of these is bad.
        """
        outputs = [tensor for _, tensor in walk(self.modules.output)]
        for tensor in outputs:
            if (origin := self.origin(tensor)) is not None and not origin.deliberate:
                return origin
        for origin in self._last:
            if not origin.deliberate:
                return origin
        for parameter in self.modules.model.parameters():
            if parameter.grad is not None and (origin := self.origin(parameter.grad)) is not None:
                return origin
        return next((each for each in self.origins if not each.deliberate and not each.idle), None)

    def origin(self, tensor: Tensor) -> NonFiniteOrigin | None:
        """The origin of a tensor's non-finite values; a mask only if nothing else is among them."""
        if self._memory.key(tensor) is None:
            return None
        found = self._bad(tensor, None)
        if found is None:
            return None
        made = [origin for origin in self.origins if origin in found.origins and not origin.deliberate]
        return made[0] if made else found.origins[0]
