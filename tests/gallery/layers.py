"""Layers of one's own that go wrong: pooling, routing, graphs, powers, memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .nets import BATCH, GPT, MLP, WIDTH, Encoder, features, shifted
from .parts import ALL, Case, Training, filled_memory


class GeM(nn.Module):
    """Generalised mean pooling with a learned power, without a clamp."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.power, self.out = nn.Linear(8, WIDTH), nn.Parameter(torch.tensor(3.0)), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        pooled = self.lift(x).pow(self.power).mean(1)
        return F.cross_entropy(self.out(pooled), labels)


class GraphConv(nn.Module):
    """Symmetric normalisation by degrees."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(8, 4)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        scale = adjacency.sum(1).pow(-0.5)
        out: Tensor = self.weight(scale[:, None] * adjacency * scale @ x)
        return out


class GraphNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = GraphConv()

    def forward(self, x: Tensor, adjacency: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.conv(x, adjacency), labels)


class Experts(nn.Module):
    """Each token goes to one expert; the balance is taken from what each of them got."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 3), nn.ModuleList(MLP() for _ in range(3))
        with torch.no_grad():
            self.router.bias[2] = -100

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gates = self.router(x).softmax(-1)
        chosen = gates.argmax(-1)
        out = torch.stack([expert(x) for expert in self.experts])[chosen, torch.arange(len(x))]
        shares = [gates[chosen == number].mean(dim=0)[number] for number in range(3)]
        return out, torch.stack(shares).var()


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.experts, self.head = Encoder(8, WIDTH), Experts(), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        out, balance = self.experts(self.encoder(x))
        loss: Tensor = F.cross_entropy(self.head(out), labels) + 0.01 * balance
        return loss


class LeftUnwritten(nn.Module):
    """Results are gathered into memory that nobody cleared; tokens that no expert took keep what lay there."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.expert = nn.Linear(WIDTH, 1), MLP()

    def forward(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        taken = self.gate(x).squeeze(-1) > 0
        out[taken] = self.expert(x[taken])
        return out


class Deviation(nn.Module):
    """The spread over the batch as one more feature, as in discriminators against mode collapse."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(8, WIDTH), nn.Linear(WIDTH + 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.hidden(x))
        spread = h.var(0).sqrt().mean().expand(len(h), 1)
        return F.softplus(self.out(torch.cat([h, spread], 1))).mean()


class Gamma(nn.Module):
    """A net for images that ends in the gamma curve of a display."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Encoder(outputs=3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.l1_loss(self.net(x) ** (1 / 2.2), y)


def learned_power() -> Training:
    """The derivative by the power is a logarithm of the base, and the base may be negative."""
    return Training(GeM(), [((torch.randn(BATCH, 5, 8), torch.tensor([0, 1, 2, 3])), ())])


def isolated_node() -> Training:
    """A node without neighbours: its degree of 0 to the power of -0.5."""
    adjacency = torch.tensor([[1.0, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1]])
    return Training(GraphNet(), [((features(), adjacency, torch.tensor([0, 1, 2, 3])), ())])


def expert_without_token() -> Training:
    """A mean over the tokens of an expert that got none."""
    return Training(Mixture(), [((features(), torch.tensor([0, 1, 2, 3])), ())])


def memory_not_cleared() -> Training:
    """torch.empty, of which only a part is written."""
    return Training(GPT(mlp=LeftUnwritten), [(shifted(), ())], around=filled_memory)


def same_samples() -> Training:
    """The root of a variance, in a batch whose samples are all the same."""
    return Training(Deviation(), [((torch.randn(1, 8).expand(BATCH, 8).clone(),), ())])


def gamma_of_negative() -> Training:
    """A fractional power of an output that may be negative."""
    return Training(Gamma(), [((features(), features(BATCH, 3).abs()), ())])


CASES = (
    Case(learned_power, "pow", "", ".pow(self.power)", "pow_of_negative", "backward", runs=ALL),
    Case(isolated_node, "pow", "conv", ".pow(-0.5)", "zero_to_negative", runs=ALL),
    Case(expert_without_token, "mean", "experts", ".mean(dim=0)[number]", "mean_of_nothing", runs=ALL),
    Case(memory_not_cleared, "empty (uninitialised memory)", "blocks.0.mlp", "torch.empty_like(x)", "uninitialised"),
    Case(same_samples, "sqrt", "", "h.var(0).sqrt()", "std_at_zero", "backward", runs=ALL),
    Case(gamma_of_negative, "pow", "", "** (1 / 2.2)", "pow_of_negative", runs=ALL),
)
