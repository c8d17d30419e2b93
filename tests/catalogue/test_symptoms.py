"""Symptoms: each has words of its own, people's phrasings find it, and every command in it can be run."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from gpt_guard import catalogue
from gpt_guard.catalogue.symptoms import ORDER, Symptom, match, symptoms
from gpt_guard.checks.runner.base import NAMES
from gpt_guard.cli.app import app

LONGEST = 330
COMMANDS: dict[str, Any] = vars(typer.main.get_command(app))["commands"]
every_symptom = pytest.mark.parametrize("symptom", symptoms().values(), ids=lambda symptom: symptom.key)


def run(*args: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["explain", *args])
    return done.exit_code, done.stdout, done.stderr


def test_all_nine_are_there_in_order() -> None:
    assert tuple(symptoms()) == ORDER
    assert len(ORDER) == 9


@every_symptom
def test_it_has_ordered_causes_each_with_a_test_and_a_command(symptom: Symptom) -> None:
    assert len(symptom.causes) >= 5
    assert len({cause.text for cause in symptom.causes}) == len(symptom.causes)
    for cause in symptom.causes:
        assert cause.run
        for text in (cause.text, cause.test, symptom.first):
            assert text == text.strip()
            assert 0 < len(text) <= LONGEST, text


@every_symptom
def test_its_commands_can_be_run(symptom: Symptom) -> None:
    """Parsed by the command itself: an option or a stage that does not exist is an error here."""
    quoted = re.findall(r"`(gpt-guard [^`]+)`", symptom.first)
    for command in [*quoted, *(command for cause in symptom.causes for command in cause.run)]:
        program, name, *args = shlex.split(command)
        assert program == "gpt-guard"
        asked = COMMANDS[name].make_context(name, args).params
        assert set(asked.get("only") or ()) <= set(NAMES)
        if asked.get("symptom"):
            assert [each.title for each in match(asked["symptom"])] != [symptom.title]
        if asked.get("code"):
            assert asked["code"] in catalogue.entries()


@every_symptom
def test_its_codes_exist(symptom: Symptom) -> None:
    assert {code for cause in symptom.causes for code in cause.codes} <= set(catalogue.entries())


@every_symptom
def test_key_and_title_find_it_alone(symptom: Symptom) -> None:
    for text in (symptom.key, symptom.title, symptom.key.replace("-", " ").upper()):
        assert match(text) == (symptom,)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("loss does not fall", "loss-does-not-fall"),
        ("my loss doesn't fall", "loss-does-not-fall"),
        ("Loss is not decreasing at all", "loss-does-not-fall"),
        ("loss stuck at 4.6", "loss-does-not-fall"),
        ("the model never learns anything", "loss-does-not-fall"),
        ("NaN", "nan"),
        ("the loss is nan after 300 steps", "nan"),
        ("loss explodes", "nan"),
        ("validation loss goes up", "overfitting"),
        ("val loss rises while train loss falls", "overfitting"),
        ("my model memorizes the text", "overfitting"),
        ("train loss is still high", "underfitting"),
        ("it converges slowly", "underfitting"),
        ("the the the the", "repetition"),
        ("= = = =", "repetition"),
        ("generation is stuck in a loop", "repetition"),
        ("the output is gibberish", "chaos"),
        ("it writes random characters", "chaos"),
        ("it ignores my prompt", "ignores-prompt"),
        ("same continuation for every prompt", "ignores-prompt"),
        ("size mismatch for head.weight", "checkpoint-load"),
        ("Missing key(s) in state_dict", "checkpoint-load"),
        ("training takes too long", "slow"),
        ("GPU utilization is low", "slow"),
    ],
)
def test_free_text_finds_the_symptom(text: str, key: str) -> None:
    assert [symptom.key for symptom in match(text)] == [key]


@pytest.mark.parametrize("text", ["", "   ", "banana", "an infant", "42", "hello world"])
def test_other_text_finds_none(text: str) -> None:
    assert match(text) == ()


def test_a_text_that_fits_two_equally_well_gets_both() -> None:
    assert {symptom.key for symptom in match("slow and nan")} == {"slow", "nan"}
    status, out, _ = run("--symptom", "slow and nan")
    assert status == 0
    assert "fits 2 symptoms" in out
    assert all(symptoms()[key].title in out for key in ("slow", "nan"))


@every_symptom
def test_the_command_says_everything_in_order(symptom: Symptom) -> None:
    status, out, err = run("--symptom", symptom.key)
    assert (status, err) == (0, "")
    assert out.startswith(symptom.title)
    words = " ".join(out.split())
    places = [words.index(" ".join(cause.text.split())) for cause in symptom.causes]
    assert places == sorted(places)
    for cause in symptom.causes:
        assert " ".join(cause.test.split()) in words
        assert all(command in out for command in cause.run)
    assert max(map(len, out.splitlines())) <= 100


def test_an_unknown_symptom_lists_the_known_ones() -> None:
    status, out, err = run("--symptom", "banana")
    assert (status, out) == (2, "")
    assert "banana" in err
    assert all(key in err for key in symptoms())


def test_a_code_and_a_symptom_are_one_too_many() -> None:
    status, _, err = run("GG101", "--symptom", "nan")
    assert status == 2
    assert "not both" in err
