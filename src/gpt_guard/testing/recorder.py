"""A sink that keeps everything in memory, for asserts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpt_guard.records import Action, Finding, Observation, Report
from gpt_guard.sinks.base import Sink


class Recorder(Sink):
    """Keeps what a Guardian sends to its sinks: `Guardian(model, optimizer, sinks=[recorder])`.

    `observations` holds one for each step and evaluation forward, `findings` and `actions` what was found and what was
    done about it, `metrics` the user's own numbers with their step, `header` and `report` the first and the last words.
    Entered again it goes on collecting.
    """

    def __init__(self) -> None:
        self.header: Mapping[str, Any] = {}
        self.observations: list[Observation] = []
        self.findings: list[Finding] = []
        self.actions: list[Action] = []
        self.metrics: list[tuple[int, dict[str, float]]] = []
        self.report: Report | None = None

    def open(self, header: Mapping[str, Any]) -> None:
        """Keep the run's facts."""
        self.header = header

    def observe(self, observation: Observation) -> None:
        """Keep an observation."""
        self.observations.append(observation)

    def find(self, finding: Finding, action: Action) -> None:
        """Keep a finding, and what is done about it."""
        self.findings.append(finding)
        self.actions.append(action)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the user's numbers."""
        self.metrics.append((step, dict(metrics)))

    def close(self, report: Report | None) -> None:
        """Keep the report."""
        self.report = report

    def codes(self) -> list[str]:
        """The codes found, in order."""
        return [finding.code for finding in self.findings]

    def series(self, field: str) -> list[Any]:
        """One field of all observations, such as `series("grad_norm")`. Raises AttributeError for an unknown field."""
        return [getattr(observation, field) for observation in self.observations]
