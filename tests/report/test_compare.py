"""What changed between two reports: nothing is missed, noise is not reported, exit codes are those of diff."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gpt_guard import catalogue
from gpt_guard.cli.app import app
from gpt_guard.records import CheckResult, Report
from gpt_guard.report.compare import Change, change_text, compare_reports

FINDING = catalogue.finding("GG101", "3 NaN", module="blocks.1")


def changes(before: dict[str, Any], after: dict[str, Any], **options: float) -> dict[str, Change]:
    found = compare_reports(Report(**before), Report(**after), **options)
    return {change.what: change for change in found}


def test_a_report_does_not_differ_from_itself() -> None:
    whole = {
        "facts": {"initial_loss": math.nan, "batch_shape": [8, 32], "loss_curve": [3.0, 2.0]},
        "findings": [FINDING],
        "checks": [CheckResult(stage="files", title="train", status="passed")],
        "grad_norm_max": math.inf,
    }
    assert changes(whole, whole) == {}


def test_figures_come_with_their_relative_change() -> None:
    found = changes(
        {"facts": {"initial_loss": 4.0, "token_max": 64}, "last_loss": 2.0},
        {"facts": {"initial_loss": 5.0, "token_max": 65}, "last_loss": 1.0},
    )
    assert found["initial_loss"].relative == pytest.approx(0.25)
    assert found["last_loss"].relative == pytest.approx(-0.5)
    assert change_text(found["initial_loss"]) == "initial_loss: 4 -> 5 (+25.00%)"
    assert found["token_max"].kind == "figure"


@pytest.mark.parametrize(
    ("old", "new", "differs"),
    [
        (1.0, 1.0 + 1e-7, False),
        (1.0, 1.0 + 1e-5, True),
        (None, 1.0, True),
        (0, 1, True),
        (True, 1, False),
        (math.nan, 1.0, True),
        (math.nan, math.nan, False),
        ("NaN", math.nan, False),
        ([1.0, 2.0], [1.0, 2.0 + 1e-9], False),
        ([1.0, 2.0], [1.0, 2.1], True),
        ([1.0], [1.0, 2.0], True),
        ("abc", "abd", True),
    ],
)
def test_what_counts_as_a_difference(old: Any, new: Any, differs: bool) -> None:
    assert bool(changes({"facts": {"x": old}}, {"facts": {"x": new}})) is differs


def test_no_relative_change_where_there_is_no_such_number() -> None:
    for old, new in ((0.0, 1.0), (1.0, math.nan), (math.inf, 1.0), (None, 1.0)):
        assert changes({"facts": {"x": old}}, {"facts": {"x": new}})["x"].relative is None


def test_checks_that_flipped_came_or_went() -> None:
    def results(**status: str) -> list[dict[str, str]]:
        return [{"stage": "shapes", "title": title, "status": value} for title, value in status.items()]

    found = changes(
        {"checks": results(loss="passed", order="failed", gone="skipped", same="passed")},
        {"checks": results(loss="failed", order="passed", new="passed", same="passed")},
    )
    assert {what: (c.before, c.after) for what, c in found.items()} == {
        "shapes: loss": ("passed", "failed"),
        "shapes: order": ("failed", "passed"),
        "shapes: gone": ("skipped", "-"),
        "shapes: new": ("-", "passed"),
    }


def test_lines_of_one_title_are_told_apart_by_their_order() -> None:
    lines = [{"stage": "files", "title": "x", "status": status} for status in ("passed", "passed")]
    other = [lines[0], {**lines[1], "status": "failed"}]
    assert [change.after for change in changes({"checks": lines}, {"checks": other}).values()] == ["failed"]


def test_findings_new_and_gone() -> None:
    other = catalogue.finding("GG101", "5 NaN", module="blocks.0")
    found = changes({"findings": [FINDING]}, {"findings": [other]})
    assert [(c.before, c.after) for c in found.values()] == [("found", "-"), ("-", "found")]
    assert all("GG101" in what for what in found)
    assert any("blocks.0" in what for what in found)
    assert changes({"findings": [FINDING]}, {"findings": [FINDING.model_copy(update={"seen": "4 NaN"})]}) == {}


def test_settings_environment_and_fingerprints() -> None:
    found = changes(
        {"model": "A", "environment": {"torch": "2.6"}, "fingerprint": {"config": "aa"}, "guards": ["x"]},
        {"model": "B", "environment": {"torch": "2.7"}, "fingerprint": {"config": "bb"}, "guards": ["x", "y"]},
    )
    assert set(found) == {"model", "environment.torch", "fingerprint.config", "guards"}


def test_control_characters_of_a_file_do_not_reach_the_terminal() -> None:
    found = changes({"model": "a"}, {"model": "\x1b[31mred"})
    assert "\x1b" not in change_text(found["model"])


def run(*args: object) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["compare", *map(str, args)])
    return done.exit_code, done.stdout, done.stderr


def write(path: Path, **fields: Any) -> Path:
    path.write_text(Report(**fields).model_dump_json(), encoding="utf-8")
    return path


def test_the_command_says_what_changed(tmp_path: Path) -> None:
    one = write(tmp_path / "a.json", facts={"initial_loss": 4.0})
    other = write(tmp_path / "b.json", facts={"initial_loss": 4.4}, findings=[FINDING])
    assert run(one, one) == (0, "no difference\n", "")
    code, out, _ = run(one, other)
    assert code == 1
    assert "figures\n  initial_loss: 4 -> 4.4 (+10.00%)" in out
    assert "findings\n  GG101" in out
    assert run(one, write(tmp_path / "c.json", facts={"initial_loss": 4.4}), "--rel-tol", "0.2")[0] == 0


@pytest.mark.parametrize("content", [None, "", "{", '{"schema_version": "gpt_guard.report/9"}', '{"unknown": 1}'])
def test_unusable_files_are_named_without_a_traceback(tmp_path: Path, content: str | None) -> None:
    one = write(tmp_path / "a.json")
    other = tmp_path / "other.json"
    if content is not None:
        other.write_text(content)
    code, out, err = run(one, other)
    assert (code, out) == (2, "")
    assert "other.json" in err
    assert "Traceback" not in err
