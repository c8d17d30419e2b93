"""Whose bad values are: an operation's, or those of a tensor that was bad before any operation ran."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gpt_guard.replaying.trace import Trace

from .parts import INF, NAN, origin_of, traced


def hidden_by_where(h: Tensor) -> Tensor:
    return torch.where(h > 0, h.log(), 0.0)


def hidden_by_nan_to_num(h: Tensor) -> Tensor:
    return (-h.abs() - 1).log().nan_to_num(0.0)


def hidden_by_masked_fill(h: Tensor) -> Tensor:
    return (h * 0).reciprocal().masked_fill(h == h, 0.0)


def hidden_by_indexing(h: Tensor) -> Tensor:
    return torch.cat([h, (h * 0).log()])[:3]


def hidden_in_place(h: Tensor) -> Tensor:
    x = (h * 0).log()
    x[:] = 1.0
    return x + h


def logits_cut(h: Tensor) -> Tensor:
    return h.masked_fill(h < h.median(), -INF).softmax(-1)


HIDDEN = [
    hidden_by_where,
    hidden_by_nan_to_num,
    hidden_by_masked_fill,
    hidden_by_indexing,
    hidden_in_place,
    logits_cut,
]


@pytest.mark.parametrize("function", HIDDEN)
def test_what_is_masked_away_is_not_blamed(function: Callable[[Tensor], Tensor]) -> None:
    out, trace = traced(function)
    assert bool(out.isfinite().all())
    assert trace.origin(out) is None
    assert trace.first() is None


@pytest.mark.parametrize("function", HIDDEN)
def test_a_later_fault_is_told_past_what_was_masked_away(function: Callable[[Tensor], Tensor]) -> None:
    def both(h: Tensor) -> Tensor:
        good = function(h)
        return (good * 0 - 1).sqrt()

    out, trace = traced(both)
    for found in (trace.origin(out), trace.first()):
        assert found is not None
        assert found.name == "sqrt"


def test_of_two_faults_each_tensor_has_its_own_and_a_nan_that_of_the_nan() -> None:
    def two(h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        log, root = (h * 0).log(), (-h.abs() - 1).sqrt()
        return log, root, root.sum() + log.sum()

    outs, trace = traced(two)
    assert [found.name for tensor in outs if (found := trace.origin(tensor))] == ["log", "sqrt", "sqrt"]


def test_each_element_has_its_own_origin() -> None:
    """An input is bad in its first row, and the operation fails in the last."""

    def rows(h: Tensor) -> tuple[Tensor, ...]:
        bad = torch.cat([(h[:1] * 0).log(), h[1:].abs() + 1])
        divisor = torch.tensor([[1.0], [1.0], [0.0]])
        out = bad / divisor
        return out[0], out[1], out[2], out.t()[0]

    outs, trace = traced(rows)
    found = [trace.origin(out) for out in outs]
    assert [each and each.name for each in found] == ["log", None, "division", "log"]


def test_beside_each_other_they_keep_their_origins() -> None:
    def beside(h: Tensor) -> tuple[Tensor, ...]:
        both = torch.cat([(h * 0).log(), h, (-h.abs() - 1).sqrt()])
        return both[:3], both[3:6], both[6:], both.sum()

    outs, trace = traced(beside)
    found = [trace.origin(out) for out in outs]
    assert [each and each.name for each in found] == ["log", None, "sqrt", "log"]


def test_an_input_whose_bad_elements_were_not_selected_is_not_blamed() -> None:
    def chosen(h: Tensor) -> Tensor:
        first, second = (h * 0).log(), (-h.abs() - 1).sqrt()
        return torch.where(h == h, second, first)

    found = origin_of(chosen)
    assert found is not None
    assert found.name == "sqrt"


def test_a_mask_that_is_not_used_up_is_no_fault() -> None:
    out, trace = traced(lambda h: h.masked_fill(torch.tensor([True, False, False, False]), -INF))
    assert trace.first() is None
    found = trace.origin(out)
    assert found is not None
    assert (found.name, found.cause) == ("masked_fill", "mask_used")


def test_a_mask_made_by_a_logarithm_is_a_mask() -> None:
    def added(h: Tensor) -> Tensor:
        keep = torch.tensor([[1.0, 0.0, 1.0, 1.0], [0.0] * 4, [1.0] * 4])
        return (h + keep.log()).softmax(-1)

    found = origin_of(added)
    assert found is not None
    assert (found.name, found.cause) == ("softmax", "fully_masked_row")


def test_nan_put_there_on_purpose_is_the_origin_once_it_is_computed_with() -> None:
    found = origin_of(lambda h: h.masked_fill(h == h, NAN).sum())
    assert found is not None
    assert (found.name, found.cause) == ("masked_fill", "filled")


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
