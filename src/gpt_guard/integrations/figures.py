"""What a callback has in common with the next one: the options of its Guardian, and the figures that it logs."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from gpt_guard.errors import GuardUsageError
from gpt_guard.guardian import Guardian
from gpt_guard.records import Action, Finding, Observation
from gpt_guard.sinks.base import Sink
from gpt_guard.sinks.console import ConsoleSink

# What the framework knows better.
_TAKEN = ("self", "model", "optimizer", "scheduler", "scaler", "start_step")


def checked_options(options: dict[str, Any]) -> dict[str, Any]:
    """Options that Guardian takes, as they are. Raises GuardUsageError for others, before anything is trained."""
    known = [name for name in inspect.signature(Guardian.__init__).parameters if name not in _TAKEN]
    for name in options:
        if name not in known:
            why = "comes from the trainer" if name in _TAKEN else "is no option of Guardian"
            raise GuardUsageError(f"GuardianCallback({name}=...): {name} {why}; it takes {', '.join(known)}.")
    return dict(options)


def required(name: str, extra: str) -> Any:
    """Import a framework's module. Raises GuardUsageError with the command that installs it, where it is missing."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            # It is there, and something that it needs is not.
            raise
        raise GuardUsageError(
            f"{name} is not installed here. Install it with: pip install 'gpt-guard-torch[{extra}]'"
        ) from error


class Figures(Sink):
    """The figures of the steps since they were last taken; floats that Guardian has read anyway."""

    def __init__(self) -> None:
        self._newest: dict[int, Observation] = {}

    def observe(self, observation: Observation) -> None:
        if not observation.evaluation:
            self._newest[observation.optimizer] = observation

    def find(self, finding: Finding, action: Action) -> None:
        """Findings are told by the other sinks."""

    def take(self) -> dict[str, float]:
        """By the names to log them under, of each optimizer that has stepped; empty where none has.

        A second optimizer's names end in `_1`, as its index in the list that the framework holds; the rates of further
        parameter groups in `_group_1`.
        """
        figures: dict[str, float] = {}
        for index, seen in sorted(self._newest.items()):
            end = f"_{index}" if index else ""
            for name in ("grad_norm", "grad_norm_clipped", "update_ratio"):
                if (value := getattr(seen, name)) is not None:
                    figures[f"gpt_guard/{name}{end}"] = value
            for group, lr in enumerate(seen.lr):
                figures[f"gpt_guard/lr{end}" + (f"_group_{group}" if group else "")] = lr
        self._newest.clear()
        return figures


def with_figures(options: dict[str, Any], figures: Figures) -> dict[str, Any]:
    """The options, with one more sink."""
    sinks = options.get("sinks")
    if sinks is None:
        sinks = [ConsoleSink(summary=options.get("summary", True))]
    return {**options, "sinks": [*sinks, figures]}
