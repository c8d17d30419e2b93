"""Read a file that may be anything, as data only; find the parts of a checkpoint in it, or say what it is instead."""

from __future__ import annotations

import os
import pickletools
import re
import stat
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint

from gpt_guard.checkpoint.reporter import Reporter
from gpt_guard.records.render import printable, some


def read_payload(path: Path, reporter: Reporter, max_bytes: int | None) -> Any:
    """Return what a checkpoint file holds, all tensors on the CPU.

    Reads with `weights_only=True`, so that nothing in the file is executed. Refuses, as GG707, what is missing, cut
    short, larger than `max_bytes` (by default, than the machine's memory), of another format, or needs code to run.
    """
    size = _size(path, reporter)
    limit = memory_size() if max_bytes is None else max_bytes
    if limit is not None and size > limit:
        seen = f"{path} has {size} bytes; at most {limit} may be read (max_bytes)"
        reporter.refuse("GG707", seen, known=["too_large"], evidence={"size": size, "limit": limit})
    _refuse_other_formats(path, size, reporter)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a hostile or broken file can make the reader raise nearly anything
        _explain(path, size, error, reporter)


def memory_size() -> int | None:
    """Return this machine's memory in bytes, or None where the system does not tell (Windows)."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _size(path: Path, reporter: Reporter) -> int:
    try:
        status = path.stat()
    except FileNotFoundError as error:
        folder = path.parent
        near = sorted(item.name for item in folder.iterdir() if item.suffix == path.suffix) if folder.is_dir() else []
        beside = f"; {folder} holds {some(near)}" if near else ""
        gone = "" if folder.is_dir() else f"; its folder {folder} does not exist either"
        reporter.refuse("GG707", f"there is no file {path}{gone}{beside}", known=["missing"], because=error)
    except OSError as error:
        reporter.refuse("GG707", f"cannot look at {path}: {error.strerror}", known=["access"], because=error)
    if stat.S_ISDIR(status.st_mode):
        inside = some(sorted(item.name for item in path.iterdir()))
        reporter.refuse("GG707", f"{path} is a folder; it holds {inside or 'nothing'}", known=["folder"])
    if not stat.S_ISREG(status.st_mode):
        reporter.refuse("GG707", f"{path} is a device, pipe or socket, not a file", known=["foreign"])
    if status.st_size == 0:
        reporter.refuse("GG707", f"{path} is empty (0 bytes)", known=["empty"])
    return status.st_size


def _refuse_other_formats(path: Path, size: int, reporter: Reporter) -> None:
    try:
        with path.open("rb") as stream:
            head = stream.read(512)
    except OSError as error:
        reporter.refuse("GG707", f"cannot read {path}: {error.strerror}", known=["access"], because=error)
    start = f"{path} ({size} bytes)"
    if head[8:10] == b'{"' and int.from_bytes(head[:8], "little") < size:
        reporter.refuse("GG707", f"{start} is a safetensors file", known=["safetensors"])
    if head.startswith(b"version https://git-lfs"):
        seen = f"{start} is a Git LFS pointer, not the file itself; `git lfs pull` brings that"
        reporter.refuse("GG707", seen, known=["text"])
    if _is_text(head):
        reporter.refuse("GG707", f"{start} is text and begins with {head[:40]!r}", known=["text"])
    if head.startswith(b"PK"):
        _refuse_bad_archive(path, size, reporter)


def _is_text(head: bytes) -> bool:
    # The legacy format and pickles begin with 0x80, zip archives hold NUL bytes within their first 30.
    return not any(byte < 9 or 13 < byte < 32 or byte >= 127 for byte in head[:30])


def _refuse_bad_archive(path: Path, size: int, reporter: Reporter) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, RuntimeError, ValueError, OSError) as error:
        seen = f"{path} ({size} bytes) begins like a torch checkpoint but has no end: {printable(error)}"
        reporter.refuse("GG707", seen, known=["truncated"], because=error)
    claimed = sum(entry.file_size for entry in entries)
    if claimed > size:  # torch.save stores without compression: only a crafted or repacked archive can hold more
        seen = f"{path} ({size} bytes) claims to hold {claimed} bytes"
        reporter.refuse("GG707", seen, known=["too_large"], evidence={"size": size, "claimed": claimed})
    names = [entry.filename for entry in entries]
    if any(name.endswith("/constants.pkl") for name in names):
        reporter.refuse("GG707", f"{path} is a TorchScript archive", known=["torchscript"])
    if not any(name.endswith("/data.pkl") for name in names):
        reporter.refuse("GG707", f"{path} is a zip archive that holds {some(names)}, no data.pkl", known=["foreign"])


def _explain(path: Path, size: int, error: Exception, reporter: Reporter) -> NoReturn:
    start = f"{path} ({size} bytes)"
    needs = unsafe_globals(path)
    if hostile := [name for name in needs if _is_hostile(name)]:
        seen = f"{start} would call {some(hostile)} when unpickled; nothing of it was run"
        fix = (
            "Do not load it by other means (weights_only=False would run it). Get the weights from a source you trust."
        )
        reporter.refuse("GG707", seen, known=["code"], because=error, fix=fix, evidence={"globals": list(needs)})
    if needs:
        reporter.refuse(
            "GG707",
            f"{start} holds objects of {some(needs)}; reading them would run their code",
            known=["objects"],
            because=error,
            fix=_plain_data_fix(needs),
            evidence={"globals": list(needs)},
        )
    words = printable((str(error) or type(error).__name__).splitlines()[0], 200)
    if isinstance(error, EOFError) or "EOF" in words or "central directory" in words:
        reporter.refuse("GG707", f"{start} ends too early: {words}", known=["truncated"], because=error)
    if isinstance(error, MemoryError):
        reporter.refuse("GG707", f"{start} does not fit into memory", known=["too_large"], because=error)
    reporter.refuse("GG707", f"{start} cannot be read: {words}", known=["foreign"], because=error)


def _plain_data_fix(needs: Iterable[str]) -> str:
    """What to write instead, in the program that saved it."""
    advice = ["In the program that wrote it, save plain data:"]
    if any(name.startswith("torch.nn.") for name in needs):
        advice.append("model.state_dict() for the model;")
    if any(name.startswith("numpy.") for name in needs):
        advice.append("float(x) or torch.from_numpy(x) for NumPy values;")
    advice.append("vars(config) or dataclasses.asdict(config) for a config object.")
    return " ".join(advice)


_HOSTILE_MODULES = frozenset(
    {"os", "posix", "nt", "sys", "subprocess", "shutil", "socket", "pty", "ctypes", "importlib", "runpy", "code"}
    | {"webbrowser", "pickle", "operator"}
)
_HOSTILE_BUILTINS = frozenset(
    {"eval", "exec", "compile", "open", "__import__", "getattr", "setattr", "delattr", "globals", "input", "breakpoint"}
)

_LEGACY_PICKLES = 4
"""torch's format before 1.6 is a row of pickles: magic number, protocol, system, and the content."""

