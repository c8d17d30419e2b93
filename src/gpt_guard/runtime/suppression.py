"""What follows from a finding that was told already: one trouble is said once, under its cause."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from gpt_guard.records import Finding, Severity


class _Rule(NamedTuple):
    """A finding `code` follows from one of `causes`; `sentence` says how, `demoted` whether it is only worth knowing.

    `together`: only in the same module, or where one is inside the other.
    """

    code: str
    causes: tuple[str, ...]
    sentence: str
    demoted: bool = True
    together: bool = False


_RULES = (
    _Rule(
        "GG660",
        ("GG697", "GG699", "GG668", "GG669", "GG698"),
        "What that mask or dimension does shows here.",
        together=True,
    ),
    _Rule("GG660", ("GG661",), "What mixes the rows mixes their positions as well.", together=True),
    _Rule("GG201", ("GG606",), "Where no target counts, the gradient is zero."),
    _Rule(
        "GG308",
        ("GG655",),
        "The loss is a sum over the targets: gradients, and with plain SGD the steps, are as many times too large.",
        demoted=False,
    ),
)


def explained(finding: Finding, told: Iterable[Finding]) -> Finding:
    """The finding with the one before it that explains it named in front of its causes; itself where there is none.

    Where the earlier one says all there is to do, and was said aloud, this one becomes information.
    """
    rules = [rule for rule in _RULES if rule.code == finding.code]
    for before in told if rules else ():
        for rule in rules:
            if rule.demoted and before.severity is Severity.INFO:
                continue
            if before.code in rule.causes and (not rule.together or _nested(before.module, finding.module)):
                where = "" if before.step is None else f" at step {before.step}"
                first = f"{before.code} ({before.title}), told{where}. {rule.sentence}"
                update: dict[str, object] = {"causes": (first, *finding.causes)}
                if rule.demoted:
                    update |= {"severity": Severity.INFO, "seen": f"{finding.seen} It follows from {before.code}."}
                return finding.model_copy(update=update)
    return finding


def _nested(one: str | None, other: str | None) -> bool:
    if one is None or other is None:
        return False
    return not one or not other or f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")
