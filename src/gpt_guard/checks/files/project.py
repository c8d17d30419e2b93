"""A project as it lies in a folder: the model's code is imported by name, everything else is read as data."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from gpt_guard.checkpoint.read import Stored, take_apart
from gpt_guard.checkpoint.reporter import Reporter
from gpt_guard.checkpoint.weights import copy_weights, fit_weights
from gpt_guard.checks.files.stage import UnusableFile, read_checkpoint, read_ids, read_tokenizer
from gpt_guard.checks.runner.base import Subject
from gpt_guard.checks.runner.forward import user_line
from gpt_guard.checks.runner.gather import VOCAB_NAMES
from gpt_guard.errors import CheckpointError, GuardUsageError

T = TypeVar("T")


@dataclass
class Project:
    """Where the parts of a project are. `required` names those that must be there, since a person asked for them."""

    model: str = "mini_gpt:MiniGPT"
    config: str | None = None
    paths: dict[str, Path] = field(default_factory=dict)
    required: frozenset[str] = frozenset()
    fresh: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    seed: int = 42


def load_project(project: Project) -> Subject:
    """A subject with the files read and the model built: with the checkpoint's weights, unless `fresh`.

    A file that is not there is left out, unless it is required; one that cannot be used is noted in
    `subject.unusable`. A model that cannot be built for want of a part is left out; `subject.sources["model"]` says
    why, or with which weights it was built. Raises GuardUsageError where the model's or config's code cannot be used.
    """
    subject = Subject(device=project.device, seed=project.seed, paths=dict(project.paths))
    _read_files(subject, project.required)
    build = _builder(project, subject)
    if build is None:
        return subject
    torch.manual_seed(project.seed)
    model = user_code(lambda: build().to(project.device), f"building {project.model}")
    subject.model, subject.make_model = model, lambda: build().to(project.device)
    if subject.payload is not None and not project.fresh:
        subject.trained = _load_weights(model, subject)
    return subject


def find(spec: str, option: str, required: bool) -> Any:
    """What `package.module:Name` names, the current folder included. None where it is not there and nobody asked."""
    module_name, _, attribute = spec.partition(":")
    if not module_name or not attribute:
        raise GuardUsageError(f"{option} {spec!r}: write package.module:Name, such as mini_gpt:MiniGPT")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise _broken(error, f"{option} {spec}: importing {module_name}") from error
        if not required:
            return None
        seen = f"there is no module {module_name} in {here} or among the installed packages"
        fix = f"run it in the folder of {module_name.partition('.')[0]}.py, or give {option} package.module:Name"
        raise GuardUsageError(f"{option} {spec}: {seen}; {fix}") from error
    except Exception as error:
        raise _broken(error, f"{option} {spec}: importing {module_name}") from error
    found: Any = module
    for name in attribute.split("."):  # a class in the module, or what is in a class (`Model.loss`)
        found = getattr(found, name, None)
    if found is None and required:
        names = ", ".join(sorted(n for n, v in vars(module).items() if isinstance(v, type) and not n.startswith("_")))
        raise GuardUsageError(
            f"{option} {spec}: {module.__name__} has no {attribute}; its classes are {names or 'none'}"
        )
    return found


def user_code(run: Callable[[], T], doing: str) -> T:
    """Run the user's code. Raises GuardUsageError with the exception and its line where it raises."""
    try:
        return run()
    except GuardUsageError:
        raise
    except (Exception, SystemExit) as error:  # the argparse of a script exits on the arguments of this command
        raise _broken(error, doing) from error


