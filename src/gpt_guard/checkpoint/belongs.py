"""Compare what a checkpoint belongs to with what is in use: tokenizer, config, weights, data, texts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from gpt_guard.checkpoint.fingerprint import (
    Difference,
    Fingerprint,
    config_changes,
    config_dict,
    state_digest,
    token_list,
    tokenizer_digest,
    unwrap,
)
from gpt_guard.checkpoint.fingerprint.config import without
from gpt_guard.checkpoint.fingerprint.record import SHORT, config_finding, part_finding, tokenizer_finding
from gpt_guard.checkpoint.read import Stored
from gpt_guard.checkpoint.reporter import Reporter
from gpt_guard.errors import GuardUsageError
from gpt_guard.records.render import printable


def model_config(model: nn.Module, config: Any) -> dict[str, Any] | None:
    """Return the config that was given, or else the model's own `.config` where that is one."""
    if config is not None:
        return config_dict(config)
    own = getattr(unwrap(model), "config", None)
    try:
        return None if own is None else config_dict(own)
    except GuardUsageError:  # an attribute of that name which is no config
        return None


def verify(
    stored: Stored,
    reporter: Reporter,
    *,
    tokenizer: Any,
    config: Mapping[str, Any] | None,
    config_given: bool,
    fingerprint: Fingerprint,
    ignore_config: Collection[str],
) -> tuple[str, ...]:
    """Say every part that differs (GG701, GG702, GG703) or cannot be compared (GG704); return those that agree."""
    asked = dict(fingerprint.parts)
    if tokenizer is not None:
        asked["tokenizer"] = tokenizer_digest(tokenizer)
    carried = stored.stamp.parts
    agreed = [part for part, digest in asked.items() if carried.get(part) == digest and part != "config"]
    for difference in Fingerprint(parts=asked).compare(Fingerprint(parts=carried)):
        if difference.part == "tokenizer":
            _say_tokenizer(stored, difference, tokenizer, reporter)
        elif difference.part != "config":
            reporter.tell(part_finding(difference, f"the checkpoint {stored.path}"))
    if config is not None and stored.config is not None:
        agreed += _compare_configs(stored, config, ignore_config, reporter)
    agreed += _verify_contents(stored, reporter)
    wanted = [*asked, *(["config"] if config_given and "config" not in asked else [])]
    known = {*carried, *(["config"] if stored.config is not None else [])}
    _say_blind(stored, [part for part in wanted if part not in known], bool(carried), reporter)
    return tuple(agreed)


def _say_tokenizer(stored: Stored, difference: Difference, tokenizer: Any, reporter: Reporter) -> None:
    old = stored.stamp.tokenizer_chars
    if old is not None and tokenizer_digest(old) != difference.theirs:
        old = None  # the list beside the digest is not the one that was digested: show neither
    new = token_list(tokenizer) if tokenizer is not None else None
    reporter.tell(tokenizer_finding(difference, f"the checkpoint {stored.path}", old, new))


def _compare_configs(
    stored: Stored, config: Mapping[str, Any], ignored: Collection[str], reporter: Reporter
) -> list[str]:
    old, new = without(config_dict(stored.config), ignored), without(config, ignored)
    changes = config_changes(old, new)
    if changes:
        reporter.tell(config_finding(f"config of the checkpoint {stored.path}", changes))
    return [] if changes else ["config"]


def _verify_contents(stored: Stored, reporter: Reporter) -> list[str]:
    """torch.load does not check the archive's checksums; a flipped bit is a weight of 1e30."""
    agreed = []
    contents = {"weights": stored.weights, "optimizer": list(stored.optimizers) or None}
    for part, content in contents.items():
        theirs = stored.stamp.fingerprint.get(part)
        if theirs is None or content is None:
            continue
        ours = state_digest(content)
        if ours == theirs:
            agreed.append(part)
            continue
        seen = (
            f"{part} in {stored.path} have digest {ours[:SHORT]}, but {theirs[:SHORT]} was recorded when it was saved"
        )
        evidence: dict[str, Any] = {"part": part, "recorded": theirs, "found": ours}
        reporter.say("GG703", seen, known=["damaged"], evidence=evidence, cause_id=part)
    return agreed


def _say_blind(stored: Stored, absent: list[str], any_carried: bool, reporter: Reporter) -> None:
    if not any_carried:
        seen = (
            f"{stored.path} carries no fingerprint: whether it belongs to this tokenizer, config and data is not known"
        )
        reporter.say("GG704", seen, known=["foreign"])
    elif absent:
        seen = f"{stored.path} carries no fingerprint of {', '.join(map(printable, absent))}: not compared"
        reporter.say("GG704", seen, known=["part"], evidence={"parts": list(absent)})
