"""A sink that fails says so once and never reaches the training loop."""

from __future__ import annotations

import errno
import logging
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from gpt_guard.records import Action, Finding, Moment, Observation, Report, Severity
from gpt_guard.sinks.base import Sink

SEEN = Observation(step=0, moment=Moment.BEFORE_STEP, loss=1.0)
FINDING = Finding(code="GG101", title="t", severity=Severity.ERROR, seen="s")


class Failing(Sink):
    """Raises what it is given, in the methods that are named."""

    def __init__(self, error: BaseException, *methods: str) -> None:
        self.error = error
        self.methods = methods
        self.called: list[str] = []

    def _call(self, method: str) -> None:
        self.called.append(method)
        if method in self.methods:
            raise self.error

    def open(self, header: Mapping[str, Any]) -> None:
        self._call("open")

    def observe(self, observation: Observation) -> None:
        self._call("observe")

    def find(self, finding: Finding, action: Action) -> None:
        self._call("find")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._call("log")

    def close(self, report: Report | None) -> None:
        self._call("close")


def use(sink: Sink) -> None:
    sink.open({})
    for _ in range(3):
        sink.observe(SEEN)
    sink.find(FINDING, Action.WARN)
    sink.log(0, {"bleu": 1.0})
    sink.close(Report())


def test_a_healthy_sink_gets_everything(caplog: pytest.LogCaptureFixture) -> None:
    sink = Failing(OSError())
    use(sink)
    assert sink.called == ["open", "observe", "observe", "observe", "find", "log", "close"]
    assert sink.trouble is None
    assert not caplog.records


@pytest.mark.parametrize("method", ["open", "observe", "find", "log", "close"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), ValueError("own mistake")])
def test_trouble_is_said_once(method: str, error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    sink = Failing(error, method, "close")
    use(sink)
    assert sink.called.count(method) == 1
    assert sink.called[-1] == "close"
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "GG905" in caplog.text
    assert str(error) in caplog.text
    assert "Failing" in caplog.text
    assert sink.trouble is not None
    assert sink.trouble.code == "GG905"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "full"), "disk or the quota is full"),
        (OSError(errno.EROFS, "read-only"), "read-only"),
        (PermissionError(errno.EACCES, "denied"), "read-only"),
        (OSError(errno.ESTALE, "stale"), "went away"),
        (KeyError("mine"), "sink of your own"),
    ],
)
def test_the_likeliest_cause_follows_from_the_error(error: Exception, words: str) -> None:
    sink = Failing(error, "observe")
    use(sink)
    assert sink.trouble is not None
    assert words in sink.trouble.causes[0]


def test_opening_again_gives_a_new_chance() -> None:
    sink = Failing(OSError(errno.ENOSPC, "full"), "observe")
    use(sink)
    sink.methods = ()
    use(sink)
    assert sink.trouble is None
    assert sink.called.count("observe") == 1 + 3


def test_leaving_is_not_stopped() -> None:
    with pytest.raises(KeyboardInterrupt):
        use(Failing(KeyboardInterrupt(), "observe"))


def test_super_calls_speak_once(caplog: pytest.LogCaptureFixture) -> None:
    class Child(Failing):
        def observe(self, observation: Observation) -> None:
            super().observe(observation)
            raise RuntimeError("and the child too")

    use(Child(OSError(errno.ENOSPC, "full"), "observe"))
    assert len(caplog.records) == 1
    assert "full" in caplog.text


def test_training_goes_on_with_a_broken_sink(caplog: pytest.LogCaptureFixture) -> None:
    def train(sink: Sink | None) -> torch.Tensor:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(5):
            loss = model(torch.randn(8, 4)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if sink is not None:
                sink.observe(SEEN.model_copy(update={"step": step, "loss": loss.item()}))
        return model.weight.detach()

    assert torch.equal(train(Failing(OSError(errno.ENOSPC, "full"), "observe")), train(None))
    assert len(caplog.records) == 1
