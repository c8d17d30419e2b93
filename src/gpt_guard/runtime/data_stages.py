"""Stages of preprocessing under watch: the first one to lose a value, a feature, a dimension or digits is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from gpt_guard.catalogue import finding
from gpt_guard.errors import GuardUsageError, error_for
from gpt_guard.hooks.frames import function_line, user_line
from gpt_guard.hooks.tensors import describe, walk, watchable
from gpt_guard.records import Finding, Moment, Severity, SourceLine
from gpt_guard.runtime.dispatch import Dispatch

T = TypeVar("T")
OnFinding = Callable[[Finding], Any]

LISTED = 8
"""Features that a sentence names; the evidence has up to 50."""
FEWEST_ROWS = 3
"""In fewer rows a feature is constant by chance."""


class Stages:
    """Steps of a preprocessing pipeline, run in order as one function, each looked at while it runs.

    Made by `gpt_guard.stages(("tokenize", tokenize), ("normalize", normalize))`. A stage is told of once: with what
    comes out of it for the first time, the later ones are not blamed. Reads the device in every call; it is meant for
    preprocessing, not for the training step.
    """

    def __init__(self, steps: tuple[tuple[str, Callable[..., Any]], ...], on_finding: OnFinding | None) -> None:
        self.names = tuple(name for name, _ in steps)
        self._steps = steps
        self._on_finding = on_finding
        self._said: set[str] = set()

    def __call__(self, data: Any) -> Any:
        """Run all stages on data of any structure and return what the last one returns.

        Raises NonFiniteError (GG150) for values that become NaN or infinite, DataError (GG639) for an error in them.
        """
        for name, function in self._steps:
            before, data = data, function(data)
            self._tell(compare_stage(name, before, data, function_line(function)))
        return data

    def _tell(self, found: Iterator[Finding]) -> None:
        for each in found:
            if each.cause_id in self._said:
                continue
            self._said.add(str(each.cause_id))
            if self._on_finding is not None:
                self._on_finding(each)
            elif each.severity is Severity.ERROR:
                raise error_for(each)


def stages(*steps: tuple[str, Callable[..., Any]], on_finding: OnFinding | None = None) -> Stages:
    """Put a preprocessing pipeline under watch: its functions one after the other, each with the name of its stage.

    After `pipeline = stages(("tokenize", tokenize), ("normalize", normalize))`, `pipeline(data)` is
    `normalize(tokenize(data))`. `on_finding` takes what is found in place of raising it, such as `list.append`; to let
    a Guardian's policy decide, give each stage's result to `guardian.stage(name, data)`.
    Raises GuardUsageError for anything but pairs of a name and a function.
    """
    for step in steps:
        if not (isinstance(step, tuple) and len(step) == 2 and isinstance(step[0], str) and callable(step[1])):
            raise GuardUsageError(f'stages({step!r:.60}) cannot work: expected pairs such as ("normalize", normalize)')
    if not steps:
        raise GuardUsageError('stages() has nothing to run: give pairs such as ("normalize", normalize)')
    return Stages(steps, on_finding)


class StageLog:
    """What `guardian.stage(name, data)` has seen: each stage is compared with the one before it."""

    def __init__(self) -> None:
        self._before: Any = None
        self._names: list[str] = []

    def note(self, name: str, data: T, submit: OnFinding) -> T:
        """Look at data as it comes out of a stage, and return it unchanged."""
        if name in self._names:
            # The pipeline begins anew.
            self._names, self._before = [], None
        self._names.append(name)
        for each in compare_stage(name, self._before, data, user_line()):
            submit(each)
        # A description, not the data: nothing is kept alive from one batch to the next.
        self._before = described(data)
        return data


def compare_stage(name: str, before: Any, after: Any, line: SourceLine | None) -> Iterator[Finding]:
    """Yield what has gone wrong between the input and the output of a stage, tensor by tensor. Reads the device.

    A non-finite value is blamed on the stage whose input was finite, together with the features that were constant
    there: their standard deviation is 0. Constant features are told of where they first appear, unless they are 0 as
    in one-hot rows; in fewer than 3 rows nothing is.
    """
    known = described(before) if before is not None else []
    was_finite = all(each.finite for each in known)
    tensors = [(position, tensor) for position, tensor in walk(after) if watchable(tensor)]
    paired = known if len(known) == len(tensors) else [None] * len(tensors)
    for (position, tensor), was in zip(tensors, paired, strict=True):
        fields: dict[str, Any] = {"where": line, "moment": Moment.START, "position": position or None}
        if not tensor.numel():
            if was is not None or not known:
                yield _lost(name, "empty", f"has no elements {list(tensor.shape)}", **fields)
            continue
        now = describe_features(tensor)
        if not now.finite:
            if was_finite if was is None else was.finite:
                yield _non_finite(name, tensor, was, fields, first=not known)
            continue
        yield from _losses(name, was, now, fields)


def _non_finite(name: str, tensor: Tensor, was: Described | None, fields: dict[str, Any], *, first: bool) -> Finding:
    stats = describe(tensor)
    assert stats is not None, "the caller has seen a value that is not finite"
    counts = ", ".join(
        f"{count} {word}"
        for count, word in ((stats.nan, "NaN"), (stats.pos_inf, "+inf"), (stats.neg_inf, "-inf"))
        if count
    )
    seen = f"Stage `{name}` makes values that are not finite: {counts} of {stats.numel} elements"
    evidence: dict[str, Any] = {"stage": name}
    likely: list[str] = []
    bad = (~features_of(tensor.detach()).isfinite()).any(0).nonzero().flatten().tolist()
    if was is not None and was.shape == stats.shape and was.constant:
        guilty = {place: value for place, value in was.constant.items() if place in set(bad)}
        if guilty:
            likely = ["zero_std"]
            evidence["features"] = list(guilty)[:50]
            values = ", ".join(f"{place} (always {value:g})" for place, value in list(guilty.items())[:LISTED])
            more = f" and {len(guilty) - LISTED} more" if len(guilty) > LISTED else ""
            plural = "s" if len(guilty) > 1 else ""
            seen += f". Feature{plural} {values}{more} came in constant: the standard deviation is 0, and this is what "
            seen += "dividing by it makes"
    elif first:
        likely = ["came_in"]
    if "features" not in evidence and tensor.dim() in (2, 3):
        evidence["features"] = bad[:50]
        seen += f", in feature{'s' if len(bad) > 1 else ''} {', '.join(map(str, bad[:LISTED]))}"
    return finding(
        "GG150", f"{seen}.", likely=likely, tensor=stats, evidence=evidence, cause_id=f"{name} non-finite", **fields
    )


def _losses(name: str, was: Described | None, now: Described, fields: dict[str, Any]) -> Iterator[Finding]:
    if was is not None and _truncated(was, now):
        seen = f"casts {_name(was.dtype)} with fractions to {_name(now.dtype)}: everything behind the point is dropped"
        yield _lost(name, "dtype", seen, **fields)
        return
    new = {place: value for place, value in now.constant.items() if value not in (0.0, 1.0)}
    if was is not None and was.features == now.features:
        new = {place: value for place, value in new.items() if place not in was.constant}
    # Masks and positions are equal in all rows, too: only rows that were different can have lost it.
    if now.rows_equal and was is not None and not was.rows_equal and was.shape[0] == now.shape[0]:
        yield _lost(name, "all_equal", f"gives {now.shape[0]} rows that are all equal", **fields)
    elif new and len(now.shape) in (2, 3):
        listed = ", ".join(f"{place} (always {value:g})" for place, value in list(new.items())[:LISTED])
        plural = "s" if len(new) > 1 else ""
        seen = f"gives {len(new)} constant feature{plural} of {now.features}: {listed}; the standard deviation is 0"
        # What comes in constant is no fault of the stage, and harmless unless something divides by its deviation.
        severity = Severity.INFO if was is None else Severity.WARNING
        yield _lost(name, "zero_std", seen, severity, features=list(new)[:50], **fields)
    if was is None:
        return
    if len(now.shape) < len(was.shape) and was.shape[0] == 1 and now.shape == was.shape[1:]:
        yield _lost(
            name, "collapsed", f"turns {list(was.shape)} into {list(now.shape)}: the first one is gone", **fields
        )
    elif (
        len(was.shape) > 1 and was.shape[0] > 1 and now.shape and now.shape[0] == 1 and len(now.shape) == len(was.shape)
    ):
        yield _lost(name, "collapsed", f"turns {list(was.shape)} into {list(now.shape)}: one row is left", **fields)


def _lost(
    name: str,
    cause: str,
    what: str,
    severity: Severity = Severity.WARNING,
    *,
    features: list[int] | None = None,
    **fields: Any,
) -> Finding:
    evidence: dict[str, Any] = {"stage": name} | ({} if features is None else {"features": features})
    fields |= {"severity": severity, "evidence": evidence, "cause_id": f"{name} {cause}"}
    return finding("GG639", f"Stage `{name}` {what}.", likely=[cause], **fields)


def _truncated(was: Described, now: Described) -> bool:
    """Whether a cast has cut off fractions; scaling to 0 ... 255 first, or sorting into bins, gives other values."""
    whole = not (now.dtype.is_floating_point or now.dtype.is_complex or now.dtype is torch.bool)
    return whole and was.fractions and now.shape == was.shape and now.whole_sum == was.whole_sum


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Described(NamedTuple):
    """What is remembered of a tensor; `whole_sum` is the sum of its elements without what stands behind the point."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    finite: bool
    features: int
    constant: dict[int, float]
    fractions: bool
    whole_sum: float
    rows_equal: bool


