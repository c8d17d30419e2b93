"""`gpt-guard replay`: run the step that a crash bundle holds again, in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpt_guard.cli.terminal import leave
from gpt_guard.errors import GuardUsageError

if TYPE_CHECKING:
    from torch import nn

    from gpt_guard.blackbox.bundle import Bundle
    from gpt_guard.blackbox.replay import Replayed


def replay(
    bundle: Annotated[Path, typer.Argument(help="The folder crash-step-... that a run left in its run_dir.")],
    model: Annotated[
        str | None, typer.Option(help="package.module:factory or file.py:factory, a function or class that builds it.")
    ] = None,
    config: Annotated[
        str | None, typer.Option(help="package.module:ConfigClass. Default: the model's name with Config behind it")
    ] = None,
    loss: Annotated[
        str | None, typer.Option(help="package.module:function, the one given to guardian.watch_loss in the run.")
    ] = None,
    trust_source: Annotated[
        bool, typer.Option("--trust-source", help="Build the model from the class that the bundle names.")
    ] = False,
    keep_buffers: Annotated[
        bool, typer.Option("--keep-buffers", help="Keep the buffers that the model is built with.")
    ] = False,
    mended: Annotated[
        bool,
        typer.Option("--mended", help="What differs from the run was changed to mend it: exit code 0 all the same."),
    ] = False,
    device: Annotated[
        str, typer.Option(help="auto (the recorded one where this machine has it), cpu, cuda, cuda:1, mps.")
    ] = "auto",
    limit: Annotated[float, typer.Option(min=0.1, help="Seconds after which the replay is given up.")] = 300.0,
    json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> None:
    """Run the step of a crash bundle again and say whether it still fails, and where.

    The bundle is read as data. Code comes from the current folder, and only what --model, --config and --loss name, or
    the recorded class with --trust-source. Exit code 0: the fault does not show any more. 1: it does. 2: no answer. The
    bundle or the model cannot be used, the replay was stopped, or the fault does not show although the code is what it
    was, or in a model of other classes (--mended takes both for an answer).
    """
    from gpt_guard.blackbox.bundle import read_bundle
    from gpt_guard.blackbox.replay import replay as replay_bundle
    from gpt_guard.checks.files.project import user_code

    try:
        opened = read_bundle(bundle)
        function = user_code(lambda: _loss_function(opened, loss), "finding the loss function")
        # Importing a script may end it, with an exit code of its own.
        built = user_code(lambda: _build(opened, model, config, trust_source, device), "building the model")
        done = replay_bundle(opened, built, loss_fn=function, buffers=not keep_buffers, mended=mended, limit_s=limit)
    except GuardUsageError as error:
        leave(f"gpt-guard replay: {error}")
    typer.echo(_as_json(done) if json else str(done))
    if done.gone is None:
        raise typer.Exit(2)
    raise typer.Exit(0 if done.gone else 1)


def _loss_function(bundle: Bundle, spec: str | None) -> Callable[..., Any] | None:
    from gpt_guard.blackbox.build import named
    from gpt_guard.checks.files.project import find

    function: Callable[..., Any] | None = None
    if spec is not None:
        function = find(named(spec, "--loss", bundle.source), "--loss", required=True)
    return function


def _build(bundle: Bundle, spec: str | None, config: str | None, trust: bool, device: str) -> nn.Module:
    from gpt_guard.blackbox.build import build_model, like, trusted_model

    if spec is None and not trust:
        raise GuardUsageError(
            f"{bundle.path} was left by the model {bundle.source}. Nothing that a bundle names is run by itself: say "
            f"which code builds the model, such as {like(bundle.source)}, in the folder from which it is imported"
        )
    model = trusted_model(config, bundle.source) if spec is None else build_model(spec, config, bundle.source)
    where = _device(bundle, device)
    return model if where is None else model.to(where)


def _device(bundle: Bundle, asked: str) -> str | None:
    from gpt_guard.blackbox.weights import usable

    recorded = bundle.environment.get("device", "cpu")
    if asked == "auto":
        if "," in recorded:  # a model spread over several devices is placed by the code that builds it
            return None
        return recorded if usable(recorded) else "cpu"
    if not usable(asked):
        raise GuardUsageError(f"--device {asked}: this machine has no such device; use --device cpu")
    return asked


def _as_json(done: Replayed) -> str:
    from gpt_guard.blackbox.write import as_json

    answer = {
        "bundle": str(done.bundle.path),
        "reproduced": done.reproduced,
        "gone": done.gone,
        "same": done.same,
        "other_parts": done.likeness.parts,
        "other_settings": done.likeness.settings,
        "edited": done.likeness.edited,
        "answer": done.verdict,
        "text": done.outcome.text,
        "seconds": done.outcome.seconds,
        "notes": done.notes,
        "finding": done.finding,
    }
    return as_json(answer).decode()
