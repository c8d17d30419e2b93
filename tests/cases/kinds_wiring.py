"""Wiring: which tensors the optimizer holds, which the loss reaches, and which move."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpt_guard.records import Finding

from .kinds import CLASSES, WIDTH, both, net, sgd, trained

BEFORE, NONE, LIST, CUT, REENTRANT = (
    "optimizer made before parameters are replaced",
    "parameter in no group",
    "layers in a plain container",
    "graph cut",
    "reentrant checkpoint with frozen input",
)


@both(BEFORE, "GG302", "2.weight")
def a_new_head_after_the_optimizer(broken: bool) -> list[Finding]:
    model = net()
    early = sgd(model.parameters())
    model[2] = nn.Linear(16, CLASSES)
    return trained(model, early if broken else sgd(model.parameters()))


@both(BEFORE, "GG307", "None of the 4 tensors")
def a_model_that_was_built_again(broken: bool) -> list[Finding]:
    early = sgd(net().parameters())
    model = net()
    return trained(model, early if broken else sgd(model.parameters()))


@both(NONE, "GG302", "0.weight")
def groups_that_leave_out_a_layer(broken: bool) -> list[Finding]:
    model = net()
    groups = [{"params": list(model[2].parameters()), "lr": 0.1}]
    groups += [] if broken else [{"params": list(model[0].parameters())}]
    return trained(model, sgd(groups))


@both(NONE, "GG302", "0.bias")
def groups_by_name_that_leave_out_the_biases(broken: bool) -> list[Finding]:
    model = net()
    named = dict(model.named_parameters())
    decayed = [each for name, each in named.items() if name.endswith("weight")]
    rest = [each for name, each in named.items() if name.endswith("scale" if broken else "bias")]
    groups = [{"params": decayed, "weight_decay": 0.1}, *([{"params": rest}] if rest else [])]
    return trained(model, sgd(groups))


class Holder(nn.Module):
    """Runs its layers one after the other, whatever holds them."""

    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.inp, self.out, self.layers = nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES), layers

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for each in self.layers.values() if hasattr(self.layers, "values") else self.layers:
            x = each(x).tanh()
        logits: Tensor = self.out(x)
        return logits


@both(LIST, "GG303", "layers")
def a_list_of_layers(broken: bool) -> list[Finding]:
    layers = [nn.Linear(8, 8) for _ in range(2)]
    return trained(Holder(layers if broken else nn.ModuleList(layers)))


@both(LIST, "GG303", "layers")
def a_dictionary_of_layers(broken: bool) -> list[Finding]:
    layers = {"first": nn.Linear(8, 8), "second": nn.Linear(8, 8)}
    return trained(Holder(layers if broken else nn.ModuleDict(layers)))


class Between(nn.Module):
    """Two layers, and something between them."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        self.first: nn.Module = nn.Linear(WIDTH, 16)
        self.second, self.between = nn.Linear(16, CLASSES), between

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.second(self.between(self.first(x)).tanh())
        return logits


@both(CUT, "GG202", "first")
def a_detach_between_two_layers(broken: bool) -> list[Finding]:
    return trained(Between((lambda x: x.detach()) if broken else (lambda x: x)))


@both(CUT, "GG202", "first")
def data_between_two_layers(broken: bool) -> list[Finding]:
    return trained(Between((lambda x: x.data) if broken else (lambda x: x)))


@both(CUT, "GG202", "first")
def numbers_taken_out_and_put_back(broken: bool) -> list[Finding]:
    def again(x: Tensor) -> Tensor:
        return torch.tensor([[each.item() for each in row] for row in x])

    return trained(Between(again if broken else (lambda x: x)))


class Extracting(nn.Linear):
    """Features that are computed without a graph, or with one."""

    shielded = True

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(not self.shielded):
            return super().forward(x)


@both(CUT, "GG202", "first")
def no_grad_around_a_layer(broken: bool) -> list[Finding]:
    model = Between(lambda x: x)
    model.first = layer = Extracting(WIDTH, 16)
    layer.shielded = broken
    return trained(model)


class Checkpointed(nn.Module):
    def __init__(self, first: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.first, self.reentrant = first, reentrant
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        logits: Tensor = self.head(x)
        return logits


@both(REENTRANT, "GG202", "blocks")
def a_frozen_layer_before_the_checkpoints(broken: bool) -> list[Finding]:
    model = Checkpointed(nn.Linear(WIDTH, WIDTH).requires_grad_(False), reentrant=broken)
    return trained(model, sgd([each for each in model.parameters() if each.requires_grad]))


@both(REENTRANT, "GG202", "blocks")
def no_layer_before_the_checkpoints(broken: bool) -> list[Finding]:
    return trained(Checkpointed(nn.Identity(), reentrant=broken))
