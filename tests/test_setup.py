""".ci/setup, with a Python that only writes down what it was asked to do."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

STUB = """#!/bin/sh
case "$*" in
    --version) echo "Python $STUB_VERSION" ;;
    *fcntl*) exec python3 "$@" ;;
    *version_info*) [ "$STUB_VERSION" != 3.9.2 ] ;;
    *ensurepip*) [ -z "$STUB_NO_VENV" ] ;;
    "-m venv "*) echo "$*" >>calls && mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pip "*) echo "$*" >>calls && sleep "${STUB_PIP_TAKES:-0}" && [ -z "$STUB_PIP_FAILS" ] ;;
esac
"""


class Clone:
    """A folder with what .ci/setup reads, and a stub Python to run it with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.venv = folder / ".venv"
        folder.mkdir()
        (folder / "python-stub").write_text(STUB)
        (folder / "python-stub").chmod(0o755)
        for name in ("pyproject.toml", "constraints.txt"):
            (folder / name).write_text(f"# {name}\n")

    def setup(self, what: str, **environment: str) -> subprocess.CompletedProcess[str]:
        (self.folder / "calls").unlink(missing_ok=True)
        process = self.start(what, **environment)
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def start(self, what: str, **environment: str) -> subprocess.Popen[str]:
        stub = {"STUB_VERSION": "3.11.0", "STUB_NO_VENV": "", "STUB_PIP_FAILS": ""}
        given = {"PATH": os.environ["PATH"], "PYTHON": "./python-stub", "VENV": ".venv", **stub, **environment}
        command = ["sh", str(ROOT / ".ci" / "setup"), what]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=self.folder, env=given, stdout=pipe, stderr=pipe, text=True)

    def calls(self) -> list[str]:
        log = self.folder / "calls"
        return [line.split()[1] for line in log.read_text().splitlines()] if log.exists() else []


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path / "a clone")


def test_a_bare_clone_gets_an_environment_and_the_second_time_nothing(clone: Clone) -> None:
    assert clone.setup("examples").returncode == 0
    assert clone.calls() == ["venv", "pip"]
    again = clone.setup("examples")
    assert (again.returncode, again.stdout, clone.calls()) == (0, "", [])


def test_the_development_tools_include_what_the_examples_need(clone: Clone) -> None:
    clone.setup("dev")
    assert ".[dev]" in (clone.folder / "calls").read_text()
    clone.setup("examples")
    assert clone.calls() == []


def test_tests_after_the_demo_install_only_what_is_missing(clone: Clone) -> None:
    clone.setup("examples")
    clone.setup("dev")
    assert clone.calls() == ["pip"]


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_new_requirements_are_installed(clone: Clone, name: str) -> None:
    clone.setup("examples")
    (clone.folder / name).write_text("# other\n")
    clone.setup("examples")
    assert clone.calls() == ["pip"]


def test_an_environment_that_a_kill_left_half_made_is_made_anew(clone: Clone) -> None:
    clone.setup("examples")
    (clone.venv / "unfinished").touch()
    (clone.venv / "left-over").touch()
    assert clone.setup("examples").returncode == 0
    assert clone.calls() == ["venv", "pip"]
    assert not (clone.venv / "left-over").exists()


def test_of_two_at_once_one_installs_and_the_other_waits(clone: Clone) -> None:
    both = [clone.start("examples", STUB_PIP_TAKES="1") for _ in range(2)]
    shown = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert clone.calls() == ["venv", "pip"]
    assert sum("waiting for it" in out for out, _ in shown) == 1


def test_after_a_kill_those_that_wait_let_its_pip_end_and_one_installs(clone: Clone) -> None:
    killed = clone.start("examples", STUB_PIP_TAKES="3")
    while clone.calls() != ["venv", "pip"]:
        assert killed.poll() is None
    # Its pip goes on.
    killed.kill()
    waiting = [clone.start("examples") for _ in range(3)]
    shown = [process.communicate(timeout=60) for process in waiting]
    killed.communicate(timeout=60)
    assert all("waiting for it" in out for out, _ in shown)
    assert [process.returncode for process in waiting] == [0, 0, 0]
    assert clone.calls() == ["venv", "pip", "venv", "pip"]


def test_an_environment_in_a_folder_that_is_not_there_yet(clone: Clone) -> None:
    assert clone.setup("examples", VENV="not/there/.venv").returncode == 0
    assert (clone.folder / "not" / "there" / ".venv" / "installed-examples").exists()


def test_an_environment_whose_python_is_gone_is_made_anew(clone: Clone) -> None:
    clone.setup("examples")
    (clone.venv / "bin" / "python").unlink()
    clone.setup("examples")
    assert clone.calls() == ["venv", "pip"]


def test_an_environment_that_moved_is_made_anew(clone: Clone, tmp_path: Path) -> None:
    clone.setup("examples")
    (tmp_path / "moved").mkdir()
    moved = Clone(tmp_path / "moved" / "clone")
    clone.venv.rename(moved.venv)
    moved.setup("examples")
    assert moved.calls() == ["venv", "pip"]


def test_a_failed_installation_is_tried_again_in_the_same_environment(clone: Clone) -> None:
    failed = clone.setup("examples", STUB_PIP_FAILS="1")
    assert failed.returncode == 1
    assert "pip could not install" in failed.stderr
    assert clone.setup("examples").returncode == 0
    assert clone.calls() == ["pip"]


def test_an_environment_of_the_users_own_is_never_removed(clone: Clone) -> None:
    clone.venv.mkdir()
    (clone.venv / "mine").touch()
    refused = clone.setup("examples")
    assert refused.returncode == 1
    assert "make did not make it" in refused.stderr
    assert (clone.venv / "mine").exists()


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"PYTHON": "no-such-python"}, "no-such-python was not found"),
        ({"STUB_VERSION": "3.9.2"}, "needs Python 3.11 or newer, and ./python-stub is Python 3.9.2"),
        ({"STUB_NO_VENV": "1"}, "apt-get install python3-venv"),
    ],
)
def test_a_python_that_will_not_do_is_named_and_nothing_is_made(
    clone: Clone, environment: dict[str, str], said: str
) -> None:
    refused = clone.setup("examples", **environment)
    assert refused.returncode == 1
    assert said in refused.stderr
    assert not clone.venv.exists()
