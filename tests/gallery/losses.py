"""Losses outside of the model that go wrong, known by `guardian.watch_loss`."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .nets import BATCH, GPT, IGNORED, LENGTH, VOCAB, WIDTH, Encoder, features, ids, shifted
from .parts import ALL, FULL, HALF, HALVES, WIDE, Case, Training


def cross_entropy_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def all_labels_ignored() -> Training:
    """A batch whose answers were all cut off: every label is -100."""
    inputs, targets = shifted()
    batches = [((inputs,), (targets,)), ((inputs,), (torch.full_like(targets, IGNORED),))]
    return Training(GPT(), batches, cross_entropy_of)


def masked_mean_of(logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return (losses * mask.flatten()).sum() / mask.sum()


def mean_of_no_token() -> Training:
    """The mean over tokens that count, in a batch that has none."""
    inputs, targets = shifted()
    return Training(GPT(), [((inputs,), (targets, torch.zeros(BATCH, LENGTH)))], masked_mean_of)


def distilled(logits: Tensor, teacher: Tensor) -> Tensor:
    q = F.log_softmax(logits, dim=-1)
    return (teacher * (teacher.log() - q)).sum(-1).mean()


def teacher_without_tail() -> Training:
    """Distillation from a teacher of which only the likeliest tokens were kept: the others are exactly 0."""
    probabilities = torch.randn(BATCH, LENGTH, VOCAB).softmax(-1)
    kept = probabilities * (probabilities > 1 / VOCAB)
    return Training(GPT(), [((ids(),), (kept / kept.sum(-1, keepdim=True),))], distilled)


def adversarial(real: Tensor, labels: Tensor) -> Tensor:
    score = torch.sigmoid(real * 200)
    return -(labels * score.log() + (1 - labels) * torch.log(1 - score)).mean()


def certain_discriminator() -> Training:
    """A binary cross entropy by hand, whose sigmoid is exactly 0 or 1 as soon as the net is certain."""
    return Training(Encoder(outputs=1), [((features() * 4,), (torch.ones(BATCH, 1),))], adversarial)


def focal(logits: Tensor, labels: Tensor) -> Tensor:
    score = torch.sigmoid(logits * 300)
    right = torch.where(labels > 0, score, 1 - score)
    losses = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    return ((1 - right) ** 0.5 * losses).mean()


def focal_below_one() -> Training:
    """A focal loss with gamma 0.5: the derivative of the root is infinite where the net is certain and right."""
    return Training(Encoder(outputs=1), [((features() * 4,), (torch.ones(BATCH, 1),))], focal)


def contrast(views: Tensor, temperature: float) -> Tensor:
    z = F.normalize(views, dim=-1)
    return F.cross_entropy(z @ z.T / temperature, torch.arange(len(z)))


def annealed_temperature() -> Training:
    """A temperature that an annealing schedule takes to 0."""
    batches = [((features(),), (1.0 - step / 2,)) for step in range(3)]
    return Training(Encoder(), batches, contrast)


def supervised_contrast(views: Tensor, labels: Tensor) -> Tensor:
    z = F.normalize(views, dim=-1, eps=1e-4)
    logits = (z @ z.T).fill_diagonal_(-torch.inf)
    positives = (labels[:, None] == labels).to(z.dtype).fill_diagonal_(0)
    return -(positives * logits.log_softmax(-1)).sum(-1).mean()


def diagonal_left_out() -> Training:
    """The pair of a sample with itself is masked by -inf, then weighted by 0."""
    return Training(Encoder(), [((features(),), (torch.tensor([0, 0, 1, 1]),))], supervised_contrast)


def gaussian(output: Tensor, target: Tensor) -> Tensor:
    mean, variance = output[:, :1], F.relu(output[:, 1:])
    return (variance.log() + (target - mean) ** 2 / variance).mean()


def variance_of_zero() -> Training:
    """A likelihood with a variance that a ReLU may make 0."""
    return Training(Encoder(outputs=2), [((features(16),), (features(16, 1),))], gaussian)


def squared_log(output: Tensor, target: Tensor) -> Tensor:
    return (torch.log1p(output * 5) - torch.log1p(target)).pow(2).mean()


def log_error() -> Training:
    """The squared error of logarithms, of an output that is free to be below -1."""
    return Training(Encoder(outputs=1), [((features(16),), (features(16, 1).abs(),))], squared_log)


def relative(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target).abs() / target.abs()).mean()


def percentage_of_zero() -> Training:
    """The mean absolute percentage error, with a target of 0."""
    target = features(BATCH, 1)
    target[2] = 0
    return Training(Encoder(outputs=1), [((features(),), (target,))], relative)


class Allowed(nn.Module):
    """A GPT that may only answer with tokens of a list; one of the right answers is not on it."""

    banned: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT()
        self.register_buffer("banned", torch.arange(VOCAB) < 4)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.gpt(ids)
        return logits.masked_fill(self.banned, -torch.inf)


def constrained(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), targets)


def target_not_allowed() -> Training:
    """A mask over the vocabulary covers a token that the text has."""
    inputs, targets = shifted()
    targets[0, 0] = 2
    return Training(Allowed(), [((inputs,), (targets,))], constrained)


def alignment(logits: Tensor, targets: Tensor, lengths: Tensor) -> Tensor:
    scores = logits.float().log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(scores, targets, torch.full((BATCH,), LENGTH), lengths)


def text_longer_than_sound() -> Training:
    """CTC of a text that has more tokens than there are frames."""
    targets = torch.randint(1, VOCAB, (BATCH, LENGTH + 4))
    lengths = torch.tensor([3, LENGTH + 4, 2, 3])
    return Training(GPT(), [((ids(),), (targets, lengths))], alignment)


def token_sum(logits: Tensor, targets: Tensor) -> Tensor:
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.repeat_interleave(1000).sum() / losses.numel()


def sum_in_half() -> Training:
    """A loss that is summed in float16 before it is divided."""
    inputs, targets = shifted()
    return Training(GPT(), [((inputs,), (targets,))], token_sum)


def similarity(hidden: Tensor, labels: Tensor) -> Tensor:
    scores = (hidden * 1000) @ (hidden * 1000).transpose(-2, -1)
    return F.mse_loss(scores.float() / 1e6, labels)


def loss_under_autocast() -> Training:
    """A loss of one's own inside of autocast: its product runs in float16."""
    return Training(Encoder(outputs=WIDTH), [((features() * 4,), (torch.eye(BATCH),))], similarity)


