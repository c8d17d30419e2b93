"""What clip_grad_norm_ did, told by its own call, against what the gradients show."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_ as imported_before

from gpt_guard.runtime.clipped import NormClip

from ..runtime.clipping_kit import with_gradients


@pytest.fixture
def model() -> nn.Module:
    return with_gradients()


@pytest.fixture
def clip(model: nn.Module) -> Iterator[NormClip]:
    found = NormClip(list(model.parameters()))
    found.open()
    yield found
    found.close()


def norm(model: nn.Module) -> float:
    return float(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm())


CALLS: dict[str, Callable[[nn.Module, float], object]] = {
    "a generator": lambda model, limit: nn.utils.clip_grad_norm_(model.parameters(), limit),
    "a list, imported by name": lambda model, limit: imported_before([*model.parameters()], limit),
    "another order": lambda model, limit: nn.utils.clip_grad_norm_([*model.parameters()][::-1], limit),
    "one by one": lambda model, limit: nn.utils.clip_grad_norm_(model.parameters(), limit, foreach=False),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("limit", [0.01, 1e6])
def test_the_factor_is_what_the_gradients_show(model: nn.Module, clip: NormClip, call: str, limit: float) -> None:
    before = norm(model)
    CALLS[call](model, limit)
    assert clip.calls == 1
    assert clip.factor is not None
    assert norm(model) == pytest.approx(clip.factor * before, rel=1e-5)


def first_half(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_([*model.parameters()][:2], 0.01)


def twice(model: nn.Module) -> None:
    for _ in range(2):
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def to_zero(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.0)


def another(_model: nn.Module) -> None:
    other = nn.Linear(2, 2)
    other(torch.randn(3, 2)).sum().backward()
    nn.utils.clip_grad_norm_(other.parameters(), 0.01)


def not_finite(model: nn.Module) -> None:
    (weight, *_) = model.parameters()
    weight.grad = torch.full_like(weight, torch.nan)
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


@pytest.mark.parametrize("act", [first_half, twice, to_zero, another, not_finite])
def test_no_factor_where_it_would_not_be_that_of_all(
    model: nn.Module, clip: NormClip, act: Callable[[nn.Module], None]
) -> None:
    act(model)
    assert clip.calls
    assert clip.factor is None


def test_another_norm_gives_the_factor_it_applies(model: nn.Module, clip: NormClip) -> None:
    before = norm(model)
    nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type=torch.inf)
    assert clip.factor is not None
    assert norm(model) == pytest.approx(clip.factor * before, rel=1e-5)


def test_begin_forgets_and_close_stops(model: nn.Module, clip: NormClip) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    clip.begin()
    assert (clip.calls, clip.factor) == (0, None)
    clip.close()
    clip.close()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    assert clip.calls == 0


def test_nothing_is_left_on_torch() -> None:
    from torch.nn.utils import clip_grad

    before: object = clip_grad._clip_grads_with_norm_
    found = NormClip([torch.ones(1, requires_grad=True)])
    found.open()
    assert clip_grad._clip_grads_with_norm_ is not before
    found.close()
    assert clip_grad._clip_grads_with_norm_ is before


def test_one_tensor_may_be_given_by_itself() -> None:
    weight = torch.ones(3, requires_grad=True)
    clip = NormClip([weight])
    clip.open()
    weight.square().sum().backward()
    nn.utils.clip_grad_norm_(weight, 1.0)
    clip.close()
    grad: Tensor | None = weight.grad
    assert grad is not None
    assert clip.factor == pytest.approx(float(grad.norm()) / 12**0.5, rel=1e-5)
