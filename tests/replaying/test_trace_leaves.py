"""What was bad before any operation ran is told by its name."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gpt_guard.replaying.trace import Trace

from .parts import INF, NAN, origin_of


class Held(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.table = nn.Buffer(torch.zeros(3, 4))
        self.other = torch.zeros(3, 4)

    def forward(self, x: Tensor, extra: dict[str, Tensor] | None = None) -> Tensor:
        out: Tensor = self.lin(x) + self.table + self.other
        return out if extra is None else out + extra["bias"]


def spoil(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor[1, 2] = NAN


@pytest.mark.parametrize(
    ("where", "kind", "name", "cause"),
    [
        ("lin.weight", "parameter", "lin.weight", "parameter_poisoned"),
        ("table", "buffer", "table", "buffer_bad"),
        ("x", "input", "input[0]", "bad_batch"),
        ("bias", "input", "input['extra']['bias']", "bad_batch"),
        ("other", "constant", "a tensor of shape [3, 4]", "bad_constant"),
    ],
)
def test_what_was_bad_before_any_operation_is_named(where: str, kind: str, name: str, cause: str) -> None:
    model, x, extra = Held(), torch.randn(3, 4), {"bias": torch.zeros(3, 4)}
    tensors = {"lin.weight": model.lin.weight, "table": model.table, "other": model.other, "x": x, **extra}
    spoil(tensors[where])
    with Trace(model) as trace:
        out = model(x, extra=extra)
    for found in (trace.origin(out), trace.first()):
        assert found is not None
        assert (found.kind, found.name, found.cause) == (kind, name, cause)
        assert found.output is not None
        assert found.output.bad_rows == (1,)


def test_a_mask_in_the_batch_or_a_buffer_is_no_fault() -> None:
    model, mask = Held(), torch.zeros(3, 4)
    mask[:, 2] = -INF
    model.table.copy_(mask)
    with Trace(model) as trace:
        out = model(torch.randn(3, 4)).softmax(-1)
    assert trace.origin(out) is None
    assert trace.first() is None


def test_a_result_that_is_all_minus_infinity_is_no_mask() -> None:
    """What a model gave out when its weights had run away, and only the loss is traced."""
    logits = torch.full((3, 1), -INF, requires_grad=True)
    with Trace(Held()) as trace:
        loss = (logits * 1 - 1).abs().mean()
    found = trace.origin(loss)
    assert found is not None
    assert (found.kind, found.cause) == ("constant", "bad_constant")


def test_uninitialised_memory() -> None:
    """torch fills it with NaN where determinism is asked for: what may lie there otherwise, made certain."""

    def unwritten(h: Tensor) -> Tensor:
        cache = torch.empty(3, 4)
        cache[0] = h[0].detach()
        return h + cache

    torch.use_deterministic_algorithms(True)
    try:
        found = origin_of(unwritten)
    finally:
        torch.use_deterministic_algorithms(False)
    assert found is not None
    assert (found.name, found.cause) == ("empty (uninitialised memory)", "uninitialised")
