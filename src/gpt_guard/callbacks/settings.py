"""The settings of a guard: of the right type, or refused where they are written and not in the middle of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from typing import Any

from gpt_guard.errors import GuardUsageError


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


# By annotation; settings of any other type are looked at by their guard.
_TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "int": (_is_whole, "a whole number"),
    "float": (_is_number, "a number"),
    "bool": (lambda value: isinstance(value, bool), "True or False"),
}


def check_types(guard: type, given: Mapping[str, Any]) -> None:
    """Refuse settings that are not of the type that the guard's `__init__` names. Raises GuardUsageError.

    `given` is `locals()` at its beginning; NumPy's numbers are numbers, and True is none.
    """
    for name, annotation in guard.__init__.__annotations__.items():  # type: ignore[misc]  # of this class itself
        wanted, _, optional = annotation.partition(" | ")
        fits, words = _TYPES.get(wanted, (None, ""))
        value = given.get(name)
        if fits is None or fits(value) or (value is None and optional):
            continue
        none = ", or None" if optional else ""
        raise GuardUsageError(f"{guard.__name__}({name}={value!r:.60}) cannot work: expected {words}{none}")


def patterns(guard: str, name: str, given: Any) -> tuple[str, ...]:
    """Patterns of module paths as a tuple; one alone may come without a list. Raises GuardUsageError."""
    found = (given,) if isinstance(given, str) or not isinstance(given, Iterable) else tuple(given)
    if wrong := [each for each in found if not isinstance(each, str)]:
        raise GuardUsageError(
            f'{guard}({name}=...) holds {wrong[0]!r:.60}; expected patterns of module paths, such as "head.*"'
        )
    return found
