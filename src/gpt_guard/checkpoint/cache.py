"""Caches that know what they were made from: the fingerprint of tokenizer, template and source beside the data."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import os
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from gpt_guard.catalogue import finding
from gpt_guard.checkpoint.fingerprint import (
    Difference,
    Fingerprint,
    config_changes,
    config_dict,
    file_digest,
    token_list,
)
from gpt_guard.checkpoint.fingerprint.record import (
    SHORT,
    Files,
    StampFile,
    config_finding,
    part_finding,
    read_stamp,
    tokenizer_finding,
    write_stamp,
)
from gpt_guard.checkpoint.read import read_payload, unsafe_globals
from gpt_guard.checkpoint.reporter import Reporter
from gpt_guard.errors import GuardUsageError, error_for
from gpt_guard.records import Finding
from gpt_guard.records.atomic import replacing

T = TypeVar("T")
_CACHE = "cache"
_NONE = "none"


def cached(
    path: str | os.PathLike[str],
    make: Callable[[], T],
    *,
    tokenizer: Any = None,
    template: str | Mapping[str, str] | None = None,
    source: Files = (),
    settings: Any = None,
    code: bool = False,
    remake: bool = False,
) -> T:
    """Return what is cached at `path`, or `make()` it and keep it there; a cache made from something else is refused.

    The digests of what it is made from are written to `path` + ".fingerprint.json": the tokenizer (its
    `chat_template`, if it has one, included), `template` (one text, or several by name), `source` (files or folders,
    read whole), `settings` (any config: `block_size`, a filter's threshold) and, with `code`, the source of `make`
    without its comments and blanks. The cached value is tensors, numbers, strings, and lists and dicts of these; it is
    written in one move and read with `weights_only=True`, so that nothing in the file is executed.

    `remake` makes a stale cache anew in place of raising. Raises FingerprintMismatch (GG709) where a part differs,
    naming it with both digests; CheckpointError for a file without fingerprint (GG710: it is never overwritten), one
    that cannot be read (GG707); GuardUsageError for a value that could not be read back.
    """
    path, stamp = Path(path), _stamp(make if code else None, tokenizer, template, source, settings)
    if path.exists():
        found = _compare(path, stamp, both=True)
        if not found:
            value: T = read_payload(path, Reporter(None), None)
            return value
        if not remake or found[0].code != "GG709":
            raise error_for(found[0])
    made = make()
    # Without a fingerprint while it is written: after a crash, a new cache never stands beside an old one.
    _stamp_path(path).unlink(missing_ok=True)
    _write(path, made)
    _write_stamp(path, stamp)
    return made


def verify_cache(
    path: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    template: str | Mapping[str, str] | None = None,
    source: Files = (),
    settings: Any = None,
) -> tuple[str, ...]:
    """Compare a cache with what is in use, and return the parts that agree; what is not given is not compared.

    Raises what `cached` raises. The cache may be of any format, such as a memory map, where `stamp_cache` has written
    its fingerprint. Reads its bytes once, and loads nothing.
    """
    path, stamp = Path(path), _stamp(None, tokenizer, template, source, settings)
    if not path.exists():
        Reporter(None).refuse("GG707", f"there is no cache {path}", known=["missing"])
    if found := _compare(path, stamp, both=False):
        raise error_for(found[0])
    return tuple(stamp.parts)


def stamp_cache(
    path: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    template: str | Mapping[str, str] | None = None,
    source: Files = (),
    settings: Any = None,
) -> None:
    """Write the fingerprint beside a cache that your own code has just made, for `verify_cache` to compare with.

    Raises GuardUsageError where there is no such file.
    """
    _write_stamp(Path(path), _stamp(None, tokenizer, template, source, settings))


def _stamp(make: Any, tokenizer: Any, template: Any, source: Files, settings: Any) -> StampFile:
    texts = {"template": template} if isinstance(template, str) else dict(template or {})
    own = getattr(tokenizer, "chat_template", None)
    if isinstance(own, str):
        texts.setdefault("chat_template", own)
    parts = Fingerprint.of(tokenizer=tokenizer, config=settings, data=source, texts=texts).parts
    if make is not None:
        parts["code:make"] = _code_digest(make)
    tokens = None if tokenizer is None else token_list(tokenizer)
    return StampFile(parts=parts, tokens=tokens, config=None if settings is None else config_dict(settings))


def _code_digest(make: Any) -> str:
    while isinstance(make, functools.partial):
        make = make.func
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(make)))
    except (OSError, TypeError, SyntaxError) as error:
        raise GuardUsageError(
            f"code=True needs the source of {make!r:.80}, which cannot be read: give a function from a file"
        ) from error
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()


def _stamp_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.fingerprint.json")


def _write_stamp(path: Path, stamp: StampFile) -> None:
    parts = {**stamp.parts, _CACHE: file_digest(path)}
    write_stamp(path.parent, stamp.model_copy(update={"parts": parts}), _stamp_path(path).name)


def _write(path: Path, value: Any) -> None:
    with replacing(path) as stream:
        torch.save(value, stream)
        stream.flush()
        if needs := unsafe_globals(Path(stream.name)):
            raise GuardUsageError(
                f"{path} was not written: make() returned a value that holds a {needs[0]}, which could only be read by "
                "running code. Return tensors (torch.from_numpy(array)), numbers, strings, and lists or dicts of them"
            )


def _compare(path: Path, now: StampFile, *, both: bool) -> list[Finding]:
    """What keeps this cache from being used; `both`: a part that only the cache was made with counts as well."""
    try:
        then = read_stamp(path.parent, _stamp_path(path).name)
    except ValueError as error:
        return [finding("GG710", f"the fingerprint of {path} cannot be read: {error}", likely=["damaged"])]
    if then is None:
        return [finding("GG710", f"{path} has no fingerprint {_stamp_path(path).name} beside it", likely=["foreign"])]
    if (digest := file_digest(path)) != then.parts.get(_CACHE):
        seen = f"{path} is not the file that its fingerprint was written for (SHA-256 {digest[:SHORT]} now, "
        return [finding("GG710", f"{seen}{then.parts.get(_CACHE, '')[:SHORT]} then)", likely=["replaced"])]
    ours, theirs = dict(now.parts), {part: value for part, value in then.parts.items() if part != _CACHE}
    if both:
        ours = dict.fromkeys(theirs, _NONE) | ours
    if unknown := sorted(ours.keys() - theirs.keys()):
        seen = f"{path} was made without a record of its {', '.join(unknown)}: whether it is the same cannot be seen"
        return [finding("GG710", seen, likely=["part"], evidence={"parts": list(unknown)})]
    differences = Fingerprint(parts=ours).compare(Fingerprint(parts=theirs))
    return [_stale(path, differences, then, now)] if differences else []


def _stale(path: Path, differences: Sequence[Difference], then: StampFile, now: StampFile) -> Finding:
    where = f"the cache {path}"
    parts = [_difference(each, where, then, now) for each in differences]
    evidence: dict[str, Any] = {
        each.part: {"cache": each.theirs, "now": each.ours, "details": one.evidence}
        for each, one in zip(differences, parts, strict=True)
    }
    causes = {"tokenizer": "tokenizer", "text": "template", "data": "source", "config": "settings", "code": "code"}
    likely = [causes[each.part.partition(":")[0]] for each in differences]
    return finding("GG709", "; ".join(one.seen for one in parts), likely=likely, evidence=evidence, cause_id=str(path))


def _difference(difference: Difference, where: str, then: StampFile, now: StampFile) -> Finding:
    if difference.part == "tokenizer" and difference.ours != _NONE:
        return tokenizer_finding(difference, where, then.tokens, now.tokens)
    if difference.part == "config" and (changes := config_changes(then.config or {}, now.config or {})):
        return config_finding(f"settings of {where}", changes)
    return part_finding(difference, where)
