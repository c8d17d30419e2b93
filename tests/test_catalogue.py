"""The words: every family is there, every entry is complete, and nothing is said twice under two keys."""

from __future__ import annotations

import re
import tomllib
from importlib import resources

import pytest

from gpt_guard import catalogue
from gpt_guard.catalogue import Entry
from gpt_guard.records import Severity

FAMILIES = {
    "GG1": "gg1_numeric.toml",
    "GG2": "gg2_gradients.toml",
    "GG3": "gg3_parameters.toml",
    "GG4": "gg4_schedule.toml",
    "GG5": "gg5_mode.toml",
    "GG7": "gg7_checkpoint.toml",
    "GG9": "gg9_blind.toml",
}
LONGEST_TITLE = 80
LONGEST_TEXT = 420
LONGEST_LINE = 480

WORDS = resources.files("gpt_guard").joinpath("words")
every_entry = pytest.mark.parametrize("entry", catalogue.entries().values(), ids=lambda entry: entry.code)


@pytest.mark.parametrize(("family", "name"), FAMILIES.items())
def test_each_family_has_its_file(family: str, name: str) -> None:
    codes = tomllib.loads(WORDS.joinpath(name).read_text(encoding="utf-8"))
    assert codes
    assert {code[:3] for code in codes} == {family}


def test_no_code_stands_in_two_files() -> None:
    files = [tomllib.loads(f.read_text(encoding="utf-8")) for f in WORDS.iterdir() if f.name.endswith(".toml")]
    codes = [code for file in files for code in file]
    assert sorted(codes) == list(catalogue.entries())


def test_lines_can_be_reviewed() -> None:
    for file in WORDS.iterdir():
        for position, line in enumerate(file.read_text(encoding="utf-8").split("\n"), start=1):
            assert len(line) <= LONGEST_LINE, f"{file.name}:{position} has {len(line)} columns"


@every_entry
def test_code_and_title(entry: Entry) -> None:
    assert re.fullmatch(r"GG[1-9]\d\d", entry.code)
    assert entry.title == entry.title.strip()
    assert 0 < len(entry.title) <= LONGEST_TITLE
    assert not entry.title.endswith(".")


@every_entry
def test_words_are_complete(entry: Entry) -> None:
    for text in (entry.meaning, entry.next_test, entry.fix, *(cause.text for cause in entry.causes)):
        assert text.strip()
        assert len(text) <= LONGEST_TEXT, text


@every_entry
def test_causes_have_names_of_their_own(entry: Entry) -> None:
    keys = [cause.key for cause in entry.causes]
    assert keys
    assert len(set(keys)) == len(keys)
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", key) for key in keys)
    assert len({cause.text for cause in entry.causes}) == len(keys)


@every_entry
def test_likely_causes_come_first_and_none_is_lost(entry: Entry) -> None:
    last = entry.causes[-1]
    ordered = entry.ordered_causes([last.key, last.key])
    assert ordered[0] == last.text
    assert sorted(ordered) == sorted(cause.text for cause in entry.causes)


def test_unknown_codes_and_keys_are_errors() -> None:
    with pytest.raises(KeyError, match="GG101"):
        catalogue.entry("GG199")
    with pytest.raises(KeyError, match="no_such_cause"):
        catalogue.finding("GG101", "x", likely=["no_such_cause"])


def test_a_finding_takes_its_words_from_the_catalogue() -> None:
    entry = catalogue.entry("GG101")
    finding = catalogue.finding("GG101", "3 NaN", likely=["all_masked_row"], step=3, severity=Severity.WARNING)
    assert (finding.title, finding.next_test, finding.fix) == (entry.title, entry.next_test, entry.fix)
    assert "masked" in finding.causes[0] or "-inf" in finding.causes[0]
    assert finding.severity is Severity.WARNING
