"""Which steps are full and which are light."""

from __future__ import annotations

from gpt_guard.hooks.pace import Pace


def kinds(pace: Pace, steps: int) -> str:
    """F for a full step, . for a light one."""
    found = ""
    for _ in range(steps):
        found += "F" if pace.full else "."
        pace.step_ended()
    return found


def test_twenty_full_steps_then_one_in_sixteen() -> None:
    assert kinds(Pace(light=True), 56) == "F" * 20 + ("." * 15 + "F") * 2 + "...."


def test_a_doubt_begins_at_once_and_lasts_as_long_as_the_start() -> None:
    pace = Pace(light=True)
    kinds(pace, 25)
    assert not pace.full
    pace.doubt()
    assert kinds(pace, 24) == "F" * 20 + "...."


def test_a_short_doubt_does_not_shorten_a_longer_one() -> None:
    pace = Pace(light=True)
    kinds(pace, 10)
    pace.doubt(1)
    assert kinds(pace, 14) == "F" * 10 + "...."
    pace.doubt(1)
    assert kinds(pace, 3) == "F.."


def test_where_a_counter_has_missed_a_write_every_step_stays_full() -> None:
    pace = Pace(light=True)
    kinds(pace, 30)
    pace.never_light()
    assert kinds(pace, 40) == "F" * 40


def test_where_reading_is_not_free_every_step_is_full() -> None:
    assert kinds(Pace(light=False), 50) == "F" * 50
