"""Parameters that had gradients and have none any more, in the middle of a run, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from gpt_guard.callbacks.gradients.calls import CallLog
from gpt_guard.callbacks.gradients.missing import (
    LISTED,
    SENTENCES,
    Reasons,
    own_parameters,
    reasons,
    shown,
    without_gradient,
)
from gpt_guard.catalogue import finding
from gpt_guard.hooks.autograd_graph.nodes import leaves
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Moment, Observation, Severity

# Of parameters whose modules ran before.
_LOST_SENTENCES = SENTENCES | {
    "unused_layer": "was not called any more",
    "skipped_layer": "was not called any more, while all others of its list ran one after another in every forward",
    "dead_branch": "was not called any more, although others of its list were",
}
_LEFT_OUT = frozenset({"unused_layer", "skipped_layer", "dead_branch"})
# Steps without a gradient before calls are noted, and before it is told.
_SUSPICIOUS, _LOST = 2, 5
# Members of a list wait so many times as long.
_MEMBER = 10
# A gap so many times as long as any before it is no longer the way in which this loop works.
_GAPS = 3


@dataclass
class _Presence:
    """Which parameters of one optimizer have had a gradient other than zero, and for how many steps they have none.

    `gaps` counts those steps, `longest` is the longest gap before, `since` the step in which the last one ended.
    """

    steps: int = 0
    had: dict[str, None] = field(default_factory=dict)
    gaps: dict[str, int] = field(default_factory=dict)
    longest: dict[str, int] = field(default_factory=dict)
    since: dict[str, int] = field(default_factory=dict)

    def unbroken(self, seen: Observation) -> bool:
        """Whether there is nothing to count: all have a gradient, as before, or none has (GG201, GG208)."""
        self.steps += 1
        norms = seen.grad_norms
        return not seen.grad_norm or (not self.gaps and len(norms) == len(self.had) and 0.0 not in norms.values())

    def count(self, norms: Mapping[str, float | None]) -> list[str]:
        """Take in one step, and give those whose gap has lasted for some steps and breaks with how the loop works."""
        for name, norm in norms.items():
            if norm and (name not in self.had or name in self.gaps):
                gap = self.gaps.pop(name, 0) if name in self.had else self.steps - 1
                self.longest[name] = max(self.longest.get(name, 0), gap)
                self.since[name] = self.steps
                self.had.setdefault(name)
        for name in self.had:
            if not norms.get(name):
                self.gaps[name] = self.gaps.get(name, 0) + 1
        return [name for name, gap in self.gaps.items() if gap >= _SUSPICIOUS and self._was_usual(name, gap)]

    def _was_usual(self, name: str, gap: int) -> bool:
        return self.steps - gap - self.since[name] + 1 >= max(_LOST, 2 * self.longest[name])

    def allowed(self, name: str) -> int:
        """How many steps without a gradient are no news."""
        return max(_LOST, _GAPS * self.longest[name])


class LostGradients:
    """Parameters that had gradients, and have had none, or one of exactly zero, in the last steps while others do.

    It must have had them in five steps in a row, and in twice as many as any earlier gap was long: how a loop with
    other habits works is not known. From the second step without on it is noted which modules are called, and which
    parameters the graphs of the losses reach. Three steps later they are reported; what was left out of the calls
    while others of its ModuleList or ModuleDict ran (an expert without tokens, stochastic depth) only after `patience`
    steps. One that the loss does reach, with a gradient of zero, is a note (GG304) after `patience` steps, ten times
    that inside of a list, as an expert is to which no token is sent. One that was frozen meanwhile, or whose module is
    not called any more, is a note: a schedule does that on purpose. Where all are there, a step costs two comparisons.
    """

    def __init__(self, watch: Watch, *, patience: int) -> None:
        self._watch = watch
        self._patience = patience
        self._presence: dict[int, _Presence] = {}
        self._suspected: set[int] = set()
        self._reported: set[str] = set()
        self._calls: CallLog | None = None
        self._reached: set[int] = set()
        self._judged = False

    def close(self) -> None:
        """Take the hooks away; may run twice."""
        if self._calls is not None:
            self._calls.close()
            self._calls = None
        self._reached.clear()

    def before_backward(self, loss: Tensor) -> None:
        """Note which parameters a loss reaches, while any is suspected; reads no values."""
        if self._calls is not None:
            if self._judged:
                self._judged = False
                self._reached.clear()
            self._reached |= {id(leaf) for leaf in leaves(loss) if self._watch.name_of(leaf) is not None}

    def judge(self, seen: Observation) -> Iterator[Finding]:
        """Count one step."""
        presence = self._presence.setdefault(seen.optimizer, _Presence())
        if presence.unbroken(seen):
            return
        suspects = [name for name in presence.count(seen.grad_norms) if name not in self._reported]
        if suspects:
            self._suspected.add(seen.optimizer)
        else:
            self._suspected.discard(seen.optimizer)
        if not self._suspected:
            self.close()
        elif self._calls is None:
            self._calls = CallLog(self._watch)
            self._calls.open()
        else:
            ripe = [name for name in suspects if presence.gaps[name] >= presence.allowed(name)]
            yield from self._report(self._calls, seen, presence.gaps, ripe)
        self._judged = True
        if self._calls is not None:
            self._calls.begin_anew()

    def _report(
        self, calls: CallLog, seen: Observation, gaps: Mapping[str, int], ripe: Sequence[str]
    ) -> Iterator[Finding]:
        index, held = seen.optimizer, own_parameters(self._watch, seen.optimizer)
        # What was replaced gets no gradient either: ParamDeltaProbe's GG302 names what took its place.
        gone = [name for name in ripe if name not in held or not self._in_model(name, held[name])]
        self._reported |= set(gone)
        ripe = [name for name in ripe if name not in gone]
        frozen = [name for name in ripe if not held[name].requires_grad]
        if frozen:
            self._reported |= set(frozen)
            yield self._frozen(seen, frozen, gaps[frozen[0]])
        reasons_of = Reasons(self._watch, calls)
        present = {name for name, norm in seen.grad_norms.items() if norm}
        owners = {reasons_of.path(name) for name in present}
        # A graph in which not even those with a gradient are found tells nothing (sharded parameters).
        seen_through = any(id(self._watch.held_by(index)[name]) in self._reached for name in present)
        kinds: dict[str, str] = {}
        zero: list[str] = []
        for name in ripe:
            if not held[name].requires_grad:
                continue
            if id(held[name]) in self._reached:
                if gaps[name] >= self._patience * (_MEMBER if _of_a_list(self._watch, name) else 1):
                    zero.append(name)
                continue
            kind = reasons_of.kind(name, owners, least=2)
            if kind == "dead_branch" and gaps[name] < self._patience:
                continue
            if seen.grad_norms.get(name) is not None and (not seen_through or kind in ("reentrant", "unknown")):
                continue
            kinds[name] = kind
        for severity in (Severity.WARNING, Severity.INFO):
            own = {name: kind for name, kind in kinds.items() if (kind in _LEFT_OUT) == (severity is Severity.INFO)}
            if own:
                self._reported |= set(own)
                yield self._lost(seen, own, gaps, reasons_of.cut_place(own, owners), severity)
        if zero:
            self._reported |= set(zero)
            yield self._dead(seen, zero, gaps[zero[0]])

    def _in_model(self, name: str, tensor: Tensor) -> bool:
        try:
            return self._watch.model.get_parameter(name) is tensor
        except AttributeError:
            return False

    def _lost(
        self, seen: Observation, kinds: dict[str, str], gaps: Mapping[str, int], cut: str, severity: Severity
    ) -> Finding:
        names = list(kinds)
        steps = min(gaps[name] for name in names)
        return without_gradient(
            names,
            kinds,
            f"{len(names)} parameters that had gradients until step {seen.step - steps} got none in the last {steps} "
            f"steps, while others did: {shown(names)}. {reasons(kinds, _LOST_SENTENCES)}{cut}",
            seen,
            title="Parameters get no gradient any more",
            severity=severity,
            cause_id=f"optimizer {seen.optimizer}, lost, {severity}",
            evidence={"since": seen.step - steps + 1},
        )

    def _dead(self, seen: Observation, names: list[str], steps: int) -> Finding:
        path, kind = self._watch.owner_of(names[0])
        return finding(
            "GG304",
            f"The gradient of {len(names)} parameters has been exactly zero in the last {steps} steps and was not "
            f"before, although the loss reaches them, and others have one: {shown(names)}.",
            title="Parameters that learned have a gradient of zero",
            severity=Severity.INFO,
            likely=["dead_units"],
            step=seen.step,
            moment=Moment.BEFORE_STEP,
            module=path,
            module_class=kind,
            parameter=names[0],
            cause_id=f"optimizer {seen.optimizer}, dead",
            evidence={"parameters": names[:LISTED], "count": len(names), "since": seen.step - steps + 1},
        )

    def _frozen(self, seen: Observation, names: list[str], steps: int) -> Finding:
        return without_gradient(
            names,
            dict.fromkeys(names, "frozen"),
            f"{len(names)} parameters that had gradients until step {seen.step - steps} were frozen: they have "
            f"requires_grad=False now, and the optimizer still holds them: {shown(names)}.",
            seen,
            title="Parameters were frozen in the middle of the run",
            severity=Severity.INFO,
            cause_id=f"optimizer {seen.optimizer}, frozen",
            evidence={"since": seen.step - steps + 1},
        )


def _of_a_list(watch: Watch, name: str) -> bool:
    """Whether the parameter is inside of a ModuleList or ModuleDict, where a choice may leave it out."""
    parts = name.split(".")[:-1]
    paths = (".".join(parts[:count]) for count in range(len(parts)))
    try:
        return any(isinstance(watch.model.get_submodule(path), (nn.ModuleList, nn.ModuleDict)) for path in paths)
    except AttributeError:
        return False
