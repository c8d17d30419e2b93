"""The user's own line is found wherever their code lives; running modules are read off the stack."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from gpt_guard.hooks import frames
from gpt_guard.hooks.frames import inside_of, passed_from_outside, running_calls, user_line
from gpt_guard.records import SourceLine

SOURCE = """
from torch import nn

class Model(nn.Module):
    def __init__(self, probe):
        super().__init__()
        self.probe = probe

    def forward(self, x):
        y = x + 1
        return self.probe(y)  # the line
"""


class Probe(nn.Module):
    """Asks for the line from inside a module call, as a hook does."""

    def __init__(self) -> None:
        super().__init__()
        self.found: SourceLine | None = None
        self.register_forward_hook(self.look)

    def look(self, *_: Any) -> None:
        self.found = ask()

    def forward(self, x: Tensor) -> Tensor:
        return x


# What asks stands in gpt_guard; here it is compiled as if it did.
_namespace: dict[str, Any] = {"user_line": user_line}
exec(compile("def ask():\n    return user_line()\n", frames.__file__, "exec"), _namespace)
ask = _namespace["ask"]


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Probe:
    """Its own method must not be taken for the user's code."""
    code = Probe.look.__code__.replace(co_filename=frames.__file__)
    monkeypatch.setattr(Probe.look, "__code__", code)
    return Probe()


def line(probe: Probe, namespace: dict[str, Any]) -> SourceLine:
    namespace["Model"](probe)(torch.zeros(1))
    assert probe.found is not None
    return probe.found


@pytest.mark.parametrize("folder", ["project", "lib/python3.11/site-packages/pkg", "lib/python3/dist-packages/pkg"])
def test_a_file_of_a_project_or_an_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, probe: Probe, folder: str
) -> None:
    """Also where packages are installed below the standard library, as in most environments."""
    monkeypatch.setattr(frames, "_STDLIB", str(tmp_path / "lib") + "/")
    file = tmp_path / folder / "their_model.py"
    file.parent.mkdir(parents=True)
    file.write_text(SOURCE, encoding="utf-8")
    module = ModuleType("their_model")
    exec(compile(SOURCE, str(file), "exec"), vars(module))
    found = line(probe, vars(module))
    assert (found.file, found.line, found.function) == (str(file), 11, "forward")
    assert found.text == "return self.probe(y)  # the line"


@pytest.mark.parametrize(
    ("file", "passed"),
    [
        ("lightning/pytorch/core/module.py", True),
        ("pytorch_lightning/core/module.py", True),
        ("accelerate/accelerator.py", True),
        ("transformers/trainer.py", True),
        ("transformers/models/llama/modeling_llama.py", False),
        ("project/lightning/module.py", False),
        ("lightning_models/module.py", False),
    ],
)
def test_a_trainer_is_passed_over_and_a_model_from_a_package_is_not(probe: Probe, file: str, passed: bool) -> None:
    namespace: dict[str, Any] = {}
    path = f"/env/lib/python3.11/site-packages/{file}"
    exec(compile(SOURCE, path, "exec"), namespace)
    assert line(probe, namespace).file == (__file__ if passed else path)


def test_the_standard_library_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, probe: Probe) -> None:
    monkeypatch.setattr(frames, "_STDLIB", str(tmp_path) + "/")
    namespace: dict[str, Any] = {}
    exec(compile(SOURCE, str(tmp_path / "contextlib.py"), "exec"), namespace)
    assert line(probe, namespace).file == __file__


def test_a_cell_of_a_notebook(monkeypatch: pytest.MonkeyPatch, probe: Probe) -> None:
    name = "<ipython-input-3-abc>"
    monkeypatch.setitem(linecache.cache, name, (len(SOURCE), None, SOURCE.splitlines(keepends=True), name))
    namespace: dict[str, Any] = {}
    exec(compile(SOURCE, name, "exec"), namespace)
    found = line(probe, namespace)
    assert (found.file, found.line, found.text) == (name, 11, "return self.probe(y)  # the line")


