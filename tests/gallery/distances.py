"""Distances, angles and pieces that are put together: finite in the forward, and often not in the backward."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .nets import BATCH, VOCAB, WIDTH, Encoder, features
from .parts import ALL, FULL, HALF, Case, Training


def triplet(z: Tensor, margin: float) -> Tensor:
    anchor, positive, negative = z.chunk(3)
    near = (anchor - positive).pow(2).sum(-1).sqrt()
    far = (anchor - negative).pow(2).sum(dim=-1).sqrt()
    return F.relu(near - far + margin).mean()


def equal_pair() -> Training:
    """A sample that is its own positive: the root of a distance of 0."""
    x = features(9)
    x[3] = x[0]
    return Training(Encoder(), [((x,), (5.0,))], triplet)


def root_error(output: Tensor, target: Tensor) -> Tensor:
    return torch.sqrt(F.mse_loss(output, target))


def perfect_fit() -> Training:
    """The root of a mean squared error that is 0, as for a zero-initialised head."""
    model = Encoder(outputs=1)
    nn.init.zeros_(model.out.weight)
    nn.init.zeros_(model.out.bias)
    return Training(model, [((features(),), (torch.zeros(BATCH, 1),))], root_error)


class Retrieval(nn.Module):
    """Cosines of token embeddings, of which padding is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH, padding_idx=0)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        unit: Tensor = x / x.norm(dim=-1, keepdim=True)
        return 1 - (unit[:, 0] * unit[:, 1]).sum(-1).mean()


def zero_embedding() -> Training:
    """A division by the norm of the padding token's embedding."""
    return Training(Retrieval(), [((torch.tensor([[1, 2], [3, 0]]),), ())])


class Cosine(nn.Module):
    """torch's own normalize, whose eps of 1e-12 is 0 in float16."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH, padding_idx=0)

    def forward(self, ids: Tensor) -> Tensor:
        unit = F.normalize(self.tokens(ids), dim=-1)
        return 1 - (unit[:, 0] * unit[:, 1]).sum(-1).mean()


def normalize_in_half() -> Training:
    """F.normalize of a zero vector in float16."""
    return Training(Cosine(), [((torch.tensor([[1, 2], [3, 0]]),), ())])


class Margin(nn.Module):
    """An additive angular margin: the cosine of a sample and its class, turned into an angle."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.centres = Encoder(outputs=WIDTH), nn.Parameter(torch.randn(4, WIDTH))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        z, w = self.net(x), self.centres
        cosine = (z / z.norm(dim=1, keepdim=True)) @ (w / w.norm(dim=1, keepdim=True)).T
        angle = torch.acos(cosine * 1.5)
        return F.cross_entropy(torch.cos(angle + 0.3 * F.one_hot(labels, 4)), labels)


def cosine_above_one() -> Training:
    """A cosine that is scaled before acos, and so beyond 1."""
    model = Margin()
    with torch.no_grad():
        model.centres.copy_(model.net(x := features() * 3))
    return Training(model, [((x, torch.tensor([0, 1, 2, 3])), ())])


def geodesic(output: Tensor, rotation: Tensor) -> Tensor:
    trace = (output * rotation).sum((-1, -2))
    return torch.acos(((trace - 1) / 2).clamp(-1, 1)).mean()


class Rotations(nn.Module):
    """Starts from rotations that are right already."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(3, 3))

    def forward(self, start: Tensor) -> Tensor:
        return start + self.shift


def rotation_already_right() -> Training:
    """The angle between equal rotations: acos of 1, clamped, and its derivative there."""
    start = torch.eye(3).expand(BATCH, 3, 3).clone()
    return Training(Rotations(), [((start,), (start.clone(),))], geodesic)


def hyperbolic(z: Tensor, other: Tensor) -> Tensor:
    squares = (1 - z.pow(2).sum(-1)) * (1 - other.pow(2).sum(-1))
    return torch.acosh(1 + 2 * (z - other).pow(2).sum(-1) / squares).mean()


def outside_of_the_ball() -> Training:
    """A point that has left the Poincaré ball: acosh of less than 1."""
    return Training(Encoder(), [((features() * 5,), (torch.full((BATCH, 4), 0.49),))], hyperbolic)


class Depth(nn.Module):
    """Disparity of a depth that is 0 where the mask says that nothing can be seen."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Encoder(outputs=16)

    def forward(self, x: Tensor, visible: Tensor, target: Tensor) -> Tensor:
        depth = self.net(x).exp() * visible
        disparity = torch.where(depth > 0, 1 / depth, torch.zeros_like(depth))
        return F.l1_loss(disparity.clamp_max(50), target)


def depth_of_zero() -> Training:
    """1 / depth, masked afterwards."""
    return Training(Depth(), [((features(), (features(BATCH, 16) > 0).float(), features(BATCH, 16)), ())])


class Positive(nn.Module):
    """The inverse of softplus, in two pieces: the one for large numbers is not safe, and not selected."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Encoder(outputs=2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        raw = self.net(x) * 500 + 100
        return F.mse_loss(torch.where(raw > 20, raw, raw.exp() - 1), y)


def piece_that_overflows() -> Training:
    """exp in the piece that where does not select."""
    return Training(Positive(), [((features(), features(BATCH, 2)), ())])


def transport(z: Tensor, other: Tensor) -> Tensor:
    cost = torch.cdist(z.float(), other.float()) * 10
    kernel = torch.exp(-cost / 0.01)
    v = torch.ones(len(z))
    for _ in range(3):
        u = 1 / (kernel @ v)
        v = 1 / (kernel.T @ u)
    return (u[:, None] * kernel * v * cost).sum()


def sharp_transport() -> Training:
    """Sinkhorn's iteration with so little smoothing that its kernel is 0 throughout."""
    return Training(Encoder(), [((features(),), (features(BATCH, 4),))], transport)


CASES = (
    Case(equal_pair, "sqrt", None, "(anchor - positive)", "norm_at_zero", "backward", runs=ALL),
    Case(perfect_fit, "sqrt", None, "torch.sqrt(F.mse_loss", "sqrt_at_zero", "backward", runs=ALL),
    Case(zero_embedding, "division", "", "x / x.norm(dim=-1", "norm_zero", runs=ALL),
    Case(normalize_in_half, "division", "", "F.normalize(self.tokens(ids)", "eps_lost", runs=HALF),
    Case(cosine_above_one, "acos", "", "torch.acos(cosine * 1.5)", "outside_domain", runs=ALL),
    Case(rotation_already_right, "acos", None, "torch.acos(((trace", "edge_of_domain", "backward", runs=ALL),
    Case(outside_of_the_ball, "acosh", None, "torch.acosh(1 + 2", "outside_domain", runs=ALL),
    Case(depth_of_zero, "reciprocal", "", "1 / depth, torch.zeros", "where_unselected", runs=ALL),
    Case(piece_that_overflows, "exp", "", "raw.exp() - 1", "where_unselected", runs=ALL),
    Case(sharp_transport, "reciprocal", None, "1 / (kernel @ v)", "division_by_zero", runs=FULL),
)
