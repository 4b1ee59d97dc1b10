"""A source to a cubin: from memory, from disk, or by NVRTC, which needs no driver and no GPU."""

from __future__ import annotations

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
    """How a source is compiled: macros as (name, text) and flags of NVRTC, such as "--use_fast_math". Made by `Options.of`."""

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
        """Options in words.

        Args:
            defines: macros; True and False become 1 and 0, a str is C++ text.
            fast_math: flush denormals, fast division and square root, fast sin, exp and their like.
            line_info: lines of the source in the binary, for profilers and compute-sanitizer.
            max_registers: registers a thread, at most.
            flags: any other flags of NVRTC, ("--ptxas-options=-v",).
        """
        made = ["--use_fast_math"] * fast_math + ["--generate-line-info"] * line_info
        if max_registers is not None:
            if not 16 <= max_registers <= 255:
                raise InvalidArgument(f"max_registers is {max_registers}; allowed is 16 to 255")
            made.append(f"--maxrregcount={max_registers}")
        return Options(tuple(sorted((n, _macro_text(n, v)) for n, v in (defines or {}).items())), (*made, *flags))


class Built(NamedTuple):
    """What NVRTC made: the cubin, and its log (warnings, and what `flags` asked for)."""

    cubin: bytes
    log: str


def compile_cubin(source: Source, architecture: str | int, options: Options = Options()) -> bytes:
    """The cubin of a source for one architecture; compiled at most once a process, and once a machine while the cache keeps it.

    A file that changes is seen by the next process.

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
            cubin = _memory[wanted] = _from_disk_or_built(source, architecture, options)
    return cubin


def build(source: Source, architecture: str | int, options: Options = Options()) -> Built:
    """Compile now, whatever the caches hold. The same errors as `compile_cubin`."""
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
    """Name of a cubin on disk: everything that the compiler's answer depends on."""
    from saccade import __version__

    described = {
        "saccade": __version__,
        "nvrtc": nvrtc.version,
        "architecture": architecture,
        "defines": options.defines,
        "flags": options.flags,
        "source": digest_of(source, toolkit_headers(nvrtc.version[0])),
        # line information holds the path
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
    """Empty the memory of this process; the disk keeps what it has."""
    _memory.clear()


_memory: dict[tuple[Source, str, Options], bytes] = {}
_lock = threading.RLock()
if hasattr(os, "register_at_fork"):
    # a fork waits for a build in another thread: the child would inherit NVRTC in the middle of it, its locks held for ever
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def _from_disk_or_built(source: Source, architecture: str, options: Options) -> bytes:
    key = key_of(source, architecture, options, require(architecture))
    cubin = store.read(key)
    if cubin is None:
        cubin = build(source, architecture, options).cubin
        store.write(key, cubin)
    return cubin


def _macro_text(name: str, value: int | str | bool) -> str:
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise InvalidArgument(f"{name!r} is no name of a macro")
    if not isinstance(value, (int, str)):
        raise InvalidArgument(f"macro {name} is {value!r}; allowed are int, bool and str (C++ text)")
    return value if isinstance(value, str) else str(int(value))
