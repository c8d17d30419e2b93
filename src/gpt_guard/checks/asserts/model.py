"""Assertions about a model for a person's own test suite: causality, rows, initial loss, determinism of evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torch import Tensor, nn

from gpt_guard.checks.asserts.failed import CheckFailed
from gpt_guard.checks.causality.stage import CausalityStage
from gpt_guard.checks.initial_loss.stage import InitialLossStage
from gpt_guard.checks.runner.base import LossFunction, Stage, Subject
from gpt_guard.checks.runner.gather import complete
from gpt_guard.checks.validation.stage import ValidationStage
from gpt_guard.errors import GuardUsageError
from gpt_guard.hooks.isolation.preserve import preserved
from gpt_guard.hooks.isolation.random_state import seed_all
from gpt_guard.records import CheckResult


class NotCausal(CheckFailed):
    """A position sees later tokens (GG660)."""


class RowsNotIndependent(CheckFailed):
    """A row's logits depend on the other rows of the batch (GG661)."""


class InitialLossWrong(CheckFailed):
    """The first loss is not log V, or the loss is not what it should be (GG650-GG658)."""


class EvalNotDeterministic(CheckFailed):
    """Two eval passes do not agree, or an eval pass changes the model (GG663-GG665)."""


def assert_causal(
    model: nn.Module,
    *,
    vocab_size: int | None = None,
    block_size: int | None = None,
    x: Tensor | None = None,
    trained: bool = True,
    seed: int = 42,
) -> None:
    """Fail with NotCausal where the logits `[B, T, V]` of a position change with later tokens.

    Asked by changing suffixes and by gradient, in eval mode; with `trained` again after eight training steps, since
    weights that begin at zero hide a leak. Sizes are those of the model's config or tables where they are not given;
    `x` are ids `[B, T]` to ask with. The model is bit-identical afterwards. Raises GuardUsageError where nothing could
    be asked.
    """
    subject = _subject(model, x, vocab_size, block_size, seed)
    stage = CausalityStage()
    _ask(subject, stage, stage.causal(subject, trained=trained), NotCausal)


def assert_batch_independent(
    model: nn.Module,
    *,
    vocab_size: int | None = None,
    block_size: int | None = None,
    x: Tensor | None = None,
    seed: int = 42,
) -> None:
    """Fail with RowsNotIndependent where a row's logits change when other rows change or change places.

    In eval mode. The model is bit-identical afterwards. Raises GuardUsageError where nothing could be asked.
    """
    subject = _subject(model, x, vocab_size, block_size, seed)
    stage = CausalityStage()
    _ask(subject, stage, stage.independence(subject), RowsNotIndependent)


def assert_initial_loss(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    loss_fn: LossFunction | None = None,
    ignore_index: int = -100,
    causal: bool = True,
    seed: int = 42,
) -> None:
    """Fail with InitialLossWrong where an untrained model's loss is not near log V, or is not mean cross entropy.

    `x` and `y` are ids `[B, T]`; without `loss_fn` the model's own loss is taken, else cross entropy. In eval mode.
    The model is bit-identical afterwards. Raises GuardUsageError where nothing could be asked.
    """
    subject = _subject(model, x, None, None, seed, y)
    subject.loss_fn, subject.ignore_index, subject.causal = loss_fn, ignore_index, causal
    stage = InitialLossStage()
    _ask(subject, stage, stage.run(subject), InitialLossWrong)


def assert_eval_deterministic(model: nn.Module, x: Tensor, *, seed: int = 42) -> None:
    """Fail with EvalNotDeterministic where two eval passes on ids `[B, T]` differ or change parameters or buffers.

    The model is bit-identical afterwards, modes included. Raises GuardUsageError where nothing could be asked.
    """
    subject = _subject(model, x, None, None, seed)
    stage = ValidationStage()
    _ask(subject, stage, stage.run(subject), EvalNotDeterministic)


def _subject(
    model: nn.Module,
    x: Tensor | None,
    vocab_size: int | None,
    block_size: int | None,
    seed: int,
    y: Tensor | None = None,
) -> Subject:
    subject = Subject(model=model, vocab_size=vocab_size, block_size=block_size, seed=seed)
    if x is not None:
        subject.batch = (x, x if y is None else y)
    complete(subject)
    return subject


def _ask(subject: Subject, stage: Stage, lines: Iterable[CheckResult], error: Callable[..., CheckFailed]) -> None:
    if why := stage.missing(subject):
        raise GuardUsageError(f"{stage.title} cannot be asked: {why}")
    model = subject.model
    with preserved(model, None, subject.batch or ()):
        seed_all(subject.seed)
        results = list(_until_failed(lines))
    findings = [found for result in results if result.status == "failed" for found in result.findings]
    if findings:
        raise error(findings)
    if not any(result.status == "passed" for result in results):
        raise GuardUsageError(f"{stage.title} cannot be asked: {'; '.join(result.measured for result in results)}")


def _until_failed(lines: Iterable[CheckResult]) -> Iterator[CheckResult]:
    for line in lines:
        yield line
        if line.status == "failed":
            return
