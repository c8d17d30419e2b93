"""Paths of modules and parameters in a model that may be wrapped now and was not then, or the other way round."""

from __future__ import annotations

import re

from torch import nn

from gpt_guard.checkpoint.fingerprint import plain_name, unwrap
from gpt_guard.records import Finding

_INPUT = re.compile(r"(?P<what>input.* of )(?P<module>\S+)$")


def plain_path(path: str) -> str:
    """A module's path without the segments that `torch.compile`, DistributedDataParallel and their like put in."""
    return plain_name(f"{path}.").removesuffix(".")


def fitted(finding: Finding, model: nn.Module) -> Finding:
    """The finding with its paths as this model has them, so that a replay looks at the same module and parameter."""
    bare = unwrap(model)
    modules = {plain_path(path): path for path, _ in reversed(list(bare.named_modules()))}
    parameters = {plain_name(name): name for name, _ in bare.named_parameters(remove_duplicate=False)}
    changes: dict[str, str] = {}
    if finding.module is not None:
        changes["module"] = modules.get(plain_path(finding.module), finding.module)
    if finding.parameter is not None:
        changes["parameter"] = parameters.get(plain_name(finding.parameter), finding.parameter)
    if (received := _INPUT.match(finding.position or "")) is not None:
        path = modules.get(plain_path(received["module"]), received["module"])
        changes["position"] = f"{received['what']}{path}"
    return finding.model_copy(update=changes)
