"""Disables a kernel that does not compile here, with one warning, so that another kernel computes in its place."""

from __future__ import annotations

import warnings
from collections.abc import Hashable

from saccade.errors import CompileError, CompilerUnavailable

FAILURES = (CompileError, CompilerUnavailable)
_MOST = 1024
_disabled: dict[Hashable, Exception] = {}
_warned: set[str] = set()


def disable(what: Hashable, instead: str, error: Exception) -> None:
    """Remember that `what` fails: a variant of a kernel, or a backend and a shape. Warn once for each failure; `instead` names the replacement."""
    # only an endless stream of shapes that do not compile fills it; a dropped entry would fail again, without a warning
    if len(_disabled) >= _MOST:
        _disabled.pop(list(_disabled)[0], None)  # noqa: RUF015 (an iterator would meet what other threads add)
    _disabled[what] = error
    summary = getattr(error, "summary", str(error).partition("\n")[0])
    if summary in _warned:
        return
    _warned.add(summary)
    log = getattr(error, "log", "").strip()
    # a missing compiler is not a kernel's fault
    report = "" if isinstance(error, CompilerUnavailable) else " Please report this text with the output of `saccade info`."
    said = f" The compiler said: {log[:500]}" if log else ""
    warnings.warn(
        f"{summary}; {instead} computes instead, more slowly.{report}{said}",
        RuntimeWarning,
        stacklevel=2,
    )


def failure_of(what: Hashable) -> Exception | None:
    """Why `what` was disabled; None if it was not."""
    return _disabled.get(what) if _disabled else None


def forget() -> None:
    """Forget all failures, so that everything is tried again."""
    _disabled.clear()
    _warned.clear()
