"""GradNormMonitor in real training: zero, cleared, exploding and vanishing gradients; healthy runs without a word."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from gpt_guard.callbacks.gradients.guard import GradNormMonitor
from gpt_guard.errors import GuardUsageError
from gpt_guard.guardian import Guardian
from gpt_guard.records import Finding, Moment, Observation, Severity

Change = Callable[[int, Tensor], Tensor]


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def unchanged(_: int, loss: Tensor) -> Tensor:
    return loss


def train(
    model: nn.Module, optimizer: Optimizer, steps: int, *, change: Change = unchanged, clip: float | None = None
) -> None:
    for step in range(steps):
        x = torch.randn(32, 8)
        optimizer.zero_grad()
        change(step, F.mse_loss(model(x), x.sum(1, keepdim=True))).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def guarded(steps: int, *, guard: GradNormMonitor | None = None, lr: float = 0.02, **how: object) -> list[Finding]:
    model = mlp()
    optimizer = SGD(model.parameters(), lr=lr)
    with Guardian(model, optimizer, guards=[guard or GradNormMonitor()], summary=False, sinks=[]) as guardian:
        train(model, optimizer, steps, **how)  # type: ignore[arg-type]  # the keywords of train
    return list(guardian.findings)


def codes(findings: Iterable[Finding]) -> list[str]:
    return [finding.code for finding in findings]


def scaled(at: set[int], factor: float) -> Change:
    """Multiply the gradient but hardly the loss, so that the run itself is not thrown off."""
    return lambda step, loss: loss + (factor - 1) * (loss - loss.detach()) if step in at else loss


def test_a_healthy_run_is_quiet() -> None:
    assert guarded(200) == []


def test_zero_gradient_with_a_loss_is_told_at_once() -> None:
    (finding,) = guarded(10, change=lambda step, loss: loss * 0.0 + 1.0 if step == 5 else loss)
    assert finding.code == "GG201"
    assert finding.step == 5
    assert finding.evidence["loss"] == 1.0
    assert "does not depend on its weights" in finding.causes[0]


def test_zero_gradient_with_zero_loss_is_told_when_it_lasts() -> None:
    assert guarded(10, change=lambda step, loss: loss * float(step not in (4, 5))) == []
    (finding,) = guarded(10, change=lambda step, loss: loss * float(step not in (4, 5, 6)))
    assert (finding.code, finding.step) == ("GG201", 6)
    assert "nothing is left in it" in finding.causes[0]


def test_a_loss_that_was_learned_to_zero_is_information() -> None:
    x, y = torch.randn(8, 8), torch.randint(4, (8,))
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with Guardian(model, optimizer, guards=[GradNormMonitor()], summary=False, sinks=[]) as guardian:
        for _ in range(120):
            optimizer.zero_grad()
            F.multi_margin_loss(model(x), y).backward()
            optimizer.step()
    (finding,) = [each for each in guardian.findings if each.code == "GG201"]
    assert finding.severity is Severity.INFO
    assert "learned" in finding.causes[0]


@pytest.mark.parametrize(("steps", "told"), [(2, []), (8, [7]), (80, [49])])
def test_a_loss_of_zero_from_the_start_is_a_warning_when_it_lasts(steps: int, told: list[int]) -> None:
    findings = guarded(steps, change=lambda step, loss: loss * 0.0)
    assert [(f.code, f.step, f.severity) for f in findings] == [("GG201", step, Severity.WARNING) for step in told]


def test_rewards_that_come_late_are_quiet() -> None:
    assert guarded(40, change=lambda step, loss: loss * float(step > 20), lr=1e-3) == []


@pytest.mark.parametrize("how", ["item", "no_grad"])
def test_a_loss_without_a_graph_is_told_at_once(how: str) -> None:
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    with Guardian(model, optimizer, guards=[GradNormMonitor()], summary=False, sinks=[]) as guardian:
        for _ in range(6):
            optimizer.zero_grad()
            x = torch.randn(8, 8)
            if how == "item":
                loss = torch.tensor(model(x).square().mean().item(), requires_grad=True)
            else:
                with torch.no_grad():
                    loss = model(x).square().mean()
                loss.requires_grad_()
            loss.backward()
            optimizer.step()
    (finding,) = guardian.findings
    assert (finding.code, finding.step) == ("GG220", 0)
    assert "was called on a leaf" in finding.seen
    assert ".item()" in finding.causes[0]


def test_dead_relus_are_told() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1, bias=False))
    nn.init.constant_(model[0].bias, -100.0)  # type: ignore[arg-type]  # a Linear has one
    optimizer = SGD(model.parameters(), lr=0.02)
    with Guardian(model, optimizer, guards=[GradNormMonitor()], summary=False, sinks=[]) as guardian:
        train(model, optimizer, 2)
    assert [(f.code, f.step) for f in guardian.findings] == [("GG201", 0)]


def test_gradients_cleared_before_the_step_are_told() -> None:
    for to_none in (True, False):
        model = mlp()
        optimizer = SGD(model.parameters(), lr=0.1)
        with Guardian(model, optimizer, guards=[GradNormMonitor()], summary=False, sinks=[]) as guardian:
            for _ in range(4):
                model(torch.randn(4, 8)).sum().backward()
                optimizer.zero_grad(set_to_none=to_none)
                optimizer.step()
        (finding,) = guardian.findings
        assert (finding.code, finding.step, finding.severity) == ("GG208", 2, Severity.ERROR)
        assert "cleared between backward() and step()" in finding.causes[0]


def test_steps_without_any_backward_are_told_unless_they_are_few() -> None:
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    with Guardian(model, optimizer, guards=[GradNormMonitor()], summary=False, sinks=[]) as guardian:
        for step in range(12):
            optimizer.zero_grad()
            if step not in (3, 4, 7, 8, 9):
                model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
    assert [(f.code, f.step) for f in guardian.findings] == [("GG208", 9)]
    assert guardian.findings[0].evidence["backward_calls"] == 0


def test_an_optimizer_of_another_model_is_told_once_in_the_default_set() -> None:
    model = mlp()
    optimizer = SGD(mlp().parameters(), lr=0.1)
    with Guardian(model, optimizer, summary=False, sinks=[]) as guardian:
        train(model, optimizer, 4)
    assert [finding.code for finding in guardian.findings] == ["GG307"]


def test_a_spike_is_told_with_the_parameters_that_make_it() -> None:
    noted, finding = guarded(80, change=scaled({60, 61, 62}, 100.0), lr=1e-4)
    assert (noted.code, noted.step, noted.severity) == ("GG203", 60, Severity.INFO)
    assert (finding.code, finding.step, finding.severity) == ("GG203", 62, Severity.WARNING)
    assert "0.weight" in finding.seen
    assert finding.evidence["factor"] > 50.0  # type: ignore[operator]  # a float


@pytest.mark.parametrize("every", [7, 15, 40])
def test_spikes_that_go_back_are_a_note_once_however_often_they_come(every: int) -> None:
    found = observe([40.0 if step and step % every == 0 else norm for step, norm in enumerate(usual(200))])
    assert {each.severity for each in found} == {Severity.INFO}
    assert len({each.cause_id for each in found}) == 1


def test_a_spike_that_leaves_a_worse_loss_behind_is_a_warning() -> None:
    _, finding = observe([*usual(40), 500.0, *usual(3)], losses=[2.0] * 41 + [9.0, 8.5, 8.0])
    assert (finding.step, finding.severity) == (40, Severity.WARNING)
    assert "The loss of the next step is 9" in finding.seen


def observe(norms: list[float], *, losses: list[float] | None = None) -> list[Finding]:
    """Feed norms as a loop would, and return what is found at each step."""
    guard = GradNormMonitor()
    found: list[Finding] = []
    for step, norm in enumerate(norms):
        loss = 2.0 + 0.1 * math.sin(step) if losses is None else losses[step]
        found += guard.judge(observation(step, norm, loss))
    return found


def observation(step: int, norm: float, loss: float | None, *, clipped_to: float | None = None) -> Observation:
    applied = norm if clipped_to is None else min(norm, clipped_to)
    return Observation(
        step=step,
        moment=Moment.BEFORE_STEP,
        loss=loss,
        lr=(0.1,),
        grad_norm=norm,
        grad_norm_clipped=applied,
        clipped=applied < norm,
        grad_norms={"weight": norm},
    )


def usual(steps: int) -> list[float]:
    return [1.0 + 0.3 * math.sin(step) for step in range(steps)]


def test_a_jump_of_norm_and_loss_in_one_step_is_an_odd_batch_first() -> None:
    losses = [2.0] * 40
    (finding,) = observe([*usual(40), 500.0], losses=[*losses, 400.0])
    assert finding.causes[0].startswith("One odd batch")


def test_a_climb_over_several_steps_is_the_learning_rate_first() -> None:
    climb = [2.5, 5.0, 9.0]
    findings = observe([*usual(40), *climb, 40.0], losses=[2.0] * 40 + [3.0, 6.0, 12.0, 60.0])
    assert findings[0].causes[0].startswith("The learning rate is too high")


def test_nan_norms_enter_no_history() -> None:
    found = observe([*usual(40), math.nan, math.inf, *usual(5), 500.0, *usual(5)])
    assert [(f.code, f.step) for f in found] == [("GG203", 47)]


def test_a_spike_that_clipping_contained_is_only_information() -> None:
    findings = guarded(80, change=scaled({60}, 1000.0), clip=1.0, lr=0.05)
    (finding,) = [each for each in findings if each.code == "GG203"]
    assert (finding.step, finding.severity) == (60, Severity.INFO)
    assert "Clipping left 1 of it" in finding.seen


def test_a_spike_of_a_memorised_batch_is_only_information() -> None:
    losses = [4.0] + [0.01] * 60
    (finding,) = observe([*usual(60), 50.0], losses=losses)
    assert finding.severity is Severity.INFO
    assert "by heart" in finding.causes[0]


def test_a_lasting_level_is_adopted_and_said_once() -> None:
    found = observe([*usual(40), *[50.0 * norm for norm in usual(60)]])
    adopted = [f for f in found if "counts as the usual level" in f.seen]
    assert len(found) == 20
    assert [(f.step, f.severity) for f in adopted] == [(59, Severity.INFO)]
    assert len({f.cause for f in found}) == 3  # at first, when it lasts, when it is the new level


def test_a_lost_gradient_is_told_after_ten_steps() -> None:
    def lost(step: int, loss: Tensor) -> Tensor:
        return loss.detach() + 1e-5 * (loss - loss.detach()) if step >= 60 else loss

    (finding,) = guarded(90, change=lost, lr=0.002)
    assert (finding.code, finding.step) == ("GG204", 69)
    assert finding.evidence["in_a_row"] == 10


def test_a_vanishing_gradient_is_healthy_where_the_loss_is_at_its_lowest() -> None:
    norms = [*usual(40), *[1e-5] * 40]
    falling = [2.0 - 0.01 * step for step in range(40)] + [1.5] * 40
    assert observe(norms, losses=falling) == []


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_to_convergence_is_quiet(line_search: str | None) -> None:
    x = torch.randn(64, 8)
    y = x.sum(1, keepdim=True) + torch.randn(64, 1)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn=line_search)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    with Guardian(model, optimizer, guards=[GradNormMonitor()], summary=False, sinks=[]) as guardian:
        for _ in range(60):
            optimizer.step(closure)
    assert not guardian.findings


def test_full_batch_descent_to_convergence_is_quiet() -> None:
    x = torch.randn(64, 8)
    y = x.sum(1, keepdim=True) + torch.randn(64, 1)
    model = nn.Linear(8, 1)
    optimizer = SGD(model.parameters(), lr=0.3)
    with Guardian(model, optimizer, guards=[GradNormMonitor()], summary=False, sinks=[]) as guardian:
        for _ in range(300):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    assert not guardian.findings


def test_the_users_own_limit() -> None:
    assert guarded(5, guard=GradNormMonitor(warn_above=1e6)) == []
    (finding,) = guarded(5, guard=GradNormMonitor(warn_above=1e-6))
    assert (finding.code, finding.step) == ("GG207", 0)
    assert finding.evidence["warn_above"] == 1e-6


def test_history_survives_a_resume() -> None:
    before = GradNormMonitor()
    assert guarded(60, guard=before) == []
    after = GradNormMonitor()
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert after.state_dict() == before.state_dict()
    first, *_ = guarded(3, guard=after, change=scaled({1}, 1e5))
    assert (first.code, first.step) == ("GG203", 1)


def test_entered_again_it_remembers_but_not_for_another_run() -> None:
    guard, model = GradNormMonitor(), mlp()
    optimizer = SGD(model.parameters(), lr=0.02)
    with Guardian(model, optimizer, guards=[guard], summary=False, sinks=[]) as guardian:
        train(model, optimizer, 40)
    with guardian:
        train(model, optimizer, 2, change=scaled({1}, 1e5))
    assert codes(guardian.findings) == ["GG203"]
    assert guarded(2, guard=guard, change=scaled({1}, 1e5)) == []


def test_skipped_steps_and_evaluation_are_left_out() -> None:
    guard = GradNormMonitor()
    nothing = observation(0, 0.0, 1.0)
    assert list(guard.judge(nothing.model_copy(update={"skipped": True}))) == []
    assert list(guard.judge(nothing.model_copy(update={"evaluation": True}))) == []


@pytest.mark.parametrize(
    "limits",
    [
        {"warn_above": 0.0},
        {"spike_factor": 1.0},
        {"vanish_factor": 1.0},
        {"vanish_steps": 21},
        {"missing_after": 50},
        {"depth_limit": 1.0},
        {"depth_steps": 0},
        {"clip_window": 5},
        {"clip_share": 0.0},
        {"clip_ratio": 1.0},
        {"least": 1},
    ],
)
def test_limits_that_cannot_work_are_refused(limits: dict[str, float]) -> None:
    with pytest.raises(GuardUsageError, match=next(iter(limits))):
        GradNormMonitor(**limits)  # type: ignore[arg-type]  # that is the point


@pytest.mark.parametrize(
    "cut",
    [
        lambda output: output.detach().clone().requires_grad_(),
        lambda output: torch.tensor(output.tolist(), requires_grad=True),
        lambda output: torch.from_numpy(output.detach().numpy().copy()).requires_grad_(),
    ],
    ids=["detach", "tensor", "numpy"],
)
def test_a_graph_that_was_cut_and_made_to_require_gradients_is_named(cut: Callable[[Tensor], Tensor]) -> None:
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    with Guardian(model, optimizer, sinks=[], summary=False) as guardian:
        for _ in range(6):
            optimizer.zero_grad()
            cut(model(torch.randn(4, 8))).square().sum().backward()
            optimizer.step()
    found = next(each for each in guardian.findings if each.code == "GG208")
    assert found.step == 2
    assert "Its graph ends in a tensor of shape [4, " in found.seen
    assert found.causes[0].startswith("The loss or what it is made of lost its graph")


def test_the_loss_of_another_model_is_not_called_cut() -> None:
    model, other = mlp(), mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    with Guardian(model, optimizer, guards=[GradNormMonitor()], sinks=[], summary=False) as guardian:
        for _ in range(6):
            model(torch.randn(4, 8))
            other(torch.randn(4, 8)).square().sum().backward()
            optimizer.step()
    (found,) = guardian.findings
    assert found.causes[0].startswith("backward() is called on the loss of another model")
