"""Compiles C++ with a plain C interface for the processor of this machine, once, and loads it with ctypes."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import threading
from pathlib import Path

import torch

from saccade.env import cache_folder
from saccade.errors import CompileError, CompilerUnavailable
from saccade.native import kept
from saccade.native.compiler import Compilation, compiler, no_compiler
from saccade.native.sealed import MARK

_logger = logging.getLogger("saccade")
_lock = threading.Lock()
_loaded: dict[Path, ctypes.CDLL] = {}
_failed: dict[Path, CompileError | CompilerUnavailable] = {}
# the meaning of the names of torch's own kernels for this processor
_PROCESSORS = {
    "AVX512": ("-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"),
    "AVX2": ("-mavx2", "-mfma"),
}


def load(folder: Path) -> ctypes.CDLL:
    """The library of all `*.cpp` of a folder, compiled at the first use on a machine, which takes some seconds.

    If the cache folder cannot be used, each process compiles the library again, and one warning says so.

    Raises:
        CompilerUnavailable: there is no C++ compiler here, or it cannot be run, or does not end.
        CompileError: the sources do not compile, or the result cannot be loaded.
    """
    found = _loaded.get(folder)
    if found is not None:
        return found
    missing = no_compiler()
    if missing:
        raise CompilerUnavailable(f"{folder} cannot be compiled: {missing}")
    with _lock:
        if folder in _failed:
            raise _failed[folder]
        if folder not in _loaded:
            try:
                _loaded[folder] = _kept_or_compiled(folder)
            except (CompileError, CompilerUnavailable) as error:
                _failed[folder] = error
                raise
        return _loaded[folder]


def path_of(folder: Path) -> Path:
    """The path of the kept library: the name depends on the sources, the compiler and the processor."""
    sources = [path.read_text() for path in sorted(folder.glob("*.[ch]pp"))]
    digest = hashlib.sha256("\0".join([*sources, *command(folder, Path("x")), MARK.decode()]).encode()).hexdigest()[:32]
    return cache_folder() / "native" / f"saccade_{folder.parent.name}-{digest}.so"


def command(folder: Path, target: Path) -> list[str]:
    """The command that compiles the sources to `target`."""
    # no -ffast-math, which assumes that there is no NaN; without the other two, rounding and selection are not vectorised
    options = ("-O3", "-std=c++17", "-fPIC", "-shared", "-pthread", "-fno-math-errno", "-fno-trapping-math", "-w")
    processor = _PROCESSORS.get(torch.backends.cpu.get_cpu_capability(), ())
    return [*(compiler() or ("c++",)), *options, *processor, *map(str, sorted(folder.glob("*.cpp"))), "-o", str(target)]


def _kept_or_compiled(folder: Path) -> ctypes.CDLL:
    target, keeps = path_of(folder), True
    try:
        found = kept.load(target, ctypes.CDLL)
        if found is not None:
            return found
    except OSError as error:
        _cannot_keep(target, error)
        keeps = False
    try:
        with kept.Workplace(target.parent) as here:
            made = here / target.name
            _compile(folder, made)
            return _loaded_from(made, target, folder, keeps)
    except OSError as error:
        raise CompilerUnavailable(f"{folder} cannot be compiled: there is no place for temporary files ({error})") from error


def _loaded_from(made: Path, target: Path, folder: Path, keeps: bool) -> ctypes.CDLL:
    """The library that was compiled to `made`, kept at `target` if it can be."""
    why = None
    if keeps:
        try:
            return kept.keep(made, target, ctypes.CDLL)
        except OSError as error:  # a full disk, or one mounted without permission to execute
            why = error
    try:
        found = ctypes.CDLL(str(made))
    except OSError as error:
        raise CompileError(f"the library compiled from {folder} cannot be loaded", (), str(error)) from error
    if why is not None:
        _cannot_keep(target, why)
    return found


def _cannot_keep(target: Path, error: OSError) -> None:
    _logger.warning(
        "saccade cannot keep its compiled code in %s (%s); each process compiles it", target.parent, error.strerror or error
    )


def _compile(folder: Path, target: Path) -> None:
    run = command(folder, target)
    try:
        compilation = Compilation(run, target.parent, str(folder))
    except OSError as error:
        raise CompilerUnavailable(f"{folder} cannot be compiled: {run[0]} cannot be run ({error.strerror or error})") from error
    compilation.wait()
    compilation.check()


def _after_fork() -> None:
    # a lock that another thread holds at a fork would stay held in the child
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
