"""A compiler meets our code: what of it runs as it is written, and what parts made by torch.jit leave unseen."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from gpt_guard import Finding, Guardian
from gpt_guard.hooks.compiled import around, away, in_one_graph, looking
from gpt_guard.hooks.patches import Patch

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


@pytest.fixture(autouse=True)
def reset() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Graphs:
    """Counts the graphs that code is compiled to."""

    def __init__(self) -> None:
        self.count = 0

    def compiled(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        return torch.compile(function, backend=self._take, **options)

    def _take(self, graph: Any, _inputs: Any) -> Any:
        self.count += 1
        return graph.forward


class Seen:
    """Notes how its calls run."""

    def __init__(self) -> None:
        self.calls: list[bool] = []

    def call(self, x: Tensor) -> None:
        # Would be compiled, or break a graph.
        self.calls.append(is_dynamo_compiling() or looking() is not None)
        (x * 2).sum().item()


def test_what_is_called_away_runs_each_time_and_uncompiled() -> None:
    seen, graphs = Seen(), Graphs()

    def function(x: Tensor) -> Tensor:
        y = x + 1
        if is_dynamo_compiling() or looking() is not None:
            away(seen.call, y)
        return y * 2

    compiled = graphs.compiled(function)
    for _ in range(3):
        assert compiled(torch.ones(2)).tolist() == [4.0, 4.0]
    assert seen.calls == [False] * 3
    # Before and after.
    assert graphs.count == 2


def test_dynamo_is_back_after_an_error() -> None:
    graphs = Graphs()

    def fail() -> None:
        raise ArithmeticError

    def call(original: Callable[[], None]) -> None:
        assert looking() is None
        original()

    @torch._dynamo.disable(recursive=False)  # type: ignore[untyped-decorator]  # torch does not say what it returns
    def between() -> None:
        before = looking()
        with pytest.raises(ArithmeticError):
            away(fail)
        assert looking() is before is not None
        with pytest.raises(ArithmeticError):
            around(call, fail)
        assert looking() is before is not None

    graphs.compiled(lambda: between())()
    assert looking() is None


def double(x: Tensor) -> Tensor:
    return x * 2


class Place:
    """Where a function is patched."""

    function = staticmethod(double)


def tell(original: Any, listeners: tuple[Seen, ...], x: Tensor) -> Any:
    for listener in listeners:
        listener.call(x)
    return original(x)


def test_a_patch_that_a_compiler_passes_by_compiles_what_it_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, graphs = Seen(), Graphs()
    patch = Patch(Place, "function", tell)
    patch.add(seen)

    @torch._dynamo.disable(recursive=False)  # type: ignore[untyped-decorator]  # torch does not say what it returns
    def between(x: Tensor) -> Any:
        return Place.function(x)

    compiled = graphs.compiled(lambda x: between(x))
    for _ in range(3):
        assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]
    patch.remove(seen)
    assert seen.calls == [False] * 3
    assert graphs.count == 1


def test_a_patch_stays_out_of_a_graph_that_must_not_break() -> None:
    seen, graphs = Seen(), Graphs()
    patch = Patch(Place, "function", tell)
    patch.add(seen)
    compiled = graphs.compiled(lambda x: Place.function(x + 1), fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [4.0, 4.0]
    patch.remove(seen)
    assert (seen.calls, graphs.count) == ([], 1)


@pytest.mark.parametrize("whole", [True, False])
def test_whether_a_graph_may_break_is_known_where_it_is_traced(whole: bool) -> None:
    def function(x: Tensor) -> Tensor:
        return x + 1 if is_dynamo_compiling() and in_one_graph() else x + 2

    assert Graphs().compiled(function, fullgraph=whole)(torch.zeros(1)).item() == (1.0 if whole else 2.0)


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
