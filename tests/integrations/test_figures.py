"""What the callbacks share."""

from __future__ import annotations

import sys

import pytest

from gpt_guard import GuardUsageError
from gpt_guard.integrations.figures import Figures, checked_options, required, with_figures
from gpt_guard.records import Moment, Observation
from gpt_guard.sinks.console import ConsoleSink


def test_a_missing_package_is_told_with_the_command_that_installs_it() -> None:
    with pytest.raises(GuardUsageError, match=r"pip install 'gpt-guard-torch\[lightning\]'"):
        required("no_such_framework.parts", "lightning")


def test_a_package_that_misses_one_of_its_own_says_so_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("broken")
    (folder / "half_installed.py").write_text("import not_there_either\n", encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    with pytest.raises(ModuleNotFoundError, match="not_there_either"):
        required("half_installed", "lightning")
    assert "half_installed" not in sys.modules


def test_the_options_are_guardians_without_what_the_trainer_knows() -> None:
    assert checked_options({"strict": True}) == {"strict": True}
    with pytest.raises(GuardUsageError, match="no option of Guardian"):
        checked_options({"strickt": True})
    with pytest.raises(GuardUsageError, match="comes from the trainer"):
        checked_options({"start_step": 3})


def test_the_console_stays_where_no_sinks_are_given() -> None:
    figures = Figures()
    assert [type(sink) for sink in with_figures({}, figures)["sinks"]] == [ConsoleSink, Figures]
    assert with_figures({"sinks": []}, figures)["sinks"] == [figures]


def seen(optimizer: int = 0, *, evaluation: bool = False) -> Observation:
    return Observation(
        step=3, moment=Moment.AFTER_STEP, optimizer=optimizer, evaluation=evaluation, lr=(0.1, 0.2), grad_norm=2.0
    )


def test_figures_are_taken_once_and_named_by_optimizer_and_group() -> None:
    figures = Figures()
    for each in (seen(), seen(optimizer=1), seen(evaluation=True)):
        figures.observe(each)
    assert figures.take() == {
        "gpt_guard/grad_norm": 2.0,
        "gpt_guard/lr": 0.1,
        "gpt_guard/lr_group_1": 0.2,
        "gpt_guard/grad_norm_1": 2.0,
        "gpt_guard/lr_1": 0.1,
        "gpt_guard/lr_1_group_1": 0.2,
    }
    assert figures.take() == {}


def test_an_evaluation_has_no_figures_to_log() -> None:
    figures = Figures()
    figures.observe(seen(evaluation=True))
    assert figures.take() == {}