CASES = (
    Case(
        all_labels_ignored,
        "cross entropy (nll_loss)",
        None,
        "ignore_index=IGNORED",
        "all_labels_ignored",
        runs=ALL,
    ),
    Case(mean_of_no_token, "division", None, ".sum() / mask.sum()", "empty_count", runs=ALL),
    Case(teacher_without_tail, "log", None, "teacher.log() - q", "log_of_zero", runs=ALL),
    Case(certain_discriminator, "log", None, "torch.log(1 - score)", "log_of_probability", runs=ALL),
    Case(focal_below_one, "pow", None, "(1 - right) ** 0.5", "pow_at_zero", "backward", runs=ALL),
    Case(annealed_temperature, "division", None, "z @ z.T / temperature", "division_by_zero", runs=WIDE),
    Case(diagonal_left_out, "multiplication", None, "positives * logits.log_softmax", "zero_times_inf", runs=ALL),
    Case(variance_of_zero, "log", None, "variance.log()", "log_of_zero", runs=ALL),
    Case(log_error, "log1p", None, "torch.log1p(output * 5)", "log_of_negative", runs=ALL),
    Case(percentage_of_zero, "division", None, "/ target.abs()", "division_by_zero", runs=ALL),
    Case(target_not_allowed, "cross entropy (nll_loss)", None, "logits.transpose(1, 2)", "target_masked", runs=ALL),
    Case(text_longer_than_sound, "ctc_loss", None, "F.ctc_loss(", "no_alignment", runs=FULL),
    Case(sum_in_half, "sum", None, "repeat_interleave(1000).sum()", "sum_overflow", runs=HALF),
    Case(
        loss_under_autocast,
        "matmul",
        None,
        "(hidden * 1000) @",
        "matmul_overflow",
        runs=HALVES,
    ),
)
