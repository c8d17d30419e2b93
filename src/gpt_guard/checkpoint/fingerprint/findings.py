"""The findings that say which part of a run is not the recorded one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpt_guard.catalogue import finding
from gpt_guard.checkpoint.fingerprint.naming import printable
from gpt_guard.checkpoint.fingerprint.record import Difference
from gpt_guard.checkpoint.fingerprint.vocabulary import tokenizer_digest
from gpt_guard.records import Finding

SHORT = 12
"""Hex digits of a digest that a sentence shows; the evidence holds all 64."""


def tokenizer_finding(
    difference: Difference, where: str, old: Sequence[str] | None, new: Sequence[str] | None
) -> Finding:
    """GG701 with the first id that stands for another token, where both vocabularies are known."""
    seen = f"{where} was made with tokenizer {difference.theirs[:SHORT]}; the one in use is {difference.ours[:SHORT]}"
    evidence: dict[str, Any] = {"checkpoint": difference.theirs, "now": difference.ours}
    likely: list[str] = []
    if new is not None:
        evidence["tokens_now"] = len(new)
    if old is not None and new is not None:
        evidence["tokens_checkpoint"] = len(old)
        first = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
        there, here = (tokens[first] if first < len(tokens) else None for tokens in (old, new))
        evidence |= {"first_differing_id": first, "token_checkpoint": there, "token_now": here}
        seen += (
            f". Id {first} is {_token(there)} there and {_token(here)} here ({len(old)} tokens there, {len(new)} here)"
        )
        likely = _token_causes(old, new, first)
    elif new is not None and tokenizer_digest(sorted(new)) == difference.theirs:
        seen += ". The saved one has the same tokens in sorted order"
        likely = ["order"]
    return finding("GG701", seen, likely=likely, evidence=evidence)


def config_finding(where: str, changes: Mapping[str, tuple[Any, Any]]) -> Finding:
    """GG702 with every key that differs, old and new."""
    listed = [f"{printable(key)} was {printable(old)}, is {printable(new)}" for key, (old, new) in changes.items()]
    more = f" and {len(listed) - 6} more" if len(listed) > 6 else ""
    evidence = {key: {"checkpoint": old, "now": new} for key, (old, new) in changes.items()}
    seen = f"{'; '.join(listed[:6])}{more} ({where})"
    return finding("GG702", seen, likely=["edited"], evidence={"changes": evidence})


def part_finding(difference: Difference, where: str) -> Finding:
    """GG703 for a data file or a text."""
    kind, _, name = difference.part.partition(":")
    what = {"data": "data file", "text": "text"}.get(kind, kind)
    seen = (
        f"{what} {printable(name) or difference.part}: {where} was made with {difference.theirs[:SHORT]}; "
        f"the one in use is {difference.ours[:SHORT]}"
    )
    likely = ["template" if kind == "text" else "rebuilt"]
    evidence: dict[str, Any] = {"part": difference.part, "checkpoint": difference.theirs, "now": difference.ours}
    return finding("GG703", seen, likely=likely, evidence=evidence, cause_id=difference.part)


def _token(token: str | None) -> str:
    return "no token" if token is None else ascii(token[:40])


def _token_causes(old: Sequence[str], new: Sequence[str], first: int) -> list[str]:
    if first == min(len(old), len(new)):
        return ["extended"]
    return ["order"] if sorted(old) == sorted(new) else ["other_text"]
