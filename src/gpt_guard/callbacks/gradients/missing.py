"""Trainable parameters that get no gradient, by name, and why: an unused layer, a cut graph, or no backward at all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from gpt_guard.callbacks.gradients.calls import CallLog
from gpt_guard.catalogue import finding
from gpt_guard.hooks.autograd_graph.nodes import leaves
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Moment, Observation, Severity

_LISTED = 20
_SHOWN = 6
# More steps than `first` to be sure that a list is no router and no stochastic depth.
_SURER = 2

SENTENCES = {
    "graph_cut": "ran with gradients enabled, but nothing it computed reached the loss through the graph",
    "unused_parameter": "ran, and other parameters in it got a gradient",
    "no_grad": "ran only with gradients disabled",
    "reentrant": "ran in a reentrant checkpoint, none of whose inputs requires a gradient",
    "unused_layer": "was never called",
    "skipped_layer": "was never called, while all others of its list ran one after another in every forward",
    "dead_branch": "was never called, although others of its list were",
    "unknown": "cannot be seen from here (compiled)",
}


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

# A kind of its own for the sentence, told under the cause of another.
_CAUSES = {"skipped_layer": "unused_layer"}


class _Reasons:
    """Why parameters have no gradient, from the calls of the modules that hold them."""

    def __init__(self, watch: Watch, calls: CallLog) -> None:
        self._watch = watch
        self._calls = calls

    def path(self, name: str) -> str:
        return self._watch.owner_of(name)[0]

    def skipped(self, name: str, *, least: int) -> bool:
        """Whether a chain of layers leaves this one out, in each of at least so many forwards."""
        path = self.path(name)
        parts = path.split(".")
        containers = [".".join(parts[:count]) for count in range(len(parts))]
        return any(self._calls.chained(each, least=least) for each in containers if not self._calls.ran(path))

    def conditional(self, name: str) -> bool:
        """Whether the module was left out of the calls by choice: it did not run, one beside it in a list did."""
        path = self.path(name)
        if path in self._calls.reentrant:
            return False
        while path:
            parent, _, own = path.rpartition(".")
            try:
                container = self._watch.model.get_submodule(parent)
            except AttributeError:
                return False
            if isinstance(container, (nn.ModuleList, nn.ModuleDict)) and not self._calls.ran(path):
                others = (key for key, _ in container.named_children() if key != own)
                if any(self._calls.ran(f"{parent}.{key}" if parent else key) for key in others):
                    return True
            path = parent
        return False

    def kind(self, name: str, gradient_paths: set[str], *, least: int) -> str:
        path = self.path(name)
        if path not in self._calls.reach:
            return "unknown"
        if path in self._calls.recorded:
            inside = f"{path}." if path else ""
            works = any(owner == path or owner.startswith(inside) for owner in gradient_paths)
            return "unused_parameter" if works else "graph_cut"
        if path in self._calls.unrecorded:
            return "reentrant" if path in self._calls.reentrant else "no_grad"
        if self.skipped(name, least=least):
            return "skipped_layer"
        return "dead_branch" if self.conditional(name) else "unused_layer"

    def cut_place(self, kinds: Mapping[str, str], owners: set[str]) -> str:
        """Name the modules between which the graph ends, from the order of the calls."""
        cut = {self.path(name) for name, kind in kinds.items() if kind in ("graph_cut", "no_grad", "reentrant")}
        called = list(self._calls.recorded)
        order = [path for path in called if path in cut]
        if not order:
            return ""
        after = next_of(owners, called, order[-1])
        if after is None:
            return ""
        return f" The last of them to be called is `{order[-1]}`; the next module that got a gradient is `{after}`."


class MissingGradients:
    """Judges the first steps of each optimizer: which of the parameters that it holds never got a gradient.

    After `first` steps without one a parameter is reported; after `patience` steps, as information, if its module was
    not called while others of the same ModuleList or ModuleDict were: an expert without tokens, stochastic depth,
    another task's head. A list whose other members ran as a chain in every forward has no such choice: its layer is
    reported two steps after `first`, or at the end of a run that is shorter.
    Frozen and empty parameters are never counted; tensors that are not the model's belong to ParamDeltaProbe. Costs
    nothing once every parameter has had a gradient.
    """

    def __init__(self, watch: Watch, *, first: int, patience: int) -> None:
        self._watch = watch
        self._first = first
        self._patience = patience
        self._calls = CallLog(watch)
        self._reasons = _Reasons(watch, self._calls)
        self._steps: Counter[int] = Counter()
        self._judged = 0
        self._without: dict[int, list[str]] = {}
        self._last: dict[int, Observation] = {}

    def open(self) -> None:
        """Begin to note which modules are called."""
        self._calls.open()

    def close(self) -> None:
        """Take the hooks away; may run twice."""
        self._calls.close()

    def settled(self, index: int) -> bool:
        """Whether nothing is left to judge of this optimizer: each parameter has had a gradient, or was reported."""
        return self._without.get(index) == []

    def judge(self, seen: Observation) -> Iterator[Finding]:
        """Yield at most one finding for each optimizer, and one more when patience ends."""
        index = seen.optimizer
        without = self._without.get(index)
        if without is None:
            without = [name for name, p in _own(self._watch, index).items() if p.requires_grad and p.numel()]
        elif not without:
            return
        held = self._watch.held_by(index)
        norms = seen.grad_norms
        without = [name for name in without if norms.get(name) is None and held[name].requires_grad]
        self._without[index] = without
        self._steps[index] += 1
        if self._steps[index] == self._first and without:
            yield from self._report_first(index, without, seen)
        elif self._steps[index] == self._first + _SURER and without:
            yield from self._report_skipped(index, seen, self._first + _SURER)
        elif self._steps[index] == self._patience and without:
            yield self._finding(index, without, seen, self._patience, Severity.INFO)
            self._without[index] = []
        self._last[index] = seen
        self._judged += 1
        if self._judged >= self._patience or self._all_settled():
            self._calls.close()

    def finish(self) -> Iterator[Finding]:
        """Tell of a layer that a chain leaves out, where the run was too short to be sooner."""
        for index, seen in self._last.items():
            if self._first <= self._steps[index] < self._first + _SURER:
                yield from self._report_skipped(index, seen, self._steps[index])

    def _report_skipped(self, index: int, seen: Observation, steps: int) -> Iterator[Finding]:
        skipped = [name for name in self._without[index] if self._reasons.skipped(name, least=steps)]
        if skipped:
            self._without[index] = [name for name in self._without[index] if name not in set(skipped)]
            yield self._finding(index, skipped, seen, steps, Severity.WARNING)

    def _all_settled(self) -> bool:
        return len(self._without) == len(self._watch.optimizers) and not any(self._without.values())

    def _report_first(self, index: int, without: list[str], seen: Observation) -> Iterator[Finding]:
        waiting = [name for name in without if self._reasons.conditional(name)]
        if any(self._calls.ran(self._reasons.path(name)) for name in without):
            # What ran before it with a graph has no gradient either: no_grad has cut it, and nobody chose.
            waiting = [name for name in waiting if self._reasons.path(name) not in self._calls.unrecorded]
        now = [name for name in without if name not in set(waiting)]
        self._without[index] = waiting
        # None at all is another story, told as GG208 by whoever counts empty steps.
        if not now or not any(norm is not None for norm in seen.grad_norms.values()):
            return
        yield self._finding(index, now, seen, self._first, Severity.WARNING)

    def _finding(self, index: int, names: list[str], seen: Observation, steps: int, severity: Severity) -> Finding:
        owners = {self._reasons.path(name) for name, norm in seen.grad_norms.items() if norm is not None}
        kinds = {name: self._reasons.kind(name, owners, least=self._first) for name in names}
        trainable = sum(p.requires_grad for p in self._watch.held_by(index).values())
        return _without_gradient(
            names,
            kinds,
            f"{len(names)} of {trainable} trainable parameters got no gradient in any of the first {steps} steps: "
            f"{shown(names)}. {reasons(kinds)}{self._reasons.cut_place(kinds, owners)}",
            seen,
            severity=severity,
            cause_id=f"optimizer {index}, {steps} steps",
            evidence={"trainable": trainable},
        )


@dataclass
class _Presence:
    """Which parameters of one optimizer have had a gradient other than zero, and for how many steps they have none.

    `gaps` counts those steps, `longest` is the longest gap before, `since` the step in which the last one ended.
    """

    steps: int = 0
    had: set[str] = field(default_factory=set)
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
                self.had.add(name)
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
    that inside of a list, as an expert is to which no token is sent. One that was frozen meanwhile, or whose module is not called any more, is a note: a schedule does that on purpose. Where all are there,
    a step costs two comparisons.
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
        index, held = seen.optimizer, _own(self._watch, seen.optimizer)
        # What was replaced gets no gradient either: ParamDeltaProbe's GG302 names what took its place.
        gone = [name for name in ripe if name not in held or not self._in_model(name, held[name])]
        self._reported |= set(gone)
        ripe = [name for name in ripe if name not in gone]
        frozen = [name for name in ripe if not held[name].requires_grad]
        if frozen:
            self._reported |= set(frozen)
            yield self._frozen(seen, frozen, gaps[frozen[0]])
        reasons_of = _Reasons(self._watch, calls)
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
        return _without_gradient(
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
            evidence={"parameters": names[:_LISTED], "count": len(names), "since": seen.step - steps + 1},
        )

    def _frozen(self, seen: Observation, names: list[str], steps: int) -> Finding:
        return _without_gradient(
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


def _own(watch: Watch, index: int) -> dict[str, Tensor]:
    """The model's parameters that an optimizer holds."""
    return {name: tensor for name, tensor in watch.held_by(index).items() if name not in watch.extra}


