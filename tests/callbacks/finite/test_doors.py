"""FiniteGuard(modules=False): only the doors are watched, which is said, and claimed of no more."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gpt_guard import Finding, FiniteGuard, Guardian, NonFiniteError
from gpt_guard.testing import inject_nonfinite


class Block(nn.Module):
    """A residual block whose own code may take the logarithm of zero."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.broken = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x).relu()
        if self.broken:
            h = (h - h.amin()).log() - (h - h.amin()).log()
        return x + self.down(h)  # type: ignore[no-any-return]  # a module call is Any


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), Block(), Block(), nn.Linear(8, 4))


def halt(
    model: nn.Sequential, spoil: Callable[[nn.Sequential], object], *, replay: bool = True
) -> tuple[Finding, Guardian]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    guardian = Guardian(model, optimizer, guards=[FiniteGuard(modules=False)], sinks=[], replay=replay)

    def run() -> None:
        for step in range(6):
            if step == 4:
                spoil(model)
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()

    with pytest.raises(NonFiniteError) as caught, guardian:
        run()
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    return caught.value.finding, guardian


def breaks(model: nn.Sequential) -> None:
    setattr(model.get_submodule("2"), "broken", True)  # noqa: B010  # a module takes what it is given


def test_the_replay_finds_the_module_the_line_and_the_operation() -> None:
    found, _ = halt(net(), breaks)
    assert (found.code, found.step, found.module) == ("GG101", 4, "2")
    assert found.operation is not None
    assert "log" in found.operation.name
    assert found.where is not None
    assert found.where.text.startswith("h = (h - h.amin()).log()")


def test_without_a_replay_it_is_the_models_output() -> None:
    found, _ = halt(net(), breaks, replay=False)
    assert (found.code, found.step, found.module, found.position) == ("GG101", 4, "", "output")


def test_no_hook_is_put_on_the_modules_inside_and_that_is_said() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Guardian(model, optimizer, guards=[FiniteGuard(modules=False)], sinks=[]) as guardian:
        inside = [module for path, module in model.named_modules() if path]
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in inside)
        assert any("modules=False" in spot for spot in guardian.report().not_watched)


def test_a_bad_gradient_does_not_speak_of_outputs_that_nobody_looked_at() -> None:
    def spoil(model: nn.Sequential) -> None:
        model.get_parameter("0.weight").register_hook(lambda gradient: gradient * math.nan)

    found, _ = halt(net(), spoil, replay=False)
    assert found.code == "GG104"
    assert "module outputs" not in found.seen
    assert "the model's output" in found.seen


def test_what_goes_bad_inside_and_is_mended_there_is_not_seen() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    model.register_forward_hook(lambda _module, _args, output: output.nan_to_num())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Guardian(model, optimizer, guards=[FiniteGuard(modules=False, gradients=False)], sinks=[]) as guardian:
        with inject_nonfinite(model, "1"), torch.no_grad():
            model(torch.randn(4, 8))
        assert guardian.findings == ()


def test_an_encoder_layer_takes_its_fast_path_as_in_a_bare_run() -> None:
    def outputs(*, guarded: bool) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 4)).eval()
        x = torch.randn(3, 5, 8)
        guard = FiniteGuard(modules=False)
        guardian = Guardian(model, None, guards=[guard], sinks=[])
        if guarded:
            guardian.start()
        with torch.no_grad():
            found: Tensor = model(x)
        guardian.stop()
        return found

    assert torch.equal(outputs(guarded=True), outputs(guarded=False))
