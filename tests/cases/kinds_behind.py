"""What happens behind the loop: recomputation, the order of data, float16's end, and what is computed and not used."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from gpt_guard import Guardian
from gpt_guard.records import Finding

from .kinds import batch, both, net, sgd, trained, watched

REDRAWN, ORDER, VANISHED, UNUSED, CONSTANT_LOSS = (
    "recomputation with other random numbers",
    "each epoch in the same order",
    "gradients that vanish in float16",
    "auxiliary loss never added",
    "loss that does not depend on the weights",
)


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool, keep: bool) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 16), nn.Linear(16, 3)
        self.block = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.3))
        self.options: Any = {"use_reentrant": reentrant, "preserve_rng_state": keep}

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(checkpoint(self.block, self.first(x), **self.options))
        return out


@both(REDRAWN, "GG509", module="block", cause="preserve_rng_state")
def other_dropout_masks(broken: bool) -> list[Finding]:
    return trained(Checkpointed(reentrant=False, keep=not broken))


@both(REDRAWN, "GG509", module="block", cause="preserve_rng_state")
def other_dropout_masks_in_a_reentrant_checkpoint(broken: bool) -> list[Finding]:
    return trained(Checkpointed(reentrant=True, keep=not broken))


def epochs(loader: Any, begin: Any) -> list[Finding]:
    model = net()
    optimizer = sgd(model.parameters())

    def loop(_: Guardian) -> None:
        for epoch in range(4):
            begin(epoch)
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()

    return watched(model, optimizer, loop)


@both(ORDER, "GG628", "DistributedSampler", begins=4, cause="set_epoch")
def set_epoch_is_forgotten(broken: bool) -> list[Finding]:
    data = TensorDataset(*batch(64))
    sampler: Any = DistributedSampler(data, num_replicas=1, rank=0)
    begin = (lambda _: None) if broken else sampler.set_epoch
    return epochs(DataLoader(data, batch_size=16, sampler=sampler), begin)


@both(ORDER, "GG628", "RandomSampler", begins=8, cause="seed is set")
def a_seed_in_each_epoch(broken: bool) -> list[Finding]:
    loader: Any = DataLoader(TensorDataset(*batch(64)), batch_size=16, shuffle=True)
    return epochs(loader, lambda epoch: torch.manual_seed(0 if broken else epoch))


def half(model: nn.Module, scale: float) -> list[Finding]:
    def loss(each: nn.Module) -> Tensor:
        x, y = batch()
        with torch.autocast("cpu", dtype=torch.float16):
            scores = each(x)
        return scale * F.cross_entropy(scores.float(), y)

    return trained(model, loss=loss)


@both(VANISHED, "GG512", "0.weight", cause="GradScaler")
def a_small_loss_without_a_scaler(broken: bool) -> list[Finding]:
    return half(net(), 3e-6 if broken else 1.0)


@both(VANISHED, "GG512", "0.weight", cause="GradScaler")
def a_wide_model_without_a_scaler(broken: bool) -> list[Finding]:
    return half(nn.Sequential(nn.Linear(6, 256), nn.GELU(), nn.Linear(256, 3)), 1e-5 if broken else 0.1)


class Balanced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.gate = net(), nn.Linear(6, 4)
        self.aux_loss: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.aux_loss = self.gate(x).softmax(-1).mean(0).square().sum()
        out: Tensor = self.body(x) + self.gate(x)[:, :3]
        return out


class Returning(Balanced):
    def forward(self, x: Tensor) -> Any:
        out = super().forward(x)
        kept, self.aux_loss = self.aux_loss, 0.0
        return out, {"balance_loss": kept}


@both(UNUSED, "GG647", "aux_loss", cause="never adds")
def an_attribute_that_nobody_adds(broken: bool) -> list[Finding]:
    def loss(model: Any) -> Tensor:
        x, y = batch()
        main = F.cross_entropy(model(x), y)
        return main if broken else main + 0.1 * model.aux_loss

    return trained(Balanced(), loss=loss)


@both(UNUSED, "GG647", "balance_loss", cause="never adds")
def a_returned_loss_that_nobody_adds(broken: bool) -> list[Finding]:
    def loss(model: Any) -> Tensor:
        x, y = batch()
        scores, more = model(x)
        main = F.cross_entropy(scores, y)
        return main if broken else main + 0.1 * more["balance_loss"]

    return trained(Returning(), loss=loss)


@both(CONSTANT_LOSS, "GG629", "0.6931", within=6, cause="one object")
def a_reference_that_is_the_policy(broken: bool) -> list[Finding]:
    model = net()
    reference = model if broken else copy.deepcopy(model).requires_grad_(False)

    def loss(policy: nn.Module) -> Tensor:
        x, _ = batch()
        with torch.no_grad():
            fixed = reference(x)
        now = policy(x)
        ahead: Tensor = (now[:, 0] - fixed[:, 0]) - (now[:, 1] - fixed[:, 1])
        return -F.logsigmoid(ahead).mean()

    return trained(model, loss=loss, steps=10)


@both(CONSTANT_LOSS, "GG629", "0.3333", within=6)
def a_loss_divided_by_itself(broken: bool) -> list[Finding]:
    def loss(model: nn.Module) -> Tensor:
        x, y = batch()
        raw = F.cross_entropy(model(x), y)
        return 0.3333333 * raw / raw.detach() if broken else raw

    return trained(net(), loss=loss, steps=10)
