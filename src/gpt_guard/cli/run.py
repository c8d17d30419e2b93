"""`gpt-guard run`: train with a script as it is, and watch the first model and optimizer that train together."""

from __future__ import annotations

import builtins
import io
import runpy
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Annotated

import typer

from gpt_guard.cli.terminal import leave
from gpt_guard.records.render import clean

if TYPE_CHECKING:
    from gpt_guard.integrations.adopting import Adoption

_INTERRUPTED = 130


def run(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="script.py [ARGS]...", help="The script, and what it is to be given.")
    ] = None,
    module: Annotated[
        bool, typer.Option("-m", help="What follows is a module, as python -m takes it, and not a file.")
    ] = False,
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder for the run log, the report, and a bundle of each failure.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Halt on every error, also on silent bugs.")] = False,
) -> None:
    """Run a training script, unchanged, and watch the first model and optimizer in it that train together.

    The script sees what python would give it. What is watched is told on stderr, and so is a finding. The exit code is
    the script's own; 1 where a finding has halted it, 130 after a Ctrl-C. A script with a Guardian of its own is only
    run. Options of this command stand before the script.
    """
    if not command:
        leave("gpt-guard run: nothing to run. Write: gpt-guard run train.py, or gpt-guard run -m package.train")
    if not module and not Path(command[0]).is_file():
        leave(f"gpt-guard run: {command[0]} is not a file. Give a script, or a module with -m before it.")
    from gpt_guard import Guardian
    from gpt_guard.integrations.adopting import Adoption

    adoption = Adoption(lambda model, optimizers: Guardian(model, optimizers, run_dir=run_dir, strict=strict), _tell)
    # Typer has put its own in place, and the script is to have python's.
    sys.excepthook = sys.__excepthook__
    try:
        _watched(adoption, _run_module if module else _run_script, command)
    except KeyboardInterrupt:
        _tell("interrupted")
        raise typer.Exit(_INTERRUPTED) from None
    except typer.Exit:
        raise
    except Exception as error:
        trace = _from_the_script_on(error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        raise typer.Exit(1) from None


def _watched(adoption: Adoption, runs: Callable[[list[str]], None], command: list[str]) -> None:
    try:
        adoption.open()
        runs(command)
    except BaseException as error:
        adoption.close(error)
        if not isinstance(error, typer.Exit):
            _tell_what_was_missed(adoption)
        raise
    adoption.close()
    _tell_what_was_missed(adoption)


def _run_script(command: list[str]) -> None:
    path = Path(command[0]).absolute()
    sys.argv[:] = command
    _first_on_path(str(path.resolve().parent))
    main = ModuleType("__main__")
    vars(main).update(
        __file__=str(path),
        __builtins__=builtins,
        __loader__=SourceFileLoader("__main__", str(path)),
        __package__=None,
        __spec__=None,
    )
    # It stays there: what is pickled, what workers import, and what runs at exit looks for it.
    sys.modules["__main__"] = main
    with io.open_code(str(path)) as stream:
        code = compile(stream.read(), str(path), "exec", dont_inherit=True)
    exec(code, vars(main))


def _run_module(command: list[str]) -> None:
    sys.argv[:] = command
    _first_on_path(str(Path.cwd()))
    try:
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
    except ImportError as error:
        if _from_the_script_on(error.__traceback__) is not None:
            # One of the module's own imports.
            raise
        leave(f"gpt-guard run: {error}. Give a module that python -m would run from here.")


def _first_on_path(folder: str) -> None:
    """As python does for the script it is given; what stands there now was for the start of this command."""
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _from_the_script_on(trace: TracebackType | None) -> TracebackType | None:
    """Without what led to the script: this file, and runpy."""
    ours = {__file__, runpy.__file__, "<frozen runpy>"}
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return trace


def _tell_what_was_missed(adoption: Adoption) -> None:
    if adoption.guardian is not None or adoption.own:
        return
    if adoption.optimizers:
        _tell(
            "nothing was watched: an optimizer was made, but no module was called, with gradients on, whose parameters "
            "it holds"
        )
    else:
        _tell("nothing was watched: this program made no optimizer")


def _tell(words: str) -> None:
    typer.echo(f"gpt_guard: {clean(words)}", err=True)
