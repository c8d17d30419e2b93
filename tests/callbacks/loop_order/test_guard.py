"""LoopOrder tells calls that are out of order, within the first three steps, with the line and both sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam

from gpt_guard.callbacks.defaults import default_guards
from gpt_guard.callbacks.loop_order.guard import LoopOrder
from gpt_guard.errors import GuardUsageError
from gpt_guard.records import Finding, Severity

from . import order_fault_sums, order_faults
from .order_loops import Body, cross_entropy, run

# torch warns of an empty generator, and of one wrong order of a scheduler; once each, easily missed.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`parameters` is an empty generator"),
    pytest.mark.filterwarnings("ignore:Detected call of"),
]

CASES = [*order_faults.CASES, *order_fault_sums.CASES]
each_case = pytest.mark.parametrize(("body", "code", "cause", "line", "saw"), CASES, ids=[c[0].__name__ for c in CASES])


@pytest.mark.parametrize("reads", ["immediate", "per_step"])
@each_case
def test_it_is_told_in_the_first_three_steps(
    body: Body, code: str, cause: str, line: str, saw: str, reads: str
) -> None:
    (found,) = run(body, reads=reads)
    assert found.code == code
    assert found.step is not None
    assert found.step < 3
    assert cause in found.causes[0]
    assert found.where is not None
    assert line in found.where.text
    assert found.where.function == body.__name__
    assert saw in str(found.evidence["saw"])
    assert f"Saw: {found.evidence['saw']}. Expected: {found.evidence['expected']}." in found.seen


@each_case
def test_the_default_guards_tell_one_trouble_once(body: Body, code: str, cause: str, line: str, saw: str) -> None:
    found = run(body, steps=20, guards=default_guards())
    assert [each.code for each in found if each.severity is not Severity.INFO or each.code == code] == [code]


def only(found: list[Finding]) -> Finding:
    (each,) = found
    return each


def test_the_sequence_expected_is_that_of_this_loop() -> None:
    found = only(run(order_faults.clip_after_step))
    assert found.evidence["expected"] == "zero_grad, forward, backward, clip, step"
    assert [part.split(" (")[0] for part in str(found.evidence["saw"]).split(", ")] == [
        *("step", "clip", "zero_grad", "forward", "backward", "step")
    ]
    assert (
        only(run(order_faults.clip_scaled)).evidence["expected"]
        == "zero_grad, forward, backward, unscale_, clip, scaler.step"
    )
    assert "(forward, backward) x 4" in str(only(run(order_faults.zero_in_each)).evidence["expected"])


def test_undivided_losses_are_only_worth_knowing_unless_clipping_makes_them_matter() -> None:
    assert only(run(order_fault_sums.not_divided)).severity is Severity.INFO
    found = only(run(order_fault_sums.not_divided_and_cut))
    assert found.severity is Severity.WARNING
    assert found.evidence["limit"] == 1.0
    assert (
        only(run(order_fault_sums.not_divided_and_cut, make=lambda parameters: Adam(parameters))).severity
        is Severity.WARNING
    )


def test_gradients_that_may_have_been_read_on_purpose_are_a_warning() -> None:
    def body(_: int, model: Any, optimizer: Any, kept: Any) -> None:
        for _sample in range(3):
            optimizer.zero_grad()
            cross_entropy(model).backward()
        optimizer.step()

    assert only(run(order_faults.zero_in_each)).severity is Severity.ERROR
    found = only(run(body))
    assert (found.code, found.severity) == ("GG230", Severity.WARNING)
    assert "read between the calls on purpose" in found.causes[-1]


def test_gradients_cleared_after_each_backward_are_one_trouble() -> None:
    """None of them counts, so none is said to, and clipping what is gone is no second cause."""

    def body(_: int, model: Any, optimizer: Any, kept: Any) -> None:
        for _micro in range(2):
            (cross_entropy(model) / 2).backward()
            optimizer.zero_grad()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    assert only(run(body)).code == "GG208"


def test_both_steps_of_scaler_and_optimizer_are_one_trouble() -> None:
    def body(_: int, model: Any, optimizer: Any, kept: Any) -> None:
        scaler = kept.setdefault("scaler", torch.amp.GradScaler("cpu"))
        optimizer.zero_grad()
        scaler.scale(cross_entropy(model)).backward()
        scaler.step(optimizer)
        optimizer.step()
        scaler.update()

    found = only(run(body, steps=20, guards=default_guards()))
    assert (found.code, found.step) == ("GG211", 1)
    assert found.where is not None
    assert "optimizer.step()" in found.where.text


def test_how_uneven_is_too_uneven_can_be_set() -> None:
    assert run(order_fault_sums.mean_of_means, guards=[LoopOrder(uneven=4.5)]) == []
    assert only(run(order_fault_sums.mean_of_means, guards=[LoopOrder(uneven=3.5)])).evidence["ratio"] == pytest.approx(
        4.0
    )


@pytest.mark.parametrize("given", [{"uneven": 1.0}, {"uneven": "2"}])
def test_figures_that_cannot_work_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(GuardUsageError, match=r"LoopOrder\("):
        LoopOrder(**given)


def test_two_optimizers_are_judged_each_on_its_own() -> None:
    def body(_: int, model: Any, optimizers: Any, kept: Any) -> None:
        good, bad = optimizers
        good.zero_grad()
        bad.zero_grad()
        cross_entropy(model).backward()
        clip_grad_norm_(model[0].parameters(), 1.0)
        good.step()
        bad.step()
        clip_grad_norm_(model[2].parameters(), 1.0)

    def two(model: Any) -> list[SGD]:
        return [SGD(model[at].parameters(), lr=0.1) for at in (0, 2)]

    found = only(run(body, optimizers=two, inspect_steps=4))
    assert (found.code, found.cause_id) == ("GG231", "optimizer 1")


def test_a_loop_that_goes_wrong_later_is_told_when_it_is_inspected_again() -> None:
    def body(step: int, model: Any, optimizer: Any, kept: Any) -> None:
        optimizer.zero_grad()
        cross_entropy(model).backward()
        optimizer.step()
        if step > 4:
            clip_grad_norm_(model.parameters(), 1.0)

    assert run(body, steps=12) == []
    torch.manual_seed(0)
    found = only(run(body, steps=12, inspect_steps=12))
    assert (found.code, found.step) == ("GG231", 7)


def test_names_of_clipping_functions_that_were_bound_before() -> None:
    # This file has imported clip_grad_norm_ long before any Guardian; so has torch.nn.utils.
    assert nn.utils.clip_grad_norm_ is clip_grad_norm_
    assert only(run(order_faults.clip_to_zero)).code == "GG233"
