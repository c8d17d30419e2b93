"""FirstLook: settings that a careful reader would query are told on entry, ordinary ones never."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from gpt_guard import FirstLook, Guardian, Severity
from gpt_guard.records import Finding

WARNING, INFO = Severity.WARNING, Severity.INFO
MakeOptimizer = Callable[[Any], Optimizer]


def net(*last: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3), *last)


def entered(model: nn.Module, optimizer: Any) -> list[Finding]:
    """What is said before anything runs."""
    with Guardian(model, optimizer, guards=[FirstLook()], sinks=[], summary=False) as guardian:
        return list(guardian.findings)


def trained(
    make: MakeOptimizer, loss_of: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy, **options: Any
) -> list[Finding]:
    model = net()
    optimizer = make(model.parameters())
    with Guardian(model, optimizer, guards=[FirstLook()], sinks=[], summary=False, **options) as guardian:
        for _ in range(5):
            x = torch.randn(8, 6)
            optimizer.zero_grad()
            loss_of(model(x), x[:, :3].argmax(1)).backward()
            optimizer.step()
    return list(guardian.findings)


ODD_OPTIMIZERS: list[tuple[str, MakeOptimizer, Severity, str]] = [
    ("betas", lambda p: Adam(p, betas=(0.999, 0.9)), WARNING, "(0.999, 0.9)"),
    ("betas", lambda p: AdamW(p, betas=(0.95, 0.9)), WARNING, "(0.95, 0.9)"),
    ("betas", lambda p: torch.optim.NAdam(p, betas=(0.9, 0.0)), WARNING, "(0.9, 0)"),
    ("eps_zero", lambda p: Adam(p, eps=0.0), WARNING, "eps is 0"),
    ("eps_large", lambda p: Adam(p, eps=10.0), WARNING, "eps is 10"),
    ("eps_zero", lambda p: RMSprop(p, eps=0.0), WARNING, "eps is 0"),
    ("decay", lambda p: AdamW(p, lr=1e-4, weight_decay=10.0), WARNING, "weight_decay is 10"),
    ("decay", lambda p: Adam(p, lr=1e-3, weight_decay=1.0), WARNING, "weight_decay is 1"),
    ("decay", lambda p: SGD(p, lr=1e-3, weight_decay=5.0), WARNING, "weight_decay is 5"),
    ("decay_coupled", lambda p: Adam(p, weight_decay=0.1), INFO, "weight_decay is 0.1"),
    ("momentum", lambda p: SGD(p, lr=0.1, momentum=1.0), WARNING, "momentum is 1"),
    ("momentum", lambda p: RMSprop(p, momentum=9.0), WARNING, "momentum is 9"),
    ("dampening", lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=1.0), WARNING, "dampening is 1"),
    ("alpha", lambda p: RMSprop(p, alpha=1.0), WARNING, "alpha is 1"),
    ("alpha", lambda p: RMSprop(p, alpha=0.01), INFO, "alpha is 0.01"),
]


@pytest.mark.parametrize(("key", "make", "severity", "text"), ODD_OPTIMIZERS)
def test_an_odd_optimizer_is_told_on_entry(key: str, make: MakeOptimizer, severity: Severity, text: str) -> None:
    model = net()
    (found,) = entered(model, make(model.parameters()))
    assert (found.code, found.severity, found.step) == ("GG330", severity, 0)
    assert text in found.seen
    assert str(found.cause_id).startswith(key)


def test_an_eps_that_is_zero_in_the_dtype_of_the_weights() -> None:
    model = net().half()
    (found,) = entered(model, Adam(model.parameters()))
    assert found.severity is WARNING
    assert "0 in the float16" in found.seen
    assert "epsilon is 0" in found.causes[0]
    for eps, dtype in ((1e-4, torch.float16), (1e-8, torch.bfloat16), (1e-15, torch.float32)):
        model = net().to(dtype)
        assert entered(model, Adam(model.parameters(), eps=eps)) == []


USUAL_OPTIMIZERS: list[MakeOptimizer] = [
    lambda p: Adam(p),
    lambda p: Adam(p, lr=2e-4, betas=(0.5, 0.999)),
    lambda p: Adam(p, betas=(0.0, 0.99)),
    lambda p: Adam(p, betas=(0.0, 0.0)),
    lambda p: AdamW(p, betas=(0.95, 0.95)),
    lambda p: AdamW(p, lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1),
    lambda p: AdamW(p, lr=1e-3, weight_decay=1.0),
    lambda p: Adam(p, eps=1.0),
    lambda p: Adam(p, weight_decay=5e-4),
    lambda p: Adam(p, eps=1.5e-4),
    lambda p: Adam(p, lr=torch.tensor(1e-3)),
    lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4),
    lambda p: SGD(p, lr=30.0, weight_decay=1.2e-6),
    lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.9),
    lambda p: RMSprop(p, lr=0.256, alpha=0.9, momentum=0.9, eps=1e-3),
    lambda p: torch.optim.Adadelta(p),
    lambda p: torch.optim.Adagrad(p, lr=0.1),
    lambda p: torch.optim.Rprop(p),
    lambda p: torch.optim.LBFGS(p),
    lambda p: torch.optim.Adamax(p),
]


@pytest.mark.parametrize("make", USUAL_OPTIMIZERS)
def test_an_ordinary_optimizer_is_left_alone(make: MakeOptimizer) -> None:
    model = net()
    assert entered(model, make(model.parameters())) == []


class Attention(nn.Module):
    def __init__(self, n_head: int, n_embd: int, head_dim: int | None = None) -> None:
        super().__init__()
        self.n_head, self.n_embd, self.qkv = n_head, n_embd, nn.Linear(n_embd, n_embd)
        if head_dim is not None:
            self.head_dim = head_dim


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(6), nn.Linear(6, 6)


class Text(nn.Module):
    def __init__(self, ids: int, scores: int) -> None:
        super().__init__()
        self.tok, self.pos, self.lm_head = nn.Embedding(ids, 8), nn.Embedding(16, 8), nn.Linear(8, scores)


def converted() -> nn.Module:
    stack = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
    stack[2].half()
    return stack


ODD_MODULES: list[tuple[str, Callable[[], nn.Module], Severity, str]] = [
    ("dropout", lambda: net(nn.Dropout(1.0)), WARNING, "3"),
    ("dropout", lambda: net(nn.Dropout(True)), WARNING, "3"),
    ("dropout", lambda: net(nn.Dropout2d(0.9)), WARNING, "3"),
    ("dropout", lambda: net(nn.Dropout(0.6)), INFO, "3"),
    ("dropout", lambda: net(nn.MultiheadAttention(4, 2, dropout=0.95)), WARNING, "3"),
    ("dropout", lambda: net(nn.LSTM(4, 4, num_layers=2, dropout=0.95)), WARNING, "3"),
    ("norm_eps", lambda: net(nn.LayerNorm(3, eps=1)), WARNING, "3"),
    ("norm_eps", lambda: net(nn.BatchNorm1d(3, 0.1)), WARNING, "3"),
    ("norm_eps", lambda: net(nn.RMSNorm(3, eps=0.5)), WARNING, "3"),
    ("norm_eps", lambda: net(nn.GroupNorm(1, 3, eps=0.0)), INFO, "3"),
    ("norm_momentum", lambda: net(nn.BatchNorm1d(3, momentum=0.99)), INFO, "3"),
    ("norm_momentum", lambda: net(nn.BatchNorm1d(3, momentum=9.0)), WARNING, "3"),
    ("slope", lambda: net(nn.LeakyReLU(True)), WARNING, "3"),
    ("slope", lambda: net(nn.LeakyReLU(1)), WARNING, "3"),
    ("slope", lambda: net(nn.LeakyReLU(5.0)), INFO, "3"),
    ("heads", lambda: Attention(5, 64), WARNING, ""),
    ("heads", lambda: Attention(64, 128), WARNING, ""),
    ("heads", lambda: net(Attention(12, 64)), WARNING, "3"),
    ("repeated", lambda: nn.ModuleList([Block()] * 3), WARNING, ""),
    ("repeated", lambda: nn.Sequential(*[Block()] * 6), WARNING, ""),
    ("repeated", lambda: nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 8)] * 2), WARNING, ""),
    ("repeated", lambda: nn.ModuleList([nn.Linear(4, 4)] * 3), INFO, ""),
    ("dtypes", converted, INFO, ""),
    ("linear_twice", lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 4)), INFO, ""),
    ("softmax_dim", lambda: net(nn.Softmax(dim=0)), INFO, "3"),
    ("stride", lambda: nn.Sequential(nn.Conv2d(3, 4, 2, stride=3)), INFO, "0"),
    ("vocabulary", lambda: Text(100, 99), INFO, "lm_head"),
    (
        "layout",
        lambda: nn.ModuleList([nn.LSTM(4, 4, batch_first=True), nn.MultiheadAttention(4, 2)]),
        INFO,
        "1",
    ),
]


@pytest.mark.parametrize(("key", "make", "severity", "path"), ODD_MODULES)
def test_an_odd_module_is_told_on_entry(key: str, make: Callable[[], nn.Module], severity: Severity, path: str) -> None:
    model = make()
    (found,) = entered(model, SGD(model.parameters(), lr=0.1))
    assert (found.code, found.severity, found.module, found.step) == ("GG331", severity, path, 0), found.seen
    assert found.cause_id == f"{key} {path}"


USUAL_MODULES: list[Callable[[], nn.Module]] = [
    lambda: nn.Transformer(16, 4, 2, 2, 32, batch_first=True),
    lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32), 3, enable_nested_tensor=False),
    lambda: nn.Sequential(nn.Conv2d(3, 8, 7, stride=2), nn.BatchNorm2d(8, eps=1e-3, momentum=0.01), nn.ReLU(True)),
    lambda: nn.Sequential(nn.Conv2d(3, 8, 1, stride=2), nn.GroupNorm(2, 8), nn.LeakyReLU(0.2, inplace=True)),
    lambda: nn.Sequential(nn.Conv2d(3, 8, 16, stride=16), nn.Dropout2d(0.5), nn.Softmax(dim=-1)),
    lambda: nn.Sequential(nn.Linear(64, 4), nn.Linear(4, 64)),
    lambda: nn.ModuleList([nn.LSTM(4, 4, 2, batch_first=True, dropout=0.5), nn.GRU(4, 4, batch_first=True)]),
    lambda: nn.Sequential(nn.Linear(4, 4), shared := nn.ReLU(), nn.Linear(4, 4), shared),
    lambda: Attention(4, 128),
    lambda: Attention(4, 8),
    lambda: Attention(12, 64, head_dim=32),
    lambda: nn.ModuleList(Block() for _ in range(4)),
    lambda: Text(100, 100),
    lambda: Text(100, 7),
    lambda: nn.Sequential(nn.InstanceNorm1d(3), nn.BatchNorm1d(3, momentum=None), nn.Embedding(4, 4, padding_idx=0)),
    lambda: nn.ModuleList(nn.Linear(4, 4).half() for _ in range(3)),
]


@pytest.mark.parametrize("make", USUAL_MODULES)
def test_an_ordinary_model_is_left_alone(make: Callable[[], nn.Module]) -> None:
    model = make()
    assert entered(model, SGD([torch.zeros(1, requires_grad=True), *model.parameters()], lr=0.1)) == []


def test_modules_with_the_same_setting_are_told_together() -> None:
    model = nn.Sequential(*(net(nn.Dropout(0.9)) for _ in range(4)))
    (found,) = entered(model, SGD(model.parameters(), lr=0.1))
    assert found.evidence["modules"] == ["0.3", "1.3", "2.3", "3.3"]
    assert "3 more like it" in found.seen


# What takes the first steps to judge.


def test_a_loss_that_is_maximised() -> None:
    makes: list[MakeOptimizer] = [
        lambda p: SGD(p, lr=0.01, maximize=True),
        lambda p: Adam(p, maximize=True),
        lambda p: AdamW([{"params": list(p), "maximize": True}]),
    ]
    losses: list[Callable[[Tensor, Tensor], Tensor]] = [
        F.cross_entropy,
        lambda scores, y: F.cross_entropy(scores, y) / 4,
        lambda scores, y: F.mse_loss(scores[:, 0], y.float()),
    ]
    for make, loss_of in zip(makes, losses, strict=True):
        (found,) = trained(make, loss_of)
        assert (found.code, found.severity, found.step) == ("GG330", WARNING, 0)
        assert "maximize is True" in found.seen
        assert "larger in each step" in found.causes[0]


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda scores, y: -F.cross_entropy(scores, y),
        lambda scores, y: F.cross_entropy(scores, y) * -0.5,
        lambda scores, y: scores.log_softmax(1).gather(1, y[:, None]).mean(),
    ],
)
def test_what_is_to_grow_may_be_maximised(loss_of: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert trained(lambda p: SGD(p, lr=0.01, maximize=True), loss_of) == []


def test_an_input_that_is_moved_to_fool_the_model() -> None:
    model, shift = net(), torch.zeros(6, requires_grad=True)
    optimizer = SGD([shift], lr=0.1, maximize=True)
    with Guardian(model, optimizer, guards=[FirstLook()], sinks=[], summary=False) as guardian:
        for _ in range(3):
            F.cross_entropy(model(torch.randn(8, 6) + shift), torch.zeros(8, dtype=torch.long)).backward()
            optimizer.step()
    assert list(guardian.findings) == []


@pytest.mark.parametrize(("lr", "text"), [(10.0, "lr is 10"), (1.0, "lr is 1"), (1e-9, "nothing moves it")])
def test_a_rate_that_adam_cannot_train_with(lr: float, text: str) -> None:
    (found,) = trained(lambda p: Adam(p, lr=lr))
    assert (found.code, found.severity) == ("GG330", WARNING)
    assert text in found.seen


def test_rates_that_the_loop_or_a_scheduler_sets() -> None:
    for scheduled in (True, False):
        model = net()
        optimizer = Adam(model.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1e-9 * (step + 1) ** 3)
        with Guardian(model, optimizer, guards=[FirstLook()], sinks=[], summary=False) as guardian:
            for step in range(5):
                if not scheduled:
                    optimizer.param_groups[0]["lr"] = 1e-9 * (step + 1)
                F.cross_entropy(model(torch.randn(8, 6)), torch.zeros(8, dtype=torch.long)).backward()
                optimizer.step()
                if scheduled:
                    schedule.step()
        assert list(guardian.findings) == []


def test_it_tells_once_over_a_resume_and_leaves_nothing_behind() -> None:
    model = net(nn.Dropout(0.9))
    optimizer = SGD(model.parameters(), lr=0.1)
    guard = FirstLook()
    with Guardian(model, optimizer, guards=[guard], sinks=[], summary=False) as first:
        state = first.state_dict()
    assert "GG331" in [each.code for each in first.findings]
    assert guard._watch is None
    again = Guardian(model, optimizer, guards=[FirstLook()], sinks=[], summary=False)
    again.load_state_dict(state)
    with again:
        pass
    assert "GG331" not in [each.code for each in again.findings]
