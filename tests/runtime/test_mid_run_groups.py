"""Tensors that an optimizer gets in mid-run are watched as those that it had on entry."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from gpt_guard import Finding, Guardian, NonFiniteError

from .loop_kit import Kept

STEPS, ADDED, BAD = 12, 3, 6
READS = pytest.mark.parametrize("reads", ["immediate", "per_step"])


class Net(nn.Module):
    """A trunk and a head; a loose `scale` may stand outside of the model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.head = nn.Linear(4, 8), nn.Linear(8, 2)
        self.scale: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.trunk(x).relu())
        return out * self.scale[0] if self.scale else out


def new_head(model: Net, optimizer: Optimizer) -> str:
    model.head = nn.Linear(8, 2)
    optimizer.add_param_group({"params": list(model.head.parameters())})
    return "head.weight"


def head_in_place_of_the_old(model: Net, optimizer: Optimizer) -> str:
    model.head = nn.Linear(8, 2)
    optimizer.param_groups[0]["params"][-2:] = model.head.parameters()
    return "head.weight"


def head_in_another_list(model: Net, optimizer: Optimizer) -> str:
    model.head = nn.Linear(8, 2)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    return "head.weight"


def loose(model: Net, optimizer: Optimizer) -> str:
    scale = nn.Parameter(torch.ones(2))
    model.scale = [scale]
    optimizer.add_param_group({"params": [scale]})
    return "optimizer[0].param_groups[1][0]"


def unfreeze(model: Net, optimizer: Optimizer) -> str:
    model.trunk.requires_grad_(True)
    optimizer.add_param_group({"params": list(model.trunk.parameters())})
    return "trunk.weight"


Add = Callable[[Net, Optimizer], str]
ALL: list[Add] = [new_head, head_in_place_of_the_old, head_in_another_list, loose, unfreeze]
ADD = pytest.mark.parametrize("add", ALL)


def start(add: Add) -> tuple[Net, Optimizer]:
    model = Net()
    if add is unfreeze:
        model.trunk.requires_grad_(False)
    return model, SGD([each for each in model.parameters() if each.requires_grad], lr=0.05)


def named(model: Net, name: str) -> Tensor:
    return model.scale[0] if name.startswith("optimizer") else model.get_parameter(name)


def loop(model: Net, optimizer: Optimizer, add: Add, *, late: bool = False) -> Iterator[tuple[int, str, Tensor]]:
    """The step and what was added, between backward and step; `late` adds between a backward and its step."""
    name = ""
    torch.manual_seed(1)
    for step in range(STEPS):
        if step == ADDED and not late:
            name = add(model, optimizer)
        optimizer.zero_grad()
        loss = model(torch.randn(5, 4)).pow(2).mean()
        loss.backward()
        if step == ADDED and late:
            name = add(model, optimizer)
        yield step, name, loss
        optimizer.step()


Act = Callable[[Net, Optimizer, int, str], None]


def halted(model: Net, optimizer: Optimizer, add: Add, act: Act, *, late: bool = False, **options: Any) -> Finding:
    """What the loop is halted with, where `act` does something between each backward and its step."""
    with pytest.raises(NonFiniteError) as caught:
        guarded(model, optimizer, add, act, late=late, **options)
    return caught.value.finding


def guarded(model: Net, optimizer: Optimizer, add: Add, act: Act, *, late: bool = False, **options: Any) -> None:
    with Guardian(model, optimizer, sinks=[], **options):
        for step, name, _ in loop(model, optimizer, add, late=late):
            act(model, optimizer, step, name)


def nothing(_model: Net, _optimizer: Optimizer, _step: int, _name: str) -> None:
    return None


def set_by_hand(model: Net, _optimizer: Optimizer, step: int, name: str) -> None:
    if step == BAD:
        grad = named(model, name).grad
        assert grad is not None
        grad.view(-1)[0] = float("nan")


