"""Trace changes nothing, comes to an end, and knows where the program is."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from gpt_guard.replaying.trace import TimeUp, Trace

from .parts import Net, origin_of


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss = F.dropout(model(x), 0.5).pow(2).mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("function", [lambda h: h.tanh(), lambda h: (h * 0).sqrt(), lambda h: h.add_(1).relu_()])
def test_values_gradients_and_random_numbers_are_those_of_an_untraced_run(
    function: Callable[[Tensor], Tensor],
) -> None:
    model, x = Net(function), torch.randn(3, 4)
    torch.manual_seed(1)
    plain = [*step(model, x), torch.rand(3)]
    torch.manual_seed(1)
    with Trace(model):
        seen = step(model, x)
    seen.append(torch.rand(3))
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(plain, seen, strict=True))


def test_the_limit_stops_it_from_inside_whatever_the_code_catches() -> None:
    def slow(h: Tensor) -> Tensor:
        time.sleep(0.02)
        try:
            return h + 1
        except Exception:
            return h

    with pytest.raises(TimeUp, match=r"0\.01 s"), Trace(model := Net(slow), limit_s=0.01):
        model(torch.randn(3, 4))
    assert not torch_module._global_forward_hooks


def test_the_limit_holds_in_the_backward_too() -> None:
    def slow(h: Tensor) -> Tensor:
        y = h * 1
        y.register_hook(lambda grad: time.sleep(0.3))
        return y

    model = Net(slow)
    with pytest.raises(TimeUp), Trace(model, limit_s=0.25):
        model(torch.randn(3, 4)).sum().backward()


def test_an_error_of_the_model_passes_through_and_leaves_nothing_behind() -> None:
    def fails(h: Tensor) -> Tensor:
        raise ValueError("of the model")

    with pytest.raises(ValueError, match="of the model"), Trace(model := Net(fails)):
        model(torch.randn(3, 4))
    assert not torch_module._global_forward_pre_hooks
    assert not torch_module._global_forward_hooks


def test_what_cannot_be_measured_is_named_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr("gpt_guard.replaying.follow.hazard", fails)
    with Trace(model := Net(lambda h: h.exp())) as trace:
        out = model(torch.randn(3, 4))
    assert trace.origin(out) is None
    assert set(trace.skipped.values()) == {"RuntimeError: no such kernel"}


def test_it_may_be_asked_while_it_watches() -> None:
    with Trace(model := Net(lambda h: (h * 0).log())) as trace:
        out = model(torch.randn(3, 4))
        found = trace.origin(out)
    assert found == trace.origin(out)


class Chunked(nn.Module):
    """A method is called in place of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def loss(self, h: Tensor) -> Tensor:
        return (h * 0).log()


def test_a_method_called_in_place_of_the_module() -> None:
    chunked = Chunked()
    with Trace(nn.Sequential(chunked)) as trace:
        out = chunked.loss(torch.randn(3, 4))
    found = trace.origin(out)
    assert found is not None
    assert (found.module, found.module_class) == ("0", "Chunked")


def test_code_outside_of_the_model_has_no_module() -> None:
    with Trace(model := Net(lambda h: h)) as trace:
        out = model(torch.randn(3, 4))
        loss = (out * 0).log().sum()
    found = trace.origin(loss)
    assert found is not None
    assert (found.module, found.name) == (None, "log")
    assert found.where is not None
    assert "(out * 0).log()" in found.where.text


def test_the_figures_explain_the_case() -> None:
    found = origin_of(lambda h: (h * torch.tensor([[1.0], [0.0], [1.0]])).abs().log())
    assert found is not None
    (operand,) = found.operands
    assert operand.tensor is not None
    assert (operand.name, operand.facts, operand.tensor.finite_min) == ("input", ("4 zeros",), 0.0)
    assert found.output is not None
    assert (found.output.bad_rows, found.output.first_bad, found.output.neg_inf) == ((1,), (1, 0), 4)
    assert found.shows == "log of 4 zeros"
    assert type(found).model_validate_json(found.model_dump_json()) == found


def test_the_first_replay_of_a_process_has_its_time_for_itself() -> None:
    """What torch imports for it takes seconds, and a replay may be given less."""
    code = (
        "import sys, torch; from gpt_guard import FiniteGuard, Guardian, NonFiniteError\n"
        "model = torch.nn.Linear(2, 2)\n"
        "model.register_forward_hook(lambda module, args, output: (output * 0).log() * 0)\n"
        "print('torch._dynamo' in sys.modules)\n"
        "try:\n"
        "    with Guardian(model, guards=[FiniteGuard()], sinks=[], replay=1.0): model(torch.ones(1, 2))\n"
        "except NonFiniteError as error: print(error.finding.replay)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    imported, replayed = done.stdout.splitlines()
    assert imported == "False"
    assert replayed.startswith("Reproduced"), done.stderr
