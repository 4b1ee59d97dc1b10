"""Replays calls from C++, at a few microseconds of host time; knows no operation.

`calls` holds these calls, and `module` the functions of the compiled module. Both are None without a C++ compiler or a GPU, with `SACCADE_NATIVE=0`,
and until the module is compiled. Python makes every call that C++ does not know, with the same result.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from saccade.native.build import Build, status

__all__ = ["calls", "finish", "forget", "module", "start", "status"]

calls: Any = None
module: Any = None
# whether this process is a forked child, without its parent's threads
forked = False
_build: Build | None = None
_starts = 0
# calls between two checks whether the compiler has finished
_EVERY = 64


def start(ready: Callable[[], None]) -> None:
    """Compile in the background, and load the module once it is compiled; to be called at each new call. ready: called once
    `calls` is set."""
    global _build, _starts
    _starts += 1
    if calls is not None or (_starts - 1) % _EVERY:
        return
    if _build is None:
        _build = Build()
    _use(_build.poll(), ready)


def finish(ready: Callable[[], None], seconds: float) -> bool:
    """Compile as `start` does, and wait at most `seconds`; returns whether there is a module."""
    global _build
    if calls is None:
        if _build is None:
            _build = Build()
        _use(_build.wait(seconds), ready)
    return calls is not None


def _use(loaded: Any, ready: Callable[[], None]) -> None:
    global calls, module
    if loaded is not None and loaded.has_driver():
        module, calls = loaded, loaded.Memory()
        ready()


def _after_fork() -> None:
    # a forked child cannot wait for its parent's compiler
    global _build, forked
    forked = True
    if _build is not None and _build.module is None:
        _build = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def forget() -> None:
    """Forget every call, because a backend was disabled."""
    if calls is not None:
        calls.forget()
