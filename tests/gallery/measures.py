"""Measures of one's own that go wrong: overlaps, correlations, spectra, headings, survival, schedules."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .nets import BATCH, GPT, VOCAB, Encoder, features, ids, shifted
from .parts import ALL, FULL, MIXED, Case, Training


def clamped(logits: Tensor, labels: Tensor) -> Tensor:
    score = torch.sigmoid(logits * 200).clamp(1e-8, 1 - 1e-8)
    return -(labels * score.log() + (1 - labels) * (1 - score).log()).mean()


def clamp_that_rounds() -> Training:
    """1 - 1e-8 is 1 in float32: the clamp that was to keep the logarithm from 0 does nothing at that end."""
    return Training(Encoder(outputs=1), [((features(16) * 4,), (torch.zeros(16, 1),))], clamped)


def smoothed(logits: Tensor, targets: Tensor) -> Tensor:
    banned = torch.arange(VOCAB) == 0
    masked = logits.masked_fill(banned, -torch.inf)
    return F.cross_entropy(masked.flatten(0, 1), targets.flatten(), label_smoothing=0.1)


def smoothing_of_a_banned_token() -> Training:
    """Label smoothing asks for some probability of every token, of masked ones too."""
    inputs, targets = shifted()
    return Training(GPT(), [((inputs,), (targets,))], smoothed)


def divergence(logits: Tensor, teacher: Tensor) -> Tensor:
    banned = torch.arange(VOCAB) < 2
    student = logits.masked_fill(banned, -torch.inf).log_softmax(-1)
    return F.kl_div(student, teacher, reduction="batchmean")


def student_without_the_token() -> Training:
    """A divergence from a teacher that gives probability to tokens which the student may not use."""
    return Training(GPT(), [((ids(),), (torch.randn(BATCH, 8, VOCAB).softmax(-1),))], divergence)


def overlap(output: Tensor, boxes: Tensor) -> Tensor:
    size, other = F.relu(output), boxes
    common = torch.minimum(size, other).prod(-1)
    union = size.prod(-1) + other.prod(-1) - common
    return (1 - common / union).mean()


def boxes_without_area() -> Training:
    """The overlap of a box without area and one that only fills the batch up."""
    model = Encoder(outputs=2)
    with torch.no_grad():
        model.out.bias.fill_(-5)
    return Training(model, [((features(),), (torch.zeros(BATCH, 2),))], overlap)


def survival(risk: Tensor, happened: Tensor) -> Tensor:
    order = risk[:, 0].float()
    return -(order - order.logcumsumexp(0))[happened].mean()


def batch_without_event() -> Training:
    """A survival loss of a batch in which nothing happened."""
    return Training(Encoder(outputs=1), [((features(),), (torch.zeros(BATCH, dtype=torch.bool),))], survival)


def correlation(output: Tensor, target: Tensor) -> Tensor:
    a, b = output - output.mean(), target - target.mean()
    return 1 - (a * b).sum() / (a.square().sum().sqrt() * b.square().sum().sqrt())


def constant_prediction() -> Training:
    """A correlation with a prediction that does not vary yet."""
    model = Encoder(outputs=1)
    nn.init.zeros_(model.out.weight)
    return Training(model, [((features(),), (features(BATCH, 1),))], correlation)


def spectral(sound: Tensor, target: Tensor) -> Tensor:
    found, wanted = torch.fft.rfft(sound.float()), torch.fft.rfft(target.float())
    size = torch.sqrt(found.real**2 + found.imag**2)
    return F.l1_loss(size, wanted.abs())


class Silent(nn.Module):
    """Sound times a gate that is closed at first."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.gate = Encoder(outputs=16), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x) * self.gate
        return out


def silence() -> Training:
    """The magnitude of a spectrum that is 0: finite, and its derivative is not."""
    return Training(Silent(), [((features(),), (features(BATCH, 16),))], spectral)


class Diffusion(nn.Module):
    """Estimates the clean signal from a noisy one, by a schedule that ends in pure noise."""

    signal: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = Encoder(8, 8)
        self.register_buffer("signal", torch.linspace(1, 0, 11))

    def forward(self, noisy: Tensor, step: Tensor, clean: Tensor) -> Tensor:
        signal = self.signal[step][:, None]
        estimate = (noisy - (1 - signal**2).sqrt() * self.net(noisy)) / signal
        return F.mse_loss(estimate, clean)


