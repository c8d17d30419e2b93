"""Whatever a model returns, and however it takes its targets, logits and loss are found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard.checks.runner.forward import UnknownOutput, call, loss_of, shifts_inside, unpack
from mini_gpt import MiniGPT, MiniGPTConfig

V = 7


class Base(nn.Module):
    """Logits that know the position they stand at."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, 4)
        self.head = nn.Linear(4, V)

    def logits(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.embedding(x).cumsum(1))
        return out

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


@dataclass
class Result:
    logits: Tensor
    loss: Tensor | None = None


class LogitsOnly(Base):
    def forward(self, idx: Tensor) -> Tensor:
        return self.logits(idx)


class Labels(Base):
    """As Hugging Face: `labels` are the ids themselves, shifted inside."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Result:
        logits = self.logits(input_ids)
        loss = None if labels is None else F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return Result(logits, loss)


class Dictionary(Base):
    def forward(self, x: Tensor, y: Tensor | None = None) -> dict[str, Tensor | None]:
        logits = self.logits(x)
        return {"loss": None if y is None else self.loss(logits, y), "logits": logits}


class RequiredTargets(Base):
    def forward(self, tokens: Tensor, nxt: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.logits(tokens)
        return self.loss(logits, nxt), logits


class NanoGPT(Base):
    """Only the last position without targets."""

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        logits = self.logits(idx)
        if targets is None:
            return logits[:, [-1]], None
        return logits, self.loss(logits, targets)


class OptionalCache(Base):
    """The second argument is no target."""

    def forward(self, x: Tensor, cache: Any = None, start: int = 0) -> Tensor:
        assert cache is None
        return self.logits(x)


class RequiredMask(Base):
    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return self.logits(x)


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module, name: str) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, inner)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.get_submodule(self.name)(*args, **kwargs)


@pytest.fixture
def x() -> Tensor:
    return torch.randint(V, (2, 5))


@pytest.fixture
def y() -> Tensor:
    return torch.randint(V, (2, 5))


@pytest.mark.parametrize("kind", [Dictionary, RequiredTargets, NanoGPT], ids=lambda kind: kind.__name__)
def test_targets_reach_the_model_and_its_loss_comes_back(kind: Callable[[], Base], x: Tensor, y: Tensor) -> None:
    model = kind()
    output = call(model, x, y)
    assert torch.equal(output.logits, model.logits(x))
    assert output.loss is not None
    assert output.loss.item() == pytest.approx(model.loss(model.logits(x), y).item())


@pytest.mark.parametrize("kind", [LogitsOnly, OptionalCache], ids=lambda kind: kind.__name__)
def test_models_without_targets_get_none(kind: Callable[[], Base], x: Tensor, y: Tensor) -> None:
    model = kind()
    output = call(model, x, y)
    assert output.loss is None
    assert torch.equal(output.logits, model.logits(x))
    assert loss_of(model, x, y).item() == pytest.approx(model.loss(output.logits, y).item())


def test_a_model_that_shows_only_the_last_position_is_asked_for_all(x: Tensor) -> None:
    model = NanoGPT()
    output = call(model, x)
    assert torch.equal(output.logits, model.logits(x))
    assert output.loss is None
    assert call(model, x[:, :1]).logits.shape == (2, 1, V)


def test_the_mini_gpt_and_wrappers_of_it() -> None:
    model = MiniGPT(MiniGPTConfig(V, block_size=5, embedding_dim=8, num_heads=2, dropout=0.0))
    x = torch.randint(V, (2, 5))
    for each in (model, Wrapped(model, "_orig_mod"), Wrapped(model, "adapted")):
        assert call(each, x, x).loss is not None
        assert call(each, x).logits.shape == (2, 5, V)


def test_a_mask_is_never_given_the_targets(x: Tensor, y: Tensor) -> None:
    with pytest.raises(TypeError, match="mask"):
        call(RequiredMask(), x, y)


def test_the_loss_of_a_project_goes_before_the_models_own(x: Tensor, y: Tensor) -> None:
    model = Dictionary()
    assert loss_of(model, x, y, lambda logits, targets: logits.sum() * 0 + 3.5).item() == 3.5
    own = call(model, x, y).loss
    assert own is not None
    assert loss_of(model, x, y).item() == own.item()


def test_labels_that_are_shifted_inside_are_noticed(x: Tensor) -> None:
    assert shifts_inside(Labels(), x)
    for kind in (LogitsOnly, Dictionary, RequiredTargets, NanoGPT):
        assert not shifts_inside(kind(), x)
    assert not shifts_inside(Labels(), x[:, :2])


class OtherLoss(Labels):
    """A loss as `reduce` makes it of logits and targets."""

    def __init__(self, reduce: Callable[[Tensor, Tensor], Tensor], shifted: bool) -> None:
        super().__init__()
        self.reduce, self.shifted = reduce, shifted

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Result:
        logits = self.logits(input_ids)
        if labels is None:
            return Result(logits)
        if self.shifted:
            return Result(logits, self.reduce(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()))
        return Result(logits, self.reduce(logits.flatten(0, 1), labels.flatten()))


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "padding ignored": lambda logits, y: F.cross_entropy(logits, y, ignore_index=0),
    "half ignored": lambda logits, y: F.cross_entropy(logits, torch.where(y > V // 2, y, -100)),
    "label smoothing": lambda logits, y: F.cross_entropy(logits, y, label_smoothing=0.1),
    "auxiliary term": lambda logits, y: F.cross_entropy(logits, y) + 0.3,
}


@pytest.mark.parametrize("scale", [0.01, 1.0, 20.0], ids=["untrained", "usual", "sure"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_another_kind_is_no_shift(name: str, scale: float) -> None:
    padded = torch.zeros(4, 12, dtype=torch.int64)
    padded[:, :5] = torch.randint(V, (4, 5))
    for shifted in (True, False):
        model = OtherLoss(LOSSES[name], shifted)
        with torch.no_grad():
            model.head.weight.mul_(scale)
        assert shifts_inside(model, padded, V) is shifted


def test_a_loss_without_the_first_position_is_no_shift() -> None:
    class SkipsFirst(Labels):
        def forward(self, input_ids: Tensor, mask: Tensor | None = None, labels: Tensor | None = None) -> Result:
            logits = self.logits(input_ids)
            loss = None if labels is None else F.cross_entropy(logits[:, 1:].flatten(0, 1), labels[:, 1:].flatten())
            return Result(logits, loss)

    for _ in range(5):
        assert not shifts_inside(SkipsFirst(), torch.zeros(1, 8, dtype=torch.int64), V)


def test_two_ids_are_enough_and_one_is_not() -> None:
    for _ in range(5):
        assert shifts_inside(Labels(), torch.tensor([[0, 1, 0, 1]]))
        assert not shifts_inside(Dictionary(), torch.tensor([[0, 1, 0, 1]]))
    assert not shifts_inside(Labels(), torch.zeros(1, 4, dtype=torch.int64))


def test_equal_logits_show_no_shift(x: Tensor) -> None:
    model = Labels()
    for parameter in model.head.parameters():
        nn.init.zeros_(parameter)
    assert not shifts_inside(model, x)


def test_only_ids_of_the_vocabulary_are_tried(x: Tensor) -> None:
    seen: list[Tensor] = []

    class Noting(Labels):
        def forward(self, input_ids: Tensor, mask: Tensor | None = None, labels: Tensor | None = None) -> Result:
            seen.extend(part for part in (input_ids, labels) if part is not None)
            return super().forward(input_ids, mask, labels)

    assert shifts_inside(Noting(), x + 1000, V)
    assert max(int(ids.max()) for ids in seen) < V


def test_noticing_it_leaves_modes_alone(x: Tensor) -> None:
    model = Labels()
    model.head.eval()
    shifts_inside(model, x)
    assert (model.training, model.head.training, model.embedding.training) == (True, False, True)


def test_losses_are_told_from_logits_whatever_their_shape() -> None:
    logits, hidden = torch.randn(2, 5, V), torch.randn(3, 2, 5, 5)
    scalar = torch.tensor(1.0)
    assert unpack((scalar, logits)).loss is scalar
    assert unpack([logits, None]).loss is None
    for shape in ((1,), (2,), (10,), (2, 5)):
        loss = torch.rand(shape)
        found = unpack((logits, loss))
        assert found.logits is logits
        assert found.loss is loss
    assert unpack((logits, (hidden,))).logits is logits
    assert unpack((logits, torch.randn(2, 5, 16))).loss is None


@pytest.mark.parametrize("output", [None, 3, "text", {"hidden": torch.ones(1)}, (torch.tensor(1.0),), {}])
def test_what_holds_no_logits_is_said(output: Any) -> None:
    with pytest.raises(UnknownOutput, match=r"logits \[B, T, V\]"):
        unpack(output)


def test_a_mapping_that_is_no_dict() -> None:
    class Output(Mapping[str, Tensor]):
        def __getitem__(self, key: str) -> Tensor:
            if key != "logits":
                raise KeyError(key)
            return torch.ones(1, 2, 3)

        def __iter__(self) -> Any:
            return iter(["logits"])

        def __len__(self) -> int:
            return 1

    assert unpack(Output()).logits.shape == (1, 2, 3)
