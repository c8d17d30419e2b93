"""A compiled step: seen where the compiler breaks it anyway, else said to be unseen; the weights are the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer

from gpt_guard import Guardian
from gpt_guard.errors import GuardError
from gpt_guard.records import Finding

from .loop_kit import Kept, batch

# What the net computes is not drawn at random, and enough steps for light ones.
STEPS = 30
# Both are torch's own, from the midst of compiling.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
Make = Callable[[Any], Optimizer]
Step = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def reset() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Run:
    """A run of compiled code, under a Guardian or bare: its losses, its weights, and how many graphs it has taken."""

    def __init__(self, make: Make, *, guarded: bool, backend: str = "eager", **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
        self.optimizer = make(self.model.parameters())
        self.graphs = 0
        self.losses: list[float] = []
        self.sink = Kept()
        self.guardian = Guardian(self.model, self.optimizer, sinks=[self.sink]) if guarded else None
        self._backend: Any = torch._dynamo.lookup_backend(backend)
        self._options = options

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def count(graph: Any, inputs: Any) -> Any:
            self.graphs += 1
            return self._backend(graph, inputs)

        return torch.compile(function, backend=count, **self._options)

    def train(self, step: Step) -> Run:
        with self.guardian or nullcontext():
            for place in range(STEPS):
                self.losses.append(step(*batch(place)).item())
        return self

    def step_alone(self) -> Run:
        """The step is compiled, and nothing else."""
        make = self.compiled(lambda: self.optimizer.step())

        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = self.backward(x, y)
            make()
            return loss.detach()

        return self.train(step)

    def backward(self, x: Tensor, y: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        return loss

    @property
    def weights(self) -> list[Tensor]:
        return [each.detach().clone() for each in self.model.parameters()]

    @property
    def findings(self) -> list[Finding]:
        assert self.guardian is not None
        return list(self.guardian.findings)


def same(bare: Run, guarded: Run) -> None:
    assert bare.losses == guarded.losses
    assert all(map(torch.equal, bare.weights, guarded.weights))


def adamw(parameters: Any) -> Optimizer:
    return AdamW(parameters, lr=1e-3)


def sgd(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.1, momentum=0.9)


class Plain(Optimizer):
    """One that a compiler puts into one graph."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for each in group["params"]:
                each.add_(each.grad, alpha=-group["lr"])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("make", [adamw, sgd])
def test_a_compiled_step_is_seen_and_computes_the_same(make: Make, backend: str) -> None:
    bare, guarded = (Run(make, guarded=guarded, backend=backend).step_alone() for guarded in (False, True))
    same(bare, guarded)
    assert guarded.graphs == bare.graphs
    assert [each.step for each in guarded.sink.seen] == list(range(STEPS))
    assert [each.loss for each in guarded.sink.seen] == guarded.losses
    assert all(each.grad_norm and each.grad_norm_clipped and each.update_ratio for each in guarded.sink.seen)
    assert not guarded.findings


def test_a_compiled_step_without_guardian_goes_on_as_it_was() -> None:
    bare, guarded = (Run(adamw, guarded=guarded).step_alone() for guarded in (False, True))
    bare.guardian = guarded.guardian = None
    same(bare.step_alone(), guarded.step_alone())


def whole(run: Run) -> Run:
    return run.train(run.compiled(run_whole(run)))


def run_whole(run: Run) -> Step:
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = run.backward(x, y)
        run.optimizer.step()
        return loss

    return step


def with_closure(run: Run) -> Run:
    def step(x: Tensor, y: Tensor) -> Tensor:
        def closure() -> Any:
            return run.backward(x, y)

        return run.optimizer.step(closure)  # type: ignore[return-value]  # torch says a float

    return run.train(run.compiled(step))


def with_scaler(run: Run) -> Run:
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)

    def step(x: Tensor, y: Tensor) -> Tensor:
        run.optimizer.zero_grad()
        loss = F.cross_entropy(run.model(x), y)
        scaler.scale(loss).backward()
        scaler.step(run.optimizer)
        scaler.update()
        return loss

    return run.train(run.compiled(step))


@pytest.mark.parametrize("how", [whole, with_closure, with_scaler])
def test_where_forward_backward_and_step_are_compiled_nothing_of_ours_is(how: Callable[[Run], Run]) -> None:
    bare, guarded = (how(Run(adamw, guarded=guarded)) for guarded in (False, True))
    same(bare, guarded)
    # Once more for each that has been compiled with the hooks and patches of the first, inspected steps.
    assert guarded.graphs <= 2 * bare.graphs
    assert [each.step for each in guarded.sink.seen] == list(range(STEPS))
    assert [each.loss for each in guarded.sink.seen] == pytest.approx(guarded.losses)
    assert [each.code for each in guarded.findings] == ["GG902"]


def test_a_halt_in_compiled_code_comes_before_the_update() -> None:
    run = Run(adamw, guarded=True)
    make = run.compiled(lambda: run.optimizer.step())
    before: list[Tensor] = []

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = run.backward(x, y)
        if len(run.losses) == STEPS - 2:
            before.extend(run.weights)
            next(run.model.parameters()).grad.fill_(math.nan)  # type: ignore[union-attr]  # it has one
        make()
        return loss.detach()

    with pytest.raises(GuardError):
        run.train(step)
    assert all(map(torch.equal, before, run.weights))


@pytest.mark.parametrize("options", [{}, {"fullgraph": True}])
def test_a_step_that_is_one_graph_stays_one_and_is_said_to_be_unseen(options: dict[str, Any]) -> None:
    bare, guarded = (Run(Plain, guarded=guarded, **options).step_alone() for guarded in (False, True))
    same(bare, guarded)
    assert guarded.graphs == bare.graphs == 1
    assert guarded.guardian is not None
    assert guarded.guardian.step == 0
    (found,) = guarded.findings
    assert found.code == "GG903"
    assert "compiled code holds the whole step() of Plain" in found.seen
    assert "torch.compile has made one graph" in found.causes[0]
    assert "optimizer steps: compiled code holds the whole step() of Plain" in guarded.guardian.report().not_watched


def test_a_graph_that_must_not_break_fails_as_it_does_without_a_guardian() -> None:
    words = []
    for guarded in (False, True):
        with pytest.raises(Exception, match="graph_break") as caught:  # torch has its own class for it
            Run(adamw, guarded=guarded, fullgraph=True).step_alone()
        words.append(str(caught.value).splitlines()[0])
    assert words[0] == words[1]
