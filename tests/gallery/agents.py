"""Policies, generators and sequences that go wrong: ratios, advantages, variances, critics, chains of factors."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .nets import BATCH, WIDTH, Encoder, features
from .parts import ALL, HALF, WIDE, Case, Training


class Policy(nn.Module):
    """Log-probabilities of actions."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Encoder(outputs=5)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        return logits.log_softmax(-1)


def clipped_ratio(scores: Tensor, actions: Tensor, old: Tensor) -> Tensor:
    ratio = torch.exp(scores.gather(1, actions[:, None])[:, 0] - old)
    return -torch.minimum(ratio, ratio.clamp(0.8, 1.2)).mean()


def old_policy_of_another_run() -> Training:
    """A ratio of probabilities, where the old one was 0 to rounding."""
    old = torch.tensor([-1.0, -200.0, -2.0, -1.0])
    return Training(Policy(), [((features(),), (torch.tensor([0, 1, 2, 3]), old))], clipped_ratio)


def grouped(scores: Tensor, rewards: Tensor) -> Tensor:
    advantage = (rewards - rewards.mean(1, keepdim=True)) / rewards.std(1, keepdim=True)
    return -(advantage.flatten() * scores[:, 0]).mean()


def equal_rewards() -> Training:
    """Rewards of a group that are all the same, standardised in the group."""
    rewards = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    return Training(Policy(), [((features(),), (rewards,))], grouped)


def group_of_one() -> Training:
    """A group with one answer: its standard deviation divides by n - 1."""
    return Training(Policy(), [((features(),), (features(BATCH, 1),))], grouped_alone)


def grouped_alone(scores: Tensor, rewards: Tensor) -> Tensor:
    spread = rewards.std(dim=1, keepdim=True).clamp_min(1e-3)
    return -((rewards - rewards.mean(1, keepdim=True)) / spread * scores[:, :1]).mean()


def squashed(actions: Tensor, target: Tensor) -> Tensor:
    raw = torch.atanh(actions)
    return F.mse_loss(raw, target)


class Squashed(nn.Module):
    """Actions within [-1, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Encoder(outputs=2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.net(x) * 200)


def action_at_the_bound() -> Training:
    """atanh of a tanh that has rounded to 1."""
    return Training(Squashed(), [((features(),), (features(BATCH, 2),))], squashed)


class VAE(nn.Module):
    """A log-variance without bounds."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Encoder(8, 8), Encoder(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        mean, logvar = self.encoder(x).chunk(2, dim=-1)
        logvar = logvar * 300
        sample = mean + (0.5 * logvar).exp() * torch.randn_like(mean)
        kl = 0.5 * (mean**2 + logvar.exp() - 1 - logvar).sum(-1).mean()
        out: Tensor = F.mse_loss(self.decoder(sample), x) + 1e-3 * kl
        return out


def variance_unbounded() -> Training:
    """exp of a log-variance that is far too large."""
    return Training(VAE(), [((features() * 3,), ())])


class Critic(nn.Module):
    """A critic whose head starts at 0, as many do, and its gradient penalty."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Encoder(outputs=1)
        nn.init.zeros_(self.net.out.weight)

    def forward(self, real: Tensor) -> Tensor:
        between = real.clone().requires_grad_()
        (slope,) = torch.autograd.grad(self.net(between).sum(), between, create_graph=True)
        penalty = ((slope**2).sum(1).sqrt() - 1) ** 2
        out: Tensor = penalty.mean() - self.net(real).mean()
        return out


def flat_critic() -> Training:
    """A gradient penalty where the gradient is 0: the norm's own derivative is infinite."""
    return Training(Critic(), [((features(),), ())])


