from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, StepLR

from gpt_guard.catalogue import entry
from gpt_guard.checkpoint import load_checkpoint, save_checkpoint
from gpt_guard.errors import CheckpointError
from gpt_guard.records import Finding, Severity
from mini_gpt import MiniGPT

Build = Callable[..., MiniGPT]
Make = Callable[[Any], Any]


def refused(path: Path, model: nn.Module, optimizer: Any, untouched: Any, **options: Any) -> Finding:
    """The finding by which this load is refused, after which model and optimizer are as before."""
    before = untouched(model, *(optimizer if isinstance(optimizer, list) else [optimizer]))
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path, model, optimizer, **options)
    before.check()
    assert caught.value.finding.code == "GG708"
    return caught.value.finding


def likeliest(finding: Finding) -> str:
    return {cause.text: cause.key for cause in entry("GG708").causes}[finding.causes[0]]


def split(model: nn.Module) -> Optimizer:
    parameters = list(model.parameters())
    return AdamW([{"params": parameters[:5]}, {"params": parameters[5:]}])


CASES: list[tuple[Make, str, str]] = [
    (split, "groups", "1 param groups in the checkpoint, 2 in the optimizer"),
    (lambda m: AdamW(list(m.parameters())[:-1]), "count", "group 0 has 29 parameters in the checkpoint, 28"),
    (lambda m: AdamW(reversed(list(m.parameters()))), "order", "parameter 0 of group 0 is token_embedding.weight in"),
    (lambda m: SGD(m.parameters(), momentum=0.9), "kind", "an optimizer with betas; SGD has momentum"),
    (lambda m: Adagrad(m.parameters()), "kind", "Adagrad has lr_decay"),
    (lambda m: [AdamW(m.parameters()), AdamW(m.parameters())], "groups", "the state of 1 optimizers, 2 are given"),
]


@pytest.mark.parametrize(("make", "cause", "words"), CASES)
def test_a_state_that_does_not_fit_is_named(
    path: Path, build: Build, train: Any, untouched: Any, make: Make, cause: str, words: str
) -> None:
    model = build()
    optimizer = AdamW(model.parameters())
    train(model, optimizer)
    save_checkpoint(path, model, optimizer)
    again = build(1)
    finding = refused(path, again, make(again), untouched)
    assert likeliest(finding) == cause
    assert words in finding.seen


def test_parameters_moved_between_groups_of_one_size_are_seen(
    path: Path, build: Build, train: Any, untouched: Any
) -> None:
    def halves(model: nn.Module, turned: bool) -> Optimizer:
        norms = [m.weight for m in model.modules() if isinstance(m, nn.LayerNorm)]
        groups = [norms[:1], norms[1:2]]
        return AdamW([{"params": group} for group in (groups[::-1] if turned else groups)])

    model, again = build(), build(1)
    optimizer = halves(model, False)
    train(model, optimizer)
    save_checkpoint(path, model, optimizer)
    assert likeliest(refused(path, again, halves(again, True), untouched)) == "order"


def test_without_names_the_shapes_tell(path: Path, build: Build, train: Any, untouched: Any) -> None:
    model = build()
    optimizer = AdamW(model.parameters())
    train(model, optimizer)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    again = build(1)
    finding = refused(path, again, AdamW(reversed(list(again.parameters()))), untouched)
    assert likeliest(finding) == "shapes"
    assert "exp_avg of parameter 0 in group 0 is [13, 16], its parameter [13, 16]" not in finding.seen


def test_a_resume_whose_optimizer_state_is_absent_is_refused_and_can_be_allowed(
    path: Path, build: Build, untouched: Any, reported: list[Finding]
) -> None:
    save_checkpoint(path, build())
    model = build(1)
    assert likeliest(refused(path, model, AdamW(model.parameters()), untouched)) == "absent"
    load_checkpoint(path, model, AdamW(model.parameters()), strict=False, on_finding=reported.append)
    assert [(finding.code, finding.severity) for finding in reported] == [("GG708", Severity.WARNING)]


def test_an_optimizer_that_is_not_asked_for_is_left_alone(path: Path, build: Build) -> None:
    model = build()
    save_checkpoint(path, model, AdamW(model.parameters()))
    assert load_checkpoint(path, build(1)).findings == ()


@pytest.mark.parametrize(
    "state",
    [{}, {"param_groups": 3}, {"param_groups": [3]}, {"param_groups": [{"params": 1}]}, {"param_groups": [{}]}],
)
def test_what_is_no_optimizer_state_is_said(path: Path, build: Build, untouched: Any, state: dict[str, Any]) -> None:
    model = build()
    torch.save({"model": model.state_dict(), "optimizer": state}, path)
    finding = refused(path, model, AdamW(model.parameters()), untouched)
    assert likeliest(finding) == "kind"


