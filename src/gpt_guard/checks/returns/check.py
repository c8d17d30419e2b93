"""check_returns: run a return or advantage function on episodes of two steps, and name the mistake it makes."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpt_guard.catalogue import finding
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
from gpt_guard.hooks.frames import function_line
from gpt_guard.records import CheckResult, Finding, Severity

GAMMA, LAM = 0.5, 0.25
"""Given to functions that take them: powers of two, so that every figure is exact in any floating-point type."""
TOLERANCE = 1e-4
ROLES: dict[str, frozenset[str]] = {
    "rewards": frozenset({"reward", "rewards", "rew", "rews", "r"}),
    "values": frozenset({"value", "values", "val", "vals", "v", "state_values", "critic_values", "baseline"}),
    "next_values": frozenset({"next_values", "values_next", "next_vals", "v_next", "next_v", "next_state_values"}),
    "last_value": frozenset({"last_value", "last_val", "last_values", "bootstrap_value", "bootstrap", "final_value"}),
    "dones": frozenset({"done", "dones", "d", "is_done", "ends"}),
    "masks": frozenset({"mask", "masks", "not_done", "not_dones", "nonterminal", "nonterminals", "continues"}),
    "valid": frozenset({"response_mask", "action_mask", "attention_mask", "padding_mask", "loss_mask", "valid"}),
    "terminated": frozenset({"terminated", "terminateds", "terminal", "terminals", "term", "terms"}),
    "truncated": frozenset({"truncated", "truncateds", "trunc", "truncs", "timeout", "timeouts", "time_limit"}),
    "starts": frozenset({"episode_starts", "episode_start", "starts", "is_first"}),
    "last_done": frozenset({"next_done", "last_done", "last_dones"}),
    "gamma": frozenset({"gamma", "discount", "discount_factor", "g"}),
    "lam": frozenset({"lam", "lambda_", "lmbda", "gae_lambda", "lamda", "lambd", "lmb", "tau"}),
}
"""Names by which an argument is known; any other one is given as `names={"its_name": "rewards"}`."""


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
    trials = _Trials(arguments, gamma, lam)
    computed, findings = trials.computed(kind)
    facts: dict[str, Any] = {"computes": [each for each in computed if each is not None]}
    if not findings:
        findings = trials.mistakes(computed)
    notes = _cannot_tell(arguments) if trials.bootstraps else []
    facts["results"] = trials.results
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


class _Trials:
    """A function and what it gave for each episode."""

    def __init__(self, arguments: Arguments, gamma: float, lam: float) -> None:
        self.arguments = arguments
        self.gamma = gamma
        self.lam = lam
        self.results: dict[str, Any] = {}
        self._form: CallForm | None = None

    @property
    def bootstraps(self) -> bool:
        """Whether it takes a value of what follows the last step."""
        return self.arguments.has("next_values", "last_value") or (self._form is not None and self._form.tail)

    @property
    def _takes_values(self) -> bool:
        return self.arguments.has("values", "next_values", "last_value")

    def run(self, episode: Episode, form: CallForm) -> list[list[float]]:
        """What it gives, each series of numbers."""
        found = self.arguments.run(episode, self.gamma, self.lam, form)
        self.results[episode.name] = found
        return found

    def expected(self, kind: Kind, episode: Episode, mistake: str = "") -> list[float]:
        """What it should give, or gives with a mistake."""
        return self._with(kind, episode, self.gamma, self.lam, mistake)

    def _with(self, kind: Kind, episode: Episode, gamma: float, lam: float, mistake: str = "") -> list[float]:
        known = episode if self._takes_values else without_values(episode)
        return expected(kind, known, gamma, lam, mistake=mistake)

    def computed(self, kind: Kind | None) -> tuple[list[Kind | None], list[Finding]]:
        """What each of the results is, seen on an episode without an end; findings where none is anything."""
        # Told no values, a function can compute returns, and a target is the reward itself.
        kinds = (kind,) if kind is not None else KINDS if self._takes_values else ("returns",)
        ran: tuple[CallForm, list[list[float]]] | None = None
        failed: Exception | None = None
        for form in self.arguments.forms():
            try:
                results = self.run(PLAIN, form)
            # The function is the user's own, and raises what it will about a form that it does not take.
            except Exception as error:
                failed = failed or error
                continue
            computed = [
                next((each for each in kinds if _near(result, self.expected(each, PLAIN))), None) for result in results
            ]
            if any(computed):
                self._form = form
                return computed, []
            ran = ran or (form, results)
        if ran is None:
            raise GuardUsageError(
                f"{self.arguments.title} could not be run on {PLAIN.name}, as tensors [T], [T, 1] or [1, T], lists or "
                f"arrays: {type(failed).__name__}: {failed}"
            ) from failed
        self._form = ran[0]
        return [], [self._unknown(self.run(PLAIN, self._form)[0], kinds)]

    def _unknown(self, result: list[float], kinds: Sequence[Kind]) -> Finding:
        wanted = {kind: self.expected(kind, PLAIN) for kind in kinds}
        listed = "; ".join(f"{kind} {_shown(values)}" for kind, values in wanted.items())
        for cause, words, gamma, lam in (
            ("discount", "rewards are not discounted", 1.0, self.lam),
            ("discount", "gamma is applied twice", self.gamma**2, self.lam),
            ("discount", "lambda is used in place of gamma, and gamma in place of lambda", self.lam, self.gamma),
            ("discount", "lambda is not used", self.gamma, 1.0),
        ):
            for kind in kinds:
                if _near(result, self._with(kind, PLAIN, gamma, lam)):
                    return self._finding(cause, f"{words}: these are {kind}", PLAIN, result, wanted[kind])
        for kind, values in wanted.items():
            if _near(result[::-1], values):
                return self._finding("order", f"the {kind} come out in reverse order", PLAIN, result, values)
        seen = (
            f"On {PLAIN.name} (rewards {_shown(PLAIN.rewards)}) it gives {_shown(result)}, which is none of: {listed}"
        )
        return self._made("arithmetic", seen, {"result": result, "episode": PLAIN.name})

    def mistakes(self, computed: Sequence[Kind | None]) -> list[Finding]:
        """The mistakes that its results show, each once."""
        found: dict[str, Finding] = {}
        assert self._form is not None, "computed() was asked first"
        for episode, candidates in self._episodes():
            results = self.run(episode, self._form)
            for kind, result in zip(computed, results, strict=False):
                if kind is None or _near(result, wanted := self.expected(kind, episode)):
                    continue
                names = [each for each in candidates if _near(result, self.expected(kind, episode, each))]
                if any(MISTAKES[each][0] in found for each in names):
                    continue
                cause, words = MISTAKES[names[0]] if names else ("arithmetic", "for no reason known here")
                found.setdefault(cause, self._finding(cause, f"{kind} are wrong: {words}", episode, result, wanted))
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


class CallForm(NamedTuple):
    """How series are given: what makes one of a list, whether flags are numbers, whether values are `[T + 1]`."""

    convert: Callable[[list[Any]], Any]
    flag: Callable[[Any], Any]
    tail: bool


class Arguments:
    """Which argument of a function plays which part. Raises GuardUsageError where that cannot be seen."""

    def __init__(self, function: Callable[..., Any], names: Mapping[str, str]) -> None:
        if wrong := [role for role in names.values() if role not in ROLES]:
            raise GuardUsageError(f"names=... has the part {wrong[0]!r}; there are {', '.join(ROLES)}")
        try:
            parameters = inspect.signature(function).parameters
        except (TypeError, ValueError) as error:
            raise GuardUsageError(
                f"{function!r:.60} has no signature that can be read: wrap it in a function"
            ) from error
        self.function = function
        self.by_role: dict[str, inspect.Parameter] = {}
        for name, parameter in parameters.items():
            role = names.get(name) or self._role(name, parameters)
            if role is not None:
                self.by_role[role] = parameter
            elif parameter.default is parameter.empty and parameter.kind not in (
                parameter.VAR_POSITIONAL,
                parameter.VAR_KEYWORD,
            ):
                raise GuardUsageError(
                    f"the part of the argument {name!r} of {_title(function)}{inspect.signature(function)} is not "
                    f"known: say it as names={{{name!r}: part}}, one of {', '.join(ROLES)}, or give it a default"
                )
        if "rewards" not in self.by_role:
            raise GuardUsageError(
                f"{_title(function)}{inspect.signature(function)} takes no rewards that could be recognised: give "
                "names={'its_argument': 'rewards'}"
            )

    def _role(self, name: str, parameters: Mapping[str, Any]) -> str | None:
        plain = name.lower().strip("_") if name.lower() != "lambda_" else "lambda_"
        if plain == "next_value":
            # Of one step it is the value behind that step; of a rollout, the value behind its end.
            return "next_values" if {"reward", "r", "rew"} & set(parameters) else "last_value"
        return next((role for role, known in ROLES.items() if plain in known), None)

    def has(self, *roles: str) -> bool:
        """Whether the function takes any of these."""
        return any(role in self.by_role for role in roles)

    @property
    def title(self) -> str:
        """The function's name."""
        return _title(self.function)

    @property
    def knows_ends(self) -> bool:
        """Whether it takes where episodes end."""
        return self.has("dones", "masks", "terminated", "starts")

    def forms(self) -> Iterator[CallForm]:
        """The forms in which the series may be given: tensors `[T]` first, then with a batch dimension, lists, arrays.

        Where nothing but `values` can tell what follows the last step, these are `[T]` first, and then `[T + 1]`.
        """
        alone = self.has("values") and not self.has("next_values", "last_value")
        for tail in (False, True) if alone else (False,):
            for convert in (_tensor, _column, _row, list, _array):
                for flag in (float, bool):
                    yield CallForm(convert, flag, tail)

    def run(self, episode: Episode, gamma: float, lam: float, form: CallForm) -> list[list[float]]:
        """Call the function on an episode: each series in what it returns, one number for each step.

        Raises whatever the function raises, and GuardUsageError where no series has a number for each step.
        """
        found = list(_series(self.function(**self._given(episode, gamma, lam, form))))
        steps = len(episode.rewards)
        if not any(len(each) in (steps, steps + 1) for each in found):
            raise GuardUsageError(f"it returned series of {[len(each) for each in found]} numbers for {steps} steps")
        return [each[:steps] for each in found if len(each) in (steps, steps + 1)]

    def _given(self, episode: Episode, gamma: float, lam: float, form: CallForm) -> dict[str, Any]:
        flag = form.flag
        ends = [flag(each) for each in episode.ended]
        starts = [flag(True), *ends[:-1]]
        if self.has("last_done") and not self.has("starts"):
            ends = [flag(False), *ends[:-1]]
        series: dict[str, list[Any]] = {
            "rewards": list(episode.rewards),
            "values": [*episode.values, episode.next_values[-1]] if form.tail else list(episode.values),
            "next_values": list(episode.next_values),
            "dones": ends,
            "masks": [flag(not each) for each in episode.ended],
            "valid": [flag(True)] * len(ends),
            "terminated": [flag(each) for each in episode.terminated],
            "truncated": [flag(each) for each in episode.truncated],
            "starts": starts,
        }
        single = {"last_value": float(episode.next_values[-1]), "last_done": flag(episode.ended[-1])}
        given = {role: form.convert(each) for role, each in series.items()}
        given |= {role: _last(form.convert([each])) for role, each in single.items()}
        given |= {"gamma": gamma, "lam": lam}
        return {parameter.name: given[role] for role, parameter in self.by_role.items()}


