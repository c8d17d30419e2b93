"""Ids and positions without a row, named before the lookup fails; padding_idx that is a real token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from gpt_guard.callbacks.attention.embedding import IndexCalls
from gpt_guard.errors import DataError, GuardUsageError
from gpt_guard.guardian import Guardian
from gpt_guard.records import Finding

VOCABULARY, BLOCK, ROWS = 12, 6, 3


class Net(nn.Module):
    """Tokens, positions that may begin later, and types."""

    def __init__(self, *, padding: int | None = None, offset: int = 0) -> None:
        super().__init__()
        self.tokens, self.wpe = nn.Embedding(VOCABULARY, 4, padding_idx=padding), nn.Embedding(BLOCK, 4)
        self.offset = offset

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(self.offset, self.offset + ids.size(1))
        answer: Tensor = self.tokens(ids) + self.wpe(places)
        return answer


def run(model: nn.Module, make: Callable[[], Tensor], guard: IndexCalls | None = None) -> Sequence[Finding]:
    """Three steps, or as many as the lookups let pass."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Guardian(model, optimizer, guards=[guard or IndexCalls()], sinks=[]) as guardian:
        for _ in range(3):
            optimizer.zero_grad()
            try:
                model(make()).sum().backward()
            except IndexError:
                break
            optimizer.step()
    return [found for found in guardian.findings if found.code != "GG903"]


def ids(length: int = BLOCK) -> Tensor:
    return torch.randint(1, VOCABULARY, (ROWS, length))


def with_one(value: int) -> Callable[[], Tensor]:
    def make() -> Tensor:
        found = ids()
        found[2, 4] = value
        return found

    return make


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        (VOCABULARY, "Ids begin at 1"),
        (VOCABULARY + 30, "A special token"),
        (-100, "A label that means"),
        (-7, "Negative ids come from"),
    ],
)
def test_an_id_without_a_row(value: int, cause: str) -> None:
    (found,) = run(Net(), with_one(value))
    assert (found.code, found.module, found.step) == ("GG631", "tokens", 0)
    assert f"is asked for id {value}: 1 of 18 ids have no row, the first at [2, 4]" in found.seen
    assert found.causes[0].startswith(cause)
    assert found.where is not None
    assert "self.tokens(ids)" in found.where.text
    assert found.evidence["rows"] == VOCABULARY


def test_many_different_ids_without_a_row_are_those_of_another_tokenizer() -> None:
    (found,) = run(Net(), lambda: ids() + 5)
    assert found.causes[0].startswith("The data was encoded with another tokenizer")


@pytest.mark.parametrize(
    ("model", "length", "cause"),
    [(Net(), BLOCK + 2, "The rows are longer"), (Net(offset=2), BLOCK, "Positions start too high")],
    ids=["long rows", "offset"],
)
def test_a_position_without_a_row(model: Net, length: int, cause: str) -> None:
    (found,) = run(model, lambda: ids(length))
    assert (found.code, found.module) == ("GG695", "wpe")
    assert f"is asked for position {BLOCK + 1}" in found.seen
    assert found.causes[0].startswith(cause)


def test_ids_that_count_up_are_no_positions() -> None:
    (found,) = run(Net(), lambda: torch.arange(ROWS)[:, None] + torch.arange(VOCABULARY - 5, VOCABULARY + 1))
    assert found.code == "GG631"


def test_strict_raises_before_torch_does() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.raises(DataError, match="GG631") as raised,
        Guardian(model, optimizer, guards=[IndexCalls()], sinks=[], strict=True),
    ):
        model(with_one(VOCABULARY)())
    assert raised.value.__cause__ is None


def gaps() -> Tensor:
    found = ids()
    found[:, 2] = 0
    return found


def ends() -> Tensor:
    found = ids()
    found[0, 4:] = found[1, :3] = 0
    return found


def test_padding_between_real_tokens() -> None:
    (found,) = run(Net(padding=0), gaps)
    assert (found.code, found.module) == ("GG696", "tokens")
    assert found.evidence["padding_idx"] == 0
    assert run(Net(), gaps) == []
    assert run(Net(padding=0), gaps, IndexCalls(padding_share=0.5)) == []


@pytest.mark.parametrize("make", [ids, ends])
def test_padding_at_the_ends_and_healthy_ids_are_silent(make: Callable[[], Tensor]) -> None:
    assert run(Net(padding=0), make) == []


def test_after_the_inspected_steps_nothing_is_looked_at() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Guardian(model, optimizer, guards=[IndexCalls()], sinks=[], inspect_steps=1) as guardian:
        model(ids()).sum().backward()
        optimizer.step()
        with pytest.raises(IndexError):
            model(with_one(VOCABULARY)())
    assert guardian.findings == ()


def test_a_share_that_is_no_number() -> None:
    with pytest.raises(GuardUsageError, match="padding_share"):
        IndexCalls(padding_share="some")  # type: ignore[arg-type]  # as a user may
