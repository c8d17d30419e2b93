"""The loss is made by code that is not known: what is said about the model's part, and what is left open."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .steps import Net, both, guarded, halt, halting, said, same, sgd


class LogOfZero(nn.Module):
    """Returns -inf, which no guard stops at: a mask looks like that."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x).clamp(max=0).mul(0).abs().log()
        return found


@both
def test_an_output_of_minus_infinity_is_followed_to_its_line(reads: Any) -> None:
    found = halt(LogOfZero(), reads)
    assert found.code == "GG102"
    assert found.operation is None
    assert "That comes from log of" in said(found)
    assert "test_outside.py" in said(found)
    assert "Unless the code between there and backward() leaves those elements out" in said(found)


@both
def test_a_finite_output_leaves_the_code_after_it(reads: Any) -> None:
    found = halt(Net(same), reads, lambda output: (output.detach() * 0 + output.sum() * 0).log().sum())
    assert "The code between there and backward() made the loss non-finite." in said(found)


def test_an_output_that_no_hook_could_see_is_not_said_to_have_been_finite() -> None:
    model = Net(lambda h: h / (h - h).norm())
    optimizer = sgd(model)
    with halting(guarded(model, optimizer)) as halted:
        stacked = {name: torch.stack([value, value]) for name, value in model.named_parameters()}
        x = torch.randn(3, 4)
        call = torch.vmap(lambda values: torch.func.functional_call(model, values, (x,)))
        call(stacked).mean().backward()
        optimizer.step()
    assert halted.finding.code == "GG102"
    assert "was finite" not in said(halted.finding)
    assert "That comes from division by" in said(halted.finding)
