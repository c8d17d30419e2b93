"""The function tap: every spelling of a call is seen, and nothing of it outlives its time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode

from gpt_guard.hooks.functions.function_calls import KINDS, FunctionCall, FunctionCalls


class Tapped:
    """A tap with a list of what it was told."""

    def __init__(self) -> None:
        self.tap = FunctionCalls()
        self.kinds: list[str] = []
        self.tap.listen(KINDS, self.note)

    def note(self, call: FunctionCall) -> None:
        self.kinds.append(call.kind)


@pytest.fixture
def tapped() -> Iterator[Tapped]:
    found = Tapped()
    found.tap.open()
    yield found
    found.tap.close()
    assert torch._C._len_torch_function_stack() == 0


LOGITS, LABELS = torch.randn(3, 4), torch.zeros(3, dtype=torch.long)


@pytest.mark.parametrize(
    "call",
    [
        lambda: F.cross_entropy(LOGITS, LABELS),
        lambda: cross_entropy(LOGITS, LABELS),
        lambda: nn.CrossEntropyLoss()(LOGITS, LABELS),
        lambda: torch.nn.functional.cross_entropy(input=LOGITS, target=LABELS),
    ],
)
def test_every_spelling_of_a_loss_is_seen(tapped: Tapped, call: object) -> None:
    assert callable(call)
    call()
    assert tapped.kinds == ["cross_entropy"]


@pytest.mark.parametrize(
    "call",
    [
        lambda: LOGITS.softmax(-1),
        lambda: torch.softmax(LOGITS, -1),
        lambda: F.softmax(LOGITS, -1),
        lambda: nn.Softmax(-1)(LOGITS),
    ],
)
def test_every_spelling_of_softmax_is_seen(tapped: Tapped, call: object) -> None:
    assert callable(call)
    call()
    assert tapped.kinds == ["softmax"]


def test_arguments_have_their_names_however_they_were_given() -> None:
    seen: list[tuple[object, object, object]] = []
    tap = FunctionCalls()
    tap.listen(["softmax", "attention"], lambda call: seen.append((call.get("dim"), call.get("is_causal"), call.name)))
    tap.open()
    LOGITS.softmax(1)
    torch.softmax(LOGITS, dim=0)
    query = torch.randn(1, 1, 2, 4)
    F.scaled_dot_product_attention(query, query, query, None, 0.0, True)
    tap.close()
    assert seen == [(1, None, "softmax"), (0, None, "softmax"), (None, True, "scaled_dot_product_attention")]


def test_a_listener_before_the_call_runs_where_the_call_fails() -> None:
    told: list[int] = []
    tap = FunctionCalls()
    tap.listen(["embedding"], lambda call: told.append(int(call.get("input").max())), before=True)
    tap.open()
    with pytest.raises(IndexError):
        nn.Embedding(3, 2)(torch.tensor([7]))
    tap.close()
    assert told == [7]


def test_an_unknown_kind_is_an_error() -> None:
    with pytest.raises(KeyError, match="no kind of call named 'soft_max'"):
        FunctionCalls().listen(["soft_max"], print)


class Counting(TorchFunctionMode):
    """A mode of the user's own."""

    calls = 0

    def __torch_function__(
        self, func: object, types: object, args: tuple[object, ...] = (), kwargs: object = None
    ) -> object:
        assert callable(func)
        self.calls += 1
        return func(*args, **(kwargs if isinstance(kwargs, dict) else {}))


def test_modes_of_the_user_stay_in_their_order_however_the_tap_opens_and_closes(tapped: Tapped) -> None:
    with torch.device("meta"):
        tapped.tap.close()
        with Counting() as own:
            tapped.tap.open()
            assert torch.zeros(2).device.type == "meta"
            LOGITS.softmax(-1)
            tapped.tap.close()
        tapped.tap.open()
    assert torch.zeros(2).device.type == "cpu"
    assert own.calls
    LOGITS.softmax(-1)
    assert tapped.kinds == ["softmax", "softmax"]


def test_a_default_device_can_change_while_the_tap_is_open(tapped: Tapped) -> None:
    try:
        torch.set_default_device("meta")
        assert torch.zeros(2).device.type == "meta"
        tapped.tap.close()
        tapped.tap.open()
    finally:
        torch.set_default_device(None)
    LOGITS.softmax(-1)
    assert torch.zeros(2).device.type == "cpu"
    assert tapped.kinds == ["softmax"]


def test_values_and_gradients_are_those_of_a_run_without_it(tapped: Tapped) -> None:
    def run() -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        loss = F.mse_loss(layer(torch.randn(2, 3, 8)), torch.ones(2, 3, 8))
        loss.backward()
        assert layer.linear1.weight.grad is not None
        return loss.detach(), layer.linear1.weight.grad

    tapped_run = run()
    tapped.tap.close()
    for mine, bare in zip(tapped_run, run(), strict=True):
        assert torch.equal(mine, bare)


def test_transforms_and_subclasses_pass_through_untold(tapped: Tapped) -> None:
    class Own(Tensor):
        pass

    torch.func.vmap(lambda row: row.softmax(-1))(LOGITS)
    LOGITS.as_subclass(Own).softmax(-1)
    assert tapped.kinds == []


def test_compiled_code_computes_the_same_and_goes_on_without_the_tap(tapped: Tapped) -> None:
    compiled = torch.compile(lambda logits: F.softmax(logits * 2, -1).sum(0), backend="eager")
    with_tap = compiled(LOGITS)
    tapped.tap.close()
    assert torch.equal(with_tap, compiled(LOGITS))


def test_what_listeners_compute_stays_out_of_the_graph(tapped: Tapped) -> None:
    graphs: list[bool] = []
    tapped.tap.listen(["softmax"], lambda call: graphs.append((call.result * 2).requires_grad))
    assert LOGITS.clone().requires_grad_().softmax(-1).requires_grad
    assert graphs == [False]
