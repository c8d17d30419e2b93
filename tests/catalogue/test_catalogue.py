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

WORDS = resources.files("gpt_guard.catalogue").joinpath("words")
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
    ways = [text for way in entry.ways.values() for text in (way.next_test, way.fix)]
    for text in (entry.meaning, entry.next_test, entry.fix, *(cause.text for cause in entry.causes), *ways):
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
def test_each_way_is_of_a_cause(entry: Entry) -> None:
    assert set(entry.ways) <= {cause.key for cause in entry.causes}


@every_entry
def test_likely_causes_come_first_and_none_is_lost(entry: Entry) -> None:
    last = entry.causes[-1]
    ordered = entry.ordered_causes([last.key, last.key])
    assert ordered[0] == last.text
    assert sorted(ordered) == sorted(cause.text for cause in entry.causes)
    first = entry.causes[0]
    assert entry.ordered_causes(unlikely=[first.key])[-1] == first.text
    assert entry.ordered_causes([first.key], [first.key]) == entry.ordered_causes()


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


def test_a_cause_that_is_shown_brings_its_own_test_and_fix() -> None:
    entry = catalogue.entry("GG101")
    found = catalogue.finding(
        "GG101", "3 NaN", likely=["zero_std"], shown=["all_masked_row"], unlikely=["overflow_half"]
    )
    by_key = {cause.key: cause.text for cause in entry.causes}
    assert found.causes[:2] == (by_key["all_masked_row"], by_key["zero_std"])
    assert found.causes[-1] == by_key["overflow_half"]
    assert (found.next_test, found.fix) == (entry.ways["all_masked_row"].next_test, entry.ways["all_masked_row"].fix)
    # One without words of its own leaves those of the code; what the caller says counts more than either.
    assert catalogue.finding("GG101", "3 NaN", shown=["uninitialised"]).next_test == entry.next_test
    assert catalogue.finding("GG101", "3 NaN", shown=["all_masked_row"], fix="Mine.").fix == "Mine."
    with pytest.raises(KeyError, match="no_such_cause"):
        catalogue.finding("GG101", "x", shown=["no_such_cause"])


def test_every_code_is_raised_somewhere() -> None:
    """Words of a finding that nothing finds would be a promise that nobody keeps."""
    package = Path(str(resources.files("gpt_guard")))
    code = "\n".join(path.read_text(encoding="utf-8") for path in package.rglob("*.py"))
    assert [known for known in catalogue.entries() if f'"{known}"' not in code] == []
