"""A mode that is open steps aside for compiled code, which is compiled as often as without it, and comes back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard.guardian import Guardian
from gpt_guard.hooks.functions.function_calls import FunctionCall, FunctionCalls
from gpt_guard.hooks.functions.function_mode import FunctionMode


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Grouped(nn.Module):
    """Calls `unflatten`, which Dynamo cannot trace below a function mode."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        groups = self.norm(self.body(x)).unflatten(-1, (2, 4)).softmax(-1)
        output: Tensor = self.head(F.dropout(groups.flatten(1), 0.1, self.training))
        return output


def error(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output.unflatten(0, (2, -1)).flatten(0, 1), target)


# Dynamo looks at the gradient of what enters the compiled code.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("part", ["model", "in place", "a module", "loss"])
def test_compiled_once_and_as_a_whole(part: str) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, examples: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled: dict[str, Any] = {"backend": backend, "fullgraph": True}
    model: Any = Grouped()
    optimizer, called, criterion = torch.optim.Adam(model.parameters()), model, error
    if part == "model":
        called = torch.compile(model, **compiled)
    elif part == "in place":
        model.compile(**compiled)
    elif part == "a module":
        model.norm = torch.compile(model.norm, **compiled)
    else:
        criterion = torch.compile(error, **compiled)
    with Guardian(called, optimizer, sinks=[]) as guardian:
        for _ in range(6):
            x = torch.randn(8, 4)
            optimizer.zero_grad()
            criterion(called(x), x.sum(1, keepdim=True)).backward()
            optimizer.step()
    assert len(graphs) == 1
    assert guardian.report().steps == 6


def test_it_is_back_after_compiled_code_and_inside_of_what_is_not_compiled() -> None:
    seen: list[FunctionCall] = []
    tap = FunctionCalls()
    tap.listen(["softmax"], seen.append)

    @torch._dynamo.disable  # type: ignore[untyped-decorator]  # torch does not say what it returns
    def as_written(x: Tensor) -> Tensor:
        return x.softmax(0)

    @torch.compile(backend="eager")
    def compiled(x: Tensor) -> Any:
        return as_written(x + 1) * 2

    tap.open()
    try:
        compiled(torch.ones(4))
        compiled(torch.ones(4))
        assert len(seen) == 2
        assert tap.opened
        torch.ones(4).softmax(0)
        assert len(seen) == 3
    finally:
        tap.close()
    torch.ones(4).softmax(0)
    assert len(seen) == 3


def test_it_is_back_after_an_error_in_compiled_code() -> None:
    @torch.compile(backend="eager")
    def failing(x: Tensor) -> Tensor:
        raise ValueError("of the user's own")

    mode = FunctionCalls()
    mode.listen(["softmax"], lambda call: None)
    mode.open()
    try:
        with pytest.raises(ValueError, match="user's own"):
            failing(torch.ones(4))
        assert mode.opened
    finally:
        mode.close()
    assert torch._C._len_torch_function_stack() == 0


def test_closed_while_aside_it_stays_away() -> None:
    mode = FunctionMode()
    mode.open()
    mode.suspend()
    assert not mode.opened
    mode.close()
    mode.resume()
    assert not mode.opened
    assert torch._C._len_torch_function_stack() == 0
