"""The step to run again, the tensor that must go bad again, and how a finding is written with what was seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpt_guard.catalogue import finding
from gpt_guard.hooks.capture.execution_context import ContextReader
from gpt_guard.records import LikelyCause, Moment, OperationSeen, SourceLine
from gpt_guard.replaying.recipe import LossRecipe, ReplayOutcome, TargetTensor, target_of, with_outcome
from gpt_guard.replaying.run import not_reproduced, reproduced

from .steps import Net, guarded, halt, halting, operation, sgd


def weighted(output: Tensor, batch: dict[str, Tensor], weight: Tensor | float = 1.0) -> Tensor:
    return ((output - batch["label"]).square() * weight).mean()


class Criterion(nn.Module):
    def forward(self, output: Tensor, label: Tensor) -> Tensor:
        return (output - label).square().mean()


def named(function: Any, *args: Any, **kwargs: Any) -> list[str]:
    return list(LossRecipe(function, args, kwargs, ContextReader(nn.Identity()).take()).named())


def test_tensors_without_a_history_go_by_the_names_of_parameters() -> None:
    output, label = torch.ones(3, requires_grad=True), torch.ones(3)
    assert named(weighted, output, {"label": label}) == ["`batch['label']` of weighted"]
    assert named(weighted, output, {"label": label}, weight=label) == [
        "`batch['label']` of weighted",
        "`weight` of weighted",
    ]
    assert named(Criterion(), output, label) == ["`label` of Criterion"]


def test_a_function_without_a_signature_is_counted_through() -> None:
    output, label = torch.ones(3, requires_grad=True), torch.ones(3)
    assert named(torch.dist, output, label) == ["`argument 2` of dist"]


def test_without_any_history_labels_cannot_be_told_from_outputs() -> None:
    assert named(Criterion(), torch.ones(3), torch.ones(3)) == []


def test_a_bad_label_is_told_by_its_name() -> None:
    label = torch.zeros(6, 1)
    label[4] = float("nan")
    model = Net(torch.tanh)
    optimizer = sgd(model)
    guardian = guarded(model, optimizer)
    loss_of = guardian.watch_loss(Criterion())
    with halting(guardian) as halted:
        loss_of(model(torch.randn(6, 4)), label).backward()
    found = operation(halted.finding)
    assert (found.kind, found.name, found.cause) == ("input", "`label` of Criterion", "bad_batch")
    assert "a part of the batch, was non-finite before any operation ran: 1 of 6" in found.shows
    assert found.output is not None
    assert found.output.bad_rows == (4,)


def test_what_the_function_closes_over_is_none_of_its_arguments() -> None:
    label = torch.full((6, 1), float("nan"))
    found = operation(halt(Net(torch.tanh), loss_of=lambda output: (output - label).mean(), watched=True))
    assert found.kind == "constant"


@pytest.mark.parametrize(
    ("code", "fields", "target"),
    [
        ("GG101", {"module": "a.b", "position": "output[0]"}, TargetTensor("output", "a.b", "[0]")),
        ("GG101", {"module": "a", "position": "input['x'] of a.b"}, TargetTensor("input", "a.b", "['x']")),
        ("GG101", {"module": "a", "position": "input[0] of the model"}, TargetTensor("input", "", "[0]")),
        ("GG101", {"module": "a.c", "position": "output.logits of a.b"}, TargetTensor("output", "a.b", ".logits")),
        ("GG101", {"position": "input[0] of b"}, TargetTensor("input", "b", "[0]")),
        ("GG102", {"module": "", "position": "output[1]"}, TargetTensor("output", "", "[1]")),
        ("GG102", {}, TargetTensor("loss")),
        (
            "GG104",
            {"module": "a", "parameter": "a.w", "moment": Moment.AFTER_BACKWARD},
            TargetTensor("gradient", "a", parameter="a.w"),
        ),
        # Made between backward() and step(), by code that is no backward.
        ("GG104", {"module": "a", "parameter": "a.w", "moment": Moment.BEFORE_STEP}, None),
        ("GG103", {"module": "", "position": "input[0]"}, None),
        ("GG106", {"parameter": "a.w"}, None),
    ],
)
def test_each_finding_has_its_tensor(code: str, fields: dict[str, Any], target: TargetTensor | None) -> None:
    assert target_of(finding(code, "It is bad.", **fields)) == target


def test_a_finding_that_is_told_more_exactly_is_still_about_the_same_tensor() -> None:
    found = finding("GG101", "It is bad.", module="a", module_class="A", position="output")
    seen = OperationSeen(name="log", module="a.b", module_class="B", shows="log of 3 zeros")
    told = with_outcome(found, ReplayOutcome(True, "Reproduced.", seen))
    assert (told.module, told.module_class, told.position) == ("a.b", "B", "output of a")
    assert target_of(told) == target_of(found)
    assert told.origin is not None
    assert "`a.b`" in told.origin


def test_what_was_not_reproduced_changes_no_place() -> None:
    found = finding("GG101", "It is bad.", module="a", position="output")
    seen = OperationSeen(name="log", module="a.b", shows="log of 3 zeros")
    told = with_outcome(found, ReplayOutcome(False, "Not reproduced.", seen))
    assert (told.module, told.operation, told.replay) == ("a", None, "Not reproduced.")


def test_an_operation_without_a_known_cause_leaves_what_the_guard_thinks_in_place() -> None:
    found = finding("GG104", "It is bad.", likely=["hook_or_manual"], module="a", parameter="a.w")
    cause = LikelyCause(key="own_formula", text="None fits.", test="Look.", fix="Mend it.")
    seen = OperationSeen(name="multiplication", shows="multiplication by NaN", causes=(cause,))
    told = with_outcome(found, ReplayOutcome(True, "Reproduced.", seen))
    assert told.operation == seen
    assert (told.causes, told.fix, told.next_test) == (found.causes, found.fix, found.next_test)


def test_the_causes_of_the_operation_come_first() -> None:
    found = finding("GG101", "It is bad.", module="a", position="output")
    cause = LikelyCause(key="log_of_zero", text="It is a log of 0.", test="Count zeros.", fix="Use log_softmax.")
    seen = OperationSeen(name="log", module="a", shows="log of 3 zeros", causes=(cause,))
    told = with_outcome(found, ReplayOutcome(True, "Reproduced.", seen))
    assert told.causes == ("It is a log of 0.", *found.causes)
    assert (told.next_test, told.fix) == ("Count zeros.", "Use log_softmax.")


def test_an_outcome_is_read_as_text() -> None:
    where = SourceLine(file="model.py", line=7, function="forward", text="y = x.log()")
    seen = OperationSeen(name="log", module="a", where=where, shows="log of 3 zeros")
    assert repr(ReplayOutcome(True, "Reproduced.", seen)).splitlines() == [
        "Reproduced.",
        "log in `a` at model.py:7 in forward: y = x.log()",
        "log of 3 zeros",
    ]
    assert repr(ReplayOutcome(False, "Not reproduced.")) == "Not reproduced."


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
