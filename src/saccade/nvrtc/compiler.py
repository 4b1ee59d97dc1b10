"""Turns a source into a cubin: from memory, from disk, or by compiling with NVRTC, which needs no driver and no GPU."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from saccade.errors import CompileError, InvalidArgument
from saccade.nvrtc import store
from saccade.nvrtc.architecture import architecture_named
from saccade.nvrtc.library import Program, loaded
from saccade.nvrtc.source import Source, digest_of
from saccade.nvrtc.toolchain import Nvrtc, require, toolkit_headers


@dataclass(frozen=True)
class Options:
    """The options of a compilation: macros as (name, text), and flags of NVRTC such as "--use_fast_math". Made by
    `Options.of`."""

    defines: tuple[tuple[str, str], ...] = ()
    flags: tuple[str, ...] = ()

    @staticmethod
    def of(
        defines: Mapping[str, int | str | bool] | None = None,
        *,
        fast_math: bool = False,
        line_info: bool = False,
        max_registers: int | None = None,
        flags: Sequence[str] = (),
    ) -> Options:
        """Make options from keywords.

        Args:
            defines: macros; True and False become 1 and 0, a str is C++ text.
            fast_math: flush denormals; use fast division, square root, sin, exp and similar functions.
            line_info: record source lines in the binary, for profilers and compute-sanitizer.
            max_registers: the most registers that a thread may use.
            flags: any other flags of NVRTC, such as ("--ptxas-options=-v",).
        """
        made = ["--use_fast_math"] * fast_math + ["--generate-line-info"] * line_info
        if max_registers is not None:
            if not 16 <= max_registers <= 255:
                raise InvalidArgument(f"max_registers is {max_registers}; allowed is 16 to 255")
            made.append(f"--maxrregcount={max_registers}")
        return Options(_macros(tuple((defines or {}).items())), (*made, *flags))


class Built(NamedTuple):
    """The result of NVRTC: the cubin and the log (warnings, and output requested by `flags`)."""

    cubin: bytes
    log: str


def compile_cubin(source: Source, architecture: str | int, options: Options = Options()) -> bytes:
    """The cubin of a source for one architecture; compiled at most once per process, and once per machine while the cache keeps
    it.

    If the file changes, only the next process sees it.

    Raises:
        CompilerUnavailable: no cuda-core, no NVRTC, or one that does not know the architecture.
        CompileError: the source does not compile.
    """
    architecture = architecture_named(architecture)
    wanted = (source, architecture, options)
    cubin = _memory.get(wanted)
    if cubin is not None:
        return cubin
    with _lock:
        cubin = _memory.get(wanted)
        if cubin is None:
            cubin = _from_disk_or_built(source, architecture, options)
            if len(_memory) >= _MOST_IN_MEMORY:
                del _memory[next(iter(_memory))]
            _memory[wanted] = cubin
    return cubin


def build(source: Source, architecture: str | int, options: Options = Options()) -> Built:
    """Compile without looking into the caches. Raises the same errors as `compile_cubin`."""
    architecture = architecture_named(architecture)
    found = require(architecture)
    flags = flags_of(source, architecture, options, toolkit_headers(found.version[0]))
    assert found.path is not None, f"NVRTC {found.name} was not found in a file"
    program = Program(loaded(found.path), source.text(), str(source.path))
    try:
        if not program.compile(flags):
            summary = f"NVRTC {found.name} cannot compile {source.path} for sm_{architecture}"
            raise CompileError(summary, flags, program.log(), architecture)
        return Built(program.cubin(), program.log())
    finally:
        program.destroy()


def key_of(source: Source, architecture: str, options: Options, nvrtc: Nvrtc) -> str:
    """The name of a cubin on disk, derived from everything on which the result of the compiler depends."""
    from saccade import __version__

    described = {
        "saccade": __version__,
        "nvrtc": nvrtc.version,
        "architecture": architecture,
        "defines": options.defines,
        "flags": options.flags,
        "source": digest_of(source, toolkit_headers(nvrtc.version[0])),
        # line information contains the path
        "path": str(source.path) if any("line" in flag for flag in options.flags) else "",
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def flags_of(source: Source, architecture: str, options: Options, toolkit: Sequence[Path]) -> tuple[str, ...]:
    """The command line of NVRTC."""
    folders = (source.path.parent, *source.headers, *toolkit)
    return (
        f"--gpu-architecture=sm_{architecture}",
        "--std=c++20",
        *(f"--define-macro={name}={text}" for name, text in options.defines),
        *options.flags,
        *(f"--include-path={folder}" for folder in folders),
    )


def forget() -> None:
    """Forget the cubins that this process holds in memory; those on disk stay."""
    _memory.clear()


# about 100 kB each; a dropped cubin is read from the disk again, and a loaded kernel no longer needs it
_MOST_IN_MEMORY = 512
_memory: dict[tuple[Source, str, Options], bytes] = {}
_lock = threading.RLock()
if hasattr(os, "register_at_fork"):
    # a fork waits for a build in another thread: otherwise the child would inherit NVRTC's locks, held for ever
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def _from_disk_or_built(source: Source, architecture: str, options: Options) -> bytes:
    key = key_of(source, architecture, options, require(architecture))
    cubin = store.read(key)
    if cubin is None:
        cubin = build(source, architecture, options).cubin
        store.write(key, cubin)
    return cubin


@functools.lru_cache(maxsize=4096)
def _macros(defines: tuple[tuple[str, int | str | bool], ...]) -> tuple[tuple[str, str], ...]:
    """Names and texts, sorted. Remembered, because some launches make their options at each call: 20 us of host time."""
    return tuple(sorted((name, _macro_text(name, value)) for name, value in defines))


def _macro_text(name: str, value: int | str | bool) -> str:
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise InvalidArgument(f"{name!r} is no name of a macro")
    if not isinstance(value, (int, str)):
        raise InvalidArgument(f"macro {name} is {value!r}; allowed are int, bool and str (C++ text)")
    return value if isinstance(value, str) else str(int(value))
