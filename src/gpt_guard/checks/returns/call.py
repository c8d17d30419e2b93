"""Call a return or advantage function of the user's own: which argument is which, and in which form it takes them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpt_guard.checks.returns.reference import Episode
from gpt_guard.errors import GuardUsageError

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


class Way(NamedTuple):
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
        """Whether it is told where episodes end."""
        return self.has("dones", "masks", "terminated", "starts")

    def ways(self) -> Iterator[Way]:
        """The forms in which the series may be given: tensors `[T]` first, then with a batch dimension, lists, arrays.

        Where nothing but `values` can tell what follows the last step, these are `[T]` first, and then `[T + 1]`.
        """
        alone = self.has("values") and not self.has("next_values", "last_value")
        for tail in (False, True) if alone else (False,):
            for convert in (_tensor, _column, _row, list, _array):
                for flag in (float, bool):
                    yield Way(convert, flag, tail)

    def run(self, episode: Episode, gamma: float, lam: float, way: Way) -> list[list[float]]:
        """Call the function on an episode: each series in what it returns, one number for each step.

        Raises whatever the function raises, and GuardUsageError where no series has a number for each step.
        """
        found = list(_series(self.function(**self._given(episode, gamma, lam, way))))
        steps = len(episode.rewards)
        if not any(len(each) in (steps, steps + 1) for each in found):
            raise GuardUsageError(f"it returned series of {[len(each) for each in found]} numbers for {steps} steps")
        return [each[:steps] for each in found if len(each) in (steps, steps + 1)]

    def _given(self, episode: Episode, gamma: float, lam: float, way: Way) -> dict[str, Any]:
        flag = way.flag
        ends = [flag(each) for each in episode.ended]
        starts = [flag(True), *ends[:-1]]
        if self.has("last_done") and not self.has("starts"):
            ends = [flag(False), *ends[:-1]]
        series: dict[str, list[Any]] = {
            "rewards": list(episode.rewards),
            "values": [*episode.values, episode.next_values[-1]] if way.tail else list(episode.values),
            "next_values": list(episode.next_values),
            "dones": ends,
            "masks": [flag(not each) for each in episode.ended],
            "valid": [flag(True)] * len(ends),
            "terminated": [flag(each) for each in episode.terminated],
            "truncated": [flag(each) for each in episode.truncated],
            "starts": starts,
        }
        single = {"last_value": float(episode.next_values[-1]), "last_done": flag(episode.ended[-1])}
        numbers = {"gamma": gamma, "lam": lam}
        given: dict[str, Any] = {}
        for role, parameter in self.by_role.items():
            if role in series:
                given[parameter.name] = way.convert(series[role])
            elif role in single:
                given[parameter.name] = _last(way.convert([single[role]]))
            else:
                given[parameter.name] = numbers[role]
        return given


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
