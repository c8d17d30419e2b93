"""Why a parameter has no gradient, in words: an unused layer, a cut graph and where it ends, a branch times zero."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from torch import nn

from gpt_guard.catalogue import finding
from gpt_guard.checks.gradients.gradient_search import Search
from gpt_guard.records import Finding, Severity

SHOWN = 6
_LISTED = 50
_SENTENCES = {
    "graph_cut": "ran with gradients enabled, but nothing it computed reached the loss through the graph",
    "unused_parameter": "ran, and other parameters in it got a gradient",
    "no_grad": "ran only with gradients disabled",
    "unused_layer": "never ran, on any input",
    "dead_branch": "never ran, although another of its kind in the same ModuleDict did",
}


def listed(names: Sequence[str], count: int = SHOWN) -> str:
    """The first few names, and how many more there are."""
    more = len(names) - count
    return ", ".join(names[:count]) + (f" and {more} more" if more > 0 else "")


def missing_findings(model: nn.Module, found: Search) -> Iterator[Finding]:
    """GG202 for the parameters that no pass gave a gradient; one for what is broken, one for what is left out by name.

    The second is `info` only: a head per task, of which this batch is of one task, is no bug.
    """
    kinds = {name: _kind(model, found, name) for name in found.missing}
    by_choice = [name for name, kind in kinds.items() if kind == "dead_branch"]
    broken = [name for name in kinds if name not in by_choice]
    if broken:
        yield _missing(model, found, broken, kinds, Severity.ERROR)
    if by_choice:
        yield _missing(model, found, by_choice, kinds, Severity.INFO)


def zero_findings(model: nn.Module, found: Search) -> Iterator[Finding]:
    """GG304 for the parameters whose gradient stayed exactly zero, `cancelled` ones as `info` only."""
    cancelled = [name for name in found.zero if _is_cancelled(name, found)]
    dead = [name for name in found.zero if name not in cancelled]
    if dead:
        cause, place = _zero_cause(model, found, dead)
        seen = (
            f"The gradient of {_count(dead)} is exactly zero on this batch, after training steps and on other inputs: "
            f"{listed(dead)}.{place}"
        )
        yield _zero(model, dead, seen, [cause], Severity.ERROR)
    if cancelled:
        seen = (
            f"The gradient of {_count(cancelled)} is exactly zero, while the weight beside it has one: "
            f"{listed(cancelled)}. The loss does not depend on such a bias."
        )
        yield _zero(model, cancelled, seen, ["cancelled"], Severity.INFO)


def owner(model: nn.Module, name: str) -> str:
    """Path of the module that uses a parameter: a ParameterList or ParameterDict only holds it."""
    path = name.rpartition(".")[0]
    while path and isinstance(model.get_submodule(path), (nn.ParameterList, nn.ParameterDict)):
        path = path.rpartition(".")[0]
    return path


def common_path(names: Sequence[str]) -> str:
    """The path of the innermost module that holds all of these parameters; "" is the model itself."""
    common: list[str] = []
    for parts in zip(*(name.split(".")[:-1] for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)


def _kind(model: nn.Module, found: Search, name: str) -> str:
    path = owner(model, name)
    if path in found.calls.recorded:
        return "unused_parameter" if _works(found, path) else "graph_cut"
    if path in found.calls.unrecorded:
        return "no_grad"
    return "dead_branch" if _chosen_by_name(model, found, path) else "unused_layer"


def _works(found: Search, path: str) -> bool:
    """Whether the module has a part in the loss: something in it got a gradient. Of the model itself, of its own."""
    if not path:
        return any("." not in name for name in found.reached)
    return any(name.startswith(f"{path}.") for name in found.reached)


def _chosen_by_name(model: nn.Module, found: Search, path: str) -> bool:
    """One of several of a kind in a ModuleDict, of which another ran: a head of another task, another language."""
    while path:
        parent, _, own = path.rpartition(".")
        container = model.get_submodule(parent)
        if isinstance(container, nn.ModuleDict):
            kind = type(container[own])
            same = (key for key, module in container.items() if key != own and type(module) is kind)
            return any(found.calls.ran(f"{parent}.{key}" if parent else key) for key in same)
        path = parent
    return False


def _missing(model: nn.Module, found: Search, names: list[str], kinds: dict[str, str], severity: Severity) -> Finding:
    counts = Counter(kinds[name] for name in names)
    total = len(found.first.norms)
    sentences = []
    for kind, count in counts.most_common():
        example = next(name for name in names if kinds[name] == kind)
        more = f" ({count} parameters)" if count > 1 else ""
        sentences.append(f"The module of `{example}` {_SENTENCES[kind]}{more}.")
    cut = [name for name in names if kinds[name] in ("graph_cut", "no_grad")]
    path = common_path(names)
    return finding(
        "GG202",
        f"{len(names)} of {total} trainable parameters got no gradient: {listed(names)}. "
        f"{' '.join(sentences)}{_cuts(model, found, cut)}",
        likely=[kind for kind, _ in counts.most_common()],
        severity=severity,
        module=path,
        module_class=type(model.get_submodule(path)).__name__,
        parameter=names[0] if len(names) == 1 else None,
        evidence={"parameters": names[:_LISTED], "count": len(names), "trainable": total, "why": dict(counts)},
        cause_id=names[0],
    )


def _cuts(model: nn.Module, found: Search, names: list[str]) -> str:
    """Between which two modules the graph ends, from the order of the calls; the first few such places."""
    cut = {owner(model, name) for name in names}
    places: dict[str | None, str] = {}
    for path in found.calls.order:
        if path in cut:
            places[_next_alive(model, found, path)] = path  # the last one before each module that is alive
    said = [
        f"between `{before or 'the model itself'}` and `{after}`"
        if after
        else f"after `{before or 'the model itself'}`"
        for after, before in places.items()
    ]
    return f" The graph ends {', '.join(said[:3])}{', ...' if len(said) > 3 else ''}." if said else ""


def _next_alive(model: nn.Module, found: Search, path: str) -> str | None:
    """The first module called after this one whose parameters have a gradient."""
    alive = {owner(model, name) for name in found.reached}
    called = list(found.calls.order)
    return next((later for later in called[called.index(path) + 1 :] if later in alive), None)


def _is_cancelled(name: str, found: Search) -> bool:
    """A bias whose own layer does learn: before a normalisation, of the keys, of logits that are compared."""
    path, _, own = name.rpartition(".")
    return "bias" in own and any(other.startswith(f"{path}.") and other != name for other in found.reached)


def _zero_cause(model: nn.Module, found: Search, names: list[str]) -> tuple[str, str]:
    """The likeliest cause, and where the gradient is lost, as far as the order of the calls tells."""
    paths = {owner(model, name) for name in names}
    path = next((called for called in reversed(found.calls.order) if called in paths), None)
    if path is None:
        return "never_used", ""
    if any(name.rpartition(".")[0] == path for name in found.reached):
        # A layer whose bias learns and whose weight does not gets zeros in: the units before it are dead.
        return "dead_units", f" What goes into `{path}` is zero, for its other parameters have a gradient."
    after = _next_alive(model, found, path)
    where = f"between `{path}` and `{after}`" if after else f"after `{path}`"
    return "multiplied_by_zero", f" The module runs; what it gives is lost {where}."


def _zero(model: nn.Module, names: list[str], seen: str, likely: list[str], severity: Severity) -> Finding:
    path = common_path(names)
    return finding(
        "GG304",
        seen,
        likely=likely,
        severity=severity,
        module=path,
        module_class=type(model.get_submodule(path)).__name__,
        parameter=names[0] if len(names) == 1 else None,
        evidence={"parameters": names[:_LISTED], "count": len(names)},
        cause_id=names[0],
    )


def _count(names: list[str]) -> str:
    return f"{len(names)} trainable parameter{'s' if len(names) > 1 else ''}"
