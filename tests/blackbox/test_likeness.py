"""A step that runs through is an answer only where something was changed, and where it is the model that failed."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from gpt_guard import Guardian
from gpt_guard.blackbox.likeness import likeness
from gpt_guard.blackbox.replay import replay
from gpt_guard.blackbox.source import Source, source_of
from gpt_guard.cli.app import app
from gpt_guard.errors import GuardError

from .conftest import HERE, Fail
from .failing_models import LogOfZero, MaskedLog, TwoFaults
from .test_bundle import reseal

MODEL = """
import torch
from torch import nn

from helper_of_it import shift


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(2, 2)

    def forward(self, x):
        return torch.log(shift(self.body(x) * 0 - 0.5))
"""
HELPER = "def shift(x):\n    return x\n"
MENDED = "def shift(x):\n    return x + 1.0\n"


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], ModuleType]]:
    """Loads the model of a file of the user's, which lies beside a helper, as a new process would."""
    for name, text in (("model_of_it.py", MODEL), ("helper_of_it.py", HELPER)):
        (tmp_path / name).write_text(text)
        os.utime(tmp_path / name, (0, 0))  # long before this process
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def load() -> ModuleType:
        sys.modules.pop("model_of_it", None)
        sys.modules.pop("helper_of_it", None)
        importlib.invalidate_caches()
        return importlib.import_module("model_of_it")

    yield load
    for name in ("model_of_it", "helper_of_it"):
        sys.modules.pop(name, None)


def failed(model: nn.Module, run_dir: Path, x: Tensor) -> str:
    with pytest.raises(GuardError) as caught, Guardian(model, run_dir=run_dir, sinks=[]):
        model(x)
    return str(caught.value.finding.bundle)


def test_code_that_was_changed_is_named_and_the_fault_is_gone(own: Callable[[], ModuleType], tmp_path: Path) -> None:
    bundle = failed(own().Shifted(), tmp_path / "run", torch.ones(1, 2))
    same = replay(bundle, own().Shifted())
    assert same.reproduced
    (tmp_path / "helper_of_it.py").write_text(MENDED)
    done = replay(bundle, own().Shifted())
    assert done.gone
    assert "The code was changed since: helper_of_it.py." in done.verdict
    assert done.likeness.unedited == ()


def test_a_file_that_may_have_been_edited_after_it_was_loaded_says_nothing(
    own: Callable[[], ModuleType], tmp_path: Path
) -> None:
    model = own().Shifted()
    os.utime(tmp_path / "model_of_it.py")
    bundle = failed(model, tmp_path / "run", torch.ones(1, 2))
    (tmp_path / "model_of_it.py").write_text(MODEL.replace("- 0.5", "+ 0.5"))
    done = replay(bundle, own().Shifted())
    assert done.gone
    assert done.likeness.edited == done.likeness.unedited == ()
    assert "If the code was changed since, it is gone; if it was not: " in done.verdict


def test_nothing_that_was_changed_is_no_success(fail: Fail) -> None:
    failed = fail("log")
    done = replay(failed.path, LogOfZero(eps=1e-3))
    assert done.reproduced is False
    assert done.gone is None
    assert "No answer: the fault does not show, although the code is what it was" in done.verdict
    assert "failing_models.py" in done.verdict
    assert "arguments that the model was built with" in done.verdict
    assert "`eps` was 0.0, is 0.001" in done.notes
    said = replay(failed.path, LogOfZero(eps=1e-3), mended=True)
    assert said.gone
    assert said.verdict.startswith("The fault does not show any more.")


class Counted(LogOfZero):
    """Fails in its third forward."""

    def __init__(self) -> None:
        super().__init__(eps=1.0)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (float("nan") if self.calls == 3 else 1.0)


def test_what_a_counter_had_is_said_in_words_that_are_true_in_both_processes(tmp_path: Path) -> None:
    model = Counted()
    for _ in range(2):
        model(torch.ones(1, 4))
    with pytest.raises(GuardError) as caught, Guardian(model, run_dir=tmp_path, sinks=[]):
        model(torch.ones(1, 4))
    done = replay(str(caught.value.finding.bundle), Counted())
    kept = "(`calls`), and what that was when the failed forward began is not kept."
    assert kept in str(caught.value.finding.replay)
    assert kept in done.verdict
    assert "`calls` was 3, is 0" in done.notes
    assert done.gone is None


def test_another_class_is_said_first_and_is_no_success(fail: Fail) -> None:
    failed = fail("log")
    done = replay(failed.path, MaskedLog())
    assert done.gone is None
    assert done.reproduced is False
    (said,) = done.likeness.parts
    assert said.startswith("the model itself was ")
    assert said.endswith("failing_models.MaskedLog")
    assert str(done).startswith("Not what the bundle was made of: the model itself was ")
    assert "No answer: the fault does not show, but this is not what failed." in done.verdict
    assert replay(failed.path, MaskedLog(), mended=True).gone


