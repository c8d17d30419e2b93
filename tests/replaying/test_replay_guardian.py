"""What Guardian shows of a replay, and that the guide's example is what it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from gpt_guard import Guardian, GuardUsageError, NonFiniteError, catalogue
from gpt_guard.blackbox.stored import MANIFEST, FileName
from gpt_guard.cli.app import app
from gpt_guard.records.render import render_finding

from .steps import Net, guarded, halting, root_of_negative, sgd


def test_a_replay_that_cannot_begin_leaves_the_plain_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise OSError("out of order")

    monkeypatch.setattr("gpt_guard.replaying.service.replay_step", broken)
    model = Net(root_of_negative)
    optimizer = sgd(model)
    with halting(guarded(model, optimizer)) as halted:
        model(torch.randn(6, 4))
    assert halted.finding.replay == "Not replayed: OSError: out of order."


def mean_of_squares(y: Tensor) -> Tensor:
    return y.square().mean()


def test_in_a_notebook_the_step_can_be_run_again() -> None:
    model = Net(root_of_negative)
    optimizer = sgd(model)
    guardian = guarded(model, optimizer).start()
    with pytest.raises(NonFiniteError):
        model(torch.randn(6, 4))
    assert "sqrt in `second`" in str(guardian.replay())
    model.second.function = torch.tanh
    outcome = guardian.replay()
    assert not outcome.reproduced
    assert "output of `second` is finite" in outcome.text
    guardian.stop()
    # The last one that belongs to a finding.
    assert guardian.replay().reproduced


def test_a_healthy_step_can_be_looked_at() -> None:
    model = Net(torch.tanh)
    optimizer = sgd(model)
    guardian = guarded(model, optimizer)
    with guardian:
        with pytest.raises(GuardUsageError, match="no step to run again"):
            guardian.replay()
        model(torch.randn(6, 4)).mean().backward()
        outcome = guardian.replay()
        assert not outcome.reproduced
        assert "Every operation of the forward gave finite values" in outcome.text
        optimizer.step()


@pytest.mark.parametrize("replay", [0, -1.0, float("nan"), "yes", None])
def test_a_limit_that_cannot_be_is_refused(replay: Any) -> None:
    with pytest.raises(GuardUsageError, match="replay"):
        Guardian(Net(torch.tanh), None, replay=replay)


def test_outside_of_a_guardian_a_watched_loss_is_the_plain_function() -> None:
    guardian = guarded(Net(torch.tanh), None)
    watched = guardian.watch_loss(mean_of_squares)
    y = torch.ones(3, 2)
    assert torch.equal(watched(y), mean_of_squares(y))
    assert watched.__name__ == "mean_of_squares"


def test_the_answer_is_in_the_message_of_the_exception() -> None:
    model = Net(root_of_negative)
    optimizer = sgd(model)
    with halting(guarded(model, optimizer)) as halted:
        model(torch.randn(6, 4))
    told = render_finding(halted.finding)
    assert "return (-x.abs() - 1).sqrt()" in told
    assert "sqrt" in told


GUIDE = (Path(__file__).parent.parent.parent / "docs" / "replay.md").read_text(encoding="utf-8")
SCRIPTS = {
    name: f"{head}{rest}"
    for head, name, rest in re.findall(r"^```python\n(# file: (\w+\.py)\n)(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE)
}
SHOWN = re.findall(r"^```text\n(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"-?\d+\.\d+")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The guide's scripts, in the folder in which one works."""
    for name, source in SCRIPTS.items():
        (tmp_path / name).write_text(source, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(path: Path) -> str:
    """The message that a script ends with; "" if it comes to its end."""
    code = compile(path.read_text(encoding="utf-8"), str(path), "exec", dont_inherit=True)
    try:
        exec(code, {"__name__": "__main__"})
    except NonFiniteError as error:
        return str(error)
    return ""


def same(text: str) -> str:
    """The text without its decimal fractions, which another version of torch may round in another way."""
    return NUMBER.sub("#", text)


@pytest.mark.parametrize(("script", "shown"), [("train.py", 0), ("regress.py", 1)])
def test_what_a_script_ends_with_is_what_the_guide_shows(script: str, shown: int, folder: Path) -> None:
    assert same(SHOWN[shown]) in same(run(folder / script))


def test_what_the_notebook_prints_is_what_the_guide_shows(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder / "notebook.py") == ""
    assert capsys.readouterr().out == SHOWN[2]


def test_the_bundle_is_opened_as_the_guide_says(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(folder / "train.py")
    command = re.search(r"^    gpt-guard (replay .*)$", GUIDE, re.MULTILINE)
    assert command is not None
    monkeypatch.syspath_prepend(folder)
    done = CliRunner().invoke(app, command[1].split())
    assert done.exit_code == 1, done.output
    assert SHOWN[3] in done.stdout


def test_the_guide_names_the_files_and_codes_that_there_are() -> None:
    table = GUIDE.partition("## The black box")[2].partition("## Before")[0]
    assert set(re.findall(r"`(\w+\.(?:jsonl?|pt))`", table)) == {*map(str, FileName), MANIFEST}
    assert set(re.findall(r"GG\d+", GUIDE)) <= set(catalogue.entries())
