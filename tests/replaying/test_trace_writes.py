"""Whatever writes them, and in whatever kind of tensor, non-finite values are followed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gpt_guard.replaying.trace import Trace

from .parts import NAN, Net, origin_of, traced


def into_a_view(h: Tensor) -> Tensor:
    out = torch.zeros(3, 4)
    out[1] = (h[1] * 0).log()
    return out * 2


def through_a_view_of_a_view(h: Tensor) -> Tensor:
    x = h * 0
    x.view(-1)[4:8].log_()
    return x.t()


def into_out(h: Tensor) -> Tensor:
    out = torch.empty(3, 4)
    torch.log(h.detach() * 0, out=out)
    return out[1]


def by_index(h: Tensor) -> Tensor:
    out = torch.zeros(3, 4)
    out.index_put_((torch.tensor([1]),), (h[1:2] * 0).log())
    return out.sum()


def by_foreach(h: Tensor) -> Tensor:
    return torch._foreach_log([h.abs() + 1, h * 0])[1]


def by_foreach_in_place(h: Tensor) -> Tensor:
    both = [h.abs() + 1, h * 0]
    torch._foreach_log_(both)
    return both[1]


def as_a_tuple(h: Tensor) -> Tensor:
    values, _ = (h * 0).log().max(-1)
    return values


def as_complex(h: Tensor) -> Tensor:
    return torch.view_as_real(torch.complex(h, (h * 0).log()))


@pytest.mark.parametrize(
    "function",
    [
        into_a_view,
        through_a_view_of_a_view,
        into_out,
        by_index,
        by_foreach,
        by_foreach_in_place,
        as_a_tuple,
        as_complex,
    ],
)
def test_writes_are_followed(function: Callable[[Tensor], Tensor]) -> None:
    found = origin_of(function)
    assert found is not None
    assert (found.name, found.module) == ("log", "part")
    assert found.cause == "log_of_zero"


def test_a_good_part_of_a_bad_tensor_is_good() -> None:
    def parts(h: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.cat([(h[:1] * 0).log(), h[1:]])
        return out[0], out[1:]

    (bad, good), trace = traced(parts)
    assert trace.origin(bad) is not None
    assert trace.origin(good) is None


def test_written_past_torch() -> None:
    def by_numpy(h: Tensor) -> Tensor:
        cache = torch.zeros(3, 4)
        cache.numpy()[1] = NAN
        return h + cache

    found = origin_of(by_numpy)
    assert found is not None
    assert (found.kind, found.cause) == ("constant", "written_unseen")
    assert found.output is not None
    assert found.output.bad_rows == (1,)


def test_what_cannot_be_measured_is_not_said_to_be_a_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(base: str, bound: object) -> None:
        if base == "log":
            raise RuntimeError("no such kernel")

    monkeypatch.setattr("gpt_guard.replaying.follow.hazard", fails)
    with Trace(model := Net(lambda h: (h * 0).log() + 1)) as trace:
        out = model(torch.randn(3, 4))
    assert trace.skipped == {"aten.log.default": "RuntimeError: no such kernel"}
    found = trace.origin(out)
    assert found is not None
    assert (found.kind, found.name, found.causes) == ("operation", "log", ())
    assert "no such kernel" in found.shows


def test_an_operation_that_is_given_functions() -> None:
    def branches(h: Tensor) -> Tensor:
        out: Tensor = torch.cond(h.sum() > 1e9, lambda h: h.sin(), lambda h: (h * 0).log(), (h,))
        return out

    found = origin_of(branches)
    assert found is not None
    assert (found.name, found.module) == ("cond", "part")


@pytest.mark.parametrize(
    "make",
    [
        lambda h: ((h * 0).log().to_sparse() * 2).to_dense(),
        lambda h: (h[:0].sum() + h.sum(), torch.arange(3) + 1, h > 0)[0],
        lambda h: torch.fft.fft(h.detach()).abs(),
        lambda h: torch.nested.nested_tensor([h[0], h[1]], layout=torch.jagged).values(),
        lambda h: torch.vmap(lambda row: row.exp())(h),
    ],
    ids=["sparse", "empty and whole numbers", "complex", "nested", "vmap"],
)
def test_kinds_of_tensors_do_not_break_it(make: Callable[[Tensor], Tensor]) -> None:
    with Trace(model := Net(make)) as trace:
        out = model(torch.randn(3, 4))
    assert (trace.origin(out) is None) == bool(out.detach().isfinite().all())
