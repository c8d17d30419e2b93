"""Operations that may differ from run to run are named for the device they are so on, and on no other."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from gpt_guard.replaying.nondeterminism import documented
from gpt_guard.replaying.schema import op_of
from gpt_guard.replaying.trace import Trace


@pytest.mark.parametrize(
    ("func", "names"),
    [
        (torch.ops.aten.scatter_add.default, ("scatter_add",)),
        (torch.ops.aten.index_add_.default, ("index_add",)),
        (torch.ops.aten.mm.default, ()),
        (torch.ops.aten.bernoulli.default, ()),
    ],
)
def test_on_an_accelerator(func: object, names: tuple[str, ...]) -> None:
    with FakeTensorMode():
        out = torch.ones(2, device="cuda")
    assert documented(op_of(func), out) == names


def test_on_the_cpu_there_is_none() -> None:
    assert documented(op_of(torch.ops.aten.scatter_add.default), torch.ones(2)) == ()
    model = nn.Embedding(4, 2)
    with Trace(model) as trace:
        model(torch.tensor([1, 1])).sum().backward()
    assert trace.nondeterministic == []
