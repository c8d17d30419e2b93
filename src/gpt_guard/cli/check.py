"""`gpt-guard check`: preflight of a project as it lies in the current folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpt_guard.cli.terminal import leave
from gpt_guard.errors import GuardUsageError

if TYPE_CHECKING:
    import torch

    from gpt_guard.checks.files.project import Project
    from gpt_guard.checks.runner.base import Subject

MODEL = "mini_gpt:MiniGPT"
CHECKPOINT = Path("checkpoints/mini_gpt_best.pt")
TOKENIZER = Path("tokenizer/char_tokenizer.json")
TRAIN_DATA = Path("data/encoded/train_ids.pt")

INTERRUPTED = 130
"""What shells say of a program that SIGINT ended (128 + 2): neither passed nor failed."""

_SPLITS = "beside the training data, if it is there"


def check(
    model: Annotated[
        str | None, typer.Option(help=f"package.module:Class, or a function that returns a model. Default: {MODEL}")
    ] = None,
    config: Annotated[
        str | None, typer.Option(help="package.module:ConfigClass. Default: the model's name with Config behind it")
    ] = None,
    checkpoint: Annotated[Path | None, typer.Option(help=f"Checkpoint. Default: {CHECKPOINT}, if it is there")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help=f"Tokenizer, a JSON file or folder. Default: {TOKENIZER}, if it is there")
    ] = None,
    train_data: Annotated[
        Path | None, typer.Option(help=f"Token ids to train on. Default: {TRAIN_DATA}, if it is there")
    ] = None,
    val_data: Annotated[Path | None, typer.Option(help=f"Validation ids. Default: val_ids.pt {_SPLITS}")] = None,
    test_data: Annotated[Path | None, typer.Option(help=f"Test ids. Default: test_ids.pt {_SPLITS}")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Check an untrained model, built from the config.")] = False,
    overfit_steps: Annotated[int, typer.Option(min=1, help="Steps of the stage that overfits one batch.")] = 300,
    skip_overfit: Annotated[bool, typer.Option("--skip-overfit", help="Leave that stage out.")] = False,
    compare_dropout: Annotated[
        bool, typer.Option("--compare-dropout", help="Overfit with dropout 0.0 and 0.2 and compare.")
    ] = False,
    causal: Annotated[bool, typer.Option(help="Whether a position may see only what came before it.")] = True,
    pad_id: Annotated[int | None, typer.Option(min=0, help="Id of the padding token, if there is one.")] = None,
    eos_id: Annotated[int | None, typer.Option(min=0, help="Id of the end-of-sequence token, if there is one.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of each stage.")] = 42,
    only: Annotated[list[str] | None, typer.Option(help="Run only this stage (name or number); repeatable.")] = None,
    skip: Annotated[list[str] | None, typer.Option(help="Leave this stage out (name or number); repeatable.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the report to this file as JSON.")] = None,
) -> None:
    """Check a project before an expensive run, from the environment to generation.

    The model's code is imported from the current folder; every file is read as data. Exit code 0: all that could be
    checked passed. 1: a check failed. 2: the input cannot be used (a file is missing, damaged or of the wrong kind).
    130: interrupted.
    """
    from gpt_guard.checks.files.project import Project, load_project
    from gpt_guard.checks.runner.base import select
    from gpt_guard.checks.runner.run import preflight
    from gpt_guard.cli.show import CheckScreen

    given = {"checkpoint": checkpoint, "tokenizer": tokenizer, "train": train_data, "val": val_data, "test": test_data}
    try:
        stages = select(only or (), [*(skip or ()), *(["overfit"] if skip_overfit else [])])
        chosen = _device(device)
        project = Project(
            model=model or MODEL,
            config=config,
            paths=_paths(given),
            required=frozenset(name for name, asked in {**given, "model": model}.items() if asked is not None),
            fresh=fresh,
            device=chosen,
            seed=seed,
        )
        subject = load_project(project)
        _refuse_nothing(project, subject)
    except GuardUsageError as error:
        leave(f"gpt-guard check: {error}")
    if device == "auto":
        subject.sources["device"] = "auto"
    subject.overfit_steps, subject.compare_dropout = overfit_steps, compare_dropout
    subject.causal, subject.pad_id, subject.eos_id = causal, pad_id, eos_id
    if subject.unusable:
        stages = select(["environment", "files"])  # what needs the files would only repeat what is wrong with them
    try:
        with CheckScreen() as screen:
            screen.about(project.model, subject)
            subject.progress = screen.progress
            report = preflight(subject, stages, screen.result)
            screen.end(report)
    except KeyboardInterrupt:
        typer.echo("\ngpt-guard check: interrupted; no report was written", err=True)
        raise typer.Exit(INTERRUPTED) from None
    if json is not None:
        try:
            report.save(json)
        except OSError as error:
            leave(f"gpt-guard check: --json {json}: cannot be written ({error.strerror or error}); choose another path")
    if subject.unusable:
        names = ", ".join(str(subject.paths[kind]) for kind in subject.unusable)
        leave(f"gpt-guard check: unusable: {names}; the other checks need it, see the remedy above")
    if report.failed:
        raise typer.Exit(1)


def _paths(given: dict[str, Path | None]) -> dict[str, Path]:
    """Where each file is looked for: as given, else at its usual place."""
    train = given["train"] or TRAIN_DATA
    usual = {
        "checkpoint": CHECKPOINT,
        "tokenizer": TOKENIZER,
        "train": TRAIN_DATA,
        "val": train.with_name("val_ids.pt"),
        "test": train.with_name("test_ids.pt"),
    }
    return {kind: given[kind] or path for kind, path in usual.items()}


def _device(asked: str) -> torch.device:
    import torch

    from gpt_guard.checks.environment.stage import best_device, unusable_device

    if asked == "auto":
        return best_device()
    try:
        device = torch.device(asked)
    except RuntimeError as error:
        raise GuardUsageError(f"--device {asked}: no such device; write auto, cpu, cuda, cuda:1 or mps") from error
    if problem := unusable_device(device):
        raise GuardUsageError(f"--device {asked}: {problem}; use --device cpu, or a build of torch that supports it")
    return device


def _refuse_nothing(project: Project, subject: Subject) -> None:
    there = [path for path in project.paths.values() if path.exists()]
    if subject.model is None and not there and not subject.unusable:
        looked = ", ".join(map(str, project.paths.values()))
        raise GuardUsageError(
            f"nothing to check in {Path.cwd()}: {subject.sources.get('model', 'no model')}; looked for {looked}. "
            f"Run it in your project's folder, or say where things are (gpt-guard check --help)"
        )
