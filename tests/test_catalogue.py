"""The words: every family is there, every entry is complete, and nothing is said twice under two keys."""

from __future__ import annotations

import re
import tomllib
from importlib import resources
from pathlib import Path

import pytest

from gpt_guard import catalogue
from gpt_guard.catalogue import Entry
from gpt_guard.records import Severity

FAMILIES = ("GG1", "GG2", "GG3", "GG4", "GG5", "GG6", "GG7", "GG8", "GG9")
LONGEST_TITLE = 80
LONGEST_TEXT = 420
LONGEST_LINE = 480

WORDS = resources.files("gpt_guard").joinpath("words")
every_entry = pytest.mark.parametrize("entry", catalogue.entries().values(), ids=lambda entry: entry.code)


def files() -> dict[str, dict[str, object]]:
    return {f.name: tomllib.loads(f.read_text(encoding="utf-8")) for f in WORDS.iterdir() if f.name.endswith(".toml")}


def test_each_file_has_codes_of_the_family_in_its_name() -> None:
    for name, codes in files().items():
        assert codes, name
        assert {code[:3] for code in codes} == {name[:3].upper()}, name


def test_every_family_is_there() -> None:
    assert {code[:3] for code in catalogue.entries()} == set(FAMILIES)


def test_no_code_stands_in_two_files() -> None:
    codes = [code for file in files().values() for code in file]
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


def test_every_code_is_raised_somewhere() -> None:
    """Words of a finding that nothing finds would be a promise that nobody keeps."""
    package = Path(str(resources.files("gpt_guard")))
    code = "\n".join(path.read_text(encoding="utf-8") for path in package.rglob("*.py"))
    assert [known for known in catalogue.entries() if f'"{known}"' not in code] == []