def described(data: Any) -> list[Described]:
    """A description of each tensor in a structure. Reads the device."""
    if isinstance(data, list) and all(isinstance(each, Described) for each in data):
        return data
    return [describe_features(tensor) for _, tensor in walk(data) if watchable(tensor) and tensor.numel()]


def describe_features(tensor: Tensor) -> Described:
    """The facts of one tensor that has elements. Reads the device."""
    with torch.no_grad():
        values = tensor.detach()
        table = features_of(values)
        finite = bool(values.isfinite().all())
        floats = values.is_floating_point()
        constant: dict[int, float] = {}
        rows_equal = False
        if values.dim() and table.shape[0] >= FEWEST_ROWS and not values.is_complex():
            same = (table == table[:1]).all(0)
            rows = values.reshape(values.shape[0], -1)
            rows_equal = bool((rows == rows[:1]).all())
            if floats and values.dim() <= 3:
                places = same.nonzero().flatten().tolist()
                constant = {place: float(table[0, place]) for place in places}
        fractions = floats and finite and bool((values != values.round()).any())
        shape, features = tuple(values.shape), table.shape[1]
        # MPS has no float64.
        wide = torch.float32 if values.device.type == "mps" else torch.float64
        whole_sum = 0.0 if values.is_complex() else float(values.to(wide).trunc().sum())
        return Described(shape, values.dtype, finite, features, constant, fractions, whole_sum, rows_equal)


def features_of(values: Tensor) -> Tensor:
    """Samples by features: of a series `[B, T, F]` the last dimension holds the features."""
    if values.dim() <= 1:
        return values.reshape(-1, 1)
    return values.reshape(-1, values.shape[-1]) if values.dim() == 3 else values.reshape(values.shape[0], -1)


class Staged:
    """The part of Guardian that looks at stages of preprocessing; it works inside and outside of an active one."""

    _dispatch: Dispatch
    _stage_log: StageLog | None = None

    def stage(self, name: str, data: T) -> T:
        """Look at data as it comes out of a stage of preprocessing, and return it: `x = guardian.stage("scale", x)`.

        Each call is compared with the one before it, until a name comes again: then the pipeline begins anew. Named
        with the stage are non-finite values (GG150, which halts by default) with the constant features that they come
        from, and constant features, dropped dimensions and dropped digits (GG639). `data` may be any structure of
        tensors; reads the device.
        """
        self._stage_log = log = self._stage_log or StageLog()
        return log.note(name, data, self._dispatch.submit)
