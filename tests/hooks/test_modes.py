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
