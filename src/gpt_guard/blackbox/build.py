"""Build the model again from code that the person names; a bundle's own words are data and never imported by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from gpt_guard.blackbox.named import named, trusted
from gpt_guard.blackbox.source import Source
from gpt_guard.checks.files.project import can_be_called, find, required_of, takes, user_code
from gpt_guard.errors import GuardUsageError


def trusted_model(config: str | None, source: Source) -> nn.Module:
    """What the class that a bundle names makes, for a person who has said that its source is to be trusted.

    Only a subclass of nn.Module is called: a bundle must not name any other function of this machine. Raises
    GuardUsageError.
    """
    spec = trusted(source)
    target = find(spec, "--trust-source", required=True)
    if not isinstance(target, type) or not issubclass(target, nn.Module):
        raise GuardUsageError(f"--trust-source: {spec} is no class of a model; give --model package.module:factory")
    return build_model(spec, config, source)


def build_model(spec: str, config: str | None, source: Source) -> nn.Module:
    """What `package.module:Name` makes, imported from the current folder, or `folder/file.py:Name` from its own.

    A class or function that can be called without arguments is; otherwise it gets the settings that the bundle
    recorded, as keywords, or as the one object that `config`, by default the name with `Config` behind it, makes of
    them. Raises GuardUsageError where that does not give a model.
    """
    spec = named(spec, "--model", source)
    config = None if config is None else named(config, "--config", source)
    target = find(spec, "--model", required=True)
    if isinstance(target, nn.Module):
        return target
    if not callable(target):
        raise GuardUsageError(f"--model {spec} is a {type(target).__name__}; give a class or a function")
    model = user_code(_call(spec, target, config, source), f"building --model {spec}")
    if not isinstance(model, nn.Module):
        raise GuardUsageError(f"--model {spec} gave a {type(model).__name__}, not an nn.Module")
    return model


def _call(spec: str, target: Callable[..., Any], config: str | None, source: Source) -> Callable[[], Any]:
    settings = source.config
    kind = find(config or f"{spec}Config", "--config", required=config is not None)
    if kind is None and can_be_called(target):
        return target
    if settings is not None and kind is not None and takes(kind, settings):
        return lambda: target(kind(**settings))
    if settings is not None and kind is None and takes(target, settings):
        return lambda: target(**settings)
    if can_be_called(target):
        return target
    wanted = ", ".join(required_of(target))
    recorded = f"recorded are {', '.join(settings)}" if settings else "the model has no .config that could be recorded"
    raise GuardUsageError(
        f"--model {spec} needs {wanted}; {recorded}. Give a function without arguments that builds the model, or "
        f"--config package.module:ConfigClass"
    )