def test_another_class_is_said_where_the_fault_shows_too(fail: Fail) -> None:
    class Same(LogOfZero):
        pass

    done = replay(fail("log").path, Same())
    assert done.same
    assert done.gone is False
    assert str(done).startswith("Not what the bundle was made of")


def test_modules_are_compared_by_path(tmp_path: Path) -> None:
    bundle = failed(TwoFaults(), tmp_path, torch.full((1, 2), 100.0))
    other = TwoFaults()
    other.add_module("power", nn.Tanh())
    other.add_module("extra", nn.Dropout())
    done = replay(bundle, other)
    power, extra = done.likeness.parts
    assert power.startswith("`power` was ")
    assert power.endswith("failing_models.Power, is torch.nn.modules.activation.Tanh")
    assert extra == "`extra` was not there, is torch.nn.modules.dropout.Dropout"


def test_the_command_ends_with_2_for_another_class(fail: Fail, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE)
    monkeypatch.setattr(sys, "path", list(sys.path))
    call = ["replay", str(fail("log").path), "--model", "failing_models:MaskedLog"]
    run = CliRunner().invoke(app, call)
    assert run.exit_code == 2
    assert run.stdout.startswith("Not what the bundle was made of: the model itself was ")
    answer = json.loads(CliRunner().invoke(app, [*call, "--json"]).stdout)
    assert (answer["reproduced"], answer["gone"], len(answer["other_parts"])) == (False, None, 1)
    assert CliRunner().invoke(app, [*call, "--mended"]).exit_code == 0


def test_a_bundle_of_before_says_as_much_as_it_did(fail: Fail) -> None:
    path = fail("log").path
    source = json.loads((path / "source.json").read_text())
    for key in ("script", "classes", "settings", "code"):
        del source[key]
    (path / "source.json").write_text(json.dumps(source))
    reseal(path, "source.json")
    done = replay(path, MaskedLog())
    assert done.likeness.parts == done.likeness.settings == done.likeness.edited == done.likeness.unedited == ()
    assert done.gone
    assert "If the code was changed since, it is gone; if it was not: " in done.verdict


def test_weights_of_another_model_are_no_success(fail: Fail) -> None:
    failed = fail("log", bundle_limit_mb=0.0001)
    fresh = LogOfZero(eps=1.0)
    done = replay(failed.path, fresh, args=[torch.ones(1, 4)])
    assert done.gone is None
    assert "the weights are not those that failed" in done.verdict


def likeness_of(one: nn.Module, other: nn.Module) -> tuple[str, ...]:
    """What the second is told to have other than the first, through a file."""
    return likeness(Source.model_validate_json(source_of(one).model_dump_json()), other).settings


def test_attributes_that_are_plain_are_compared() -> None:
    one, other = nn.MultiheadAttention(8, 2), nn.MultiheadAttention(8, 4)
    assert likeness_of(one, nn.MultiheadAttention(8, 2)) == ()
    assert likeness_of(one, other) == ("`num_heads` was 2, is 4", "`head_dim` was 4, is 2")


def test_functions_and_lists_are_compared_and_what_has_no_text_is_not() -> None:
    one, other = nn.Identity(), nn.Identity()
    values: list[tuple[Any, Any]] = [(torch.relu, torch.tanh), ([1, 2], [1, 3]), (object(), object()), ("a" * 200, "b")]
    for place, (before, after) in enumerate(values):
        setattr(one, f"v{place}", before)
        setattr(other, f"v{place}", after)
    other.forward = torch.neg  # type: ignore[method-assign]  # what a person does in a notebook
    told = likeness_of(one, other)
    assert [each.partition(" ")[0] for each in told] == ["`v0`", "`v1`", "`v3`", "`forward`"]
    assert told[1] == "`v1` was [1, 2], is [1, 3]"


def test_a_config_of_the_model_is_compared_by_key() -> None:
    one, other = nn.Identity(), nn.Identity()
    for model, heads in ((one, 2), (other, 4)):
        vars(model)["config"] = {"heads": heads, "depth": 1}
    assert likeness_of(one, other) == ("`config.heads` was 2, is 4",)


def test_a_lazy_layer_is_what_it_becomes() -> None:
    one = nn.Sequential(nn.LazyLinear(2))
    one(torch.ones(1, 3))
    assert likeness(source_of(one), nn.Sequential(nn.LazyLinear(2))).parts == ()


def test_names_from_a_file_do_not_steer_the_terminal(fail: Fail) -> None:
    path = fail("log").path
    source = json.loads((path / "source.json").read_text())
    source["classes"] |= {"\x1b[2J": "a:\x1b[2J"}
    source["settings"] |= {"\x1b[2J": "\x1b[2J"}
    (path / "source.json").write_text(json.dumps(source))
    reseal(path, "source.json")
    assert "\x1b" not in str(replay(path, MaskedLog()))
