"""Which cause of a parameter that no optimizer holds comes first, by where it lies."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gpt_guard import Guardian


class Mixed(nn.Module):
    """Two branches and a raw parameter that weighs them, inside a module or at the root."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 1), nn.Linear(4, 1)
        self.mix = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.mix[0] * self.one(x) + self.mix[1] * self.other(x.square())
        return mixed


class Deep(nn.Module):
    """The same further in, and a norm before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.body, self.head = nn.LayerNorm(4), Mixed(), nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(self.norm(x)))
        return out


@pytest.mark.parametrize(
    ("model", "left_out", "first"),
    [
        (Mixed(), ("mix",), "The parameter groups were made by filters"),
        (Deep(), ("mix",), "The parameter groups were made by filters"),
        (Deep(), ("bias",), "The parameter groups were made by filters"),
        (Deep(), ("head",), "The module was added or replaced"),
        (Deep(), ("norm", "body"), "The optimizer was given the parameters of a part"),
    ],
    ids=["a raw parameter", "a raw parameter further in", "all biases", "a whole head", "all but the head"],
)
def test_the_first_cause_is_what_the_names_say(model: nn.Module, left_out: tuple[str, ...], first: str) -> None:
    held = [each for name, each in model.named_parameters() if not any(part in name for part in left_out)]
    optimizer = torch.optim.SGD(held, lr=0.01)
    with Guardian(model, optimizer, sinks=[], summary=False) as guardian:
        for _ in range(6):
            model.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
    (found,) = [each for each in guardian.findings if each.code == "GG302"]
    assert found.causes[0].startswith(first)