def last_step_of_the_schedule() -> Training:
    """A division by the share of the signal, which is 0 in the last step."""
    return Training(Diffusion(), [((features(), torch.tensor([1, 4, 10, 2]), features()), ())])


def weighted(logits: Tensor, labels: Tensor) -> Tensor:
    weight = (1 - labels).sum(0) / labels.sum(0)
    return F.binary_cross_entropy_with_logits(logits, labels, pos_weight=weight)


def class_without_positive() -> Training:
    """Weights by the frequency of each class in the batch, one of which does not occur."""
    labels = torch.tensor([[1.0, 0, 1], [0, 0, 1], [1, 0, 0], [0, 0, 1]])
    return Training(Encoder(outputs=3), [((features(),), (labels,))], weighted)


class Spread(nn.Module):
    """Rewards features that vary: the model returns its loss, which is the logarithm of their deviation."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Encoder(outputs=6)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.net(x))
        return h.std(0).log().mean()


class Spectrum(nn.Module):
    """A cepstrum: the logarithm of a complex spectrum, of a signal that is 0 in one channel."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Encoder(outputs=8)

    def forward(self, x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
        spectrum = torch.fft.rfft((self.net(x) * gate).float())
        cepstrum = torch.log(spectrum).real
        return F.mse_loss(cepstrum, y[:, : cepstrum.size(1)])


class Flow(nn.Module):
    """An invertible layer and the logarithm of its determinant."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.diag(torch.tensor([1.0, 1.0, 1.0, -1.0])))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.mix).pow(2).mean() - torch.logdet(self.mix)


def reflection() -> Training:
    """The logarithm of a determinant that is negative, for which torch itself writes NaN."""
    return Training(Flow(), [((features(BATCH, 4),), ())])


def log_likelihood(output: Tensor, bounds: Tensor) -> Tensor:
    return F.relu(bounds - output.abs()).prod(-1).log().mean()


def outside_of_its_support() -> Training:
    """A likelihood to be made small, of values where the density is 0: the loss is -inf."""
    return Training(Encoder(outputs=3), [((features(),), (torch.tensor([1.0, 1.0, 0.1]),))], log_likelihood)


def dead_feature() -> Training:
    """The logarithm of a deviation that is 0: the loss that the model returns is -inf, and no mask."""
    model = Spread()
    with torch.no_grad():
        model.net.out.bias[2] = -10
    return Training(model, [((features(),), ())])


def silent_channel() -> Training:
    """The complex logarithm of 0."""
    gate = torch.tensor([[1.0], [1.0], [0.0], [1.0]])
    return Training(Spectrum(), [((features(), features(), gate), ())])


CASES = (
    Case(clamp_that_rounds, "log", None, "(1 - score).log()", "log_of_probability", runs=ALL),
    Case(smoothing_of_a_banned_token, "sum", None, "label_smoothing=0.1", "mask_used", runs=ALL),
    Case(student_without_the_token, "sum", None, "F.kl_div(student, teacher", "target_masked", runs=ALL),
    Case(boxes_without_area, "division", None, "common / union", "division_by_zero", runs=ALL),
    Case(batch_without_event, "mean", None, "[happened].mean()", "mean_of_nothing", runs=ALL),
    Case(constant_prediction, "division", None, "(a * b).sum() /", "zero_std", runs=ALL),
    Case(silence, "sqrt", None, "torch.sqrt(found.real**2", "sqrt_at_zero", "backward", runs=MIXED),
    Case(last_step_of_the_schedule, "division", "", "self.net(noisy)) / signal", "division_by_zero", runs=ALL),
    Case(class_without_positive, "division", None, "(1 - labels).sum(0) /", "empty_count", runs=ALL),
    Case(outside_of_its_support, "log", None, ".prod(-1).log()", "log_of_zero", runs=ALL),
    Case(reflection, "logdet", "", "torch.logdet(self.mix)", "log_of_negative", runs=FULL),
    Case(dead_feature, "log", "", "h.std(0).log()", "log_of_zero", runs=ALL),
    Case(silent_channel, "log", "", "torch.log(spectrum)", "log_of_zero", runs=MIXED),
)
