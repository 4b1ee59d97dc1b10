"""Compiles C++ with a plain C interface for the processor of this machine, once, and loads it with ctypes."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import subprocess
import tempfile
import threading
from pathlib import Path

import torch

from saccade.env import cache_folder
from saccade.errors import CompileError, CompilerUnavailable
from saccade.folders import check_file, make_private
from saccade.native.compiler import compiler, no_compiler
from saccade.native.sealed import MARK, is_sealed, seal, sweep

_logger = logging.getLogger("saccade")
_lock = threading.Lock()
_loaded: dict[Path, ctypes.CDLL] = {}
_failed: dict[Path, CompileError] = {}
# what the names of torch's own kernels for this processor stand for
_PROCESSORS = {
    "AVX512": ("-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"),
    "AVX2": ("-mavx2", "-mfma"),
}


def load(folder: Path) -> ctypes.CDLL:
    """The library of all `*.cpp` of a folder, compiled at the first use on a machine, which takes some seconds.

    Where the cache folder cannot be used, each process compiles it again, and one warning says so.

    Raises:
        CompilerUnavailable: there is no C++ compiler here.
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
            except CompileError as error:
                _failed[folder] = error
                raise
        return _loaded[folder]


def path_of(folder: Path) -> Path:
    """Where the library is kept: the name depends on the sources, the compiler and the processor."""
    sources = [path.read_text() for path in sorted(folder.glob("*.[ch]pp"))]
    digest = hashlib.sha256("\0".join([*sources, *command(folder, Path("x")), MARK.decode()]).encode()).hexdigest()[:32]
    return cache_folder() / "native" / f"saccade_{folder.parent.name}-{digest}.so"


def command(folder: Path, target: Path) -> list[str]:
    """The command that compiles the sources to `target`."""
    # no -ffast-math, which would take a NaN for a number; without the other two, rounding and selection are not vectorised
    options = ("-O3", "-std=c++17", "-fPIC", "-shared", "-pthread", "-fno-math-errno", "-fno-trapping-math", "-w")
    processor = _PROCESSORS.get(torch.backends.cpu.get_cpu_capability(), ())
    return [compiler() or "c++", *options, *processor, *map(str, sorted(folder.glob("*.cpp"))), "-o", str(target)]


def _kept_or_compiled(folder: Path) -> ctypes.CDLL:
    target = path_of(folder)
    try:
        make_private(target.parent)
        if target.exists():
            check_file(target)
            if is_sealed(target):
                return _open(target, folder)
            target.unlink()
        sweep(target.parent)
        # under another name first: other processes may compile the same library, and none may load half of one
        handle, made = tempfile.mkstemp(suffix=".so", dir=target.parent)
        os.close(handle)
        try:
            _compile(folder, Path(made))
            seal(Path(made), target)
            Path(made).replace(target)
        finally:
            Path(made).unlink(missing_ok=True)
        return _open(target, folder)
    except OSError as error:
        _logger.warning(
            "saccade cannot keep its compiled code in %s (%s); each process compiles it", target.parent, error.strerror or error
        )
    with tempfile.TemporaryDirectory() as here:
        _compile(folder, Path(here) / target.name)
        return _open(Path(here) / target.name, folder)


def _compile(folder: Path, target: Path) -> None:
    run = command(folder, target)
    done = subprocess.run(run, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False)
    if done.returncode:
        ended = f" (it was ended by signal {-done.returncode})" if done.returncode < 0 else ""
        raise CompileError(f"{run[0]} cannot compile {folder}{ended}", tuple(run[1:]), done.stdout.strip())


def _open(target: Path, folder: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(target))
    except OSError as error:
        raise CompileError(f"the library compiled from {folder} cannot be loaded", (), str(error)) from error
