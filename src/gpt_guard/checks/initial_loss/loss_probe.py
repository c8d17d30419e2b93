"""Ask a project's loss with logits and targets that tell its possible forms apart."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gpt_guard.callbacks.losses.scores import are_probabilities
from gpt_guard.checks.initial_loss.loss_forms import IGNORED, Form, Probe, recognise
from gpt_guard.checks.initial_loss.output_layer import output_layer
from gpt_guard.checks.runner.base import LossFunction, Subject
from gpt_guard.checks.runner.forward import call
from gpt_guard.checks.runner.perturb import Forward, probe_ids, repeatable
from gpt_guard.hooks.isolation.preserve import preserved, seed_all

_ROWS, _LENGTH, _SETS = 3, 7, 3
_FLAT, _LOUD, _SHARP = 0.5, 2.0, 10.0
"""Standard deviations of logits: below the first the forms give nearly the same number; what is aimed at; above the
last the loss is a single large score and rounding decides."""
_HALF = (torch.float16, torch.bfloat16)


def form_of_loss(model: nn.Module, subject: Subject) -> Form | None:
    """Recognise the loss that the project trains with; None if it is no known form. The model must have a loss.

    An untrained model's logits are nearly equal, and every form of loss near log V: the output layer is made larger
    for the question, and put back. Reads the device; runs a few forwards of 3 x 7 tokens in eval mode, no gradient.
    """
    length = min(_LENGTH, probe_ids(subject).size(1))
    x = probe_ids(subject, _ROWS, length)
    with preserved(model):
        logits = _tell_apart(model, x, repeatable(model, subject.seed))
        vocab = min(logits.size(-1), subject.vocab_size or logits.size(-1))
        generator = torch.Generator().manual_seed(subject.seed)
        sets = [torch.randint(vocab, tuple(x.shape), generator=generator) for _ in range(_SETS)]
        if subject.batch is not None and bool((subject.batch[1] == subject.ignore_index).any()):
            for targets in sets:
                targets.view(-1)[::3] = IGNORED  # as in the batch, some labels do not count

        def loss(targets: Tensor) -> float:
            labels = targets.masked_fill(targets == IGNORED, subject.ignore_index).to(x.device)
            return loss_at(model, x, labels, subject.loss_fn, subject.seed)

        losses = [loss(targets) for targets in sets]
        return recognise(Probe(logits.double().cpu(), sets, losses, _precision(logits)), loss)


def loss_at(model: nn.Module, x: Tensor, y: Tensor, loss_fn: LossFunction | None, seed: int) -> float:
    """The project's own loss, always with the same random numbers. Raises ValueError where there is none."""
    seed_all(seed)
    loss = project_loss(model, x, y, loss_fn)
    if loss is None:
        raise ValueError("the model returns no loss, and no loss_fn was given")
    return float(loss.detach().double().mean())


def project_loss(model: nn.Module, x: Tensor, y: Tensor, loss_fn: LossFunction | None) -> Tensor | None:
    """`loss_fn(logits, y)`, else the model's own; None without either.

    A model whose loss is computed outside is not given the targets: they may hold labels that its own would refuse.
    """
    return loss_fn(call(model, x).logits, y) if loss_fn is not None else call(model, x, y).loss


def _tell_apart(model: nn.Module, x: Tensor, forward: Forward) -> Tensor:
    logits = forward(x)
    head = output_layer(model, x, logits.size(-1)).weight
    for _ in range(3):  # tied weights change the hidden states, too
        scores = logits.log() if are_probabilities(logits) else logits
        spread = float(scores.float().std(-1).mean())
        if head is None or _FLAT <= spread <= _SHARP:
            break
        if spread < 1e-3:
            head.data.normal_(0.0, _LOUD / head.size(1) ** 0.5)
        else:
            head.data.mul_(_LOUD / spread)
        logits = forward(x)
    return logits


def _precision(logits: Tensor) -> float:
    """Relative: a few roundings of a mean of a few terms, in the dtype in which the loss may have been computed."""
    eps = torch.finfo(logits.dtype).eps
    return 2 * eps if logits.dtype in _HALF else 1e-4
