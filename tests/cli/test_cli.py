"""The command line: the catalogue's words in a terminal, helpful errors, and no torch until it is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from gpt_guard import catalogue
from gpt_guard.cli.app import app


def run(*args: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, list(args))
    return done.exit_code, done.stdout, done.stderr


@pytest.mark.parametrize("code", ["GG101", "gg101", "101", " GG101 "])
def test_explain_says_everything(code: str) -> None:
    status, out, _ = run("explain", code)
    entry = catalogue.entry("GG101")
    words = " ".join(out.split())
    assert status == 0
    assert out.startswith(f"GG101 {entry.title}")
    for text in (entry.meaning, entry.next_test, entry.fix):
        assert " ".join(text.split()) in words
    for key, way in entry.ways.items():
        assert key in {cause.key for cause in entry.causes}
        assert f"test: {' '.join(way.next_test.split())} fix: {' '.join(way.fix.split())}" in words
    places = [words.index(f"{n}. {' '.join(cause.text.split())}") for n, cause in enumerate(entry.causes, start=1)]
    assert places == sorted(places)
    assert max(map(len, out.split("\n"))) <= 100


@pytest.mark.parametrize("code", list(catalogue.entries()))
def test_every_code_can_be_explained(code: str) -> None:
    status, out, _ = run("explain", code)
    assert status == 0
    assert catalogue.entry(code).title in out


def test_explain_without_code_lists_all() -> None:
    status, out, _ = run("explain")
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()] == list(catalogue.entries())
    assert all(entry.title in out for entry in catalogue.entries().values())


def test_unknown_code_names_near_ones() -> None:
    status, out, err = run("explain", "GG188")
    assert status == 2
    assert out == ""
    assert "GG188" in err
    assert "GG101" in err
    assert "Traceback" not in err


def test_nonsense_points_to_the_list() -> None:
    status, _, err = run("explain", "banana")
    assert status == 2
    assert "`gpt-guard explain` lists all codes" in err


def test_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpt_guard.cli.app.metadata.version", {"gpt-guard-torch": "1.2.3"}.__getitem__)
    assert run("--version") == (0, "gpt-guard 1.2.3\n", "")


def test_help_lists_the_commands() -> None:
    status, out, _ = run("--help")
    assert status == 0
    assert "explain" in out


def test_explain_needs_no_torch() -> None:
    code = (
        "import sys; sys.argv = ['gpt-guard', 'explain', 'GG102']\n"
        "from gpt_guard.cli.app import main\n"
        "try: main()\n"
        "except SystemExit as leaving: print(leaving.code, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 False"
