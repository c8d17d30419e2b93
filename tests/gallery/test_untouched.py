"""A replay that the user survives leaves nothing behind: weights, buffers, gradients and random state, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gpt_guard import Guardian

from .collection import CASES
from .parts import Case, loop_of

RECORD = {"error": "record", "warning": "record"}
Left = dict[str, Tensor | None]


def trained(case: Case, *, guarded: bool) -> tuple[Left, list[str]]:
    """What a training leaves, and what was said of replays in them."""
    loop = loop_of(case, case.runs[0])
    batches = list(loop.training.batches)
    guardian = Guardian(loop.model, loop.optimizer, sinks=[], policy=RECORD)
    if guarded and loop.loss_of is not None:
        loop.loss_of = guardian.watch_loss(loop.loss_of)
    torch.manual_seed(5)
    with loop.training.around():
        if guarded:
            guardian.start()
        for batch in batches:
            loop.step(*batch)
        guardian.stop()
    left: Left = {"generator": torch.get_rng_state()}
    for name, parameter in loop.model.named_parameters():
        left |= {name: parameter.detach(), f"the gradient of {name}": parameter.grad}
    left |= dict(loop.model.named_buffers())
    return left, [finding.replay for finding in guardian.findings if finding.replay is not None]


def bits(tensor: Tensor | None) -> bytes | None:
    """NaN is not equal to itself; its bits are."""
    return None if tensor is None else tensor.flatten().view(torch.uint8).numpy().tobytes()


@pytest.mark.filterwarnings("ignore:std..:UserWarning")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_run_goes_on_as_if_nothing_had_been_run_again(case: Case) -> None:
    bare, _ = trained(case, guarded=False)
    watched, said = trained(case, guarded=True)
    assert [name for name in bare if bits(bare[name]) != bits(watched[name])] == []
    assert said or case.operation in ("batch", "update", "buffer", "parameter")