def test_code_without_a_file(probe: Probe) -> None:
    namespace: dict[str, Any] = {}
    exec(SOURCE, namespace)
    found = line(probe, namespace)
    assert (found.file, found.line, found.text) == ("<string>", 11, "")


def test_a_forward_written_by_torch_fx_is_nobodys_line(probe: Probe) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.probe = probe

        def forward(self, x: Tensor) -> Tensor:
            return self.probe(x) + 1  # type: ignore[no-any-return]  # a module call is Any

    class Leaves(fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return True

    model = Model()
    traced = fx.GraphModule(model, Leaves().trace(model))
    traced(torch.zeros(1))
    assert probe.found is not None
    assert (probe.found.file, probe.found.text) == (__file__, "traced(torch.zeros(1))")


# The modules that are running.


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        self.seen = [*running_calls()]
        return x * scale


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.place: Any = None

    def forward(self, x: Tensor) -> Tensor:
        doubled = x * 2
        return self.helper(doubled)

    def helper(self, hidden: Tensor) -> Tensor:
        return self.inner(hidden, scale=3.0)  # type: ignore[no-any-return]  # a module call is Any

    def again(self, x: Tensor, depth: int) -> Tensor:
        return self(x) if depth == 0 else self.again(x, depth - 1)


def train(model: nn.Module, x: Tensor) -> None:
    """A function that is given a model is no method of it."""
    model(x)


def test_modules_that_run_are_listed_with_what_they_were_called_with() -> None:
    model, x = Outer(), torch.ones(1)
    train(model, x)
    inner, outer = model.inner.seen
    assert (inner.module, outer.module) == (model.inner, model)
    assert (inner.inputs[0][0].item(), inner.inputs[1]) == (2.0, {"scale": 3.0})
    assert outer.inputs[0][0] is x


def test_a_method_that_was_called_instead_stands_without_inputs() -> None:
    model = Outer()
    model.helper(torch.ones(1))
    assert [(call.module, call.inputs is None) for call in model.inner.seen] == [(model.inner, False), (model, True)]


def test_what_a_pre_hook_has_put_in_place_of_the_input_counts() -> None:
    model = Outer()
    model.inner.register_forward_pre_hook(lambda _module, args: (args[0] + 5,))
    train(model, torch.ones(1))
    assert model.inner.seen[0].inputs[0][0].item() == 7.0


def test_a_model_that_calls_itself_is_listed_for_each_call() -> None:
    class Recursive(nn.Module):
        seen: list[Any]

        def forward(self, x: Tensor, depth: int) -> Tensor:
            if depth:
                return self(x, depth - 1)  # type: ignore[no-any-return]  # a module call is Any
            self.seen = [call.inputs[0][1] for call in running_calls() if call.inputs]
            return x

    model = Recursive()
    model(torch.ones(1), 2)
    assert model.seen == [0, 1, 2]


def test_line_and_variables_of_a_running_module_are_those_of_its_innermost_method() -> None:
    model = Outer()
    kept: dict[str, Any] = {}
    model.inner.register_forward_hook(lambda *_: kept.update(inside_of(model)._asdict()))
    train(model, torch.ones(1))
    assert kept["line"].function == "helper"
    assert "self.inner(hidden, scale=3.0)" in kept["line"].text
    assert kept["variables"]["hidden"].item() == 2.0
    assert inside_of(model) == (None, {})


def test_a_tensor_of_the_loop_is_told_from_one_that_a_method_has_made() -> None:
    model, batch, told = Outer(), {"x": torch.ones(1)}, []

    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            told.append(passed_from_outside(model, x))
            return x

    model.inner = Asks()  # type: ignore[assignment]  # stands in
    model.inner.forward = lambda x, scale: Asks.forward(model.inner, x)  # type: ignore[method-assign,assignment,arg-type,misc]  # takes a scale
    model.helper(batch["x"])
    model(batch["x"])
    assert told == [True, False]


def test_frames_are_let_go() -> None:
    model, x = Outer(), torch.ones(1)
    train(model, x)
    model.inner.seen.clear()
    inside_of(model)
    # x itself, and the argument of getrefcount.
    assert sys.getrefcount(x) == 2
