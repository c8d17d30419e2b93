"""Stage 9: gradients are there, finite and not zero; each planted bug is named, each healthy model passes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard.checks.gradients.backward import Task, gradient_norms
from gpt_guard.checks.gradients.diagnosis import diagnose
from gpt_guard.checks.gradients.stage import GradientsStage
from gpt_guard.checks.runner.base import Subject
from gpt_guard.checks.runner.run import preflight
from gpt_guard.records import CheckResult, Finding
from mini_gpt import MiniGPT, MiniGPTConfig

V, T, C = 23, 12, 16
CONFIG = MiniGPTConfig(V, block_size=16, embedding_dim=C, num_heads=2, num_layers=2, dropout=0.0)
BAD_AT_ZERO = -100.0


def gpt(kind: Callable[[MiniGPTConfig], MiniGPT] = MiniGPT) -> Any:  # bugs are planted in its attributes
    return kind(CONFIG)


def batch() -> tuple[Tensor, Tensor]:
    rows = torch.randint(V, (4, T + 1))
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def after(module: nn.Module, change: Callable[[Any], Any]) -> None:
    """Plant a bug behind one module."""
    original = module.forward
    module.forward = lambda *args, **kwargs: change(original(*args, **kwargs))


def checks(model: nn.Module, **fields: Any) -> tuple[CheckResult, ...]:
    fields.setdefault("batch", batch())
    fields.setdefault("vocab_size", V)
    return preflight(Subject(model=model, **fields), [GradientsStage()]).checks


def findings(model: nn.Module, **fields: Any) -> list[Finding]:
    """The findings of the lines that failed."""
    return [found for result in checks(model, **fields) if result.status == "failed" for found in result.findings]


# Healthy models.


class Split(nn.Module):
    """Keys of their own, whose bias has mathematically no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(C, C) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(-1, -2) / C**0.5
        out: Tensor = scores.softmax(-1) @ self.value(x)
        return out


class Experts(nn.Module):
    """Each token goes to one of sixteen experts; those without a token are not called."""

    def __init__(self, count: int = 16) -> None:
        super().__init__()
        self.router = nn.Linear(C, count)
        self.experts = nn.ModuleList(nn.Linear(C, C) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        weight, choice = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            chosen = choice == index
            if chosen.any():
                out[chosen] = expert(x[chosen]) * weight[chosen].unsqueeze(-1)
        return out


class MaskedExperts(Experts):
    """All experts are called, and multiplied by zero where they were not chosen."""

    def forward(self, x: Tensor) -> Tensor:
        gates = self.router(x).softmax(-1)
        gates = gates * F.one_hot(gates.argmax(-1), 16)
        return torch.stack([expert(x) * gates[..., [i]] for i, expert in enumerate(self.experts)]).sum(0)


class Lora(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(base.in_features, 2))
        self.b = nn.Parameter(torch.zeros(2, base.out_features))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + x @ self.a @ self.b
        return out


class Around(nn.Module):
    """An embedding, one part, and a head; logits alone."""

    def __init__(self, part: nn.Module, *, sparse: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, C, sparse=sparse)
        self.part = part
        self.head = nn.Linear(C, V)

    def forward(self, idx: Tensor) -> Tensor:
        x = self.embedding(idx)
        out: Tensor = self.head(x + self.part(x))
        return out


class Object(MiniGPT):
    def forward(self, token_ids: Tensor, labels: Tensor | None = None) -> Any:
        logits, loss = super().forward(token_ids, labels)
        return SimpleNamespace(logits=logits, loss=loss)


class LayerDrop(MiniGPT):
    """In training mode a block is left out half of the time."""

    def forward(self, token_ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        blocks = self.blocks
        kept = [block for block in blocks if not self.training or torch.rand(()) < 0.5]
        self.blocks = nn.ModuleList(kept)
        try:
            return super().forward(token_ids, targets)
        finally:
            self.blocks = blocks


def tied() -> Any:
    model = gpt()
    model.head.weight = model.token_embedding.weight
    return model


def lora() -> Any:
    model = gpt().requires_grad_(False)
    for block in model.blocks:
        projection = block.attention.projection
        assert isinstance(projection, nn.Linear)
        block.attention.projection = Lora(projection)
    return model


def zero_initialised() -> Any:
    """Residual branches and head start at zero: at step 0 only the head has a gradient."""
    model = gpt()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("head") or "projection" in name or "down" in name:
                parameter.zero_()
    return model


def frozen_part() -> Any:
    model = gpt()
    model.blocks[0].requires_grad_(False)
    return model


HEALTHY: dict[str, Callable[[], nn.Module]] = {
    "gpt": gpt,
    "eval mode": lambda: gpt().eval(),
    "tied weights": tied,
    "bfloat16": lambda: gpt().bfloat16(),
    "lora": lora,
    "zero-initialised": zero_initialised,
    "frozen part": frozen_part,
    "object": lambda: gpt(Object),
    "layer drop": lambda: gpt(LayerDrop),
    "key bias": lambda: Around(Split()),
    "experts": lambda: Around(Experts()),
    "masked experts": lambda: Around(MaskedExperts()),
    "sparse embedding": lambda: Around(nn.Linear(C, C), sparse=True),
    "bias before normalisation": lambda: Around(nn.Sequential(nn.Linear(C, C), nn.LayerNorm(C))),
}


@pytest.mark.parametrize("make", HEALTHY.values(), ids=HEALTHY.keys())
def test_healthy_models_pass(make: Callable[[], nn.Module]) -> None:
    model = make()
    results = checks(model)
    assert [result.status for result in results] == ["passed"] * 4, findings(model)
    facts: dict[str, Any] = {name: value for result in results for name, value in result.facts.items()}
    assert facts["grad_norm"] > 0
    assert facts["missing_gradients"] == []


def test_sixty_four_experts_and_one_row() -> None:
    x, y = batch()
    results = checks(Around(Experts(64)), batch=(x[:1], y[:1]))
    assert {result.status for result in results} == {"passed"}
    assert "only on other inputs" in results[0].measured


def test_a_head_of_another_task_is_worth_a_note_only() -> None:
    class Heads(Around):
        def __init__(self) -> None:
            super().__init__(nn.Linear(C, C))
            self.heads = nn.ModuleDict({"this": nn.Linear(C, V), "other": nn.Linear(C, V)})
            del self.head

        def forward(self, idx: Tensor) -> Tensor:
            out: Tensor = self.heads["this"](self.part(self.embedding(idx)))
            return out

    results = checks(Heads())
    assert {result.status for result in results} == {"passed"}
    (note,) = results[0].findings
    assert note.module == "heads.other"
    assert note.severity == "info"


def test_everything_is_as_before() -> None:
    model, (x, y) = gpt(), batch()
    model(x, y)[1].backward()
    before = {name: (p.detach().clone(), p.grad) for name, p in model.named_parameters()}
    model.eval()
    state = torch.get_rng_state()
    diagnose(model, Task(x, y), V)
    assert torch.equal(state, torch.get_rng_state())
    assert not any(module.training or module._forward_pre_hooks for module in model.modules())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name][0])
        assert parameter.grad is before[name][1]