def _last(series: Any) -> Any:
    """The only step: a number of no dimension, or `[B]` where there is a batch."""
    return series[0] if not isinstance(series, Tensor) or series.shape[0] == series.numel() == 1 else series[..., 0]


def _tensor(values: list[Any]) -> Tensor:
    return torch.tensor(values) if isinstance(values[0], bool) else torch.tensor(values, dtype=torch.float64)


def _column(values: list[Any]) -> Tensor:
    return _tensor(values).unsqueeze(1)


def _row(values: list[Any]) -> Tensor:
    return _tensor(values).unsqueeze(0)


def _array(values: list[Any]) -> Any:
    return _tensor(values).numpy()


def _series(made: Any) -> Iterator[list[float]]:
    """Each series of numbers in what a function returned."""
    if isinstance(made, Tensor) or hasattr(made, "tolist"):
        yield torch.as_tensor(made).detach().double().flatten().tolist()
    elif isinstance(made, Mapping):
        for part in made.values():
            yield from _series(part)
    elif isinstance(made, (list, tuple)) and made:
        if all(isinstance(each, (int, float)) or getattr(each, "shape", None) in ((), (1,)) for each in made):
            yield [float(each) for each in made]
        else:
            for part in made:
                yield from _series(part)


def _title(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _cannot_tell(arguments: Arguments) -> list[Finding]:
    """A function with one flag for all ends cannot treat the two kinds of ends as they must be."""
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
