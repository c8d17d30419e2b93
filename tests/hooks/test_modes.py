"""Who last called `.train()` or `.eval()`."""

from __future__ import annotations

import pytest
from torch import nn

from gpt_guard.hooks.modes import ModeLog

_TRAIN = nn.Module.train


def test_the_outermost_call_and_its_line() -> None:
    model = nn.Sequential(nn.Dropout(0.1), nn.Sequential(nn.Linear(1, 1)))
    log = ModeLog(model)
    assert log.who(training=False) is None
    log.open()
    model.eval()
    found = log.who(training=False)
    assert found is not None
    path, where = found
    assert path == ""
    assert where is not None
    assert where.text == "model.eval()"
    assert where.file == __file__
    model[1].train()
    again = log.who(training=True)
    assert again is not None
    assert again[0] == "1"
    log.close()
    log.close()
    assert nn.Module.train is _TRAIN


def test_a_call_on_what_holds_the_model_counts() -> None:
    model = nn.Linear(1, 1)
    log = ModeLog(model)
    log.open()
    nn.ModuleDict({"generator": model}).eval()
    found = log.who(training=False)
    assert found is not None
    assert found[0] == ""
    log.close()


def test_other_models_are_not_noted() -> None:
    model, stranger = nn.Linear(1, 1), nn.Dropout()
    log, other = ModeLog(model), ModeLog(stranger)
    log.open()
    other.open()
    stranger.eval()
    assert log.who(training=False) is None
    assert other.who(training=False) is not None
    other.close()
    log.close()
    assert nn.Module.train is _TRAIN


def test_a_call_that_fails_does_not_close_the_ears() -> None:
    model = nn.Linear(1, 1)
    log = ModeLog(model)
    log.open()
    with pytest.raises(ValueError, match="boolean"):
        model.train("yes")  # type: ignore[arg-type]  # the mistake is the test
    model.eval()
    assert log.who(training=False) is not None
    log.close()


def test_the_result_is_passed_on() -> None:
    model = nn.Linear(1, 1)
    log = ModeLog(model)
    log.open()
    assert model.train(mode=False) is model
    assert model.train() is model
    assert model.training
    log.close()


def test_the_call_that_set_a_module_is_one_on_it_or_around_it() -> None:
    model = nn.Sequential(nn.Sequential(nn.Dropout()), nn.Dropout())
    log = ModeLog(model)
    log.open()
    model.train()
    model[0].train()
    model[1].eval()
    log.close()

    def path(of: str | None, *, training: bool) -> str | None:
        found = log.who(training=training, of=of)
        return None if found is None else found[0]

    assert path("0.0", training=True) == "0"
    assert path("1", training=True) == ""
    assert path(None, training=True) == "0"
    assert path("1", training=False) == "1"
    assert path("0.0", training=False) is None


def test_each_call_on_a_module_of_the_model_is_counted() -> None:
    inner = nn.Linear(1, 1)
    model = nn.Sequential(nn.Dropout(), nn.Sequential(inner))
    log = ModeLog(model)
    model.eval()
    assert log.changes == 0
    log.open()
    seen = [log.changes]
    model.train()
    seen.append(log.changes)
    inner.eval()
    seen.append(log.changes)
    with log.ignoring():
        model[0].eval()
    seen.append(log.changes)
    nn.ModuleDict({"generator": model}).train()
    seen.append(log.changes)
    assert seen == sorted(set(seen))
    nn.Linear(1, 1).eval()
    log.close()
    model.eval()
    assert log.changes == seen[-1]


class Looking(nn.Module):
    """Notes the count and its mode while the modes are being set."""

    def __init__(self, logs: list[ModeLog]) -> None:
        super().__init__()
        self.logs, self.seen = logs, (0, True)

    def train(self, mode: bool = True) -> Looking:
        self.seen = (self.logs[0].changes, self.training)
        return super().train(mode)


def test_whoever_looks_before_a_mode_is_set_finds_another_count_afterwards() -> None:
    logs: list[ModeLog] = []
    inner = Looking(logs)
    model = nn.Sequential(nn.Dropout(), inner)
    logs.append(ModeLog(model))
    logs[0].open()
    model.eval()
    logs[0].close()
    count, training = inner.seen
    assert training
    assert 0 < count < logs[0].changes
