"""How a finding is told with what its replay has shown, and what is said where that was nothing."""

from __future__ import annotations

from gpt_guard.catalogue import finding
from gpt_guard.records import LikelyCause, OperationSeen, SourceLine
from gpt_guard.replaying.outcome import Outcome, not_reproduced, reproduced, with_outcome
from gpt_guard.replaying.target import target_of


def test_a_finding_that_is_told_more_exactly_is_still_about_the_same_tensor() -> None:
    found = finding("GG101", "It is bad.", module="a", module_class="A", position="output")
    seen = OperationSeen(name="log", module="a.b", module_class="B", shows="log of 3 zeros")
    told = with_outcome(found, Outcome(True, "Reproduced.", seen))
    assert (told.module, told.module_class, told.position) == ("a.b", "B", "output of a")
    assert target_of(told) == target_of(found)
    assert told.origin is not None
    assert "`a.b`" in told.origin


def test_what_was_not_reproduced_changes_no_place() -> None:
    found = finding("GG101", "It is bad.", module="a", position="output")
    seen = OperationSeen(name="log", module="a.b", shows="log of 3 zeros")
    told = with_outcome(found, Outcome(False, "Not reproduced.", seen))
    assert (told.module, told.operation, told.replay) == ("a", None, "Not reproduced.")


def test_an_operation_without_a_known_cause_leaves_what_the_guard_thinks_in_place() -> None:
    found = finding("GG104", "It is bad.", likely=["hook_or_manual"], module="a", parameter="a.w")
    cause = LikelyCause(key="own_formula", text="None fits.", test="Look.", fix="Mend it.")
    seen = OperationSeen(name="multiplication", shows="multiplication by NaN", causes=(cause,))
    told = with_outcome(found, Outcome(True, "Reproduced.", seen))
    assert told.operation == seen
    assert (told.causes, told.fix, told.next_test) == (found.causes, found.fix, found.next_test)


def test_the_causes_of_the_operation_come_first() -> None:
    found = finding("GG101", "It is bad.", module="a", position="output")
    cause = LikelyCause(key="log_of_zero", text="It is a log of 0.", test="Count zeros.", fix="Use log_softmax.")
    seen = OperationSeen(name="log", module="a", shows="log of 3 zeros", causes=(cause,))
    told = with_outcome(found, Outcome(True, "Reproduced.", seen))
    assert told.causes == ("It is a log of 0.", *found.causes)
    assert (told.next_test, told.fix) == ("Count zeros.", "Use log_softmax.")


def test_an_outcome_is_read_as_text() -> None:
    where = SourceLine(file="model.py", line=7, function="forward", text="y = x.log()")
    seen = OperationSeen(name="log", module="a", where=where, shows="log of 3 zeros")
    assert repr(Outcome(True, "Reproduced.", seen)).splitlines() == [
        "Reproduced.",
        "log in `a` at model.py:7 in forward: y = x.log()",
        "log of 3 zeros",
    ]
    assert repr(Outcome(False, "Not reproduced.")) == "Not reproduced."


def test_a_replay_of_something_else_does_not_claim_to_be_of_the_same() -> None:
    assert reproduced("it is bad again", []).endswith("with the same inputs, weights and random numbers.")
    assert reproduced("it is bad again", ["The batch was written to."]) == (
        "Reproduced: it is bad again, although not everything is as it was. The batch was written to."
    )


def test_what_is_known_to_differ_is_said_instead_of_a_guess() -> None:
    assert not_reproduced("it is finite.", ["The batch was written to."], []) == (
        "Not reproduced: it is finite. The batch was written to."
    )
    said = not_reproduced("it is finite.", [], ["index_add", "cumsum"])
    assert "index_add, cumsum. torch.use_deterministic_algorithms(True)" in said
    assert "Something outside of inputs, weights" not in said
    assert "Something outside of inputs, weights" in not_reproduced("it is finite.", [], [])