def _without_gradient(
    names: list[str], kinds: Mapping[str, str], text: str, seen: Observation, *, evidence: dict[str, Any], **fields: Any
) -> Finding:
    counts = Counter(kinds.values())
    return finding(
        "GG202",
        text,
        likely=_likely(counts),
        step=seen.step,
        moment=Moment.BEFORE_STEP,
        module=common_path(names),
        parameter=names[0] if len(names) == 1 else None,
        evidence={"parameters": names[:_LISTED], "count": len(names), "why": dict(counts)} | evidence,
        **fields,
    )


def _likely(counts: Counter[str]) -> list[str]:
    """Cause keys, the most frequent first; what ran without a graph explains why the graph ends before it."""
    kinds = sorted(counts, key=lambda kind: (kind not in ("no_grad", "reentrant"), -counts[kind]))
    return [_CAUSES.get(kind, kind) for kind in kinds if kind != "unknown"]


def next_of(wanted: Container[str], called: Sequence[str], path: str) -> str | None:
    """The first of the wanted modules that was called after this one."""
    return next((later for later in called[called.index(path) + 1 :] if later in wanted), None)


def reasons(kinds: Mapping[str, str], sentences: Mapping[str, str] = SENTENCES) -> str:
    """A sentence for each kind of missing gradient, the most frequent first, with a parameter of it by name."""
    return " ".join(
        f"The module of `{next(name for name, own in kinds.items() if own == kind)}` {sentences[kind]}"
        f"{f' ({count} parameters)' if count > 1 else ''}."
        for kind, count in Counter(kinds.values()).most_common()
    )


def shown(names: Iterable[str], most: int = _SHOWN) -> str:
    """The first few names, and how many more there are."""
    listed = list(names)
    more = len(listed) - most
    return ", ".join(listed[:most]) + (f" and {more} more" if more > 0 else "")


def common_path(names: Iterable[str]) -> str:
    """The path of the innermost module that holds all of these parameters; "" is the model itself."""
    split = [name.split(".")[:-1] for name in names]
    common: list[str] = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)
