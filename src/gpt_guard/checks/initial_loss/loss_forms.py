"""Which function of logits and targets a loss is: cross entropy in its right form, or in one of the known wrong ones.

Recognised by value: the same logits, several sets of targets, and a form is found only if it gives the loss for all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt_guard.callbacks.losses.scores import are_probabilities
from gpt_guard.checks.runner.base import Subject
from gpt_guard.checks.runner.forward import call, project_loss
from gpt_guard.checks.runner.perturb import probe_ids, repeatable
from gpt_guard.hooks.isolation.preserve import preserved, seed_all

IGNORED = -100
"""The label that does not count, in the probe: torch's default."""
_ROWS, _LENGTH, _SETS, _MOST_SETS = 3, 7, 3, 8
_FLAT, _LOUD, _SHARP = 0.5, 2.0, 10.0
"""Standard deviations of logits: below the first the forms give nearly the same number; what is aimed at; above the
last the loss is a single large score and rounding decides."""
_HALF = (torch.float16, torch.bfloat16)
LossOf = Callable[[Tensor], float]
"""The project's loss on the probe's inputs, for targets `[B, T]`."""


class Form(NamedTuple):
    """A recognised form: `key` for code, `words` for people, `shift` the number of positions that it shifts targets.

    `left_out` is the target id that does not count, where a form "ignored" has one.
    """

    key: str
    words: str
    shift: int = 0
    left_out: int | None = None


class Probe(NamedTuple):
    """Logits `[B, T, V]` in float64, targets to ask with, the losses that came back, and their relative precision."""

    logits: Tensor
    targets: Sequence[Tensor]
    losses: Sequence[float]
    precision: float

    def fits(self, values: Sequence[float]) -> bool:
        """True where these values are the losses, up to rounding."""
        return all(
            math.isfinite(value) and abs(value - loss) <= self.precision * max(1.0, abs(loss))
            for value, loss in zip(values, self.losses, strict=True)
        )

    def each(self, form: Callable[[Tensor, Tensor], Tensor]) -> list[float]:
        """The values of a form for all sets of targets."""
        return [float(form(self.logits, targets)) for targets in self.targets]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over all positions, in nats; `[B, T, V]` and `[B, T]`."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def recognise(probe: Probe, loss: LossOf) -> Form | None:
    """The first form that gives the losses, right ones first; None if none does. May ask for more losses."""
    for form, values in _exact(probe):
        if probe.fits(values):
            return form
    twice = probe._replace(logits=probe.logits.softmax(-1))
    for shift in (0, 1):
        plain = probe.each(_shifted(shift))
        if _smoothing(twice, twice.each(_shifted(shift)), shift) is not None:
            return Form("softmax_twice", "cross entropy of softmax(logits) with label smoothing", shift)
        for fitted in (_term, _smoothing, _factor):
            if (found := fitted(probe, plain, shift)) is not None:
                return found
    return _ignored(probe) or _weighted(probe, loss)


def _exact(probe: Probe) -> Iterator[tuple[Form, list[float]]]:
    for shift, words in ((0, "cross entropy"), (1, "cross entropy of logits[:, :-1] and targets[:, 1:]")):
        yield Form("plain", words, shift), probe.each(_shifted(shift))
    for shift, words in ((-1, "logits[:, 1:] against targets[:, :-1]"), (2, "logits[:, :-2] against targets[:, 2:]")):
        yield Form("shift", words, shift), probe.each(_shifted(shift))
    for shift in (0, 1):
        yield (
            Form("unnormalised", "the negative score of the target, without log_softmax", shift),
            probe.each(_of_raw_scores(shift)),
        )
    yield Form("nll", "the negative log of the probabilities that the model returns"), probe.each(_of_probabilities)
    for shift in (0, 1):
        twice = _shifted(shift)
        yield Form("softmax_twice", "cross entropy of softmax(logits)", shift), probe.each(_with_softmax(twice))
    for words, square in _SQUARES:
        yield Form("squared", words), probe.each(square)
    yield Form("probability", "the negative probability, without a logarithm"), probe.each(_without_log)
    for key, words, form in _FLATTENED:
        yield Form(key, words), probe.each(form)
    yield Form("perplexity", "exp of the cross entropy"), [math.exp(value) for value in probe.each(cross_entropy)]


def _shifted(shift: int) -> Callable[[Tensor, Tensor], Tensor]:
    def form(logits: Tensor, targets: Tensor) -> Tensor:
        length = targets.size(1)
        logits = logits[:, max(0, -shift) : length - max(0, shift)]
        return cross_entropy(logits, targets[:, max(0, shift) : length - max(0, -shift)])

    return form


def _of_raw_scores(shift: int) -> Callable[[Tensor, Tensor], Tensor]:
    def form(logits: Tensor, targets: Tensor) -> Tensor:
        scores = logits[:, : logits.size(1) - shift]
        return F.nll_loss(scores.flatten(0, 1), targets[:, shift:].flatten())

    return form


