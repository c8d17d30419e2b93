"""Run preflight: what is given is checked, what cannot be is skipped and says why, and all state is put back."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gpt_guard.checks.batches.stage import UNUSABLE, BatchesStage, BatchFormStage, unusable, without_batch
from gpt_guard.checks.environment.facts import surroundings
from gpt_guard.checks.environment.stage import EnvironmentStage
from gpt_guard.checks.runner.base import LossFunction, Stage, Subject, select
from gpt_guard.checks.runner.forward import raised
from gpt_guard.checks.runner.gather import complete, gather
from gpt_guard.checks.runner.report import FACTS, PreflightReport
from gpt_guard.hooks.isolation.preserve import preserved, seed_all
from gpt_guard.records import CheckResult

OnResult = Callable[[CheckResult], Any]


def check(
    model: nn.Module | None = None,
    *,
    batch: Any = None,
    data: Mapping[str, Any] | Tensor | str | os.PathLike[str] | None = None,
    tokenizer: Any = None,
    optimizer: Optimizer | None = None,
    loss_fn: LossFunction | None = None,
    config: Any = None,
    make_model: Callable[[], nn.Module] | None = None,
    batches: Any = None,
    checkpoint: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    vocab_size: int | None = None,
    block_size: int | None = None,
    device: str | torch.device | None = None,
    seed: int = 42,
    trained: bool | None = None,
    causal: bool = True,
    only: Iterable[str | int] = (),
    skip: Iterable[str | int] = (),
    overfit_steps: int = 300,
    compare_dropout: bool = False,
    ignore_index: int = -100,
    pad_id: int | None = None,
    eos_id: int | None = None,
    text: str | None = None,
    progress: Callable[[int, int, str], None] | None = None,
    on_result: OnResult | None = None,
) -> PreflightReport:
    """Check whatever is given, in the order in which data flows, and return the report. Nothing is printed or raised.

    `batch` is `(x, y)`, token ids `[B, T]` each, or a dict with `input_ids` and `labels`. `data` is the 1-D token ids
    of the training split, or a dict of splits ("train", "val", "test"), as tensors, arrays or paths. `batches` gives
    one batch after another: a DataLoader, or a function that returns a batch (or an iterator of them) at each call.
    `tokenizer` and `checkpoint` may be paths; files are read as data only. `make_model` builds a fresh model, as
    `type(model)(config)` does where the model has a `config`. `trained=None` finds out whether the weights come from
    training: they are those of the checkpoint, or the optimizer has made steps. `causal=False` is for encoders.
    `only` and `skip` take names or numbers of stages. `progress` is told how far a long check is; `on_result` gets
    each line as it is known.

    A batch cut from `data` cannot show how your own loop shifts its targets: give `batch` or `batches` for that.
    Parameters, buffers, gradients, optimizer state, modes, random state and tensors are bit-identical afterwards, also
    after an exception or Ctrl-C. Raises GuardUsageError for arguments that cannot be used.
    """
    stages = select(only, skip)
    subject = Subject(
        model=model,
        optimizer=optimizer,
        config=config,
        loss_fn=loss_fn,
        make_model=make_model,
        vocab_size=vocab_size,
        block_size=block_size,
        seed=seed,
        causal=causal,
        overfit_steps=overfit_steps,
        compare_dropout=compare_dropout,
        ignore_index=ignore_index,
        pad_id=pad_id,
        eos_id=eos_id,
        text=text,
    )
    if progress is not None:
        subject.progress = progress
    gather(
        subject,
        batch=batch,
        data=data,
        tokenizer=tokenizer,
        batches=batches,
        checkpoint=checkpoint,
        device=device,
        trained=trained,
    )
    return preflight(subject, stages, on_result)


def preflight(subject: Subject, stages: Sequence[Stage], on_result: OnResult | None = None) -> PreflightReport:
    """Run stages on a subject, what can be derived filled in first. `on_result` gets each line as it is known."""
    results: list[CheckResult] = []

    def say(result: CheckResult) -> None:
        results.append(result)
        if on_result is not None:
            on_result(result)

    # The data is held once for all stages, since it is large and every stage only reads it.
    with preserved(tensors=subject.data.values()):
        with torch.enable_grad():  # where they are disabled, the stage for the environment says so, and no other fails
            complete(subject)
        asked = subject
        for stage in stages:
            if asked is subject and stage.number > BatchesStage.number and _bad_batch(subject, results, say):
                asked = without_batch(subject)
            failed = {result.stage for result in results if result.status == "failed"}
            if blocked := [name for name in stage.after if name in failed]:
                say(stage.skipped(stage.title, f"says nothing new while {' and '.join(blocked)} fails"))
            else:
                _ask(stage, asked, say)
    return _report(subject, results)


def _bad_batch(subject: Subject, results: Sequence[CheckResult], say: Callable[[CheckResult], None]) -> bool:
    """True where no model can be called with the batch; said here if the stage for batches was left out."""
    lines = [result for result in results if result.stage == BatchesStage.name]
    if lines or subject.batch is None:
        return bool(unusable(lines))
    _ask(BatchFormStage(), subject, lines.append)
    for line in (bad := unusable(lines)):
        say(line)
    return bool(bad)


def _ask(stage: Stage, subject: Subject, say: Callable[[CheckResult], None]) -> None:
    """All lines of one stage; an exception in it is a failed line, unless it comes from whoever is told."""
    gradients = torch.is_grad_enabled() or stage.number > EnvironmentStage.number
    with preserved(subject.model, subject.optimizer, subject.batch or ()), torch.set_grad_enabled(gradients):
        seed_all(subject.seed)
        lines = _lines(stage, subject)
        result: CheckResult | None = None
        while True:
            try:
                result = next(lines, None)
            except Exception as error:
                found = raised(error, stage.title)
                say(stage.line(stage.title, type(error).__name__, "no exception", found))
                return
            if result is None:
                return
            say(result)


def _lines(stage: Stage, subject: Subject) -> Iterator[CheckResult]:
    if why := stage.missing(subject):
        dropped = "batch" in why and subject.sources.get("batch") == UNUSABLE
        yield stage.skipped(stage.title, f"{why}: {UNUSABLE}" if dropped else why)
    else:
        yield from stage.run(subject)


def _report(subject: Subject, results: list[CheckResult]) -> PreflightReport:
    model = subject.model
    facts: dict[str, Any] = dict.fromkeys(FACTS)
    if subject.vocab_size is not None:
        facts["vocab_size"] = subject.vocab_size
    facts |= subject.facts
    for result in results:
        facts |= result.facts
    findings = tuple(found for result in results for found in result.findings)
    return PreflightReport(
        environment={**surroundings(model), "seed": str(subject.seed)},
        model=type(model).__name__ if model is not None else "",
        parameters=sum(parameter.numel() for parameter in model.parameters()) if model is not None else 0,
        facts=facts,
        checks=tuple(results),
        findings=findings,
        counts={code: sum(found.code == code for found in findings) for code in sorted({f.code for f in findings})},
    )
