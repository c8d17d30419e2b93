"""Assertions for a person's own test suite: each asks what a stage of preflight asks, and raises what it found.

Whatever is given is bit-identical afterwards, random state included. GuardUsageError means that nothing could be asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gpt_guard.checks.batches.form import bad_batch_shape
from gpt_guard.checks.batches.targets import hardly_any, not_shifted, supervised
from gpt_guard.checks.causality.stage import CausalityStage
from gpt_guard.checks.checkpoint.reload import reload
from gpt_guard.checks.gradients.backward import Task
from gpt_guard.checks.gradients.diagnosis import frozen_finding
from gpt_guard.checks.gradients.stage import GradientsStage
from gpt_guard.checks.initial_loss.stage import InitialLossStage
from gpt_guard.checks.optimizer.stage import OptimizerStage
from gpt_guard.checks.overfit.seed_model import Learner, own_learner
from gpt_guard.checks.overfit.stage import learn
from gpt_guard.checks.returns import check_returns
from gpt_guard.checks.runner.base import LossFunction, Stage, Subject, vocabulary
from gpt_guard.checks.runner.forward import shifts_inside
from gpt_guard.checks.runner.gather import as_ids, complete
from gpt_guard.checks.runner.perturb import probe_ids
from gpt_guard.checks.token_ids.ids import id_stats, is_integer, not_integers, out_of_range
from gpt_guard.checks.tokenizer.roundtrip import roundtrip
from gpt_guard.checks.tokenizer.tokenizers import adapt
from gpt_guard.checks.validation.stage import ValidationStage
from gpt_guard.errors import GuardUsageError
from gpt_guard.hooks.isolation.preserve import preserved, seed_all
from gpt_guard.records import CheckResult, Finding, Severity
from gpt_guard.records.render import render_finding


class CheckFailed(AssertionError):
    """An assertion that did not hold: `.findings` has the evidence as records, and the message is the same in words.

    Raises ValueError where there is no finding that says why.
    """

    def __init__(self, findings: Finding | Iterable[Finding]) -> None:
        found = (findings,) if isinstance(findings, Finding) else tuple(findings)
        if not found:
            raise ValueError("a failed assertion needs at least one finding that says why")
        super().__init__(found)  # what unpickling calls this with
        self.findings = found

    @property
    def finding(self) -> Finding:
        """The first finding."""
        return self.findings[0]

    def __str__(self) -> str:
        # A test runner shows its own prefix on the first line only.
        return "\n\n".join(render_finding(finding) for finding in self.findings)


class NotCausal(CheckFailed):
    """A position sees later tokens (GG660)."""


class RowsNotIndependent(CheckFailed):
    """A row's logits depend on the other rows of the batch (GG661)."""


class InitialLossWrong(CheckFailed):
    """The first loss is not log V, or the loss is not what it should be (GG650-GG658)."""


class EvalNotDeterministic(CheckFailed):
    """Two eval passes do not agree, or an eval pass changes the model (GG663-GG665)."""


def assert_shifted(x: Any, y: Any, *, shift: int = 1, ignore_index: int = -100) -> None:
    """Assert that `y[:, t]` is `x[:, t + shift]`, for token ids `[B, T]` or one row `[T]`; ignored ones aside.

    The message says which shift was found. `shift=0` is right for models that shift inside, as those of Hugging Face.
    Raises CheckFailed, with GG603, GG600 for shapes that differ, GG632 for other than integers, or GG606 where no
    target counts; GuardUsageError where the rows are too short to tell.
    """
    x, y = _integers("x", x), _integers("y", y)
    if x.dim() == y.dim() == 1:
        x, y = x[None], y[None]
    if (found := bad_batch_shape(x, y, None, ignore_index)) is not None:
        raise CheckFailed(found)
    seen, problem = not_shifted(x, y, shift, ignore_index, model_known=shift == 0)
    if problem is not None:
        raise CheckFailed(problem)
    if seen.positions == 0:
        if (none := hardly_any(supervised([(x, y)], ignore_index), ignore_index)) is not None:
            raise CheckFailed(none)
        raise GuardUsageError(f"rows of {x.size(1)} ids are too short to see a shift in; give rows of 8 or more")


def assert_ids_in_range(ids: Any, vocab_size: int) -> None:
    """Assert that all ids, of any shape, are in 0 ... vocab_size - 1. Reads the device.

    Raises CheckFailed with GG631 (how many are outside, the first of them and its place) or GG632 for other than
    integers; GuardUsageError where there are no ids.
    """
    tensor = _integers("ids", ids)
    found = out_of_range("ids", tensor, id_stats(tensor), vocab_size, f"vocab_size is {vocab_size}", ())
    if found is not None:
        raise CheckFailed(found)