class Picky(AdamW):
    """An optimizer that takes no state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict["state"]:
            raise KeyError("no")
        super().load_state_dict(state_dict)


def test_an_optimizer_that_refuses_by_itself_leaves_all_as_it_was(
    path: Path, build: Build, train: Any, untouched: Any
) -> None:
    model = build()
    optimizer = AdamW(model.parameters())
    train(model, optimizer)
    save_checkpoint(path, model, optimizer)
    again = build(1)
    finding = refused(path, again, Picky(again.parameters()), untouched)
    assert "Picky does not take the state" in finding.seen


def test_a_model_that_refuses_by_itself_leaves_the_optimizer_as_it_was(
    path: Path, build: Build, train: Any, untouched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build()
    optimizer = AdamW(model.parameters())
    train(model, optimizer)
    save_checkpoint(path, model, optimizer)
    again = build(1)
    fresh = AdamW(again.parameters())
    train(again, fresh, 1)
    before = untouched(again, fresh)

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("Error(s) in loading:\n\tno")

    monkeypatch.setattr(again, "load_state_dict", refuse)
    with pytest.raises(CheckpointError, match="GG705"):
        load_checkpoint(path, again, fresh)
    before.check()


SCHEDULERS: list[Make] = [
    lambda o: CosineAnnealingLR(o, 10),
    lambda o: StepLR(o, 3),
    lambda o: OneCycleLR(o, 0.1, total_steps=20),
    lambda o: LambdaLR(o, lambda step: 1 / (step + 1)),
]


@pytest.mark.parametrize("make", SCHEDULERS)
def test_a_scheduler_goes_on(path: Path, build: Build, train: Any, make: Make) -> None:
    model = build()
    optimizer = AdamW(model.parameters())
    scheduler = make(optimizer)
    train(model, optimizer, 3, scheduler)
    save_checkpoint(path, model, optimizer, scheduler=scheduler)
    again = build(1)
    fresh = AdamW(again.parameters())
    following = make(fresh)
    assert load_checkpoint(path, again, fresh, scheduler=following).findings == ()
    assert following.last_epoch == 3
    assert following.get_last_lr() == scheduler.get_last_lr()
    assert fresh.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_a_scheduler_of_another_kind_is_refused(path: Path, build: Build, untouched: Any) -> None:
    model = build()
    optimizer = AdamW(model.parameters())
    save_checkpoint(path, model, optimizer, scheduler=StepLR(optimizer, 3))
    finding = refused(path, model, optimizer, untouched, scheduler=CosineAnnealingLR(optimizer, 10))
    assert likeliest(finding) == "scheduler"
    assert "gamma" in finding.seen
    assert "T_max" in finding.seen


def test_a_scheduler_state_cannot_replace_the_schedulers_own_parts(path: Path, build: Build, untouched: Any) -> None:
    model = build()
    optimizer = AdamW(model.parameters())
    scheduler = StepLR(optimizer, 3)
    torch.save({"model": model.state_dict(), "scheduler": {**scheduler.state_dict(), "optimizer": 1}}, path)
    with pytest.raises(CheckpointError, match="it has optimizer"):
        load_checkpoint(path, model, scheduler=scheduler)


def test_several_schedulers_each_get_their_own(path: Path, build: Build, untouched: Any) -> None:
    model = build()
    optimizer = AdamW(model.parameters())
    schedulers = [StepLR(optimizer, 3), StepLR(optimizer, 5)]
    save_checkpoint(path, model, optimizer, scheduler=schedulers)
    fresh = [StepLR(optimizer, 1), StepLR(optimizer, 1)]
    load_checkpoint(path, model, optimizer, scheduler=fresh)
    assert [scheduler.step_size for scheduler in fresh] == [3, 5]
    finding = refused(path, model, optimizer, untouched, scheduler=fresh[0])
    assert "2 schedulers, 1 are given" in finding.seen


def test_a_checkpoint_without_scheduler_state_loads_with_a_warning(
    path: Path, build: Build, reported: list[Finding]
) -> None:
    model = build()
    optimizer = AdamW(model.parameters())
    save_checkpoint(path, model, optimizer)
    load_checkpoint(path, model, optimizer, scheduler=StepLR(optimizer, 3), on_finding=reported.append)
    assert [(finding.code, finding.severity, finding.cause_id) for finding in reported] == [
        ("GG708", Severity.WARNING, "scheduler")
    ]
