"""When the model is asked, what is said where it is not, and that nothing is left behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard.callbacks.attention.embedding import IndexCalls
from gpt_guard.callbacks.attention.guard import AttentionCalls
from gpt_guard.callbacks.base import Guard
from gpt_guard.callbacks.modes.guard import EvalModeAssert
from gpt_guard.callbacks.probes.guard import ModelProbe
from gpt_guard.errors import DataError, GuardUsageError
from gpt_guard.guardian import Guardian

from ...cases import probe_twin_texts as healthy
from ...cases.model_probes import language, text
from ...cases.probe_models import Language


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def guard(model: nn.Module, optimizer: torch.optim.Optimizer, *given: Guard, **options: Any) -> Guardian:
    all_of_them = [ModelProbe(), AttentionCalls(), IndexCalls(), EvalModeAssert()]
    return Guardian(model, optimizer, guards=list(given) or all_of_them, sinks=[], **options)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3)


# What is not asked is said.


def left_out(guardian: Guardian) -> list[str]:
    """What ModelProbe could not tell."""
    return [spot for spot in guardian.report().not_watched if spot.startswith("ModelProbe")]


def blind(model: nn.Module, *given: Guard, batch: Any = None) -> str:
    optimizer = adam(model)
    with guard(model, optimizer, *(given or (ModelProbe(),))) as guardian:
        x, y = text()
        F.cross_entropy(model(x if batch is None else batch).flatten(0, 1), y.flatten()).backward()
        optimizer.step()
    assert guardian.findings == ()
    return "\n".join(guardian.report().not_watched)


def test_a_budget_that_is_spent_is_said() -> None:
    assert "budget of 1e-06 seconds" in blind(Language("bare"), ModelProbe(budget=1e-6))


def test_hooks_of_the_users_own_do_not_run_once_more() -> None:
    model, calls = Language("bare"), []
    model.head.register_forward_hook(lambda *given: calls.append(1))
    assert "hooks of your own" in blind(model)
    assert len(calls) == 1


def test_inputs_that_cannot_be_copied_are_left_alone() -> None:
    class Ids:
        def __init__(self, ids: Tensor) -> None:
            self.ids = ids

    class Unpacking(Language):
        def forward(self, ids: Any) -> Tensor:
            return super().forward(ids.ids)

    assert "given a Ids" in blind(Unpacking("bare"), batch=Ids(text()[0]))


def test_a_model_that_cannot_run_without_gradient_is_said() -> None:
    class Forces(Language):
        def forward(self, ids: Tensor) -> Tensor:
            if not torch.is_grad_enabled():
                raise RuntimeError("needs its own gradient")
            return super().forward(ids)

    assert "RuntimeError: needs its own gradient" in blind(Forces("bare"))


def test_what_the_probe_leaves_is_as_it_was_after_an_error_inside_of_it() -> None:
    class Breaks(Language):
        def forward(self, ids: Tensor) -> Tensor:
            if not torch.is_grad_enabled():
                self.note = "left behind"
                self.embed.weight.add_(1.0)
                raise RuntimeError("half-way")
            return super().forward(ids)

    model, bare = Breaks(), Breaks()
    bare.load_state_dict(model.state_dict())
    optimizer, other = adam(model), adam(bare)
    x, y = text()
    with guard(model, optimizer):
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()
    F.cross_entropy(bare(x).flatten(0, 1), y.flatten()).backward()
    other.step()
    assert not hasattr(model, "note")
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), bare.parameters(), strict=True))
    assert model.training
    assert torch.backends.mha.get_fastpath_enabled()


def test_as_many_rows_as_tokens() -> None:
    def classes(model: nn.Module, length: int) -> Guardian:
        optimizer = adam(model)
        with guard(model, optimizer, ModelProbe()) as guardian:
            F.cross_entropy(model(text(6, length)[0]), torch.zeros(6, dtype=torch.long)).backward()
            optimizer.step()
        return guardian

    leaking = Language("bare", pooled=2, after="mean_over_rows")
    assert "cannot be told" in str(classes(leaking, 6).report().not_watched)
    assert classes(leaking, 6).findings == ()
    assert not left_out(classes(leaking, 5))
    assert [found.code for found in classes(leaking, 5).findings] == ["GG661"]


@pytest.mark.parametrize("rows", [2, 5, 10])
def test_rows_of_a_language_model_are_known_by_its_targets(rows: int) -> None:
    model = Language(after="mean_over_rows")
    optimizer = adam(model)
    with guard(model, optimizer, ModelProbe()) as guardian:
        x, y = text(rows, 10)
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()
    assert [found.code for found in guardian.findings] == ["GG661"]
    assert not left_out(guardian)


# When it is asked.


def probed(model: nn.Module, steps: int, **options: Any) -> dict[str, int]:
    optimizer = adam(model)
    with guard(model, optimizer, ModelProbe(), **options) as guardian:
        language(model, optimizer, steps)
        session = guardian._session
        assert session is not None
        return dict(session.watch.inspection.probes)


def test_once_in_each_stretch_of_inspected_steps() -> None:
    assert probed(Language(), 9)["causality"] == 1
    assert probed(Language(), 9, inspect_every=3)["causality"] == 2
    assert probed(Language(), 9, inspect_steps=0) == {}


def test_again_on_demand_but_said_once() -> None:
    model = Language("bare")
    optimizer = adam(model)
    with guard(model, optimizer, ModelProbe()) as guardian:
        language(model, optimizer, 5)
        guardian.inspect_now()
        language(model, optimizer, 2)
        session = guardian._session
        assert session is not None
        assert session.watch.inspection.probes["causality"] == 2
    assert [found.code for found in guardian.findings] == ["GG660"]


@pytest.mark.parametrize("fails", [False, True])
def test_detached_on_every_way_out(fails: bool) -> None:
    model = Language()
    given: list[Guard] = [ModelProbe(), AttentionCalls(), IndexCalls(), EvalModeAssert()]
    optimizer = adam(model)
    try:
        with guard(model, optimizer, *given):
            language(model, optimizer, 1)
            if fails:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert all(each._watch is None for each in given)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    language(model, optimizer, 1)


def test_strict_halts_at_the_line_of_the_lookup() -> None:
    model = Language()
    optimizer = adam(model)
    with pytest.raises(DataError, match="GG631"), guard(model, optimizer, strict=True):
        model(text()[0] + 1000)


# What is meant.


def test_leaks_that_are_allowed() -> None:
    model = Language("bare")
    with guard(model, optimizer := adam(model), ModelProbe(allow="blocks.*")) as guardian:
        language(model, optimizer, 2)
    assert guardian.findings == ()


def test_masks_that_are_allowed() -> None:
    model = Language("future_and_itself")
    with guard(model, optimizer := adam(model), AttentionCalls(allow=["blocks.*"])) as guardian:
        language(model, optimizer, 2)
    assert guardian.findings == ()


@pytest.mark.parametrize("allow", [(), ("",)])
def test_monte_carlo_dropout_that_was_allowed(allow: tuple[str, ...]) -> None:
    model = Language(after="dropout")
    with guard(model, optimizer := adam(model), ModelProbe(), EvalModeAssert(allow=allow)) as guardian:
        language(model, optimizer, 2)
    assert [found.code for found in guardian.findings] == ([] if allow else ["GG505"])


@pytest.mark.parametrize("budget", [0, -1.0, "much"])
def test_a_budget_that_cannot_work(budget: Any) -> None:
    with pytest.raises(GuardUsageError, match="budget"):
        ModelProbe(budget=budget)


def test_a_causal_flag_is_told_in_an_evaluation_too() -> None:
    model = healthy.Bidirectional(0)
    optimizer = adam(model)
    with guard(model, optimizer, AttentionCalls()) as guardian:
        for _ in range(4):
            optimizer.zero_grad()
            healthy.rebuilt(model).backward()
            optimizer.step()
        with torch.no_grad():
            model.head = nn.Sequential(Behind(), model.head)  # type: ignore[assignment]  # torch does not mind
            model.eval()
            model(healthy.ids())
    assert [(found.code, found.evaluation) for found in guardian.findings] == [("GG668", True)]


class Behind(nn.Module):
    """One query and all keys, with the flag of training."""

    def forward(self, x: Tensor) -> Tensor:
        return x + F.scaled_dot_product_attention(x[..., -1:, :], x, x, is_causal=True)


def test_a_loss_in_forward_that_is_flattened_in_another_order_says_nothing_of_the_rows() -> None:
    """The model's own answer keeps them apart; LossInputs tells of the order (GG654)."""

    class WithLoss(Language):
        def forward(self, ids: Tensor, targets: Any = None) -> Any:
            logits = super().forward(ids)
            scores = logits.transpose(0, 1).reshape(-1, logits.size(-1))
            return logits, F.cross_entropy(scores, targets.reshape(-1))

    model = WithLoss("past_bool")
    optimizer = adam(model)
    with guard(model, optimizer, ModelProbe()) as guardian:
        for _ in range(3):
            optimizer.zero_grad()
            model(*text())[1].backward()
            optimizer.step()
    assert guardian.report().probes["independence of rows"] == 1
    assert [found.code for found in guardian.findings] == []
