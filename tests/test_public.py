"""The public names: each is where the table says, seen by type checkers too, and loaded only when it is used."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import FunctionType

import pytest

import gpt_guard

HOME = gpt_guard._HOME
SOURCE = Path(gpt_guard.__file__)


def fresh(code: str) -> str:
    """What a new interpreter prints."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_the_list_and_the_table_have_the_same_names_in_one_order() -> None:
    assert list(HOME) == gpt_guard.__all__
    assert sorted(HOME) == sorted(set(HOME))
    assert set(HOME) <= set(dir(gpt_guard))


@pytest.mark.parametrize("name", HOME)
def test_a_name_is_what_its_home_defines(name: str) -> None:
    thing = getattr(gpt_guard, name)
    assert thing is getattr(import_module(f"gpt_guard.{HOME[name]}"), name)
    assert thing.__name__ == name
    assert inspect.getdoc(thing)


def test_type_checkers_see_the_same_names() -> None:
    seen = {
        alias.name: (node.module or "").removeprefix("gpt_guard.")
        for node in ast.walk(ast.parse(SOURCE.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gpt_guard.")
        for alias in node.names
    }
    assert seen == HOME


def test_every_assertion_of_the_checks_is_public() -> None:
    functions = [
        node.name
        for node in ast.parse((SOURCE.parent / "checks" / "asserts.py").read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("assert_")
    ]
    assert len(functions) >= 11
    assert set(functions) == {name for name in HOME if name.startswith("assert_")}


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Guardain'"):
        _ = gpt_guard.Guardain


def test_importing_it_loads_no_torch_and_neither_do_logs_and_reports() -> None:
    names = "read_run, read_report, compare_reports, Finding, Report, GuardError, PreflightError"
    told = fresh(f"import sys, gpt_guard; from gpt_guard import {names}; print('torch' in sys.modules)")
    assert told == "False"


@pytest.mark.parametrize(
    "before", ["", "import gpt_guard.cli.app; ", "import gpt_guard.checks.runner.run, gpt_guard.cli.check; "]
)
def test_check_is_the_function_whatever_was_imported_before(before: str) -> None:
    assert fresh(f"{before}from gpt_guard import check; print(type(check).__name__, check.__module__)") == (
        f"{FunctionType.__name__} gpt_guard.checks.runner.run"
    )