def assert_roundtrip(tokenizer: Any, text: str) -> None:
    """Assert that `decode(encode(text))` is `text`, for anything with `encode` and `decode`, or a list of characters.

    Raises CheckFailed with GG621: where the two part and what was done to the text, or the exception; TypeError for
    something that is no tokenizer.
    """
    if (found := roundtrip(adapt(tokenizer), text, "the text")) is not None:
        raise CheckFailed(found)


def assert_returns(
    fn: Callable[..., Any],
    *,
    gamma: float | None = None,
    lam: float | None = None,
    names: Mapping[str, str] | None = None,
) -> None:
    """Assert that a function treats terminals, time limits and the borders between episodes as it must.

    Takes what `check_returns` takes. Raises CheckFailed with GG617 for each mistake, with the figures of an episode of
    two steps; GuardUsageError where the function cannot be called.
    """
    found = check_returns(fn, gamma=gamma, lam=lam, names=names).findings
    if errors := [each for each in found if each.severity is Severity.ERROR]:
        raise CheckFailed(errors)


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
    subject, stage = _subject(model, x, vocab_size=vocab_size, block_size=block_size, seed=seed), CausalityStage()
    complete(subject)
    _ask(stage, subject, NotCausal, stage.causal(subject, trained=trained))


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
    subject, stage = _subject(model, x, vocab_size=vocab_size, block_size=block_size, seed=seed), CausalityStage()
    complete(subject)
    _ask(stage, subject, RowsNotIndependent, stage.independence(subject))


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
    subject = _subject(model, x, y, loss_fn=loss_fn, ignore_index=ignore_index, causal=causal, seed=seed)
    complete(subject)
    _ask(InitialLossStage(), subject, InitialLossWrong)


def assert_eval_deterministic(model: nn.Module, x: Tensor, *, seed: int = 42) -> None:
    """Fail with EvalNotDeterministic where two eval passes on ids `[B, T]` differ or change parameters or buffers.

    The model is bit-identical afterwards, modes included. Raises GuardUsageError where nothing could be asked.
    """
    subject = _subject(model, x, seed=seed)
    complete(subject)
    _ask(ValidationStage(), subject, EvalNotDeterministic)


def assert_gradients_reach_all(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    loss_fn: LossFunction | None = None,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    seed: int = 42,
) -> None:
    """Every trainable parameter gets a gradient that is finite and not zero, on this batch, or after a few steps.

    `x` and `y` are token ids `[B, T]`; the loss is `loss_fn(logits, y)`, else the model's own, else cross entropy.
    Zero-initialised factors, idle experts and frozen parts are no failure. The model is as before afterwards. Raises
    CheckFailed with a finding for each cause.
    """
    fields = {"loss_fn": loss_fn, "vocab_size": vocab_size, "ignore_index": ignore_index, "seed": seed}
    _ask(GradientsStage(), _subject(model, x, y, **fields), whole=True)


def assert_step_changes_parameters(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    optimizer: Optimizer | None = None,
    *,
    loss_fn: LossFunction | None = None,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    seed: int = 42,
) -> None:
    """The optimizer holds exactly the trainable parameters, with lr above 0, and a step changes each of them.

    The step starts from an empty optimizer state, so that no old momentum hides anything; without an optimizer it is
    that of AdamW at lr 1e-3. Model and optimizer are as before afterwards. Raises CheckFailed with a finding for each
    cause.
    """
    fields = {"loss_fn": loss_fn, "vocab_size": vocab_size, "ignore_index": ignore_index, "seed": seed}
    _ask(OptimizerStage(), _subject(model, x, y, optimizer=optimizer, **fields), whole=True)


def assert_overfits(
    model: nn.Module | Callable[[], nn.Module],
    x: Tensor,
    y: Tensor,
    *,
    steps: int = 300,
    lr: float = 1e-3,
    loss_fn: LossFunction | None = None,
    causal: bool = True,
    ignore_index: int = -100,
    seed: int = 42,
) -> None:
    """A model (as it is, and put back afterwards), or the one that a function makes, learns one batch by heart.

    AdamW at `lr` with clipping 1.0 and dropout set to 0. Learned means: the loss is down to a tenth of the way between
    its start and the lowest value that the batch allows, where equal beginnings go on differently; or 99 % of the
    targets are right at half of that way. A small model makes a fast test: block 32, width 64, 2 layers take about two
    seconds. Raises CheckFailed with one finding whose code is the shape of the curve.
    """
    if steps < 1:
        raise GuardUsageError(f"steps is {steps}; give at least 1, and about 300 for a verdict")
    with _put_back(model if isinstance(model, nn.Module) else None, (x, y), seed):
        who = own_learner(model, x.size(-1)) if isinstance(model, nn.Module) else _made(model, x.size(-1))
        built = who.make(0.0)
        inside = shifts_inside(built, x.to(next(built.parameters()).device))
        task = Task(x, y, loss_fn, ignore_index)
        seed_all(seed)
        run = learn(who, task, steps, lambda *_: None, lr=lr, causal=causal, shifts_inside=inside)
        if run is None:
            raise CheckFailed(frozen_finding(built))
    if run.found is not None and run.found.severity is Severity.ERROR:
        raise CheckFailed(run.found)


