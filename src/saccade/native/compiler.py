"""The C++ compiler of the machine."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from saccade.env import compiling_environment, cxx
from saccade.errors import CompileError, CompilerUnavailable

_logger = logging.getLogger("saccade")
_USUAL = ("c++", "g++", "clang++")
# a compiler takes 5 to 60 seconds
SLOW_SECONDS, MOST_SECONDS = 30.0, 300.0


def compiler() -> tuple[str, ...] | None:
    """The first words of a command: the compiler and arguments that CXX names, else the path of the first of c++, g++ and clang++ that exists;
    None without one."""
    return _find(cxx(), os.pathsep.join(os.get_exec_path()))


# looked for by every call on a CPU, and a search takes 50 us
@functools.lru_cache(8)
def _find(asked: str | None, path: str) -> tuple[str, ...] | None:
    if asked is None:
        found = next(filter(None, (shutil.which(name, path=path) for name in _USUAL)), None)
        return (found,) if found else None
    words = [asked]
    if shutil.which(asked, path=path) is None:  # a path may hold spaces
        with contextlib.suppress(ValueError):  # an unterminated quote
            words = shlex.split(asked)
    found = shutil.which(words[0], path=path) if words else None
    return (found, *words[1:]) if found else None


def no_compiler() -> str:
    """Why C++ cannot be compiled here; empty if it can be tried."""
    if sys.platform != "linux":
        return f"the C++ path is for Linux, this is {sys.platform}"
    if compiler() is None:
        asked = f": CXX is {cxx()!r}, which is no program here" if cxx() else " (c++, g++ or clang++; CXX names another)"
        return f"no C++ compiler was found{asked}"
    return ""


# a compiled graph keeps the answer, because the search for a file cannot be traced; see `saccade.nvrtc.toolchain.obstacles`
no_compiler._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.lru_cache(1)
def standard_library() -> tuple[str, ...]:
    """The C++ library that this process uses, as a word for the linker; none if it is unknown.

    A compiler without a shared library links its own copy, as does `g++ -static-libstdc++`. Two copies in one process mix the locales of their streams,
    and printing an error then crashed.
    """
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            path = Path(line.partition("/")[1] + line.partition("/")[2])
            if path.name.startswith("libstdc++.so") and path.is_file():
                return (str(path),)
    return ()


class Compilation:
    """A compiler at work in a process of its own. Raises OSError if it cannot be started."""

    def __init__(self, command: list[str], folder: Path, what: str):
        self._command, self._log, self._what = command, folder / "log", what
        self._began, self._said, self._late = time.monotonic(), False, False
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=compiling_environment(folder), start_new_session=True
            )

    def ended(self) -> bool:
        """Whether it has ended; a compilation that takes too long is killed."""
        if self._process.poll() is None and time.monotonic() - self._began > MOST_SECONDS:
            self._late = True
            self.stop()
        return self._process.poll() is not None

    def wait(self) -> None:
        """Wait until it ends, and log that after some seconds."""
        try:
            while not self.ended():
                passed = time.monotonic() - self._began
                if passed > SLOW_SECONDS and not self._said:
                    self._said = True
                    _logger.warning(
                        "%s has been compiling %s for %.0f s; saccade waits up to %.0f s",
                        self._command[0],
                        self._what,
                        passed,
                        MOST_SECONDS,
                    )
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(max(0.01, (MOST_SECONDS if self._said else SLOW_SECONDS) - passed))
        finally:
            self.stop()

    def stop(self) -> None:
        """Kill it and the processes that it started."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def check(self) -> None:
        """Raise CompileError if it failed, and CompilerUnavailable if it took too long."""
        code = self._process.returncode
        if self._late:
            raise CompilerUnavailable(
                f"{self._command[0]} took more than {MOST_SECONDS:.0f} s to compile {self._what}, and was ended"
            )
        if code:
            log = self._log.read_text(errors="replace").strip()
            why = f" (it was ended by signal {-code})" if code < 0 else ""
            raise CompileError(f"{self._command[0]} cannot compile {self._what}{why}", tuple(self._command[1:]), log)
