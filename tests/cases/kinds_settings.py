"""Settings of the optimizer and of modules that are an argument in the wrong place, and ordinary ones close to them."""

from __future__ import annotations

import torch
from torch import nn

from gpt_guard.records import Finding

from .kinds import both, net, sgd, trained

OPTIMIZER, MODULE = "odd setting of the optimizer", "odd setting of a module"


@both(OPTIMIZER, "GG330", "betas are (0.999, 0.9)", cause="beta1 and beta2 are swapped")
def betas_in_the_other_order(broken: bool) -> list[Finding]:
    model = net()
    return trained(model, torch.optim.Adam(model.parameters(), betas=(0.999, 0.9) if broken else (0.9, 0.999)))


@both(OPTIMIZER, "GG330", "maximize is True", cause="maximize=True makes the loss larger")
def a_loss_that_is_to_grow(broken: bool) -> list[Finding]:
    model = net()
    return trained(model, torch.optim.SGD(model.parameters(), lr=0.01, maximize=broken))


@both(OPTIMIZER, "GG330", "momentum is 1", cause="momentum is 1 or above")
def momentum_that_never_fades(broken: bool) -> list[Finding]:
    model = net()
    return trained(model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=1.0 if broken else 0.99))


@both(MODULE, "GG331", "p is 0.95", module="1", cause="p is the share that is dropped")
def a_share_to_keep_that_is_dropped(broken: bool) -> list[Finding]:
    model = net()
    model.insert(1, nn.Dropout(0.95 if broken else 0.5))
    return trained(model, sgd(model.parameters()))


@both(MODULE, "GG331", "2 entries with weights are 1 module", module="1", cause="One module was put into the list")
def one_layer_several_times(broken: bool) -> list[Finding]:
    layers = [nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.Tanh()) for _ in range(2)]
    model = net()
    model.insert(1, nn.Sequential(*(layers[:1] * 2 if broken else layers)))
    return trained(model, sgd(model.parameters()))


@both(MODULE, "GG331", "negative_slope is True", module="1", cause="The slope below zero was given a flag")
def a_flag_for_a_slope(broken: bool) -> list[Finding]:
    model = net()
    model[1] = nn.LeakyReLU(True) if broken else nn.LeakyReLU(inplace=True)
    return trained(model, sgd(model.parameters()))
