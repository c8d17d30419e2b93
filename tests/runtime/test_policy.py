"""What is done about which finding."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from gpt_guard.callbacks.base import Guard
from gpt_guard.catalogue import entries, finding
from gpt_guard.errors import FingerprintMismatch, GradientError, GuardError, GuardUsageError, NonFiniteError
from gpt_guard.guardian import Guardian
from gpt_guard.records import Action, Finding, Observation, Report, Severity
from gpt_guard.runtime.policy import Policy
from gpt_guard.sinks.base import Sink


def found(code: str, severity: Severity | None = None, **fields: Any) -> Finding:
    return finding(code, "seen", **({"severity": severity} if severity else {}), **fields)


class Says(Guard):
    """Finds the same at every step, for two modules in turn."""

    def __init__(self, code: str, severity: Severity | None = None) -> None:
        self.code, self.severity = code, severity

    def judge(self, seen: Observation) -> Iterable[Finding]:
        yield found(self.code, self.severity, module=f"blocks.{seen.step % 2}")


class Notes(Sink):
    def __init__(self) -> None:
        self.found: list[tuple[str, Action]] = []
        self.report: Report | None = None

    def observe(self, observation: Observation) -> None:
        """Not of interest."""

    def find(self, finding: Finding, action: Action) -> None:
        self.found.append((finding.code, action))

    def close(self, report: Report | None) -> None:
        self.report = report


def run(guard: Guard, steps: int = 6, **options: Any) -> tuple[Guardian, Notes]:
    model, notes = nn.Linear(2, 1), Notes()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Guardian(model, optimizer, guards=[guard], sinks=[notes], **options) as guardian:
        for _ in range(steps):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return guardian, notes


def test_defaults() -> None:
    policy = Policy()
    assert policy(found("GG101")) is Action.HALT
    assert policy(found("GG109")) is Action.RECORD
    assert policy(found("GG203", Severity.ERROR)) is Action.WARN
    assert policy(found("GG203", Severity.INFO)) is Action.RECORD
    for code, entry in entries().items():
        if entry.severity is Severity.ERROR:
            halts = code.startswith("GG1") or code in ("GG701", "GG702", "GG703")
            assert policy(found(code)) is (Action.HALT if halts else Action.WARN)


def test_strict_halts_on_every_error_that_no_rule_decides() -> None:
    policy = Policy({"GG201": "record"}, strict=True)
    assert policy(found("GG203", Severity.ERROR)) is Action.HALT
    assert policy(found("GG203", Severity.WARNING)) is Action.WARN
    assert policy(found("GG201", Severity.ERROR)) is Action.RECORD


def test_code_goes_before_family_before_severity() -> None:
    policy = Policy({"GG203": "halt", "GG2xx": "record", "warning": "halt", "GG3": "record"})
    assert policy(found("GG203")) is Action.HALT
    assert policy(found("GG204", Severity.WARNING)) is Action.RECORD
    assert policy(found("GG301", Severity.ERROR)) is Action.RECORD
    assert policy(found("GG401", Severity.WARNING)) is Action.HALT


def test_codes_of_a_guard_of_ones_own() -> None:
    own = Finding(code="MY101", title="Loss spike", severity=Severity.WARNING, seen="9 after 2")
    assert Policy({"MY101": "halt"})(own) is Action.HALT
    assert Policy({"GG1xx": "halt"})(own) is Action.WARN


def test_a_callable_decides_or_leaves_it_to_the_default() -> None:
    policy = Policy(lambda each: "record" if each.module == "head" else None)
    assert policy(found("GG101", module="head")) is Action.RECORD
    assert policy(found("GG101", module="body")) is Action.HALT


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"GG1x": "warn"}, "neither a finding code"),
        ({"GG999": "warn"}, "GG999"),
        ({"GG190": "warn"}, r"neither a finding code \(GG"),
        ({"fatal": "warn"}, "info, warning, error"),
        ({"GG101": "stop"}, "policy says 'stop'; it can say halt, warn, record"),
        (["GG101"], "give a mapping"),
        (lambda each: "stop", "policy says 'stop'"),
    ],
)
def test_rules_that_cannot_work_teach(rules: Any, message: str) -> None:
    with pytest.raises(GuardUsageError, match=message):
        Policy(rules)(found("GG101"))


def test_a_cause_is_said_once_and_counted() -> None:
    guardian, notes = run(Says("GG203"))
    assert notes.found == [("GG203", Action.WARN)] * 2
    assert [each.module for each in guardian.findings] == ["blocks.0", "blocks.1"]
    assert notes.report is not None
    assert notes.report.counts == {"GG203": 6}
    assert guardian.findings[0].guard == "Says"
    assert guardian.findings[0].step == 0


@pytest.mark.parametrize(
    ("code", "error"), [("GG101", NonFiniteError), ("GG701", FingerprintMismatch), ("GG201", GradientError)]
)
def test_a_halt_raises_what_stands_for_it(code: str, error: type[GuardError]) -> None:
    with pytest.raises(error) as caught:
        run(Says(code, Severity.ERROR), policy={code: "halt"})
    assert caught.value.finding.code == code


def test_strict_reaches_the_loop() -> None:
    with pytest.raises(GradientError):
        run(Says("GG201", Severity.ERROR), strict=True)
    guardian, _ = run(Says("GG201", Severity.ERROR))
    assert len(guardian.findings) == 2


def test_a_recorded_halt_lets_training_go_on() -> None:
    guardian, notes = run(Says("GG101"), policy={"GG1xx": "record"})
    assert guardian.step == 6
    assert {action for _, action in notes.found} == {Action.RECORD}


def test_every_halt_of_the_same_cause_raises() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Guardian(model, optimizer, guards=[Says("GG101")], sinks=[]) as guardian:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            with pytest.raises(NonFiniteError):
                optimizer.step()
    assert guardian.step == 0
    assert guardian.report().counts == {"GG101": 3}
