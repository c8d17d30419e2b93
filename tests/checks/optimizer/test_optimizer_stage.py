"""Stage 10: the optimizer holds exactly what is trainable, and a step from a fresh state changes each of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from gpt_guard.checks.optimizer.stage import OptimizerStage
from gpt_guard.checks.runner.base import Subject
from gpt_guard.checks.runner.run import preflight
from gpt_guard.records import CheckResult, Finding
from mini_gpt import MiniGPT, MiniGPTConfig

V, T, C = 23, 12, 16
STEP = "parameters that a step changes"


def gpt() -> Any:  # bugs are planted in its attributes
    return MiniGPT(MiniGPTConfig(V, block_size=16, embedding_dim=C, num_heads=2, num_layers=2, dropout=0.0))


def batch() -> tuple[Tensor, Tensor]:
    rows = torch.randint(V, (4, T + 1))
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def checks(model: nn.Module, optimizer: Optimizer | None = None, **fields: Any) -> tuple[CheckResult, ...]:
    fields.setdefault("batch", batch())
    return preflight(Subject(model=model, optimizer=optimizer, **fields), [OptimizerStage()]).checks


def findings(model: nn.Module, optimizer: Optimizer | None = None) -> list[Finding]:
    """The findings of the lines that failed."""
    results = checks(model, optimizer)
    return [found for result in results if result.status == "failed" for found in result.findings]


OPTIMIZERS: dict[str, Callable[[MiniGPT], Optimizer]] = {
    "adamw": lambda model: AdamW(model.parameters(), lr=3e-4),
    "adamw tensor lr": lambda model: AdamW(model.parameters(), lr=torch.tensor(3e-4)),
    "sgd momentum": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters()),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters()),
    "lbfgs": lambda model: torch.optim.LBFGS(model.parameters()),
    "groups": lambda model: AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=3e-4,
    ),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_optimizers_that_hold_everything_pass(make: Callable[[MiniGPT], Optimizer]) -> None:
    model = gpt()
    results = checks(model, make(model))
    assert {result.status for result in results} == {"passed"}, findings(model, make(model))
    assert results[0].measured == "29 of 29"
    size: Any = results[-1].facts["update_size"]
    assert size > 0


def test_without_an_optimizer_a_usual_one_steps_and_says_so() -> None:
    coverage, step, size = checks(gpt())
    assert coverage.status == "skipped"
    assert step.status == size.status == "passed"
    assert "AdamW at lr 1e-3, for none was given" in step.measured


def test_the_size_of_the_first_step_is_measured_exactly() -> None:
    model, data = gpt(), batch()
    size = checks(model, SGD(model.parameters(), lr=0.1), batch=data)[-1]
    model(*data)[1].backward()
    grad = sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None) ** 0.5
    weight = sum(float(p.detach().double().square().sum()) for p in model.parameters()) ** 0.5
    assert size.facts["update_size"] == pytest.approx(0.1 * grad / weight, rel=1e-4)
    largest = max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)
    assert size.facts["update_max"] == pytest.approx(0.1 * largest, rel=1e-3)


def test_model_and_optimizer_are_as_before() -> None:
    model = gpt()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 10)
    model(*batch())[1].backward()
    optimizer.step()
    scheduler.step()
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    gradients = [parameter.grad for parameter in model.parameters()]
    checks(model, optimizer)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert all(p.grad is grad for p, grad in zip(model.parameters(), gradients, strict=True))
    after = optimizer.state_dict()
    assert after["param_groups"] == state["param_groups"]
    for index, held in state["state"].items():
        assert all(torch.equal(value, after["state"][index][name]) for name, value in held.items())


def test_old_momentum_hides_nothing() -> None:
    """The weights still move by momentum, although the optimizer no longer gets a gradient for them."""
    model = gpt()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    model(*batch())[1].backward()
    optimizer.step()
    forward = model.blocks[0].mlp.forward
    model.blocks[0].mlp.forward = lambda x: forward(x).detach()
    (found,) = findings(model, optimizer)
    assert found.code == "GG202"
    assert "blocks.0.mlp.up.weight" in found.seen


# What is held.


def test_a_head_that_was_replaced_afterwards() -> None:
    model = gpt()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    model.head = nn.Linear(C, V)
    strange, uncovered = findings(model, optimizer)
    assert (strange.code, uncovered.code) == ("GG307", "GG302")
    assert uncovered.module == "head"
    assert "replaced after the optimizer" in uncovered.causes[0]
    assert uncovered.evidence["parameters"] == ["head.weight", "head.bias"]


def test_an_optimizer_of_one_part() -> None:
    model = gpt()
    (found,) = findings(model, AdamW(model.blocks.parameters(), lr=1e-3))
    assert found.code == "GG302"
    assert "a part of the model" in found.causes[0]


def test_an_optimizer_of_another_copy() -> None:
    model = gpt()
    results = checks(model, AdamW(copy.deepcopy(model).parameters(), lr=1e-3))
    assert [result.status for result in results] == ["failed", "passed", "skipped"]
    (found,) = results[0].findings
    assert found.code == "GG307"
    assert "deep-copied" in found.causes[0]


def test_a_prompt_trained_beside_the_model_is_well() -> None:
    model = gpt()
    scale = nn.Parameter(torch.ones(()))
    optimizer = AdamW([*model.parameters(), scale], lr=1e-3)

    def loss_fn(logits: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy((logits * scale).flatten(0, 1), y.flatten())

    assert {result.status for result in checks(model, optimizer, loss_fn=loss_fn)} == {"passed"}


def test_tied_weights_are_held_once() -> None:
    model = gpt()
    model.head.weight = model.token_embedding.weight
    optimizer = AdamW(model.parameters(), lr=1e-3)
    results = checks(model, optimizer)
    assert {result.status for result in results} == {"passed"}
    assert "token_embedding.weight = head.weight" in results[0].measured
    optimizer.param_groups[0]["params"].append(model.head.weight)
    (found,) = findings(model, optimizer)
    assert (found.code, found.parameter) == ("GG320", "token_embedding.weight")
    assert "Tied weights" in found.causes[0]


def test_a_frozen_model() -> None:
    model = gpt().requires_grad_(False)
    (found,) = findings(model, AdamW(model.parameters(), lr=1e-3))
    assert found.code == "GG310"
    (found,) = findings(model)
    assert found.code == "GG310"


# Learning rates.


@pytest.mark.parametrize(("lr", "code"), [(0.0, "GG401"), (-1e-3, "GG402"), (float("nan"), "GG402")])
def test_rates_that_cannot_train(lr: float, code: str) -> None:
    model = gpt()
    optimizer = AdamW([{"params": model.blocks.parameters()}, {"params": model.head.parameters()}], lr=1e-3)
    for name in ("token_embedding", "position_embedding", "norm"):
        model.get_submodule(name).requires_grad_(False)
    optimizer.param_groups[1]["lr"] = lr
    (found,) = findings(model, optimizer)
    assert found.code == code
    assert found.evidence["group"] == 1


def test_a_warm_up_that_starts_at_zero_is_well() -> None:
    model = gpt()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 100)
    assert optimizer.param_groups[0]["lr"] == 0.0
    results = checks(model, optimizer)
    assert {result.status for result in results} == {"passed"}
    assert optimizer.param_groups[0]["lr"] == 0.0


def test_steps_that_are_too_large_or_too_small() -> None:
    model = gpt()
    (found,) = findings(model, AdamW(model.parameters(), lr=0.3))
    assert found.code == "GG321"
    assert "too high" in found.causes[0]
    (found,) = findings(model, AdamW(model.parameters(), lr=1e-11))
    assert found.code == "GG309"
    assert "orders of magnitude too small" in found.causes[0]


# Steps.


def test_a_step_that_does_nothing() -> None:
    model = gpt()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    optimizer.step = lambda *args: None  # type: ignore[method-assign]  # the bug
    found = findings(model, optimizer)[0]
    assert found.code == "GG301"
    assert "was replaced" in found.causes[0]


def test_a_weight_that_is_put_back() -> None:
    class Restores(AdamW):
        def step(self, closure: Any = None) -> Any:
            held = self.param_groups[0]["params"][0]
            saved = held.detach().clone()
            super().step()
            held.data.copy_(saved)

    model = gpt()
    (found,) = findings(model, Restores(model.parameters(), lr=1e-3))
    assert (found.code, found.parameter) == ("GG304", "token_embedding.weight")
    assert "puts the old value back" in found.causes[0]


def test_a_frozen_part_stays_and_one_that_moves_is_named() -> None:
    class Decays(SGD):
        """Decays all that it holds, gradient or not."""

        def step(self, closure: Any = None) -> Any:
            super().step()
            for parameter in self.param_groups[0]["params"]:
                parameter.data.mul_(0.9)

    model = gpt()
    model.blocks[0].requires_grad_(False)
    results = checks(model, AdamW(model.parameters(), lr=1e-3, weight_decay=0.1))
    assert {result.status for result in results} == {"passed"}
    assert any(result.title.startswith("frozen") for result in results)
    (found,) = findings(model, Decays(model.parameters(), lr=1e-3))
    assert (found.code, found.module) == ("GG306", "blocks.0")


def test_half_precision() -> None:
    """At 1e-3 only the gains of the normalisation stand still, which is how bfloat16 is; at 1e-5 all do."""
    model = gpt().bfloat16()
    results = checks(model, AdamW(model.parameters(), lr=1e-3))
    assert {result.status for result in results} == {"passed"}
    assert "stood still" in next(result.measured for result in results if result.title == STEP)
    (found,) = findings(model, AdamW(model.parameters(), lr=1e-5))
    assert found.code == "GG305"


def test_adam_in_float16_breaks_the_weights() -> None:
    model = gpt().half()
    (found,) = findings(model, torch.optim.Adam(model.parameters(), lr=1e-3))
    assert found.code == "GG106"
    assert "eps=1e-8" in found.causes[0]


def test_a_key_bias_without_gradient_is_no_failure_under_sgd() -> None:
    """Its gradient is rounding noise, far too small to move it."""

    class Keys(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(V, C, sparse=True)
            self.query, self.key, self.head = nn.Linear(C, C), nn.Linear(C, C), nn.Linear(C, V)

        def forward(self, idx: Tensor) -> Tensor:
            x = self.embedding(idx)
            scores = self.query(x) @ self.key(x).transpose(-1, -2)
            out: Tensor = self.head(x + scores.softmax(-1) @ x)
            return out

    model = Keys()
    assert findings(model, SGD(model.parameters(), lr=0.1)) == []
    assert findings(model) == []
    assert model.embedding.sparse


def test_an_idle_expert_does_not_fail_the_step() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(V, C), nn.Linear(C, V)
            self.experts = nn.ModuleList(nn.Linear(C, C) for _ in range(4))

        def forward(self, idx: Tensor) -> Tensor:
            x = self.embedding(idx)
            choice = idx % 4
            out = torch.stack([self.experts[i](x) * (choice == i).unsqueeze(-1) for i in choice.unique().tolist()])
            logits: Tensor = self.head(out.sum(0))
            return logits

    model = Experts()
    even = torch.tensor([[0, 4, 8, 12]])
    results = checks(model, AdamW(model.parameters(), lr=1e-3), batch=(even, even + 1), vocab_size=V)
    assert {result.status for result in results} == {"passed"}
    assert "had no gradient to move by" in next(result.measured for result in results if result.title == STEP)


def test_without_a_batch_the_coverage_is_still_compared() -> None:
    model = nn.Linear(2, 2)
    results = preflight(Subject(model=model, optimizer=SGD(model.parameters(), lr=0.1)), [OptimizerStage()]).checks
    assert [result.status for result in results] == ["passed", "passed", "skipped"]