def _parameters(target: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The arguments that a class or function takes; none where it does not tell."""
    try:
        return inspect.signature(target).parameters
    except (TypeError, ValueError):
        return {}


def required_of(target: Callable[..., Any]) -> list[str]:
    """The names of the arguments without which it cannot be called."""
    collecting = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = _parameters(target).items()
    return [name for name, each in parameters if each.kind not in collecting and each.default is each.empty]


def can_be_called(target: Callable[..., Any], **given: Any) -> bool:
    """True where nothing that is required is missing from `given`."""
    return set(required_of(target)) <= set(given)


def takes(target: Callable[..., Any], settings: Mapping[str, Any]) -> bool:
    """True where it can be called with exactly these settings."""
    parameters = _parameters(target)
    anything = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    return can_be_called(target, **settings) and (anything or set(settings) <= set(parameters))


def _read_files(subject: Subject, required: frozenset[str]) -> None:
    for kind, path in subject.paths.items():
        if not path.exists() and kind not in required:
            continue
        try:
            if kind == "tokenizer":
                subject.tokenizer = read_tokenizer(path)
            elif kind == "checkpoint":
                subject.payload = read_checkpoint(path)
                _stored(subject)
            else:
                subject.data[kind] = read_ids(path)
        except UnusableFile as error:
            subject.unusable[kind] = error.finding
        except CheckpointError as error:
            subject.payload = None
            subject.unusable[kind] = error.finding


def _stored(subject: Subject) -> Stored | None:
    if subject.payload is None:
        return None
    return take_apart(subject.paths["checkpoint"], subject.payload, Reporter(None))


def _load_weights(model: nn.Module, subject: Subject) -> bool:
    """Load the checkpoint's weights; where they do not fit the model stays fresh: the checkpoint's stage says why."""
    stored = _stored(subject)
    if stored is None:
        return False
    voice = Reporter(lambda finding: None)
    try:
        found = fit_weights(model, stored, stored.config, True, voice)
        copy_weights(model, found, stored, True, voice)
    except CheckpointError:
        subject.sources["model"] = "untrained: the checkpoint's weights do not fit it"
        return False
    subject.sources["model"] = "with the checkpoint's weights"
    return True


def _builder(project: Project, subject: Subject) -> Callable[[], nn.Module] | None:
    target = find(project.model, "--model", "model" in project.required)
    if target is None:
        subject.sources["model"] = (
            f"there is no {project.model} in {Path.cwd()}; name yours: --model package.module:Class"
        )
        return None
    if isinstance(target, nn.Module):
        return lambda: target
    if not callable(target):
        raise GuardUsageError(f"--model {project.model} is a {type(target).__name__}; give a class or a function")
    config = _config(project, subject)
    if config is None and not can_be_called(target):
        settings = _settings(subject)
        if settings is None or not takes(target, settings):
            wanted = ", ".join(required_of(target))
            subject.sources.setdefault("model", f"{project.model} needs {wanted}: give --config package.module:Class")
            return None
        return _checked(lambda: target(**settings), project.model)
    subject.config = config
    return _checked((lambda: target(config)) if config is not None else target, project.model)


def _checked(build: Callable[[], Any], name: str) -> Callable[[], nn.Module]:
    def checked() -> nn.Module:
        model = build()
        if not isinstance(model, nn.Module):
            raise GuardUsageError(f"--model {name} gave a {type(model).__name__}, not an nn.Module")
        return model

    return checked


def _config(project: Project, subject: Subject) -> Any:
    """The config object: with the checkpoint's own settings if there are any, else with the tokenizer's vocabulary."""
    spec = project.config or f"{project.model}Config"
    kind = find(spec, "--config", project.config is not None)
    if kind is None:
        return None
    if not callable(kind):
        return kind
    saved = _settings(subject)
    if saved is not None:
        return user_code(lambda: kind(**saved), f"{spec}(**config) with the config in {subject.paths['checkpoint']}")
    sizes = _sizes(kind, subject)
    if can_be_called(kind, **sizes):
        return user_code(lambda: kind(**sizes), f"{spec}({', '.join(f'{k}={v}' for k, v in sizes.items())})")
    wanted = ", ".join(required_of(kind))
    subject.sources["model"] = f"{spec} needs {wanted}, which neither a checkpoint nor a tokenizer told"
    return None


def _settings(subject: Subject) -> dict[str, Any] | None:
    stored = _stored(subject)
    return stored.config if stored is not None else None


def _sizes(kind: Callable[..., Any], subject: Subject) -> dict[str, int]:
    size = subject.tokenizer.size if subject.tokenizer is not None else 0
    name = next((name for name in VOCAB_NAMES if name in _parameters(kind)), None)
    return {name: size} if name is not None and size > 0 else {}


def _broken(error: BaseException, doing: str) -> GuardUsageError:
    where = user_line(error.__traceback__)
    place = f" ({where.file}:{where.line} in {where.function})" if where is not None else ""
    return GuardUsageError(f"{doing} failed: {type(error).__name__}: {error}{place}")
