"""Gradient norms and the signs that gradients were changed or cleared."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from gpt_guard.hooks.gradients import Gradients, GradNorms, exact_norm, fused_norms, total_norm


def parameters(*grads: Tensor | None) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for place, grad in enumerate(grads):
        parameter = nn.Parameter(torch.zeros(2) if grad is None else torch.zeros(grad.shape, dtype=grad.dtype))
        parameter.grad = grad
        found[f"p{place}"] = parameter
    return found


@pytest.mark.parametrize("immediate", [True, False])
def test_norms_by_name_without_those_that_have_none(immediate: bool) -> None:
    gradients = Gradients(parameters(torch.tensor([3.0, 4.0]), None, torch.tensor([1.0])))
    measured = gradients.measure(None, immediate=immediate)
    assert measured.names == ["p0", "p2"]
    assert isinstance(measured.norms, list) == immediate
    assert list(measured.norms) == pytest.approx([5.0, 1.0])


def test_a_scale_is_taken_out() -> None:
    gradients = Gradients(parameters(torch.tensor([30.0, 40.0])))
    assert gradients.measure(torch.tensor(10.0), immediate=True).norms == pytest.approx([5.0])


def test_nothing_to_measure() -> None:
    assert Gradients(parameters(None)).measure(None, immediate=True).norms == []
    assert Gradients({}).measure(None, immediate=False).norms == []


def test_sparse_and_complex_gradients() -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1, 1])).sum().backward()
    wave = nn.Parameter(torch.zeros(1, dtype=torch.complex64))
    wave.grad = torch.tensor([3 + 4j])
    gradients = Gradients({"rows": embedding.weight, "wave": wave})
    # The row was taken twice: its gradient is the sum.
    assert gradients.measure(None, immediate=True).norms == pytest.approx([math.sqrt(8.0), 5.0])


def test_dtypes_together() -> None:
    grads = [torch.full((4,), 200.0, dtype=torch.float16), torch.ones(1), torch.full((1,), 1e200, dtype=torch.float64)]
    norms = fused_norms(grads)
    assert norms.dtype is torch.float64
    assert norms[:2].tolist() == pytest.approx([400.0, 1.0])
    assert fused_norms(grads[:2]).dtype is torch.float32


def test_half_precision_squares_do_not_overflow() -> None:
    assert fused_norms([torch.full((4,), 60000.0, dtype=torch.float16)]).tolist() == pytest.approx([120000.0], rel=1e-3)


@pytest.mark.parametrize("norms", [[3.0, 4.0], [], [3e200, 4e200]])
def test_total(norms: list[float]) -> None:
    assert total_norm(norms) == pytest.approx(5.0 * max(norms, default=0.0) / 4.0)
    assert math.isnan(total_norm([1.0, math.nan]))


def test_exact_norm_of_a_gradient_whose_squares_overflow() -> None:
    assert exact_norm(torch.full((4,), 1e30)) == pytest.approx(2e30)
    assert exact_norm(torch.zeros(0)) == 0.0


def test_writes_and_replacements_touch() -> None:
    tensors = parameters(torch.ones(2), torch.ones(2))
    gradients = Gradients(tensors)
    gradients.mark()
    assert not gradients.touched()
    grad = tensors["p0"].grad
    assert grad is not None
    grad.mul_(1.0)
    assert gradients.touched()
    gradients.mark()
    tensors["p1"].grad = torch.ones(2)
    assert gradients.touched()
    gradients.mark()
    tensors["p1"].grad = None
    assert gradients.touched()


def test_cleared_means_all_gone_or_all_written() -> None:
    tensors = parameters(torch.ones(2), torch.ones(2), None)
    optimizer = torch.optim.SGD(tensors.values(), lr=0.1)
    gradients = Gradients(tensors)
    gradients.mark()
    assert not gradients.mark()
    optimizer.zero_grad(set_to_none=False)
    assert gradients.mark()
    grad = tensors["p0"].grad
    assert grad is not None
    grad.add_(1.0)
    assert not gradients.mark()
    optimizer.zero_grad()
    assert gradients.mark()


def kept(*grads: Tensor) -> tuple[Gradients, GradNorms, list[Tensor]]:
    gradients = Gradients(parameters(*grads))
    gradients.mark()
    return gradients, gradients.measure(None, immediate=True), list(grads)


def ten(*, of: float = 1.0) -> list[Tensor]:
    return [torch.full((2,), of * (place + 1)) for place in range(10)]


def test_nobody_has_written() -> None:
    gradients, measured, _ = kept(*ten())
    assert gradients.applied(measured, None, immediate=True) is None


@pytest.mark.parametrize("through_data", [True, False])
def test_all_scaled_by_one_factor(through_data: bool) -> None:
    gradients, measured, grads = kept(*ten())
    for grad in grads:
        (grad.data if through_data else grad).mul_(0.1)
    applied = gradients.applied(measured, None, immediate=True)
    assert applied is not None
    assert applied.names == measured.names
    assert applied.norms == pytest.approx([0.1 * norm for norm in measured.norms], rel=1e-4)


@pytest.mark.parametrize("place", range(10))
def test_a_single_one_changed_is_measured(place: int) -> None:
    gradients, measured, grads = kept(*ten())
    grads[place].mul_(0.5)
    applied = gradients.applied(measured, None, immediate=True)
    assert applied is not None
    expected = [norm * (0.5 if other == place else 1.0) for other, norm in enumerate(measured.norms)]
    assert applied.norms == pytest.approx(expected)


def test_values_clamped_through_data() -> None:
    gradients, measured, grads = kept(*ten())
    for grad in grads:
        grad.data.clamp_(max=3.0)
    assert not gradients.touched()
    applied = gradients.applied(measured, None, immediate=True)
    assert applied is not None
    assert applied.norms == pytest.approx([min(place + 1, 3) * math.sqrt(2) for place in range(10)])


def test_a_scale_that_is_still_on_the_gradients() -> None:
    gradients, _, _ = kept(*ten(of=8.0))
    measured = gradients.measure(torch.tensor(8.0), immediate=True)
    assert gradients.applied(measured, torch.tensor(8.0), immediate=True) is None


@pytest.mark.parametrize("odd", [math.inf, math.nan, 0.0])
def test_odd_norms_are_measured(odd: float) -> None:
    gradients, measured, grads = kept(*ten())
    grads[9].fill_(odd)
    measured = gradients.measure(None, immediate=True)
    applied = gradients.applied(measured, None, immediate=True)
    assert applied is not None
    assert applied.norms[:9] == measured.norms[:9]


def test_where_reads_wait_everything_is_measured() -> None:
    gradients, measured, _ = kept(*ten())
    applied = gradients.applied(measured, None, immediate=False)
    assert applied is not None
    assert applied.norms.tolist() == pytest.approx(measured.norms)
