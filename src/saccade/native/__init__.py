"""Calls that were made before, made again from C++ at a few microseconds of host time; knows no operation.

`calls` is the memory of these calls, None where there is none: no C++ compiler, no GPU, switched off by `SACCADE_NATIVE=0`, or not compiled
yet. What it does not know, Python does, with the same result; so nothing depends on it but time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from saccade.native.build import Build, status

__all__ = ["calls", "forget", "start", "status"]

calls: Any = None
_build: Build | None = None
_asked = 0
_EVERY = 64  # calls between two looks at whether the compiler is done


def start(ready: Callable[[], None]) -> None:
    """Compile in the background, and load when that is done; asked again at each call that is new. ready: called once `calls` is there."""
    global calls, _build, _asked
    _asked += 1
    if calls is not None or (_asked - 1) % _EVERY:
        return
    if _build is None:
        _build = Build()
    module = _build.poll()
    if module is not None and module.has_driver():
        calls = module.Memory()
        ready()


def forget() -> None:
    """Forget every call: a backend was set aside."""
    if calls is not None:
        calls.forget()
