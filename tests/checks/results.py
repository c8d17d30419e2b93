"""What the tests of the data stages ask of a stage's lines."""

from __future__ import annotations

from collections.abc import Iterable

from gpt_guard.records import CheckResult, Severity


def by_title(results: Iterable[CheckResult]) -> dict[str, CheckResult]:
    """The lines of one stage."""
    return {result.title: result for result in results}


def failed(results: dict[str, CheckResult]) -> dict[str, str]:
    """The lines that failed, each with the code of its first finding."""
    return {title: result.findings[0].code for title, result in results.items() if result.status == "failed"}


def assert_caught(results: dict[str, CheckResult], title: str, code: str, cause: str) -> None:
    """One line fails, no other, and its likeliest cause is this one."""
    assert failed(results) == {title: code}
    found = results[title].findings[0]
    assert cause in found.causes[0]
    assert found.severity is Severity.ERROR
    assert results[title].expected
