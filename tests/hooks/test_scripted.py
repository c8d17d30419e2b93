"""Parts made by torch.jit take no hooks: they are named as unseen, and all around them is watched."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from gpt_guard import Finding, Guardian


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        scaled: Tensor = h / h.norm()
        return scaled


def scripted() -> nn.Module:
    made: nn.Module = torch.jit.script(Scaled())
    return made


def traced() -> nn.Module:
    made: nn.Module = torch.jit.trace(Scaled(), torch.randn(3, 4))
    return made


MADE = pytest.mark.parametrize("made", [scripted, traced])


@pytest.fixture(autouse=True)
def jit() -> Iterator[None]:
    """torch tells of other ways to compile."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        yield


def run(made: Callable[[], nn.Module], *, guarded: bool, bad: int | None) -> tuple[list[Finding], list[Tensor], str]:
    torch.manual_seed(0)
    model = nn.Sequential(made(), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy = {"error": "record", "warning": "record"}
    guardian = Guardian(model, optimizer, sinks=[], policy=policy) if guarded else None
    if guardian is not None:
        guardian.start()
    for step in range(5):
        x = torch.randn(3, 4) * (step != bad)
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
    if guardian is not None:
        guardian.stop()
    findings = [] if guardian is None else list(guardian.findings)
    unseen = "" if guardian is None else " ".join(guardian.report().not_watched)
    return findings, [parameter.detach().clone() for parameter in model.parameters()], unseen


@MADE
def test_what_a_scripted_part_makes_is_found_where_it_comes_out(made: Callable[[], nn.Module]) -> None:
    findings, _, unseen = run(made, guarded=True, bad=3)
    found = next(each for each in findings if each.code == "GG101")
    assert found.module == "0"
    assert found.operation is not None
    assert found.operation.name == "division"
    assert not any(each.code == "GG906" for each in findings)
    assert "the inside of the compiled 0" in unseen


@MADE
def test_a_guarded_run_is_the_bare_one(made: Callable[[], nn.Module]) -> None:
    """The executor of torch.jit counts its calls, and rounds in another way after some of them."""
    _, bare, _ = run(made, guarded=False, bad=None)
    findings, seen, _ = run(made, guarded=True, bad=None)
    assert all(torch.equal(one, other) for one, other in zip(bare, seen, strict=True))
    assert not any(each.code == "GG906" for each in findings)
