"""The command that a finding prints works where it is printed, and never trains a second time."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn
from typer.testing import CliRunner

from gpt_guard.blackbox.code import home_of, module_of, root_of, runs_when_imported
from gpt_guard.blackbox.source import class_of
from gpt_guard.cli.app import app

from .conftest import Fail

CLASS = """
import pathlib

import torch
from torch import nn

from gpt_guard import Guardian, NonFiniteError


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(2, 2)

    def forward(self, x):
        return torch.log(self.body(x) * 0 - 1)
"""
TRAINING = """
    pathlib.Path("trained").write_text("once more")
    model = Net()
    try:
        with Guardian(model, run_dir="run", sinks=[], summary=False):
            model(torch.ones(1, 2))
    except NonFiniteError as error:
        print(error)
"""
GUARDED = f'{CLASS}\n\nif __name__ == "__main__":{TRAINING}'
BARE = f"{CLASS}\n\nif True:{TRAINING}"
SCRIPT = "script_of_a_run"


def printed(folder: Path, *command: str) -> list[str]:
    """Run a script as a person does; the arguments of the command that its message shows."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    found = re.search(r"open it with:\s+gpt-guard (replay .*)$", done.stdout.strip().replace("\\\n", ""))
    assert found is not None, done.stdout + done.stderr
    return found[1].split()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a person works; what is imported from it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    forget()
    return tmp_path


def forget() -> None:
    """As in a new process, which has not loaded the script."""
    for name in [name for name in sys.modules if name == "kit" or name.endswith(SCRIPT)]:
        del sys.modules[name]


def test_a_script_with_a_guard_is_named_and_opened_by_what_is_printed(folder: Path) -> None:
    (folder / f"{SCRIPT}.py").write_text(GUARDED)
    command = printed(folder, f"{SCRIPT}.py")
    assert command[-1] == f"{SCRIPT}:Net"
    (folder / "trained").unlink()
    run = CliRunner().invoke(app, command)
    assert run.exit_code == 1, run.output
    assert not (folder / "trained").exists()


def test_a_script_in_another_folder_is_named_by_its_file(folder: Path) -> None:
    (folder / "kit").mkdir()
    (folder / "kit" / "__init__.py").touch()
    (folder / "kit" / f"{SCRIPT}.py").write_text(GUARDED)
    command = printed(folder, os.path.join("kit", f"{SCRIPT}.py"))
    assert command[-1] == os.path.join("kit", f"{SCRIPT}.py") + ":Net"
    run = CliRunner().invoke(app, command)
    assert run.exit_code == 1, run.output
    assert "Not what the bundle was made of" not in run.stdout
    bare = CliRunner().invoke(app, command[:2])
    assert bare.exit_code == 2
    assert f"such as --model {command[-1]}" in bare.stderr


def test_a_script_without_a_guard_is_not_run_again(folder: Path) -> None:
    script = folder / f"{SCRIPT}.py"
    script.write_text(BARE)
    command = printed(folder, f"{SCRIPT}.py")
    assert command[-1] == f"{SCRIPT}:Net"
    (folder / "trained").unlink()
    options: list[list[str]] = [["--model", f"{SCRIPT}:Net"], ["--model", f"{SCRIPT}.py:Net"], ["--trust-source"]]
    for each in options:
        run = CliRunner().invoke(app, [*command[:2], *each])
        assert run.exit_code == 2
        assert 'has no `if __name__ == "__main__":`' in run.stderr
        assert "would run it again" in run.stderr
    assert not (folder / "trained").exists()
    forget()
    script.write_text(CLASS)  # the training has moved elsewhere
    assert CliRunner().invoke(app, command).exit_code == 1


def test_a_module_that_only_another_folder_has_is_said_to_be_there(folder: Path) -> None:
    there, here = folder / "there", folder / "here"
    there.mkdir()
    here.mkdir()
    (there / f"{SCRIPT}.py").write_text(GUARDED)
    path = str(folder / printed(folder, os.path.join("there", f"{SCRIPT}.py"))[1])
    os.chdir(here)
    run = CliRunner().invoke(app, ["replay", path, "--model", f"{SCRIPT}:Net"])
    assert run.exit_code == 2
    assert f"the run had it in {there}: give --model {there / SCRIPT}.py:Net" in run.stderr
    run = CliRunner().invoke(app, ["replay", path, "--model", "nowhere.py:Net"])
    assert run.exit_code == 2
    assert "there is no file nowhere.py" in run.stderr
    assert CliRunner().invoke(app, ["replay", path, "--trust-source"]).exit_code == 1


def test_a_script_that_ends_itself_is_no_answer(fail: Fail, folder: Path) -> None:
    (folder / f"{SCRIPT}.py").write_text("import sys\n\nsys.exit(0)\n")
    run = CliRunner().invoke(app, ["replay", str(fail("log").path), "--model", f"{SCRIPT}:Net"])
    assert run.exit_code == 2
    assert "SystemExit" in run.stderr


@pytest.mark.parametrize("main", ["__main__", "__mp_main__"])
def test_a_class_of_a_script_is_known_by_the_scripts_name(folder: Path, main: str) -> None:
    file = folder / f"{SCRIPT}.py"
    file.write_text(CLASS)
    variables = {"__name__": main}
    exec(compile(file.read_text(), str(file), "exec", dont_inherit=True), variables)
    kind: type[nn.Module] = variables["Net"]  # type: ignore[assignment]  # made by exec
    assert home_of(kind) == (SCRIPT, str(file))
    assert class_of(kind()).typed == f"{SCRIPT}:Net"


def test_a_class_that_was_typed_in_has_no_name_elsewhere() -> None:
    variables = {"__name__": "__main__"}
    exec(compile(CLASS, "<stdin>", "exec", dont_inherit=True), variables)
    kind: type[nn.Module] = variables["Net"]  # type: ignore[assignment]  # made by exec
    assert class_of(kind()).typed is None


@pytest.mark.parametrize(
    ("module", "file", "root"),
    [
        ("a", "/x/a.py", "/x"),
        ("a.b", "/x/a/b.py", "/x"),
        ("a.b", "/x/a/b/__init__.py", "/x"),
        ("a", "/x/b.py", None),
        ("y.x.a", "/x/a.py", None),
    ],
)
def test_the_folder_of_a_module_is_what_its_name_leaves_of_its_file(module: str, file: str, root: str | None) -> None:
    assert root_of(module, file) == (None if root is None else Path(root))


def test_packages_around_a_file_belong_to_its_name(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    for folder in (inner, inner.parent):
        (folder / "__init__.py").touch()
    assert module_of(inner / "c.py") == (tmp_path, "a.b.c")
    assert module_of(inner / "__init__.py") == (tmp_path, "a.b")
    assert module_of(tmp_path / "c.py") == (tmp_path, "c")


@pytest.mark.parametrize(
    ("text", "runs"),
    [
        ('if __name__ == "__main__":\n    main()\n', False),
        ("if '__main__' == __name__ and True:\n    main()\n", False),
        ("main()\n", True),
        ("if name == '__main__':\n    main()\n", True),
        ("no python\n", False),
    ],
)
def test_a_guard_is_found_in_the_text_of_a_script(tmp_path: Path, text: str, runs: bool) -> None:
    (tmp_path / "a.py").write_text(text)
    assert runs_when_imported(tmp_path / "a.py") is runs
