"""From an operation that has run to the origin it is, put into words once for each line that makes a mask."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from gpt_guard.replaying.answer import answer, deliberate
from gpt_guard.replaying.case import Case
from gpt_guard.replaying.decide import Read, Result
from gpt_guard.replaying.forwards import Forward
from gpt_guard.replaying.memory import Origin
from gpt_guard.replaying.places import Modules, Place
from gpt_guard.replaying.schema import Op, single


class Before(NamedTuple):
    """What an operation was given, measured before it ran; `node` is that of the backward it belongs to, if any."""

    op: Op
    bound: dict[str, Any]
    reads: list[Read]
    given: set[int]
    written: list[Tensor]
    place: Place
    stands: str
    node: Any
    forward: Forward | None


class Origins:
    """Makes the origins of a trace."""

    def __init__(self, modules: Modules) -> None:
        self._modules = modules
        self._masks: dict[tuple[str, str, int, str | None], Origin] = {}

    def made(self, before: Before, position: int, result: Result) -> Origin:
        """The origin that an operation is whose result is bad by its own doing."""
        node = before.node
        op, bound = single(before.op, before.bound, position)
        case = Case(
            op=op,
            bound=bound,
            reads=before.reads,
            result=result,
            position=position if op is before.op else 0,
            place=self.place_of(before, exact=True),
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
        seen = answer(case)
        number = node._sequence_nr() if node is not None else None
        origin = Origin(lambda: seen, deliberate=on_purpose, cause=cause, node=number)
        if on_purpose:
            self._masks[same] = origin
        return origin

    def place_of(self, before: Before, *, exact: bool = False) -> Place:
        """Of a derivative, the line of its forward; the line that called backward() where that is not known.

        `exact` also looks for a method that was called in place of its module, which reads the variables of frames.
        """
        place, forward = before.place, before.forward
        if before.stands == "backward":
            return forward.place if forward is not None else place
        if place.module is None and before.stands == "inside" and forward is not None:
            return place._replace(module=forward.place.module, module_class=forward.place.module_class)
        if exact and place.module is None and (method := self._modules.method())[0] is not None:
            return place._replace(module=method[0], module_class=method[1])
        return place
