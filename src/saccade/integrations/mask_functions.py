"""Recognises the mask functions of transformers: each is a closure over other functions and numbers, which are compared."""

from __future__ import annotations

from types import FunctionType
from typing import Any

HOLE, OTHER_HOLE, THIRD_HOLE = object(), object(), object()


def found_in(given: Any, pattern: Any) -> dict[object, Any]:
    """The values in the holes of a pattern, by hole; empty if `given` is another function."""
    found: dict[object, Any] = dict.fromkeys((HOLE, OTHER_HOLE, THIRD_HOLE))
    return found if fits(given, pattern, found) else {}


def fits(given: Any, pattern: Any, found: dict[object, Any]) -> bool:
    """Whether `given` is the same function over the same functions as `pattern`; the values in its holes are put into `found`."""
    if isinstance(pattern, tuple):
        return isinstance(given, tuple) and len(given) == len(pattern) and all(map(fits, given, pattern, [found] * len(given)))
    if not isinstance(pattern, FunctionType):
        if pattern not in found:
            return given is pattern
        found[pattern] = given
        return True
    if given is pattern:
        return True
    if not isinstance(given, FunctionType) or given.__code__ is not pattern.__code__:
        return False
    return fits(_cells(given), _cells(pattern), found)


def _cells(function: FunctionType) -> tuple[Any, ...]:
    return tuple(cell.cell_contents for cell in function.__closure__ or ())
