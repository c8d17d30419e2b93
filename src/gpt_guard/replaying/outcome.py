"""Outcome: what running a step again has shown, and how a finding is told with it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpt_guard.records import Finding, OperationSeen
from gpt_guard.replaying.target import target_of

# The key of the cause that is told where no other fits.
_UNKNOWN = "own_formula"


@dataclass(frozen=True, repr=False)
class Outcome:
    """`reproduced` is True only where the very tensor of the finding went bad again.

    `operation` is what made it so, None where no operation could be proven; `text` says in sentences what was compared
    and, where it was not reproduced, what may differ and what to switch on. `seconds` is how long it took. `decided` is
    False where the replay came to no answer: it was stopped, could not run, or the fault lies in unknown code.
    """

    reproduced: bool
    text: str
    operation: OperationSeen | None = None
    finding: Finding | None = None
    seconds: float = 0.0
    decided: bool = True

    def __repr__(self) -> str:
        # What a notebook shows.
        return str(self)

    def __str__(self) -> str:
        operation = self.operation
        if operation is None:
            return self.text
        module = f" in `{operation.module}`" if operation.module else ""
        line = f" at {operation.where}" if operation.where is not None else ""
        causes = "".join(f"\n  {cause.text}" for cause in operation.causes[:2])
        return f"{self.text}\n{operation.name}{module}{line}\n{operation.shows}{causes}"


def with_outcome(finding: Finding, outcome: Outcome) -> Finding:
    """The finding with what its replay has shown.

    Place, line and causes are those of the operation where the same tensor was reproduced, and as the guard said them
    otherwise: a place is never guessed.
    """
    operation = outcome.operation
    if operation is None or not outcome.reproduced:
        return finding.model_copy(update={"replay": outcome.text})
    changes: dict[str, object] = {"replay": outcome.text, "operation": operation}
    if operation.where is not None:
        changes["where"] = operation.where
    # Where none of the known causes fits the operation, what the guard has seen says more.
    if operation.causes and operation.cause != _UNKNOWN:
        first = operation.causes[0]
        changes |= {
            "causes": _unique([*(cause.text for cause in operation.causes), *finding.causes]),
            "next_test": first.test or finding.next_test,
            "fix": first.fix or finding.fix,
        }
    if _more_exact(finding, operation):
        changes |= {"module": operation.module, "module_class": operation.module_class}
        whose = f"`{operation.module}`" if operation.module else "the model itself"
        changes["origin"] = f"The replay shows that {whose} made it; it was first noticed in the tensor named above."
        if (target := target_of(finding)) is not None and target.kind != "loss":
            changes["position"] = target.where
    return finding.model_copy(update=changes)


def _more_exact(finding: Finding, operation: OperationSeen) -> bool:
    """Whether the operation knows better in which module it stands.

    For a gradient, `module` is that of the parameter, and stays so.
    """
    if operation.module is None or finding.code == "GG104":
        return False
    # The wrapper of torch.compile and what is in it are one module to a person.
    return operation.module.removesuffix("_orig_mod").removesuffix(".") != finding.module


def _unique(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(texts))


def reproduced(compared: str, notes: Sequence[str]) -> str:
    """What was compared, and what is known to differ although it has come out the same."""
    if notes:
        return " ".join([f"Reproduced: {compared}, although not everything is as it was.", *notes])
    return f"Reproduced: {compared}, with the same inputs, weights and random numbers."


def not_reproduced(
    compared: str, notes: Sequence[str], nondeterministic: Sequence[str], own: Sequence[str] = (), *, live: bool = True
) -> str:
    """Why a replay may show something else, and what to switch on, in sentences.

    `live` tells that the model is the very one that failed: one that was built anew may differ in more than is listed.
    """
    parts = [f"Not reproduced: {compared}", *notes]
    if nondeterministic:
        listed = ", ".join(nondeterministic[:5])
        parts.append(
            f"Operations without a fixed order of summation ran: {listed}. torch.use_deterministic_algorithms(True) "
            f"makes them repeatable."
        )
    if own:
        listed = ", ".join(f"`{name}`" for name in dict.fromkeys(own[:5]))
        parts.append(
            f"The forward writes to state of its own ({listed}), and what that was when the failed forward began is "
            f"not kept."
        )
    if live and not notes and not nondeterministic and not own:
        parts.append(
            "Something outside of inputs, weights and torch's generators differs: state that the forward keeps in "
            "Python objects, time, other threads, or another generator."
        )
    return " ".join(parts)
