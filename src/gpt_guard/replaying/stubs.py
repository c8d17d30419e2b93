"""Stand-ins for what a replay must not touch: it would take from an iterator what belongs to the loop."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn

from gpt_guard.hooks.isolation.consumed import Kind, consumed, may_block

_READS: dict[Kind, frozenset[str]] = {
    "iterator": frozenset({"send", "throw"}),
    "queue": frozenset({"get", "get_nowait", "recv", "recv_bytes", "recv_bytes_into", "join"}),
    "file": frozenset({"read", "read1", "readall", "readinto", "readline", "readlines", "seek"}),
}
_WRITES: dict[Kind, frozenset[str]] = {
    "iterator": frozenset({"close"}),
    "queue": frozenset({"put", "put_nowait", "send", "send_bytes", "task_done", "close"}),
    "file": frozenset({"write", "writelines", "flush", "truncate", "close"}),
}
# What is longer is data.
_DEEPEST, _LONGEST = 4, 1000


class OutOfReach(BaseException):
    """The forward reads from what cannot be rewound. Not an Exception, so that no handler in the forward takes it."""


class StandIn:
    """Stands where an iterator, a queue or a file stood: reading ends the replay, writing does nothing."""

    def __init__(self, original: Any, kind: Kind, name: str) -> None:
        self._original = original
        self._kind: Kind = kind
        self._name = name

    def __iter__(self) -> StandIn:
        return self

    def __next__(self) -> NoReturn:
        self._end()

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *raised: object) -> None:
        return None

    def __getattr__(self, attribute: str) -> Any:
        if attribute in _READS[self._kind]:
            return self._end
        return _nothing if attribute in _WRITES[self._kind] else getattr(self._original, attribute)

    def _end(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        of = type(self._original).__qualname__
        article = "an" if self._kind == "iterator" else "a"
        raise OutOfReach(
            f"Not replayed: the forward reads from `{self._name}`, {article} {self._kind} ({of}), which has no way "
            f"back: a second forward would take from it what belongs to the loop. Take the batch out of it in the "
            f"loop, and give the model tensors."
        )


class OpenLock:
    """Stands where a lock, an event or a barrier stood: the forward that is being replayed may still hold it."""

    def __enter__(self) -> bool:
        return True

    def __exit__(self, *raised: object) -> None:
        return None

    def __getattr__(self, attribute: str) -> Any:
        return _at_once

    def locked(self) -> bool:
        """Nobody holds it."""
        return False


def _at_once(*_args: Any, **_kwargs: Any) -> bool:
    return True


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    return None


def lend(value: Any, name: str, depth: int = 0) -> Any:
    """Inputs with stand-ins for iterators, queues and files; the same object where there is none in it."""
    if type(value) in (tuple, list, dict) and depth < _DEEPEST and len(value) <= _LONGEST:
        pairs = list(value.items() if isinstance(value, dict) else enumerate(value))
        lent = {key: lend(each, f"{name}[{key!r}]", depth + 1) for key, each in pairs}
        if all(lent[key] is each for key, each in pairs):
            return value
        return lent if isinstance(value, dict) else type(value)(lent.values())
    return _one(value, name)


def _one(value: Any, name: str) -> Any:
    if may_block(value):
        return OpenLock()
    kind = consumed(value)
    return value if kind is None else StandIn(value, kind, name)


def lend_attributes(model: nn.Module, registries: frozenset[str]) -> None:
    """Put stand-ins in place of such attributes of modules; who has held the attributes before puts them back."""
    for path, module in model.named_modules():
        attributes = vars(module)
        for name, value in attributes.items():
            if name not in registries:
                attributes[name] = lend(value, f"{path}.{name}" if path else name)