def _square(logits: Tensor, targets: Tensor) -> Tensor:
    counted = targets != IGNORED
    wanted = F.one_hot(targets[counted].long(), logits.size(-1)).to(logits.dtype)
    return (logits[counted].softmax(-1) - wanted).square().sum(-1).mean()


_SQUARES: tuple[tuple[str, Callable[[Tensor, Tensor], Tensor]], ...] = (
    ("the squared distance of softmax(logits) from the one-hot target", _square),
    (
        "the mean squared error of softmax(logits) and the one-hot target",
        lambda logits, targets: _square(logits, targets) / logits.size(-1),
    ),
)


def _with_softmax(form: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda logits, targets: form(logits.softmax(-1), targets)


def _of_probabilities(logits: Tensor, targets: Tensor) -> Tensor:
    return F.nll_loss(logits.clamp_min(0).log().flatten(0, 1), targets.flatten())


def _without_log(logits: Tensor, targets: Tensor) -> Tensor:
    return F.nll_loss(logits.softmax(-1).flatten(0, 1), targets.flatten())


_FLATTENED: tuple[tuple[str, str, Callable[[Tensor, Tensor], Tensor]], ...] = (
    (
        "targets_transposed",
        "logits flattened as [B, T], targets as [T, B]",
        lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets.t().flatten()),
    ),
    (
        "logits_transposed",
        "logits flattened as [T, B], targets as [B, T]",
        lambda logits, targets: F.cross_entropy(logits.transpose(0, 1).flatten(0, 1), targets.flatten()),
    ),
    (
        "viewed",
        "logits viewed as [B, V, T] without a transpose",
        lambda logits, targets: F.cross_entropy(
            logits.reshape(logits.size(0), logits.size(2), logits.size(1)), targets
        ),
    ),
    (
        "viewed",
        "logits transposed to [B, V, T], then viewed as [B * T, V]",
        lambda logits, targets: F.cross_entropy(logits.transpose(1, 2).reshape(-1, logits.size(2)), targets.flatten()),
    ),
)


def _term(probe: Probe, plain: list[float], shift: int) -> Form | None:
    """Cross entropy and a term that does not depend on the targets: an auxiliary or a z-loss."""
    term = probe.losses[0] - plain[0]
    if not probe.fits([value + term for value in plain]):
        return None
    return Form("term", f"cross entropy and a term of {term:.4g} that does not depend on the targets", shift)


def _smoothing(probe: Probe, plain: list[float], shift: int) -> Form | None:
    """Label smoothing: `(1 - e)` cross entropy and `e` of the mean over all classes."""

    def even(logits: Tensor, targets: Tensor) -> Tensor:
        counted = targets[:, shift:] != IGNORED
        return -logits[:, : logits.size(1) - shift].log_softmax(-1)[counted].mean()

    uniform = probe.each(even)
    if abs(uniform[0] - plain[0]) <= probe.precision:
        return None
    share = (probe.losses[0] - plain[0]) / (uniform[0] - plain[0])
    mixed = [(1 - share) * value + share * flat for value, flat in zip(plain, uniform, strict=True)]
    if not 0 < share < 0.9 or not probe.fits(mixed):
        return None
    return Form("smoothing", f"cross entropy with label smoothing {share:.3g}", shift)


def _factor(probe: Probe, plain: list[float], shift: int) -> Form | None:
    """A constant multiple of cross entropy."""
    factor = probe.losses[0] / plain[0] if plain[0] else 0.0
    if factor == 0 or not probe.fits([factor * value for value in plain]):
        return None
    counted = probe.targets[0][:, shift:] != IGNORED
    rows, length = counted.shape
    count = int(counted.sum())
    known = {
        "sum": (count, "the sum over all positions"),
        "sum_over_time": (count / rows, "the sum over positions, averaged over samples"),
        "sum_over_batch": (count / length, "the sum over samples, averaged over positions"),
        "all_positions": (count / (rows * length), "the sum divided by all positions, ignored ones included"),
        "bits": (1 / math.log(2), "cross entropy in bits"),
    }
    for key, (expected, words) in known.items():
        if math.isclose(factor, expected, rel_tol=10 * probe.precision):
            return Form(key, words, shift)
    parts = 1 / factor
    if parts > 1.5 and math.isclose(parts, round(parts), rel_tol=10 * probe.precision):
        return Form("accumulation", f"cross entropy divided by {round(parts)}", shift)
    return Form("negated" if factor < 0 else "factor", f"cross entropy times {factor:.4g}", shift)


def _ignored(probe: Probe) -> Form | None:
    """Cross entropy without the positions of one target id."""
    candidates = [int(each) for each in torch.stack(list(probe.targets)).unique() if int(each) != IGNORED]
    for shift in (0, 1):
        logits = probe.logits[:, : probe.logits.size(1) - shift].flatten(0, 1)
        targets = [each[:, shift:].flatten() for each in probe.targets]
        for left_out in candidates:
            values = [float(F.cross_entropy(logits, each.masked_fill(each == left_out, IGNORED))) for each in targets]
            if probe.fits(values):
                return Form("ignored", f"cross entropy without targets of {left_out}", shift, left_out)
    return None


