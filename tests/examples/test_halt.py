from __future__ import annotations

import pytest

from gpt_guard.errors import NonFiniteError
from gpt_guard.records import Finding, Severity
from halt import exit_on_halt

FOUND = Finding(code="GG101", title="a module made a NaN", severity=Severity.ERROR, seen="1 NaN of 4", module="head")


def test_a_guard_error_is_printed_once_and_ends_with_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped, exit_on_halt():
        raise NonFiniteError(FOUND)
    assert stopped.value.code == 1
    assert stopped.value.__suppress_context__
    said = capsys.readouterr().err
    assert said.count("a module made a NaN") == 1
    assert "1 NaN of 4" in said
    assert "Traceback" not in said


def test_another_error_passes_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError), exit_on_halt():
        _ = 1 / 0
    assert capsys.readouterr().err == ""