def out_of_backward(model: Net, _optimizer: Optimizer, step: int, name: str) -> None:
    if step == BAD - 1:
        named(model, name).register_hook(lambda grad: torch.full_like(grad, float("nan")))


@READS
@ADD
@pytest.mark.parametrize("act", [set_by_hand, out_of_backward])
def test_a_bad_gradient_halts_before_the_update(act: Act, add: Add, reads: Any) -> None:
    names = []

    def adding(model: Net, optimizer: Optimizer) -> str:
        names.append(add(model, optimizer))
        return names[0]

    model, optimizer = start(add)
    found = halted(model, optimizer, adding, act, reads=reads)
    assert (found.code, found.step, found.parameter) == ("GG104", BAD, names[0])
    assert torch.isfinite(named(model, names[0])).all()


@READS
def test_what_is_added_between_backward_and_step_is_judged_in_that_step(reads: Any) -> None:
    def add_bad(model: Net, optimizer: Optimizer) -> str:
        name = unfreeze(model, optimizer)
        model.trunk.weight.grad = torch.full_like(model.trunk.weight, float("nan"))
        return name

    model, optimizer = start(unfreeze)
    found = halted(model, optimizer, add_bad, nothing, late=True, reads=reads)
    assert (found.code, found.step, found.parameter) == ("GG104", ADDED, "trunk.weight")
    assert torch.isfinite(model.trunk.weight).all()


class Spoiling(SGD):
    """An optimizer whose step leaves NaN in one tensor."""

    victim: Tensor | None = None

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        if self.victim is not None:
            with torch.no_grad():
                self.victim.view(-1)[0] = float("nan")
        return result


def spoil_in_the_step(model: Net, optimizer: Optimizer, step: int, name: str) -> None:
    if step == BAD:
        assert isinstance(optimizer, Spoiling)
        optimizer.victim = named(model, name)


def write_before_the_step(model: Net, _optimizer: Optimizer, step: int, name: str) -> None:
    if step == BAD:
        with torch.no_grad():
            named(model, name).view(-1)[0] = float("nan")


@READS
@pytest.mark.parametrize("add", [new_head, head_in_place_of_the_old])
@pytest.mark.parametrize(("act", "code"), [(spoil_in_the_step, "GG106"), (write_before_the_step, "GG105")])
def test_a_new_parameter_that_turns_bad_is_found(act: Act, code: str, add: Add, reads: Any) -> None:
    model = Net()
    found = halted(model, Spoiling(model.parameters(), lr=0.05), add, act, reads=reads)
    assert (found.code, found.step, found.parameter) == (code, BAD, "head.weight")


def codes(sink: Kept) -> set[str]:
    return {found.code for _, found in sink.found}


# Of the old head that the optimizer still holds, and of a tensor that is not the model's, a note is right.
NOTES: dict[Add, set[str]] = {new_head: {"GG307"}, loose: {"GG307"}}


@READS
@pytest.mark.parametrize(("add", "late"), [*((each, False) for each in ALL), (unfreeze, True)])
def test_healthy_changes_are_quiet_and_change_nothing(add: Add, reads: Any, late: bool) -> None:
    model, optimizer = start(add)
    plain = [loss.detach() for _, _, loss in loop(model, optimizer, add, late=late)]
    weights, rng = [each.detach().clone() for each in model.parameters()], torch.get_rng_state()
    model, optimizer = start(add)
    sink = Kept()
    with Guardian(model, optimizer, sinks=[sink], reads=reads):
        guarded = [loss.detach() for _, _, loss in loop(model, optimizer, add, late=late)]
    assert codes(sink) <= NOTES.get(add, set())
    assert all(map(torch.equal, plain, guarded))
    assert all(map(torch.equal, weights, model.parameters()))
    assert torch.equal(rng, torch.get_rng_state())
    assert [each.step for each in sink.seen] == list(range(STEPS))