def _weighted(probe: Probe, loss: LossOf) -> Form | None:
    """Class weights: with one class alone they cancel out, and the loss is plain cross entropy."""
    classes = [int(each) for each in probe.targets[0].flatten() if int(each) != IGNORED][:3]
    for shift in (0, 1):
        single = [torch.full_like(probe.targets[0], each) for each in classes]
        alone = probe._replace(targets=single, losses=[loss(targets) for targets in single])
        if alone.fits(alone.each(_shifted(shift))):
            return Form("weighted", "cross entropy with a weight for each class", shift)
    return None


def form_of_loss(model: nn.Module, subject: Subject) -> Form | None:
    """Recognise the loss that the project trains with; None if it is no known form. The model must have a loss.

    An untrained model's logits are nearly equal, and every form of loss near log V: the output layer is made larger
    for the question, and put back. Reads the device; runs a few forwards of 3 x 7 tokens in eval mode, no gradient.
    """
    length = min(_LENGTH, probe_ids(subject).size(1))
    x = probe_ids(subject, _ROWS, length)
    with preserved(model):
        logits = _tell_apart(model, x, subject.seed)
        vocab = min(logits.size(-1), subject.vocab_size or logits.size(-1))
        sets = _sets_of_targets(subject, vocab, tuple(x.shape))
        if subject.batch is not None and bool((subject.batch[1] == subject.ignore_index).any()):
            for targets in sets:
                targets.view(-1)[::3] = IGNORED  # as in the batch, some labels do not count

        def loss(targets: Tensor) -> float:
            labels = targets.masked_fill(targets == IGNORED, subject.ignore_index).to(x.device)
            seed_all(subject.seed)
            value = project_loss(model, x, labels, subject.loss_fn)
            if value is None:
                raise ValueError("the model returns no loss, and no loss_fn was given")
            return float(value.detach().double().mean())

        losses = [loss(targets) for targets in sets]
        return recognise(Probe(logits.double().cpu(), sets, losses, _precision(logits)), loss)


def _sets_of_targets(subject: Subject, vocab: int, shape: tuple[int, ...]) -> list[Tensor]:
    """Targets to ask with: the ids that are most frequent in the batch, each of them once, then ids at random.

    An id that the loss leaves out is only seen if it is asked about, and the frequent ones are what it would cost.
    """
    generator = torch.Generator().manual_seed(subject.seed)
    common: list[int] = []
    if subject.batch is not None and not subject.batch[1].is_floating_point():
        ids, counts = subject.batch[1].detach().cpu().long().flatten().unique(return_counts=True)
        ordered = ids[counts.argsort(descending=True, stable=True)].tolist()
        common = [index for index in ordered if 0 <= index < vocab]
    cells = math.prod(shape)
    number = min(_MOST_SETS, max(_SETS, -(-len(common) // cells)))
    drawn = torch.randint(vocab, (number * cells,), generator=generator)
    kept = torch.tensor(common[: number * cells], dtype=torch.int64)
    drawn[: kept.numel()] = kept
    # Mixed, so that rare and frequent ids stand side by side in every set.
    return list(drawn[torch.randperm(drawn.numel(), generator=generator)].view(number, *shape))


def _tell_apart(model: nn.Module, x: Tensor, seed: int) -> Tensor:
    """Logits of a spread at which the forms differ, the output layer made larger for it."""
    forward = repeatable(model, seed)
    logits = forward(x)
    head, _ = output_layer(model, x, logits.size(-1))
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


def output_layer(model: nn.Module, x: Tensor, vocab: int) -> tuple[Tensor | None, float | None]:
    """The weight `[V, C]` that makes logits out of hidden states and the RMS of what enters it, each None if not seen.

    It is that of the last module called that has V rows and returns V scores; else that of an embedding: where the
    output is `F.linear(x, embedding.weight)` no module is called for it. Runs the model once; reads.
    """
    called: list[tuple[Tensor, float]] = []
    handles = [
        module.register_forward_hook(_note(called, vocab))
        for module in model.modules()
        if not isinstance(module, nn.Embedding) and _rows(module) == vocab
    ]
    try:
        call(model, x)
    finally:
        for handle in handles:
            handle.remove()
    if called:
        return called[-1]
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding) and _rows(module) == vocab]
    return tables[0].weight if tables else None, None


def _rows(module: nn.Module) -> int | None:
    weight = getattr(module, "weight", None)
    return weight.size(0) if isinstance(weight, Tensor) and weight.dim() == 2 else None


def _note(called: list[tuple[Tensor, float]], vocab: int) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        entered = args[0] if args and isinstance(args[0], Tensor) else None
        weight = module.weight
        scores = isinstance(output, Tensor) and output.dim() >= 2 and output.size(-1) == vocab
        if scores and entered is not None and entered.is_floating_point() and isinstance(weight, Tensor):
            called.append((weight, float(entered.detach().float().square().mean().sqrt())))

    return hook
