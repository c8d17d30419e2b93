"""What a load does not restore, what an evaluation leaves behind, and settings that nobody reads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard import Guardian
from gpt_guard.records import Finding

from .kinds import WIDTH, both, net, sgd, step, watched

LIVE, NOTHING_FITS, BY_POSITION, RATE_KEPT, UNREAD = (
    "a snapshot that is no copy",
    "load that fits nothing",
    "optimizer state of other parameters",
    "dropout rate changed by an evaluation",
    "group key that is not read",
)
Loop = Callable[[nn.Module, torch.optim.Optimizer], None]


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    for _ in range(count):
        step(model, optimizer)


def run(model: nn.Module, optimizer: torch.optim.Optimizer, loop: Loop) -> list[Finding]:
    def whole(_: Guardian) -> None:
        steps(model, optimizer, 4)
        loop(model, optimizer)
        steps(model, optimizer, 4)

    return watched(model, optimizer, whole)


@both(LIVE, "GG730", begins=8, cause="without a copy")
def the_best_state_is_kept_by_reference(broken: bool) -> list[Finding]:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        best = model.state_dict() if broken else copy.deepcopy(model.state_dict())
        steps(model, optimizer, 4)
        model.load_state_dict(best)

    model = net()
    return run(model, sgd(model.parameters()), loop)


@both(LIVE, "GG730", begins=8, cause="without a copy")
def a_dictionary_of_live_tensors(broken: bool) -> list[Finding]:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        state = model.state_dict()
        best = dict(state) if broken else {name: each.clone() for name, each in state.items()}
        steps(model, optimizer, 4)
        model.load_state_dict(best)

    model = net()
    return run(model, sgd(model.parameters()), loop)


def loads(prefix: str) -> list[Finding]:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        state = {prefix + name: each.clone() for name, each in model.state_dict().items()}
        model.load_state_dict(state, strict=False)

    model = net()
    return run(model, sgd(model.parameters()), loop)


@both(NOTHING_FITS, "GG731", "_orig_mod.", begins=4, cause="prefix of a wrapper")
def names_of_a_compiled_model(broken: bool) -> list[Finding]:
    return loads("_orig_mod." if broken else "")


@both(NOTHING_FITS, "GG731", "module.", begins=4, cause="prefix of a wrapper")
def names_of_a_wrapped_model(broken: bool) -> list[Finding]:
    return loads("module." if broken else "")


class Ordered(nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in names})
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers["b"](self.layers["a"](x).tanh()).tanh())
        return out


def resumed(broken: bool, named: bool) -> list[Finding]:
    def adam(model: nn.Module) -> torch.optim.Optimizer:
        given: Any = model.named_parameters() if named else model.parameters()
        return torch.optim.Adam(given, lr=1e-3)

    saved = Ordered("b", "a") if broken else Ordered("a", "b")
    before = adam(saved)
    steps(saved, before, 2)

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model.load_state_dict(copy.deepcopy(saved.state_dict()))
        optimizer.load_state_dict(copy.deepcopy(before.state_dict()))

    model = Ordered("a", "b")
    return run(model, adam(model), loop)


@both(BY_POSITION, "GG732", "layers.b.weight", begins=4, cause="another order")
def layers_in_another_order(broken: bool) -> list[Finding]:
    return resumed(broken, named=False)


@both(BY_POSITION, "GG732", "layers.b.weight", begins=4, cause="another order")
def names_in_another_order(broken: bool) -> list[Finding]:
    return resumed(broken, named=True)


class Dropping(nn.Module):
    """Writes to one of its two rates when it is evaluated: its own, or that of the module that drops."""

    def __init__(self, writes: str) -> None:
        super().__init__()
        self.body, self.drop, self.dropout_p, self.writes = net(), nn.Dropout(0.2), 0.2, writes

    def forward(self, x: Tensor) -> Tensor:
        rate = self.dropout_p if self.training else 0.0
        if not self.training and self.writes == "own":
            self.dropout_p = 0.0
        elif not self.training and self.writes == "module":
            self.drop.p = 0.0
        out: Tensor = self.body(F.dropout(self.drop(x), rate))
        return out


def evaluated(writes: str) -> list[Finding]:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model.eval()
        with torch.no_grad():
            model(torch.randn(4, WIDTH))
        model.train()

    model = Dropping(writes)
    return run(model, sgd(model.parameters()), loop)


@both(RATE_KEPT, "GG513", "dropout_p", begins=4, cause="forward() sets")
def a_rate_that_forward_writes(broken: bool) -> list[Finding]:
    return evaluated("own" if broken else "")


@both(RATE_KEPT, "GG513", "drop.p", begins=4, cause="forward() sets")
def the_rate_of_a_module_that_forward_writes(broken: bool) -> list[Finding]:
    return evaluated("module" if broken else "")


def written(key: str) -> list[Finding]:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0][key] = 1e-3

    model = net()
    return run(model, sgd(model.parameters()), loop)


@both(UNREAD, "GG413", "learning_rate", begins=4)
def a_schedule_by_hand_under_another_name(broken: bool) -> list[Finding]:
    return written("learning_rate" if broken else "initial_lr")


@both(UNREAD, "GG413", "LR", begins=4)
def a_schedule_by_hand_in_capitals(broken: bool) -> list[Finding]:
    return written("LR" if broken else "lr_scale")
