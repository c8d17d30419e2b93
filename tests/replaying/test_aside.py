"""What the loop has put around its step does not see a replay, and a person can stop one."""

from __future__ import annotations

import sys

import pytest
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from gpt_guard import NonFiniteError

from .divided import Divided, batches, mean, run
from .steps import Reads, both, guarded, said, sgd


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.part, self.use_reentrant = nn.Linear(4, 4, bias=False), Divided(), use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.part, self.first(x), use_reentrant=self.use_reentrant)
        return found


@both
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_loop_that_goes_on_can_still_run_the_backward_of_a_checkpointed_part(
    use_reentrant: bool, reads: Reads
) -> None:
    found = run(Checkpointed(use_reentrant), reads, mean)
    assert said(found).startswith("Reproduced")
    assert found.module == "part"


def test_dispatch_modes_of_the_loop_do_not_see_a_replay() -> None:
    def flops(reads: Reads | None) -> int:
        total = 0

        def counted(model: nn.Module, x: Tensor) -> Tensor:
            nonlocal total
            with FlopCounterMode(display=False) as counter:
                loss = mean(model, x)
            total += counter.get_total_flops()
            return loss

        run(Divided(), reads, counted, inspect_steps=0) if reads else run(Divided(), reads, counted)
        return total

    assert flops("immediate") == flops(None) > 0


class Stops(Divided):
    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        if not found.isfinite().all():
            breakpoint()  # what a person writes into a forward to look at a NaN
        return found


def test_a_breakpoint_stops_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stops: list[int] = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: stops.append(1))
    assert said(run(Stops(), "immediate", mean)).startswith("Reproduced")
    assert stops == [1]
    breakpoint()
    assert len(stops) == 2


class Interrupted(Divided):
    """Ctrl-C at the second run of the bad batch."""

    calls = 0

    def before(self, x: Tensor) -> Tensor:
        self.calls += not x.any()
        if self.calls == 2:
            type(self).calls = 3
            raise KeyboardInterrupt
        return x


def test_ctrl_c_in_a_replay_stops_the_run_and_the_finding_is_told_all_the_same() -> None:
    model = Interrupted()
    optimizer = sgd(model)
    guardian = guarded(model, optimizer)

    def loop() -> None:
        with guardian:
            for x in batches():
                optimizer.zero_grad()
                mean(model, x).backward()
                optimizer.step()

    with pytest.raises(KeyboardInterrupt) as stopped:
        loop()
    assert [found.code for found in guardian.findings] == ["GG101"]
    assert isinstance(stopped.value.__cause__, NonFiniteError)
    assert model.training
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
