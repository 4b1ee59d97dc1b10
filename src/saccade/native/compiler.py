"""The C++ compiler of the machine."""

from __future__ import annotations

import functools
import os
import shutil
import sys

from saccade.env import cxx

_USUAL = ("c++", "g++", "clang++")


def compiler() -> str | None:
    """The path of the compiler that CXX names, or else of the first of c++, g++ and clang++ that there is; None without one."""
    return _find(cxx(), os.pathsep.join(os.get_exec_path()))


# looked for by every call on a CPU, and a search takes 50 us
@functools.lru_cache(8)
def _find(asked: str | None, path: str) -> str | None:
    return next(filter(None, (shutil.which(name, path=path) for name in ([asked] if asked else _USUAL))), None)


def no_compiler() -> str:
    """Why C++ cannot be compiled here; empty if it can be tried."""
    if sys.platform != "linux":
        return f"the C++ path is for Linux, this is {sys.platform}"
    if compiler() is None:
        return "no C++ compiler was found (c++, g++ or clang++; CXX names another)"
    return ""


# a compiled graph keeps the answer, as it cannot hold the search for a file; see `saccade.nvrtc.toolchain.obstacles`
no_compiler._dynamo_marked_constant = True  # type: ignore[attr-defined]
