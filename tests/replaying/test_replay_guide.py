"""docs/replay.md: its scripts run, and print what the guide shows of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gpt_guard import NonFiniteError, catalogue
from gpt_guard.blackbox.manifest import MANIFEST, FileName
from gpt_guard.cli.app import app

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
