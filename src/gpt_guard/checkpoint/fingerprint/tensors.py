"""The digest of weights and optimizer state, in bounded memory, and the names weights go by without their wrappers."""

from __future__ import annotations

import ctypes
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gpt_guard.checkpoint.fingerprint.config import plain
from gpt_guard.errors import GuardUsageError

if TYPE_CHECKING:
    from hashlib import _Hash

CHUNK_ELEMENTS = 4 * 2**20
"""Elements moved to the host at a time: 16 MiB of float32."""

_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_LEADING = re.compile(r"^(?:module\.)+")


def weights_digest(weights: nn.Module | Mapping[str, Any]) -> str:
    """Return the SHA-256, in hex, of name, dtype, shape and bytes of every weight and buffer, in the order of names.

    A module stands for the `state_dict()` of what `unwrap` finds in it. Reads every element from the device, some
    16 MiB at a time. Bytes are compared, so 0.0 and -0.0 differ. Raises GuardUsageError for a tensor without bytes of
    its own here (meta device, sharded over processes).
    """
    return state_digest(unwrap(weights).state_dict() if isinstance(weights, nn.Module) else weights)


def state_digest(state: Any) -> str:
    """Return the SHA-256, in hex, of nested dicts and lists that hold tensors and plain values (optimizer state)."""
    digest = hashlib.sha256()
    _feed(digest, [], state)
    return digest.hexdigest()


def unwrap(model: nn.Module) -> nn.Module:
    """Return the user's own module from inside `torch.compile`, DataParallel or DistributedDataParallel."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def plain_name(name: str) -> str:
    """Return a weight's name without `module.` in front and without `_orig_mod.` and its like anywhere.

    DistributedDataParallel puts `module.` before every name, `torch.compile` `_orig_mod.` where a module is compiled,
    FSDP and activation checkpointing a segment of their own; in any order, since they nest.
    """
    previous = ""
    while name != previous:
        previous, name = name, _LEADING.sub("", _WRAPPERS.sub("", name))
    return name


def _feed(digest: _Hash, path: list[str], value: Any) -> None:
    if isinstance(value, Tensor):
        _header(digest, path, str(value.dtype), list(value.shape))
        for chunk in _chunks(path, value.detach()):
            digest.update(_bytes(chunk))
    elif isinstance(value, Mapping):
        _header(digest, path, "mapping", len(value))
        for key in sorted(value, key=str):
            _feed(digest, [*path, str(key)], value[key])
    elif isinstance(value, (list, tuple)):
        _header(digest, path, "list", len(value))
        for index, item in enumerate(value):
            _feed(digest, [*path, str(index)], item)
    else:
        _header(digest, path, "value", plain(value))


def _header(digest: _Hash, path: list[str], kind: str, detail: Any) -> None:
    digest.update(json.dumps([path, kind, detail]).encode() + b"\n")


def _chunks(path: list[str], tensor: Tensor) -> Iterator[Tensor]:
    """Flat pieces in the order of elements; a tensor that is not contiguous is never copied as a whole."""
    if tensor.is_meta or hasattr(tensor, "full_tensor"):
        kind = "lies on the meta device and has no bytes" if tensor.is_meta else "is sharded over processes"
        raise GuardUsageError(
            f"{'.'.join(path)} {kind}: materialize or gather it first "
            "(torch.distributed.checkpoint.state_dict.get_model_state_dict with full_state_dict=True)"
        )
    if tensor.layout is not torch.strided:
        tensor = tensor.to_sparse().coalesce()
        yield from _chunks(path, tensor.indices())
        tensor = tensor.values()
    if tensor.numel() <= CHUNK_ELEMENTS:
        yield tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    elif tensor.is_contiguous():
        yield from tensor.resolve_conj().resolve_neg().reshape(-1).split(CHUNK_ELEMENTS)
    else:
        rows = max(1, CHUNK_ELEMENTS // max(1, tensor[0].numel()))
        for part in tensor.split(rows):
            yield from _chunks(path, part[0] if len(part) == 1 else part)


def _bytes(chunk: Tensor) -> Any:
    """The bytes of a flat tensor, without NumPy: torch does not require it, and it has no bfloat16 or float8."""
    if chunk.numel() == 0:
        return b""
    raw = chunk.cpu().view(torch.uint8)
    # string_at copies while `raw` is alive; a buffer over its address would outlive it.
    return ctypes.string_at(raw.data_ptr(), raw.numel())
