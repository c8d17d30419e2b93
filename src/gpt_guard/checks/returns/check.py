"""check_returns: run a return or advantage function on episodes of two steps, and name the mistake it makes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gpt_guard.catalogue import finding
from gpt_guard.checks.returns.call import Arguments, Way
from gpt_guard.checks.returns.reference import (
    CUT,
    KINDS,
    LIMIT,
    MISTAKES,
    PLAIN,
    TERMINAL,
    TWO,
    TWO_LIMITS,
    Episode,
    Kind,
    expected,
    without_values,
)
from gpt_guard.errors import GuardUsageError
from gpt_guard.hooks.source_lines import function_line
from gpt_guard.records import CheckResult, Finding, Severity

GAMMA, LAM = 0.5, 0.25
"""Given to functions that take them: powers of two, so that every figure is exact in any floating-point type."""
TOLERANCE = 1e-4


class _Form(NamedTuple):
    """What one of the results is."""

    kind: Kind
    gamma: float
    lam: float


def check_returns(
    fn: Callable[..., Any],
    *,
    gamma: float | None = None,
    lam: float | None = None,
    kind: Kind | None = None,
    names: Mapping[str, str] | None = None,
) -> CheckResult:
    """Ask whether a function treats terminals, time limits and the borders between episodes as it must.

    `fn` takes some of rewards, values (`[T]`, or `[T + 1]` where nothing else tells what follows), next_values,
    last_value, dones or masks, terminated, truncated, gamma and lam, by these or similar names, and returns discounted
    returns, TD targets or errors, advantages (GAE), lambda returns, or several of these. It is run on episodes of two
    steps whose results are known exactly. Which of these it computes is seen on an episode without an end, or said by
    `kind`. `dones` that come together with `next_done` mark the first step of an episode.

    `gamma` and `lam` are those that the function uses, where it does not take them as arguments. `names` says which
    part an argument plays that has a name of its own: `{"x": "rewards"}`. The result has a finding (GG617) for each
    mistake, with the figures; facts hold what was returned for each episode. Raises GuardUsageError where the function
    cannot be called.
    """
    if not callable(fn):
        raise GuardUsageError(f"check_returns takes a function, not a {type(fn).__name__}")
    if kind is not None and kind not in KINDS:
        raise GuardUsageError(f"kind={kind!r}; there are {', '.join(map(repr, KINDS))}")
    arguments = Arguments(fn, names or {})
    gamma = _factor(arguments, "gamma", gamma, GAMMA)
    lam = (LAM if arguments.has("lam") else 1.0) if lam is None else lam
    asked = _Asked(arguments, gamma, lam)
    forms, findings = asked.forms(kind)
    facts: dict[str, Any] = {"computes": [form.kind for form in forms if form is not None]}
    if not findings:
        findings = asked.mistakes(forms)
    notes = _cannot_tell(arguments) if asked.bootstraps else []
    facts["results"] = asked.results
    failed = any(each.severity is Severity.ERROR for each in findings)
    return CheckResult(
        stage="returns",
        title=arguments.title,
        status="failed" if failed else "passed",
        measured="; ".join(each.seen for each in findings) or f"{', '.join(facts['computes'])}: right on every episode",
        expected=f"ends of episodes and time limits as they are (gamma {gamma:g}, lambda {lam:g})",
        facts=facts,
        findings=(*findings, *notes),
    )


class _Asked:
    """A function and what it gave for each episode."""

    def __init__(self, arguments: Arguments, gamma: float, lam: float) -> None:
        self.arguments = arguments
        self.gamma = gamma
        self.lam = lam
        self.results: dict[str, Any] = {}
        self._way: Way | None = None

    @property
    def bootstraps(self) -> bool:
        """Whether it is told a value of what follows the last step."""
        return self.arguments.has("next_values", "last_value") or (self._way is not None and self._way.tail)

    @property
    def _takes_values(self) -> bool:
        return self.arguments.has("values", "next_values", "last_value")

    def run(self, episode: Episode, way: Way) -> list[list[float]]:
        """What it gives, each series of numbers."""
        found = self.arguments.run(episode, self.gamma, self.lam, way)
        self.results[episode.name] = found
        return found

    def expected(self, form: _Form, episode: Episode, mistake: str = "") -> list[float]:
        """What it should give."""
        known = episode if self._takes_values else without_values(episode)
        return expected(form.kind, known, form.gamma, form.lam, mistake=mistake)

    def forms(self, kind: Kind | None) -> tuple[list[_Form | None], list[Finding]]:
        """What each of the results is, seen on an episode without an end; findings where none is anything."""
        # Told no values, a function can compute returns, and a target is the reward itself.
        kinds = (kind,) if kind is not None else KINDS if self._takes_values else ("returns",)
        ran: tuple[Way, list[list[float]]] | None = None
        failed: Exception | None = None
        for way in self.arguments.ways():
            try:
                results = self.run(PLAIN, way)
            # The function is the user's own, and raises what it will about a form that it does not take.
            except Exception as error:
                failed = failed or error
                continue
            forms = [self._form(result, kinds) for result in results]
            if any(form is not None for form in forms):
                self._way = way
                return forms, []
            ran = ran or (way, results)
        if ran is None:
            raise GuardUsageError(
                f"{self.arguments.title} could not be run on {PLAIN.name}, as tensors [T], [T, 1] or [1, T], lists or "
                f"arrays: {type(failed).__name__}: {failed}"
            ) from failed
        self._way = ran[0]
        return [], [self._unknown(self.run(PLAIN, self._way)[0], kinds)]

    def _form(self, result: list[float], kinds: Sequence[Kind]) -> _Form | None:
        for kind in kinds:
            form = _Form(kind, self.gamma, self.lam)
            if _near(result, self.expected(form, PLAIN)):
                return form
        return None

    def _unknown(self, result: list[float], kinds: Sequence[Kind]) -> Finding:
        wanted = {kind: self.expected(_Form(kind, self.gamma, self.lam), PLAIN) for kind in kinds}
        listed = "; ".join(f"{kind} {_shown(values)}" for kind, values in wanted.items())
        for cause, words, gamma, lam in (
            ("discount", "rewards are not discounted", 1.0, self.lam),
            ("discount", "gamma is applied twice", self.gamma**2, self.lam),
            ("discount", "lambda is used in place of gamma, and gamma in place of lambda", self.lam, self.gamma),
            ("discount", "lambda is not used", self.gamma, 1.0),
        ):
            for kind in kinds:
                if _near(result, self.expected(_Form(kind, gamma, lam), PLAIN)):
                    return self._finding(cause, f"{words}: these are {kind}", PLAIN, result, wanted[kind])
        for kind, values in wanted.items():
            if _near(result[::-1], values):
                return self._finding("order", f"the {kind} come out in reverse order", PLAIN, result, values)
        seen = (
            f"On {PLAIN.name} (rewards {_shown(PLAIN.rewards)}) it gives {_shown(result)}, which is none of: {listed}"
        )
        return self._made("arithmetic", seen, {"result": result, "episode": PLAIN.name})

    def mistakes(self, forms: Sequence[_Form | None]) -> list[Finding]:
        """The mistakes that its results show, each once."""
        found: dict[str, Finding] = {}
        assert self._way is not None, "forms() was asked first"
        for episode, candidates in self._episodes():
            results = self.run(episode, self._way)
            for form, result in zip(forms, results, strict=False):
                if form is None or _near(result, wanted := self.expected(form, episode)):
                    continue
                names = [each for each in candidates if _near(result, self.expected(form, episode, each))]
                cause, words = "arithmetic", "for no reason known here"
                if any(MISTAKES[each].cause in found for each in names):
                    continue
                if names:
                    cause, words = MISTAKES[names[0]].cause, MISTAKES[names[0]].words
                found.setdefault(
                    cause, self._finding(cause, f"{form.kind} are wrong: {words}", episode, result, wanted)
                )
        if len(found) > 1:
            found.pop("arithmetic", None)
        return list(found.values())

    def _episodes(self) -> Iterator[tuple[Episode, tuple[str, ...]]]:
        """The episodes that this function can be asked about, with the mistakes that each of them shows."""
        takes = self.arguments
        if takes.knows_ends:
            # First the border: it tells a wrong index from a terminal that is not looked at.
            yield TWO, ("late", "late_open", "early", "leaks", "bootstraps", "ignores")
            yield TERMINAL, ("bootstraps", "ignores", "late", "late_open", "early")
        if self.bootstraps:
            yield CUT, ("no_bootstrap",)
        if self.bootstraps and takes.has("terminated", "truncated"):
            yield LIMIT, ("stops", "no_bootstrap")
            if takes.has("next_values") and takes.has("truncated", "dones"):
                yield TWO_LIMITS, ("stops", "runs_on", "late", "late_open", "early")

    def _finding(self, cause: str, words: str, episode: Episode, result: list[float], wanted: list[float]) -> Finding:
        rewards = f"On {episode.name} (rewards {_shown(episode.rewards)})"
        seen = f"{rewards} it gives {_shown(result)}, expected {_shown(wanted)}"
        evidence = {"episode": episode.name, "result": result, "expected": wanted}
        return self._made(cause, f"{words[0].upper()}{words[1:]}. {seen}", evidence)

    def _made(self, cause: str, seen: str, evidence: dict[str, Any]) -> Finding:
        where = function_line(self.arguments.function)
        return finding("GG617", f"{seen}.", likely=[cause], where=where, evidence=evidence, cause_id=cause)


def _cannot_tell(arguments: Arguments) -> list[Finding]:
    """A function that is told of ends in one word cannot treat the two kinds of ends as they must be."""
    if not arguments.has("dones", "masks", "starts") or arguments.has("terminated", "truncated"):
        return []
    seen = (
        f"{arguments.title} is told only that an episode is over, not why: where a time limit ended it, the value of "
        "the last state is left out. Give it terminated, and truncated apart."
    )
    where = function_line(arguments.function)
    return [finding("GG617", seen, likely=["truncation"], severity=Severity.INFO, where=where, cause_id="one flag")]


def _factor(arguments: Arguments, name: str, given: float | None, usual: float) -> float:
    if given is None and not arguments.has(name):
        raise GuardUsageError(f"{arguments.title} takes no {name}: say which it uses, check_returns(fn, {name}=0.99)")
    value = usual if given is None else given
    if not 0 < value <= 1:
        raise GuardUsageError(f"{name}={value!r} cannot work: expected a number above 0 and up to 1")
    return value


def _near(one: Sequence[float], other: Sequence[float]) -> bool:
    return len(one) == len(other) and all(
        math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE) for a, b in zip(one, other, strict=True)
    )


def _shown(values: Sequence[float]) -> str:
    return f"[{', '.join(f'{value:g}' for value in values)}]"
