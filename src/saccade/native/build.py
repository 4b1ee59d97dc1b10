"""Compiles `cpp/calls.cpp` with the C++ compiler of the machine, once for each torch and Python, in a background process."""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import logging
import sys
import sysconfig
import time
from pathlib import Path
from types import ModuleType

import torch

from saccade.env import cache_folder, native_wanted
from saccade.errors import CompileError, CompilerUnavailable
from saccade.native import kept
from saccade.native.compiler import Compilation, compiler, no_compiler, standard_library
from saccade.native.sealed import MARK

_logger = logging.getLogger("saccade")
SOURCE = Path(__file__).parent / "cpp" / "calls.cpp"
_NAME = "saccade_calls"


class Build:
    """One compilation, started by the first `poll`."""

    def __init__(self) -> None:
        self.module: ModuleType | None = None
        self.refusal = _refusal()
        self._target = None if self.refusal else library()
        self._compilation: Compilation | None = None
        self._folder: kept.Workplace | None = None

    def poll(self) -> ModuleType | None:
        """The module once it is compiled; None before that, and if it cannot be compiled."""
        target = self._target
        if self.module is not None or self.refusal or target is None:
            return self.module
        if self._compilation is None:
            self._begin(target)
        elif self._compilation.ended():
            self._end(target)
        return self.module

    def wait(self, seconds: float = 600) -> ModuleType | None:
        """Wait at most `seconds` for the compilation, and return the module if there is one."""
        until = time.monotonic() + seconds
        while self.poll() is None and self._compilation is not None and time.monotonic() < until:
            time.sleep(0.01)
        return self.module

    def _begin(self, target: Path) -> None:
        """Load the library that is kept, or start to compile it."""
        try:
            self.module = kept.load(target, _open)
        except OSError as error:
            self._refuse(f"the folder of the compiled library cannot be used ({error.strerror or error})")
        if self.module is not None or self.refusal:
            return
        try:
            self._folder = kept.Workplace(target.parent)
            made = self._folder.path / target.name
            self._compilation = Compilation(command(made), made.parent, SOURCE.name)
        except OSError as error:
            self._drop()
            self._refuse(f"{error}")

    def _end(self, target: Path) -> None:
        assert self._compilation is not None
        assert self._folder is not None
        made = self._folder.path / target.name
        try:
            self._compilation.check()
            try:
                self.module = kept.keep(made, target, _open)
            except (OSError, ImportError):  # a full disk, or one mounted without permission to execute
                self.module = _open(str(made))
        except CompileError as error:
            self._refuse(f"{error.summary}: {error.log[:500]}")
        except CompilerUnavailable as error:
            self._refuse(str(error))
        except (OSError, ImportError) as error:
            self._refuse(f"{target.name} cannot be loaded: {error}")
        self._drop()

    def _drop(self) -> None:
        self._compilation = None
        if self._folder is not None:
            self._folder.delete()

    def _refuse(self, reason: str) -> None:
        self.refusal = reason
        _logger.warning("calls are made from Python, each some tens of microseconds slower: %s", reason)


def _open(path: str) -> ModuleType:
    spec = importlib.util.spec_from_loader(_NAME, importlib.machinery.ExtensionFileLoader(_NAME, path))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def command(target: Path) -> list[str]:
    """The command that compiles the source to `target`."""
    root = Path(torch.__file__).parent
    include = [root / "include", root / "include" / "torch" / "csrc" / "api" / "include", Path(sysconfig.get_path("include"))]
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    return [
        *(compiler() or ("c++",)), "-O2", "-std=c++20", "-fPIC", "-shared", "-w", f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
        *(f"-I{folder}" for folder in include), str(SOURCE), f"-L{root / 'lib'}", "-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10",
        *standard_library(), "-ldl", "-o", str(target),
    ]  # fmt: skip


def library() -> Path:
    """The path of the module compiled for this torch and Python."""
    sources = [path.read_text() for path in sorted(SOURCE.parent.glob("*.[ch]pp"))]
    parts = [*sources, torch.__version__, sys.version, *command(Path("x")), MARK.decode()]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    return cache_folder() / "native" / f"{_NAME}-{digest}.so"


def status() -> str:
    """How short calls are launched, in a few words, for `saccade info`."""
    reason = _refusal()
    if reason:
        return f"Python: {reason}"
    return (
        f"C++, compiled at {library()}" if library().exists() else "C++, compiled in the background of the first calls on a GPU"
    )


def _refusal() -> str:
    """Why the module cannot be compiled; empty if compiling can be tried."""
    if not native_wanted():
        return "SACCADE_NATIVE is 0"
    missing = no_compiler()
    if missing:
        return missing
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "the headers of Python are not installed (python3-dev)"
    return ""
