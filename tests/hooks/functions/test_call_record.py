"""What the calls of a step have shown is kept once, with the place of each in the watched model."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard.hooks.functions.call_record import NOTED, CallPlace, CallRecord
from gpt_guard.hooks.functions.function_calls import FunctionCall, FunctionCalls
from gpt_guard.hooks.functions.masks import HIDDEN, VisibleKeys, visible_keys

LENGTH = 5


class Reader(nn.Module):
    """Ids to scores, with a softmax in a module that is not registered."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4, padding_idx=0)
        self.inner = nn.Sequential(nn.Linear(4, 3), nn.Softmax(-1))
        self.hidden = [nn.Softmax(-1)]

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.hidden[0](self.inner(self.table(ids)))
        return scores


class Noting:
    """A record of a model's calls, and the places that they came from; `forward` is counted by hand."""

    def __init__(self, model: nn.Module) -> None:
        self.forward = 0
        self.record = CallRecord(model, lambda: self.forward)
        self.places: dict[str, CallPlace] = {}
        self.functions = FunctionCalls()
        # Two guards listen to the same calls.
        for _ in range(2):
            self.functions.listen(NOTED, self.record.note)
        self.functions.listen(("softmax", "embedding", "cross_entropy"), self.place)

    def place(self, call: FunctionCall) -> None:
        self.places[call.kind] = self.record.place(call)


@pytest.fixture
def noting() -> Iterator[Noting]:
    found = Noting(Reader())
    found.functions.open()
    yield found
    found.functions.close()


def model_of(noting: Noting) -> Reader:
    model = noting.record._model
    assert isinstance(model, Reader)
    return model


def test_ids_are_kept_once_and_by_their_forward(noting: Noting) -> None:
    one, other = torch.ones(2, 3, dtype=torch.long), torch.zeros(2, 3, dtype=torch.long)
    model_of(noting)(one)
    noting.forward = 1
    model_of(noting)(other)
    assert [each.ids.tolist() for each in noting.record.embedded] == [one.tolist(), other.tolist()]
    assert [(each.padding, each.width) for each in noting.record.embedded_now()] == [(0, 4)]
    assert torch.equal(noting.record.embedded_now()[0].ids, other)
    noting.record.clear()
    assert not noting.record.embedded


def test_a_place_is_the_innermost_module_of_the_model(noting: Noting) -> None:
    scores = model_of(noting)(torch.ones(2, 3, dtype=torch.long))
    nn.CrossEntropyLoss()(scores.flatten(0, 1), torch.zeros(6, dtype=torch.long))
    assert (noting.places["embedding"].module, noting.places["embedding"].module_class) == ("table", "Embedding")
    # What is not registered is code of the module that holds it.
    assert (noting.places["softmax"].module, noting.places["softmax"].module_class) == ("", "Reader")
    assert noting.places["cross_entropy"].module is None


def test_a_softmax_is_known_by_its_operation(noting: Noting) -> None:
    model = model_of(noting)
    inner = model.inner(torch.randn(2, 4))
    found = noting.record.softmax_of(inner.grad_fn)
    assert found is not None
    assert str(found).startswith("softmax in module 'inner.1' (Softmax)")
    assert noting.record.softmax_of((inner * 2).grad_fn) is None
    assert noting.record.softmax_of(None) is None


def test_shapes_before_flattening(noting: Noting) -> None:
    targets = torch.zeros(2, 3, dtype=torch.long)
    flat = targets.reshape(-1)
    assert noting.record.flattened_from(flat) == noting.record.flattened_from(targets) == (2, 3)
    assert noting.record.flattened_from(torch.zeros(6, dtype=torch.long)) is None


def additive(low: float) -> Tensor:
    return torch.full((LENGTH, LENGTH), low).triu(1)


@pytest.mark.parametrize(("low", "hides"), [(-2000.0, False), (HIDDEN, True), (-1e4, True), (-torch.inf, True)])
def test_a_mask_hides_at_one_threshold_whoever_asks(noting: Noting, low: float, hides: bool) -> None:
    seen: list[list[VisibleKeys]] = []
    noting.functions.listen(("attention",), lambda call: seen.append(visible_keys(call)))
    query = torch.randn(1, 2, LENGTH, 4)
    F.scaled_dot_product_attention(query, query, query, attn_mask=additive(low))
    assert noting.record.causal is hides
    assert [each.only_the_past for each in seen[0]] == [hides]


@pytest.mark.parametrize(
    ("call", "causal"),
    [
        (lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), True),
        (lambda x: F.scaled_dot_product_attention(x, x, x), False),
        (lambda x: (x @ x.mT).masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -torch.inf), True),
        (lambda x: (x @ x.mT).masked_fill(torch.eye(LENGTH).bool(), -torch.inf), False),
    ],
    ids=["flag", "no mask", "filled", "only itself"],
)
def test_what_keeps_attention_from_looking_ahead(
    noting: Noting, call: Callable[[Tensor], Tensor], causal: bool
) -> None:
    call(torch.randn(1, 2, LENGTH, 4))
    assert noting.record.causal is causal


def test_a_boolean_mask_is_read_by_the_sense_of_its_call(noting: Noting) -> None:
    seen: list[bool] = []
    noting.functions.listen(
        ("attention", "masked_fill"), lambda call: seen.extend(each.only_the_past for each in visible_keys(call))
    )
    below, x = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(), torch.randn(1, 2, LENGTH, 4)
    for mask in (below, ~below):
        F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
        (x @ x.mT).masked_fill(mask, -1e9)
    assert seen == [True, False, False, True]


def test_a_hook_on_a_gradient_is_noted(noting: Noting) -> None:
    assert not noting.record.hooked
    torch.ones(2, requires_grad=True).exp().register_hook(lambda gradient: None)
    assert noting.record.hooked
