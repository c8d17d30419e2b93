"""What of ours a compiler meets runs as it is written; what it calls of others is compiled as ever."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from gpt_guard.hooks.patches import Patch
from gpt_guard.hooks.untraced import around, away, in_one_graph, looking

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