class Rays(nn.Module):
    """Transmittance along a ray as the exp of a sum of logarithms."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Encoder(outputs=6)

    def forward(self, x: Tensor, colours: Tensor) -> Tensor:
        alpha = torch.sigmoid(self.net(x) * 400)
        passed = torch.cumsum(torch.log(1 - alpha), -1).exp()
        return F.mse_loss((passed * alpha).sum(-1), colours)


def opaque_sample() -> Training:
    """An alpha of exactly 1: the logarithm is -inf, exp makes 0 of it, and the backward meets it again."""
    return Training(Rays(), [((features() * 3, features(BATCH, 1)[:, 0].abs()), ())])


class Chain(nn.Module):
    """Scores of sequences by the forward algorithm, where some steps are forbidden."""

    forbidden: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.emit, self.steps = nn.Linear(8, 3), nn.Parameter(torch.randn(3, 3))
        self.register_buffer("forbidden", torch.tensor([[1, 0, 0], [1, 0, 0], [1, 0, 0]], dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        steps = self.steps.masked_fill(self.forbidden, -torch.inf)
        alpha = self.emit(x[:, 0])
        for position in range(1, x.size(1)):
            alpha = torch.logsumexp(alpha[:, :, None] + steps, 1) + self.emit(x[:, position])
        out: Tensor = -alpha[:, 1:].mean()
        return out


def state_out_of_reach() -> Training:
    """A state that no other leads to: logsumexp over nothing but -inf, which is left out at the end."""
    return Training(Chain(), [((torch.randn(BATCH, 4, 8),), ())])


class Evidence(nn.Module):
    """The parameters of a Dirichlet distribution, without the 1 that belongs to them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Encoder(outputs=8)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.net(x))


def evidential(alpha: Tensor, labels: Tensor) -> Tensor:
    right = alpha.gather(1, labels[:, None])[:, 0]
    return (torch.digamma(alpha.sum(-1)) - torch.digamma(right)).mean()


def no_evidence() -> Training:
    """digamma of 0: a class without any evidence."""
    return Training(Evidence(), [((features(16),), (torch.randint(8, (16,)),))], evidential)


class Timestamps(nn.Module):
    """Features of a time in seconds since 1970."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = nn.Parameter(torch.tensor([1e-4, 1e-3, 1e-2, 1e-1]))
        self.out = nn.Linear(WIDTH // 4, 1)

    def forward(self, seconds: Tensor, y: Tensor) -> Tensor:
        waves = torch.sin(seconds.to(self.rates.dtype)[:, None] * self.rates)
        return F.mse_loss(self.out(waves), y)


def seconds_in_half() -> Training:
    """Seconds since 1970 in float16."""
    seconds = torch.randint(1_700_000_000, 1_700_086_400, (BATCH,))
    return Training(Timestamps(), [((seconds, features(BATCH, 1)), ())])


CASES = (
    Case(old_policy_of_another_run, "exp", None, "torch.exp(scores.gather", "exp_overflow", runs=ALL),
    Case(equal_rewards, "division", None, "/ rewards.std(1, keepdim=True)", "zero_std", runs=ALL),
    Case(group_of_one, "std", None, "rewards.std(dim=1", "std_of_one", runs=ALL),
    Case(action_at_the_bound, "atanh", None, "torch.atanh(actions)", "outside_domain", runs=ALL),
    Case(variance_unbounded, "exp", "", "(0.5 * logvar).exp()", "exp_overflow", runs=ALL),
    Case(flat_critic, "sqrt", "", "(slope**2).sum(1).sqrt()", "norm_at_zero", "backward", runs=ALL),
    Case(opaque_sample, "log", "", "torch.log(1 - alpha)", "where_unselected", "backward", runs=ALL),
    Case(state_out_of_reach, "logsumexp", "", "torch.logsumexp(alpha", "logsumexp_masked", "backward", runs=ALL),
    Case(no_evidence, "digamma", None, "torch.digamma(right)", "outside_domain", runs=WIDE),
    Case(seconds_in_half, "cast", "", "seconds.to(self.rates.dtype)", "cast_overflow", runs=HALF),
)