_TENSOR_PARTS = re.compile(r"torch\.(_utils\.|\w+$|nn\.parameter\.)|collections\.OrderedDict$|_codecs\.encode$")


def unsafe_globals(path: Path) -> list[str]:
    """Return the names that `torch.load` with `weights_only=True` would refuse; none where there is no pickle."""
    try:
        return sorted(get_unsafe_globals_in_checkpoint(path))
    except Exception:  # torch scans zip archives only, and broken ones make it raise anything
        return sorted(name for name in _scan(path) if not _TENSOR_PARTS.match(name))


def _is_hostile(name: str) -> bool:
    """Whether no checkpoint has a reason to call this."""
    module, _, function = name.rpartition(".")
    if module in ("builtins", "__builtin__"):
        return function in _HOSTILE_BUILTINS
    return name.partition(".")[0] in _HOSTILE_MODULES


def _scan(path: Path) -> set[str]:
    found: set[str] = set()
    with path.open("rb") as stream:
        for _ in range(_LEGACY_PICKLES):
            strings: list[str] = []
            memo: dict[int, str] = {}
            try:
                for opcode, argument, _ in pickletools.genops(stream):
                    _follow(opcode.name, argument, strings, memo, found)
            except Exception:  # the end of the pickles, or what is none
                break
    return found


def _follow(name: str, argument: object, strings: list[str], memo: dict[int, str], found: set[str]) -> None:
    """STACK_GLOBAL takes module and name from the two strings pushed last, which may come from the memo."""
    if name in ("GLOBAL", "INST"):
        found.add(str(argument).replace(" ", "."))
    elif name == "STACK_GLOBAL":
        found.add(".".join(strings[-2:]))
    elif name == "MEMOIZE":
        memo[len(memo)] = strings[-1] if strings else ""
    elif name in ("PUT", "BINPUT", "LONG_BINPUT") and isinstance(argument, int):
        memo[argument] = strings[-1] if strings else ""
    elif name in ("GET", "BINGET", "LONG_BINGET") and isinstance(argument, int):
        strings.append(memo.get(argument, ""))
    elif "UNICODE" in name or "STRING" in name:
        strings.append(str(argument))


MODEL_KEYS = ("model_state_dict", "model", "state_dict", "model_state", "net", "weights")
OPTIMIZER_KEYS = ("optimizer_state_dict", "optimizer", "optimizer_states", "optimizers", "optim")
SCHEDULER_KEYS = ("scheduler_state_dict", "scheduler", "lr_scheduler", "lr_schedulers")
SCALER_KEYS = ("scaler_state_dict", "scaler")
STEP_KEYS = ("step", "global_step", "iter_num", "iteration")
CONFIG_KEYS = ("model_args", "config")