def assert_checkpoint_roundtrip(
    model: nn.Module | Callable[[], nn.Module],
    x: Tensor | None = None,
    *,
    make_model: Callable[[], nn.Module] | None = None,
    vocab_size: int | None = None,
    block_size: int | None = None,
    seed: int = 42,
) -> None:
    """Assert that a model which is saved, built anew and loaded gives the same logits, bit for bit.

    `model` is a module, or a function that builds one, which then serves as `make_model`, too. Without `make_model` the
    model is built as `type(model)(model.config)`. `x` is token ids `[B, T]`; without them ids are drawn, for which
    `vocab_size` and `block_size` are found in the config or the embedding tables where they are not given. State and
    modes of the model, and the random state, are as before afterwards. Raises CheckFailed, and GuardUsageError where
    the model cannot be built anew or no ids can be made.
    """
    with preserved():
        torch.manual_seed(seed)
        build = make_model
        if not isinstance(model, nn.Module):
            build = make_model or model
            model = model()
        subject = _subject(model, x, make_model=build, vocab_size=vocab_size, block_size=block_size, seed=seed)
        complete(subject)
        if subject.make_model is None:
            raise GuardUsageError(
                f"{type(model).__name__} cannot be built anew from a `config`: give make_model=lambda: "
                f"{type(model).__name__}(...)"
            )
        ids = x if x is not None else probe_ids(subject) if vocabulary(subject) is not None else None
        if ids is None:
            raise GuardUsageError("no ids to ask with: give x, token ids [B, T], or vocab_size=... and block_size=...")
        with preserved(model, tensors=[ids]):
            done = reload(model, subject.make_model, ids, seed)
    if not done.rebuilt:
        raise GuardUsageError("make_model gives back the model itself; give a function that builds a new one")
    if not done.repeatable:
        raise GuardUsageError(
            "the model's logits differ between two eval passes by themselves: nothing can be compared"
        )
    if done.finding is not None:
        raise CheckFailed(done.finding)


def _integers(name: str, ids: Any) -> Tensor:
    tensor = as_ids(name, ids)
    if tensor.numel() == 0:
        raise GuardUsageError(f"{name} holds no token ids")
    if not is_integer(tensor):
        raise CheckFailed(not_integers(name, tensor))
    return tensor


def _made(make: Callable[[], nn.Module], block: int) -> Learner:
    def build(_dropout: float) -> nn.Module:
        return own_learner(make(), block).make(0.0)

    return Learner(build, "the model that was made", block)


def _subject(model: nn.Module, x: Tensor | None, y: Tensor | None = None, **fields: Any) -> Subject:
    batch = (x, x if y is None else y) if x is not None else None
    return Subject(model=model, batch=batch, **fields)


def _ask(
    stage: Stage,
    subject: Subject,
    error: type[CheckFailed] = CheckFailed,
    lines: Iterable[CheckResult] | None = None,
    *,
    whole: bool = False,
) -> None:
    """Raise for the first of a stage's lines that fails, or with `whole` for all of them, each cause once."""
    if why := stage.missing(subject):
        raise GuardUsageError(f"{stage.title} cannot be asked: {why}")
    results: list[CheckResult] = []
    with _put_back(subject.model, subject.batch or (), subject.seed, subject.optimizer):
        for line in stage.run(subject) if lines is None else lines:
            results.append(line)
            if line.status == "failed" and not whole:
                break
    findings = {found.cause: found for line in results if line.status == "failed" for found in line.findings}
    if findings:
        raise error(findings.values())
    if not any(line.status == "passed" for line in results):
        raise GuardUsageError(f"{stage.title} cannot be asked: {'; '.join(line.measured for line in results)}")


@contextmanager
def _put_back(
    model: nn.Module | None, tensors: tuple[Tensor, ...], seed: int, optimizer: Optimizer | None = None
) -> Iterator[None]:
    with preserved(model, optimizer, tensors), torch.enable_grad():
        seed_all(seed)
        yield