# Planted bugs.


def test_an_unused_layer_is_named() -> None:
    model = gpt()
    model.leftover = nn.Linear(C, C)
    (found,) = findings(model)
    assert (found.code, found.module) == ("GG202", "leftover")
    assert "never called in forward" in found.causes[0]
    assert "leftover.weight" in found.seen
    assert checks(model)[0].facts["missing_gradients"] == ["leftover.weight", "leftover.bias"]


def test_a_loop_that_ends_one_early_is_no_idle_expert() -> None:
    class Short(MiniGPT):
        def forward(self, token_ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
            blocks = self.blocks
            self.blocks = blocks[:-1]
            try:
                return super().forward(token_ids, targets)
            finally:
                self.blocks = blocks

    (found,) = findings(gpt(Short))
    assert (found.code, found.module) == ("GG202", "blocks.1")
    assert "never called in forward" in found.causes[0]


def test_a_detached_branch_is_named_with_the_place() -> None:
    model = gpt()
    after(model.blocks[0].mlp, lambda output: output.detach())
    (found,) = findings(model)
    assert found.code == "GG202"
    assert "the graph was cut behind it" in found.causes[0]
    assert "between `blocks.0.mlp.down` and `blocks.1.attention_norm`" in found.seen
    assert found.module == "blocks.0"


def test_a_branch_without_gradient_mode_is_named() -> None:
    model = gpt()
    original = model.blocks[1].mlp.forward
    model.blocks[1].mlp.forward = torch.no_grad()(original)
    (found,) = findings(model)
    assert found.code == "GG202"
    assert "torch.no_grad()" in found.causes[0]
    assert "between `blocks.1.mlp.down` and `norm`" in found.seen


def test_an_unused_parameter_beside_used_ones() -> None:
    model = gpt()
    model.blocks[0].attention.scale = nn.Parameter(torch.ones(1))
    (found,) = findings(model)
    assert found.parameter == "blocks.0.attention.scale"
    assert "without this parameter" in found.causes[0]


def test_layers_in_a_python_list_are_found() -> None:
    model = gpt()
    model.hidden = [nn.Linear(C, C)]
    after(model.norm, model.hidden[0])
    (found,) = findings(model)
    assert (found.code, found.parameter) == ("GG303", "hidden")
    assert "Python list" in found.causes[0]
    optimizer = torch.optim.SGD([*model.parameters(), *model.hidden[0].parameters()], lr=0.1)
    assert findings(model, optimizer=optimizer) == []


def test_a_branch_times_zero_is_dead() -> None:
    model = gpt()
    after(model.blocks[0].mlp, lambda output: output * 0.0)
    (found,) = findings(model)
    assert (found.code, found.module) == ("GG304", "blocks.0")
    assert "multiplied by zero" in found.causes[0]
    assert "between `blocks.0.mlp.down` and `blocks.1.attention_norm`" in found.seen


def test_both_halves_of_an_adapter_at_zero_never_learn() -> None:
    model = lora()
    adapter = model.get_submodule("blocks.0.attention.projection")
    assert isinstance(adapter, Lora)
    nn.init.zeros_(adapter.a)
    (found,) = findings(model)
    assert found.code == "GG304"
    assert found.module == "blocks.0.attention.projection"


def test_dead_units_are_told_from_a_branch_times_zero() -> None:
    model = gpt()
    model.blocks[0].mlp.activation = nn.ReLU()
    nn.init.constant_(model.blocks[0].mlp.up.bias, BAD_AT_ZERO)
    (found,) = findings(model)
    assert found.code == "GG304"
    assert "dead" in found.causes[0]
    assert "What goes into `blocks.0.mlp.down` is zero" in found.seen


def test_a_cancelled_bias_is_no_failure() -> None:
    class Cancelled(Split):
        def forward(self, x: Tensor) -> Tensor:
            # The exact form of a bias that does not matter: it is taken away again.
            return super().forward(x) + self.value.bias.detach() * 0 + (self.key.bias - self.key.bias)

    class Without(Split):
        def forward(self, x: Tensor) -> Tensor:
            keys = F.linear(x, self.key.weight) + 0.0 * self.key.bias
            out: Tensor = (self.query(x) @ keys.transpose(-1, -2)).softmax(-1) @ self.value(x)
            return out

    assert findings(Around(Cancelled())) == []
    results = checks(Around(Without()))
    assert {result.status for result in results} == {"passed"}
    (note,) = results[2].findings
    assert note.parameter == "part.key.bias"
    assert note.severity == "info"


def test_a_batch_of_ignored_targets() -> None:
    x, y = batch()
    (found,) = findings(gpt(), batch=(x, torch.full_like(y, -100)))
    assert found.code == "GG102"
    assert "ignore_index" in found.causes[0]


def test_a_loss_of_zero() -> None:
    (found,) = findings(gpt(), loss_fn=lambda logits, y: (logits * 0.0).sum())
    assert found.code == "GG201"
    assert "masked or ignored" in found.causes[0]


def test_a_frozen_model() -> None:
    (found,) = findings(gpt().requires_grad_(False))
    assert found.code == "GG310"
    assert "whole model was frozen" in found.causes[0]


def test_a_loss_without_graph() -> None:
    def detached(logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits.detach().flatten(0, 1), y.flatten())

    (found,) = findings(gpt(), loss_fn=detached)
    assert found.code == "GG220"
    assert ".detach()" in found.causes[0]
    model = gpt()
    model.forward = torch.no_grad()(model.forward)
    (found,) = findings(model)
    assert found.code == "GG220"
    assert "no_grad" in found.causes[0]


def test_nan_is_named_where_it_is_made() -> None:
    model = gpt()
    nn.init.constant_(model.head.weight, float("nan"))
    (found,) = findings(model)
    assert (found.code, found.parameter) == ("GG105", "head.weight")

    model = gpt()
    after(model.blocks[0].mlp.down, lambda output: output / 0.0)
    (found,) = findings(model)
    assert (found.code, found.module) == ("GG101", "blocks.0.mlp.down")

    model = gpt()
    after(model.blocks[1], lambda output: output + (output * 0).sum().sqrt())
    (found,) = findings(model)
    assert found.code == "GG104"
    assert found.module is not None
    assert found.module.startswith("blocks.1")


def test_norms_are_exact_about_zero_and_infinity() -> None:
    tiny, huge, none = (nn.Parameter(torch.zeros(3)) for _ in range(3))
    tiny.grad, huge.grad = torch.full((3,), 1e-30), torch.full((3,), 1e30)
    norms = gradient_norms({"tiny": tiny, "huge": huge, "none": none})
    assert norms["none"] is None
    assert norms["tiny"] == pytest.approx(3**0.5 * 1e-30)
    assert norms["huge"] == pytest.approx(3**0.5 * 1e30)


def test_nothing_is_asked_without_a_batch() -> None:
    (result,) = preflight(Subject(model=nn.Linear(2, 2)), [GradientsStage()]).checks
    assert result.status == "skipped"
    assert "no batch" in result.measured
