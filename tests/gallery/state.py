"""What was wrong before the step began, or grew into it: batches, buffers, parameters, learning rates, loss scales."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam

from .nets import BATCH, GPT, WIDTH, Encoder, features, shifted
from .parts import ALL, FULL, HALF, HALVES, Case, Training, filled_memory


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Encoder(outputs=1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.net(x), y)


def missing_value() -> Training:
    """A sample with a missing value, as a table has them."""
    x = features()
    x[2, 5] = torch.nan
    return Training(Regression(), [((features(), features(BATCH, 1)), ()), ((x, features(BATCH, 1)), ())])


def learning_rate_of_100() -> Training:
    """Steps so large that weights grow until a product leaves the range."""
    batch = ((features(), features(BATCH, 1)), ())
    return Training(Deep(), [batch] * 30, optimizer=lambda parameters: SGD(parameters, lr=100.0))


class Deep(nn.Module):
    """Two layers with nothing that bounds them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = F.relu(self.first(x))
        return F.mse_loss(self.last(hidden), y)


class Codebook(nn.Module):
    """Codes that follow the mean of what was assigned to them."""

    codes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Encoder(8, 4), Encoder(4, 8)
        self.register_buffer("codes", torch.randn(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x)
        nearest = (z[:, None] - self.codes).pow(2).sum(-1).argmin(1)
        quantised = z + (self.codes[nearest] - z).detach()
        with torch.no_grad():
            taken = F.one_hot(nearest, 6).to(z.dtype)
            self.codes.copy_(taken.T @ z / taken.sum(0)[:, None])
        out: Tensor = F.mse_loss(self.decoder(quantised), x) + (z - self.codes[nearest].detach()).pow(2).mean()
        return out


def dead_code() -> Training:
    """The mean of what a code was assigned, for a code that got nothing: the next step meets it."""
    return Training(Codebook(), [((features(),), ()) for _ in range(3)])


def adam_in_half() -> Training:
    """Adam with its usual eps on weights in float16: rows that got no gradient are divided 0 / 0."""
    return Training(GPT(), [(shifted(), ()) for _ in range(3)], optimizer=lambda parameters: Adam(parameters, lr=1e-3))


def scaled_by_hand(logits: Tensor, targets: Tensor) -> Tensor:
    loss = F.cross_entropy(logits.float().transpose(1, 2), targets)
    return loss * 2.0**24


def fixed_loss_scale() -> Training:
    """A loss scale that is fixed, and too large for gradients in float16."""
    inputs, targets = shifted()
    return Training(GPT(), [((inputs,), (targets,))], scaled_by_hand)


def squared(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target, reduction="sum")


def missing_label() -> Training:
    """A label with a missing value, which the model never sees."""
    target = features(BATCH, 1)
    target[1] = torch.nan
    return Training(Encoder(outputs=1), [((features(),), (target,))], squared)


def outlier_channel() -> Training:
    """A channel that has grown until a product under autocast leaves float16."""
    model = GPT()
    with torch.no_grad():
        for name in ("up", "down"):
            model.get_submodule(f"blocks.1.mlp.{name}").get_parameter("weight").mul_(3000)
    return Training(model, [(shifted(), ())])


class Late(nn.Module):
    """Built without memory, as large models are, and materialised without being initialised."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.adapter = nn.Linear(8, 8)
        self.net = Regression()
        self.adapter.to_empty(device="cpu")

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out: Tensor = self.net(x + self.adapter(x), y)
        return out


def weights_never_written() -> Training:
    """to_empty() from the meta device, and neither a checkpoint nor an initialisation after it."""
    with filled_memory():
        model = Late()
    return Training(model, [((features(), features(BATCH, 1)), ())])


CASES = (
    Case(missing_label, "input", None, "target, reduction=", "bad_batch", runs=ALL),
    Case(
        outlier_channel,
        "matmul",
        "blocks.1.mlp.down",
        "self.down(F.gelu",
        "matmul_overflow",
        runs=HALVES,
    ),
    Case(weights_never_written, "parameter", "adapter", "self.adapter(x)", "uninitialised", runs=ALL),
    Case(missing_value, "batch", "", "output = self.model(*inputs)", "missing_values", runs=ALL),
    Case(learning_rate_of_100, "matmul", "last", "self.last(hidden)", "lr_too_high", runs=FULL),
    Case(dead_code, "buffer", "", "", "running_average", "after step", runs=ALL),
    Case(adam_in_half, "update", "tokens", "", "adam_eps_half", "after step", runs=HALF),
    Case(fixed_loss_scale, "cast", None, "logits.float().transpose", "gradient_overflow", "backward", runs=HALF),
)