def test_histories_and_names_go_on() -> None:
    model, optimizer = start(new_head)
    sink = Kept()
    with Guardian(model, optimizer, sinks=[sink]):
        for _ in loop(model, optimizer, new_head):
            pass
    assert set(sink.seen[ADDED - 1].grad_norms) == set(dict(model.named_parameters()))
    assert set(sink.seen[ADDED].grad_norms) == set(dict(model.named_parameters()))


@READS
def test_gradual_unfreezing_is_quiet(reads: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.LayerNorm(6), nn.GELU())))
    model.requires_grad_(False)
    model[9].requires_grad_(True)
    optimizer = AdamW(model[9].parameters(), lr=1e-3)
    sink = Kept()
    with Guardian(model, optimizer, sinks=[sink], reads=reads):
        for step in range(40):
            if step in (10, 20, 30):
                layer = model[9 - 3 * (step // 10)]
                layer.requires_grad_(True)
                optimizer.add_param_group({"params": list(layer.parameters())})
            optimizer.zero_grad()
            model(torch.randn(8, 6)).sub(1.0).pow(2).mean().backward()
            optimizer.step()
    assert not codes(sink)
    assert len(sink.seen[-1].grad_norms) == 8


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator, self.critic = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, noise: Tensor) -> Tensor:
        score: Tensor = self.critic(self.generator(noise))
        return score


def train_gan(model: Gan, optimizers: list[Optimizer], bad: str = "") -> None:
    first, second = optimizers
    for step in range(STEPS):
        if step == ADDED:
            model.critic = nn.Linear(4, 1)
            second.param_groups[0]["params"] = list(model.critic.parameters())
        for optimizer, sign in ((second, 1.0), (first, -1.0)):
            optimizer.zero_grad()
            (sign * nn.functional.softplus(model(torch.randn(6, 3)))).mean().backward()
            if bad and step == BAD and optimizer is second:
                grad = model.get_parameter(bad).grad
                assert grad is not None
                grad.view(-1)[0] = float("nan")
            optimizer.step()


@READS
def test_two_optimizers(reads: Any) -> None:
    found: dict[str, list[Any]] = {"plain": [], "guarded": []}
    for kind in found:
        model, sink = Gan(), Kept()
        optimizers: list[Optimizer] = [SGD(each.parameters(), lr=0.01) for each in (model.generator, model.critic)]
        if kind == "plain":
            train_gan(model, optimizers)
        else:
            with Guardian(model, optimizers, sinks=[sink], reads=reads):
                train_gan(model, optimizers)
            assert not codes(sink)
            assert set(sink.seen[-2].grad_norms) == {"critic.weight", "critic.bias"}
        found[kind] = [each.detach() for each in model.parameters()]
    assert all(map(torch.equal, *found.values()))

    model = Gan()
    optimizers = [SGD(each.parameters(), lr=0.01) for each in (model.generator, model.critic)]
    with pytest.raises(NonFiniteError) as caught, Guardian(model, optimizers, sinks=[], reads=reads):
        train_gan(model, optimizers, bad="critic.weight")
    assert (caught.value.finding.code, caught.value.finding.parameter) == ("GG104", "critic.weight")
    assert torch.isfinite(model.critic.weight).all()


def test_what_is_exchanged_without_a_trace_in_the_lists_is_seen_from_the_next_step_on() -> None:
    def exchange(model: Net, optimizer: Optimizer, step: int, name: str) -> None:
        if step == ADDED:
            model.trunk.weight = nn.Parameter(model.trunk.weight.detach().clone())
            optimizer.param_groups[0]["params"][0] = model.trunk.weight
        set_by_hand(model, optimizer, step, name)

    model, optimizer = start(new_head)
    found = halted(model, optimizer, lambda *_: "trunk.weight", exchange)
    assert (found.code, found.step, found.parameter) == ("GG104", BAD, "trunk.weight")
