"""Healthy loops of other kinds stay silent: vision, adversaries, experts, latent variables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .parts import adam, mlp, update

STEPS = 60
Guarded = Callable[..., Any]


def images(rows: int = 16) -> tuple[Tensor, Tensor]:
    """Bright in one of four quarters."""
    y = torch.randint(4, (rows,))
    x = 0.3 * torch.randn(rows, 1, 8, 8)
    for row, quarter in enumerate(y.tolist()):
        x[row, 0, 4 * (quarter // 2) :, 4 * (quarter % 2) :][:4, :4] += 1.0
    return x, y


def cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(72, 4),
    )


def test_cnn_with_batch_norm_and_in_place_relu(guarded: Guarded) -> None:
    model = cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)
    with guarded(model, optimizer, scheduler=schedule):
        for step in range(STEPS):
            x, y = images()
            loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
            update(optimizer, loss)
            if step % 10 == 9:
                model.eval()
                with torch.inference_mode():
                    schedule.step(F.cross_entropy(model(x), y).item())
                model.train()


def test_frozen_batch_norm_in_fine_tuning(guarded: Guarded) -> None:
    model = cnn()
    model[1].eval().requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    with guarded(model, optimizer):
        for _ in range(STEPS):
            x, y = images()
            update(optimizer, F.cross_entropy(model(x), y))


def test_transformer_encoder_with_padding(guarded: Guarded) -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
            self.embed = nn.Embedding(10, 16, padding_idx=0)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(16, 2)

        def forward(self, ids: Tensor) -> dict[str, Tensor]:
            padding = ids == 0
            x = self.encoder(self.embed(ids), src_key_padding_mask=padding)
            return {"logits": self.head(x[:, 0])}

    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with guarded(model, optimizer):
        for step in range(STEPS):
            ids = torch.randint(1, 10, (8, 9))
            ids[:, 5:][torch.rand(8, 4) < 0.5] = 0
            update(optimizer, F.cross_entropy(model(ids)["logits"], (ids[:, 0] > 4).long()))
            if step % 20 == 19:
                model.eval()
                with torch.no_grad():
                    model(ids)
                model.train()


def real(rows: int = 32) -> Tensor:
    return torch.randn(rows, 2) * 0.5 + torch.tensor([2.0, -1.0])


def play(generator: nn.Module, discriminator: nn.Module, optimizers: list[Any], zero: dict[str, Any]) -> None:
    ones, zeros = torch.ones(32, 1), torch.zeros(32, 1)
    for _ in range(STEPS):
        fake = generator(torch.randn(32, 4))
        optimizers[1].zero_grad(**zero)
        judged = F.binary_cross_entropy_with_logits(discriminator(real()), ones)
        judged = judged + F.binary_cross_entropy_with_logits(discriminator(fake.detach()), zeros)
        judged.backward()
        optimizers[1].step()
        optimizers[0].zero_grad(**zero)
        F.binary_cross_entropy_with_logits(discriminator(fake), ones).backward()
        optimizers[0].step()


@pytest.mark.parametrize("zero", [{}, {"set_to_none": False}], ids=["none", "zeros"])
@pytest.mark.parametrize("together", [False, True], ids=["two guardians", "one guardian"])
def test_adversaries(guarded: Guarded, together: bool, zero: dict[str, Any]) -> None:
    generator, discriminator = mlp(4, 32, 2), mlp(2, 32, 1, activation=nn.Tanh)
    optimizers = [adam(generator, 1e-3, betas=(0.5, 0.999)), adam(discriminator, 1e-3, betas=(0.5, 0.999))]
    if together:
        both = nn.ModuleDict({"generator": generator, "discriminator": discriminator})
        with guarded(both, optimizers) as guardian:
            play(generator, discriminator, optimizers, zero)
        assert guardian.step == STEPS
        return
    with guarded(generator, optimizers[0]) as first, guarded(discriminator, optimizers[1]) as second:
        play(generator, discriminator, optimizers, zero)
    assert first.latest.micro_batches == second.latest.micro_batches == 1
    # Of two linear layers each: nothing of the other model's is told.
    assert len(first.latest.grad_norms) == len(second.latest.grad_norms) == 4


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs(guarded: Guarded, search: str | None) -> None:
    model = mlp(2, 16, 1, activation=nn.Tanh)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=5, line_search_fn=search)
    x = torch.randn(64, 2)
    y = x.prod(1, keepdim=True)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    with guarded(model, optimizer):
        for _ in range(20):
            optimizer.step(closure)


class Mixture(nn.Module):
    """Experts in a list; the last one gets no row for most of the run."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(mlp(4, 16, 2) for _ in range(3))

    def forward(self, x: Tensor, choice: Tensor) -> Tensor:
        output = x.new_zeros(len(x), 2)
        for number, expert in enumerate(self.experts):
            rows = (choice == number).nonzero().flatten()
            if len(rows):
                output = output.index_copy(0, rows, expert(x[rows]))
        return output


def test_an_idle_expert(guarded: Guarded) -> None:
    model = Mixture()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with guarded(model, optimizer):
        for step in range(STEPS):
            x, choice = torch.randn(32, 4), torch.randint(2 + (step % 30 == 29), (32,))
            update(optimizer, F.mse_loss(model(x, choice), x[:, :2] * (choice + 1)[:, None]))


class Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(8, 32, 4), mlp(2, 32, 8)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, variance = self.encoder(x).chunk(2, -1)
        return mean, variance

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, variance = self.encode(x)
        return self.decoder(mean + torch.randn_like(mean) * (variance / 2).exp()), mean, variance


@pytest.mark.parametrize("by_methods", [False, True])
def test_variational_autoencoder(guarded: Guarded, by_methods: bool) -> None:
    model = Variational()
    optimizer = adam(model)
    with guarded(model, optimizer):
        for step in range(STEPS):
            x = torch.randn(32, 2) @ torch.ones(2, 8)
            if by_methods:
                mean, variance = model.encode(x)
                again = model.decoder(mean + torch.randn_like(mean) * (variance / 2).exp())
            else:
                again, mean, variance = model(x)
            divergence = -0.5 * (1 + variance - mean.pow(2) - variance.exp()).sum(1).mean()
            # The divergence is weighed from 0 up, as is usual.
            update(optimizer, F.mse_loss(again, x) + min(1.0, step / 40) * 0.1 * divergence)
        with torch.no_grad():
            model.decoder(torch.randn(4, 2))
