"""A buffer that no checkpoint holds was not loaded from one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gpt_guard import Guardian, NonFiniteError


class Table(nn.Module):
    def __init__(self, *, persistent: bool) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.register_buffer("table", torch.full((4,), torch.nan), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x) * self.table
        return out


@pytest.mark.parametrize(
    ("persistent", "first"),
    [(False, "register_buffer(torch.empty(...)), or a non-persistent"), (True, "Loaded so from a checkpoint")],
)
def test_the_first_cause_of_a_bad_buffer_on_entry(persistent: bool, first: str) -> None:
    model = nn.Sequential(Table(persistent=persistent))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(NonFiniteError) as halted, Guardian(model, optimizer, sinks=[], summary=False):
        model(torch.randn(2, 4)).sum().backward()
    assert halted.value.finding.parameter == "0.table"
    assert halted.value.finding.causes[0].startswith(first)
