"""Programs that make things up train under every default guard without a word."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .conftest import Guarded
from .parts import mlp
from .programs import STEPS, learned, pictures

NOISE = 8


def ring(rows: int = 32) -> Tensor:
    """Points on a circle."""
    angle = 2 * math.pi * torch.rand(rows)
    return torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(rows, 2)


class PictureMaker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(NOISE, 8 * 2 * 2)
        self.grow = nn.Sequential(
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.ConvTranspose2d(8, 8, 4, stride=2, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.ConvTranspose2d(8, 1, 4, stride=2, padding=1),
            nn.Tanh(),
        )

    def forward(self, z: Tensor) -> Tensor:
        picture: Tensor = self.grow(self.start(z).view(-1, 8, 2, 2))
        return picture


def critic_of_pictures() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 8, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(8, 16, 4, stride=2, padding=1),
        nn.BatchNorm2d(16),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Flatten(),
        nn.Linear(64, 1),
    )


def test_adversaries_that_make_pictures(guarded: Guarded) -> None:
    """Two Guardians; the discriminator judges real and made pictures in two backward calls of one step."""
    generator, discriminator = PictureMaker(), critic_of_pictures()
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()
    fixed = torch.randn(9, NOISE)
    data = pictures(256)[0].clamp(-1, 1)
    with guarded(generator, g_optimizer), guarded(discriminator, d_optimizer):
        for step in range(STEPS):
            real = data[torch.randint(len(data), (16,))]
            ones, zeros = torch.ones(16, 1), torch.zeros(16, 1)
            discriminator.zero_grad()
            criterion(discriminator(real), 0.9 * ones).backward()
            fake = generator(torch.randn(16, NOISE))
            criterion(discriminator(fake.detach()), zeros).backward()
            d_optimizer.step()
            generator.zero_grad()
            criterion(discriminator(fake), ones).backward()
            g_optimizer.step()
            if step % 50 == 49:
                generator.eval()
                with torch.no_grad():
                    generator(fixed)
                generator.train()
    with torch.no_grad():
        assert abs(float(generator(fixed).mean() - data.mean())) < 0.4


@pytest.mark.parametrize("together", [False, True], ids=["two guardians", "one guardian"])
def test_a_critic_with_a_penalty_on_its_slope(guarded: Guarded, together: bool) -> None:
    """Five steps of the critic to one of the generator, whose parameters are not needed in the critic's."""
    generator, critic = mlp(NOISE, 32, 2), mlp(2, 32, 32, 1, activation=nn.LeakyReLU)
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.0, 0.9))
    c_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.0, 0.9))

    def train() -> None:
        for step in range(STEPS):
            real = ring()
            fake = generator(torch.randn(32, NOISE)).detach()
            share = torch.rand(32, 1)
            between = (share * real + (1 - share) * fake).requires_grad_()
            (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
            penalty = 10 * (slope.norm(2, dim=1) - 1).pow(2).mean()
            c_optimizer.zero_grad()
            (critic(fake).mean() - critic(real).mean() + penalty).backward()
            c_optimizer.step()
            if step % 5 == 4:
                critic.requires_grad_(False)
                g_optimizer.zero_grad()
                (-critic(generator(torch.randn(32, NOISE))).mean()).backward()
                g_optimizer.step()
                critic.requires_grad_(True)

    if together:
        both = nn.ModuleDict({"generator": generator, "critic": critic})
        with guarded(both, [g_optimizer, c_optimizer]):
            train()
    else:
        with guarded(generator, g_optimizer), guarded(critic, c_optimizer):
            train()
    with torch.no_grad():
        assert float(generator(torch.randn(64, NOISE)).norm(dim=1).mean()) > 0.1


class Variational(nn.Module):
    def __init__(self, inputs: int, latent: int = 4) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(inputs, 32), nn.ReLU())
        self.mean, self.log_variance = nn.Linear(32, latent), nn.Linear(32, latent)
        self.decoder = mlp(latent, 32, inputs)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.body(x.flatten(1))
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        return self.decoder(z), mean, log_variance


@pytest.mark.parametrize("bits", [False, True], ids=["grey", "black and white"])
def test_a_variational_autoencoder(guarded: Guarded, bits: bool) -> None:
    data, _ = pictures(256)
    data = (data > 0.8).float() if bits else data
    model = Variational(64)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    with guarded(model, optimizer):
        for step in range(STEPS):
            x = data[torch.randint(len(data), (32,))]
            again, mean, log_variance = model(x)
            if bits:
                error = F.binary_cross_entropy_with_logits(again, x.flatten(1), reduction="sum") / len(x)
            else:
                error = F.mse_loss(again, x.flatten(1), reduction="sum") / len(x)
            divergence = -0.5 * torch.mean((1 + log_variance - mean.pow(2) - log_variance.exp()).sum(1))
            loss = error + min(1.0, step / 100) * divergence
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(error.item())
        with torch.no_grad():
            model.decoder(torch.randn(4, 4)).sigmoid()
    learned(losses, 0.85)


class Denoiser(nn.Module):
    """Tells the noise in a point from the time, given as sines."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(2 + 8, 64, 64, 2, activation=nn.SiLU)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        waves = time[:, None].float() / 50 * torch.tensor([1.0, 3.0, 9.0, 27.0])
        noise: Tensor = self.net(torch.cat([x, waves.sin(), waves.cos()], 1))
        return noise


def test_diffusion_with_samples_from_averaged_weights(guarded: Guarded) -> None:
    betas = torch.linspace(1e-3, 0.2, 50)
    kept = torch.cumprod(1 - betas, 0)
    model = Denoiser()
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.95))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    with guarded(model, optimizer):
        for step in range(STEPS):
            x, time, noise = ring(64), torch.randint(50, (64,)), torch.randn(64, 2)
            level = kept[time][:, None]
            loss = F.mse_loss(model(level.sqrt() * x + (1 - level).sqrt() * noise, time), noise)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            average.update_parameters(model)
            losses.append(loss.item())
            if step % 100 == 99:
                average.eval()
                with torch.inference_mode():
                    sample = torch.randn(16, 2)
                    for number in reversed(range(0, 50, 5)):
                        when = torch.full((16,), number)
                        sample = sample - 0.1 * average(sample, when)
    learned(losses, 0.8)


def flow_parts() -> nn.ModuleList:
    return nn.ModuleList(mlp(1, 32, 2, activation=nn.Tanh) for _ in range(4))


def test_a_normalising_flow(guarded: Guarded) -> None:
    """Maximum likelihood; the loss may well be negative."""

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = flow_parts()

        def log_prob(self, x: Tensor) -> Tensor:
            total = x.new_zeros(len(x))
            for number, part in enumerate(self.parts):
                held, moved = (x[:, :1], x[:, 1:]) if number % 2 else (x[:, 1:], x[:, :1])
                shift, scale = part(held).chunk(2, 1)
                scale = scale.tanh()
                moved = (moved - shift) * (-scale).exp()
                total = total - scale.squeeze(1)
                x = torch.cat([held, moved] if number % 2 else [moved, held], 1)
            density: Tensor = total + torch.distributions.Normal(0.0, 1.0).log_prob(x).sum(1)
            return density

    def data(rows: int) -> Tensor:
        x = torch.randn(rows, 1)
        return torch.cat([x, 0.1 * torch.randn(rows, 1) + x**2 / 2], 1)

    model: Any = Flow()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    losses = []
    with guarded(model, optimizer):
        for _ in range(STEPS):
            loss = -model.log_prob(data(64)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    learned(losses)
