"""Compiles `cpp/calls.cpp` with the C++ compiler of the machine, once for each torch and Python, in a background process."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.machinery
import importlib.util
import logging
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

import torch

from saccade.env import cache_folder, native_wanted
from saccade.folders import check_file, make_private
from saccade.native.compiler import compiler, no_compiler
from saccade.native.sealed import MARK, is_sealed, seal, sweep

_logger = logging.getLogger("saccade")
SOURCE = Path(__file__).parent / "cpp" / "calls.cpp"
_NAME = "saccade_calls"


class Build:
    """One compilation, started by the first `poll`."""

    def __init__(self) -> None:
        self.module: ModuleType | None = None
        self.refusal = _refusal()
        self._target = None if self.refusal else library()
        self._process: subprocess.Popen | None = None
        self._log: Path | None = None
        self._made: Path | None = None

    def poll(self) -> ModuleType | None:
        """The module once it is compiled; None before that, and where it cannot be compiled."""
        target = self._target
        if self.module is not None or self.refusal or target is None:
            return self.module
        if self._process is not None:
            if self._process.poll() is not None:
                self._end(target)
        elif self._usable(target):
            self._load(target)
        elif not self.refusal:
            self._begin(target)
        return self.module

    def wait(self, seconds: float = 600) -> ModuleType | None:
        """Wait for the compilation and return the module."""
        self.poll()
        if self._process is not None:
            self._process.wait(seconds)
        return self.poll()

    def _usable(self, target: Path) -> bool:
        """Whether the library is there and whole. One that is not is deleted, so that it is compiled again; nothing is loaded from
        where others can write."""
        try:
            make_private(target.parent)
            if not target.exists():
                return False
            check_file(target)
            if is_sealed(target):
                return True
            target.unlink()
        except OSError as error:
            self._refuse(f"the folder of the compiled library cannot be used ({error.strerror or error})")
        return False

    def _begin(self, target: Path) -> None:
        try:
            sweep(target.parent)
            # written under another name and renamed: other processes may compile the same module, and none may load an incomplete
            # file
            handle, made = tempfile.mkstemp(suffix=".so", dir=target.parent)
            os.close(handle)
            self._made, self._log = Path(made), Path(made).with_suffix(".log")
            with open(self._log, "wb") as log:
                self._process = subprocess.Popen(
                    command(self._made), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
                )
        except OSError as error:
            self._refuse(f"{error}")

    def _end(self, target: Path) -> None:
        assert self._process is not None
        assert self._made is not None
        assert self._log is not None
        said = self._log.read_text(errors="replace").strip() if self._log.exists() else ""
        code, self._process = self._process.returncode, None
        failed = code != 0
        if code < 0:
            said = f"it was ended by signal {-code}. {said}".strip()
        try:
            self._log.unlink(missing_ok=True)
            if failed:
                self._made.unlink(missing_ok=True)
            else:
                seal(self._made, target)
                self._made.replace(target)
        except OSError as error:
            said, failed = str(error), True
            with contextlib.suppress(OSError):
                self._made.unlink(missing_ok=True)
        if failed:
            self._refuse(f"{' '.join(command(target)[:1])} cannot compile {SOURCE.name}: {said[:500]}")
        else:
            self._load(target)

    def _load(self, target: Path) -> None:
        try:
            loader = importlib.machinery.ExtensionFileLoader(_NAME, str(target))
            spec = importlib.util.spec_from_loader(_NAME, loader)
            assert spec is not None
            module = importlib.util.module_from_spec(spec)
            loader.exec_module(module)
            self.module = module
        except (ImportError, OSError) as error:
            with contextlib.suppress(OSError):
                # the file is damaged, and the next process will compile it again
                target.unlink()
            self._refuse(f"{target} cannot be loaded: {error}")

    def _refuse(self, reason: str) -> None:
        self.refusal = reason
        _logger.warning("calls are made from Python, each some tens of microseconds slower: %s", reason)


def command(target: Path) -> list[str]:
    """The command that compiles the source to `target`."""
    root = Path(torch.__file__).parent
    include = [root / "include", root / "include" / "torch" / "csrc" / "api" / "include", Path(sysconfig.get_path("include"))]
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    return [
        compiler() or "c++", "-O2", "-std=c++20", "-fPIC", "-shared", "-w", f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
        *(f"-I{folder}" for folder in include), str(SOURCE), f"-L{root / 'lib'}", "-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10",
        "-ldl", "-o", str(target),
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