Digest = Annotated[str, Field(max_length=256)]


class Stamp(BaseModel):
    """The entries that only gpt_guard and checkpoints made for it carry, validated since the file is not trusted."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    tokenizer_fingerprint: Digest | None = None
    tokenizer_chars: list[str] | None = None
    fingerprint: dict[str, Digest] = Field(default_factory=dict)
    gpt_guard: dict[str, Any] = Field(default_factory=dict)
    optimizer_parameters: list[list[list[str]]] | None = None

    @property
    def parts(self) -> dict[str, str]:
        """Digests by part; the tokenizer's stands in an entry of its own, which older checkpoints have alone."""
        alone = {"tokenizer": self.tokenizer_fingerprint} if self.tokenizer_fingerprint else {}
        return {**self.fingerprint, **alone}


@dataclass(frozen=True)
class Stored:
    """A checkpoint taken apart; `weights` is the mapping as it was read, with the `_metadata` torch gave it."""

    path: Path
    stamp: Stamp
    weights: Mapping[str, Any]
    optimizers: tuple[dict[str, Any], ...] = ()
    schedulers: tuple[dict[str, Any], ...] = ()
    scalers: tuple[dict[str, Any], ...] = ()
    step: int | None = None
    config: dict[str, Any] | None = None
    extra: dict[str, Any] = field(default_factory=dict)


def take_apart(path: Path, payload: Any, reporter: Reporter) -> Stored:
    """Find the parts of a payload in any common layout; refuses, as GG707, what holds no weights."""
    if not isinstance(payload, Mapping):
        _refuse(path, f"holds {_kind(payload)}, not a dict", reporter)
    if odd := [key for key in payload if not isinstance(key, str)]:
        _refuse(path, f"holds a dict with the key {printable(repr(odd[0]))}, which is no name", reporter)
    if payload and _is_state_dict(payload):
        return Stored(path=path, stamp=Stamp(), weights=payload)
    rest = dict(payload)
    weights = _take(rest, MODEL_KEYS)
    if not isinstance(weights, Mapping) or not _is_state_dict(weights):
        inside = f" (its keys are {some(payload)})" if payload else ""
        _refuse(path, f"holds a dict without model weights{inside}; looked for {', '.join(MODEL_KEYS)}", reporter)
    if odd := [key for key in weights if not isinstance(key, str)]:
        _refuse(path, f"holds weights under the key {printable(repr(odd[0]))}, which is no name", reporter)
    return Stored(
        path=path,
        stamp=_stamp(path, rest, reporter),
        weights=weights,
        optimizers=_states(_take(rest, OPTIMIZER_KEYS)),
        schedulers=_states(_take(rest, SCHEDULER_KEYS)),
        scalers=_states(_take(rest, SCALER_KEYS)),
        step=_step(rest),
        config=_config(rest),
        extra=rest,
    )


def _is_state_dict(candidate: Mapping[Any, Any]) -> bool:
    """Names to tensors; modules may add values of their own under `_extra_state`."""
    plain_entries = (value for key, value in candidate.items() if not str(key).endswith("_extra_state"))
    tensors = [isinstance(value, Tensor) for value in plain_entries]
    return all(tensors)


def _take(rest: dict[str, Any], keys: tuple[str, ...]) -> Any:
    for key in keys:
        if isinstance(rest.get(key), (Mapping, list, tuple)):
            return rest.pop(key)
    return None


def _states(value: Any) -> tuple[dict[str, Any], ...]:
    """One state or several."""
    listed = value if isinstance(value, (list, tuple)) else [value]
    return tuple(dict(state) for state in listed if isinstance(state, Mapping))


def _stamp(path: Path, rest: dict[str, Any], reporter: Reporter) -> Stamp:
    ours = {key: rest.pop(key) for key in Stamp.model_fields if key in rest}
    try:
        return Stamp(**ours)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(printable(part) for part in first["loc"])
        _refuse(path, f"holds a damaged entry {where}: {first['msg']}", reporter)


def _step(rest: dict[str, Any]) -> int | None:
    for key in STEP_KEYS:
        value = rest.get(key)
        if isinstance(value, Tensor) and value.numel() == 1 and not value.is_floating_point():
            value = int(value.item())
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            rest.pop(key)
            return value
    return None


def _config(rest: dict[str, Any]) -> dict[str, Any] | None:
    """nanoGPT keeps the model's own config in `model_args` and the run's in `config`, so the former goes first."""
    for key in CONFIG_KEYS:
        value = rest.get(key)
        if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
            rest.pop(key)
            return dict(value)
    return None


def _kind(payload: Any) -> str:
    name = type(payload).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _refuse(path: Path, what: str, reporter: Reporter) -> NoReturn:
    reporter.refuse("GG707", f"{path} {what}", known=["payload"])
