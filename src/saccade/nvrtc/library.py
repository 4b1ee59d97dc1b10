"""NVRTC's shared library through ctypes: the few functions that compile, loaded from a given file.

`cuda.bindings.nvrtc` does not suffice: a process holds only one, of torch's CUDA version, while sm_70 also needs the library of
CUDA 12. The C interface is the same in both.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

_FUNCTIONS = (
    "nvrtcVersion",
    "nvrtcGetNumSupportedArchs",
    "nvrtcGetSupportedArchs",
    "nvrtcCreateProgram",
    "nvrtcCompileProgram",
    "nvrtcGetProgramLogSize",
    "nvrtcGetProgramLog",
    "nvrtcGetCUBINSize",
    "nvrtcGetCUBIN",
    "nvrtcDestroyProgram",
)
_SUCCESS = 0


class Library:
    """One loaded NVRTC.

    Raises:
        OSError: the file cannot be loaded, or is not NVRTC.
    """

    def __init__(self, path: Path):
        # NVRTC opens the library of its built-in functions by its bare name, which outside the system's folders is found only if
        # already loaded
        self._builtins = [ctypes.CDLL(str(p)) for p in sorted(path.parent.glob(f"libnvrtc-builtins.so.{_major(path)}.*"))]
        self._native = ctypes.CDLL(str(path))
        missing = [name for name in _FUNCTIONS if not hasattr(self._native, name)]
        if missing:
            raise OSError(f"{path} has no {missing[0]}")
        self._native.nvrtcGetErrorString.restype = ctypes.c_char_p

    def version(self) -> tuple[int, int]:
        """Major and minor."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.ask("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def capabilities(self) -> tuple[int, ...]:
        """The compute capabilities that it compiles for, ascending; 90 for sm_90."""
        count = ctypes.c_int()
        self.ask("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        found = (ctypes.c_int * count.value)()
        self.ask("nvrtcGetSupportedArchs", found)
        return tuple(found)

    def ask(self, function: str, *arguments: object) -> None:
        """Call a function; RuntimeError unless it succeeds."""
        status = getattr(self._native, function)(*arguments)
        if status != _SUCCESS:
            raise RuntimeError(f"{function}: {self._native.nvrtcGetErrorString(status).decode()}")

    def compiles(self, handle: ctypes.c_void_p, flags: Sequence[str]) -> bool:
        """Run `nvrtcCompileProgram`; False if the source has errors, which are in the log."""
        given = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
        # for any other status, such as that of an unknown flag, the log says why
        return self._native.nvrtcCompileProgram(handle, ctypes.c_int(len(flags)), given) == _SUCCESS


def _major(path: Path) -> str:
    return path.name.rpartition(".")[2]


@functools.cache
def loaded(path: Path) -> Library:
    """The library of a file, loaded once per process and never unloaded."""
    return Library(path)


class Program:
    """NVRTC's program object, which compiles one source."""

    def __init__(self, library: Library, text: str, name: str):
        self._library, self._handle = library, ctypes.c_void_p()
        library.ask("nvrtcCreateProgram", ctypes.byref(self._handle), text.encode(), name.encode(), ctypes.c_int(0), None, None)

    def compile(self, flags: Sequence[str]) -> bool:
        """Compile a program; whether it compiles."""
        return self._library.compiles(self._handle, flags)

    def log(self) -> str:
        """Errors and warnings."""
        return self._bytes("nvrtcGetProgramLog").rstrip(b"\0").decode(errors="replace").strip()

    def cubin(self) -> bytes:
        """The binary, after `compile`."""
        return self._bytes("nvrtcGetCUBIN")

    def destroy(self) -> None:
        """Free its memory."""
        self._library.ask("nvrtcDestroyProgram", ctypes.byref(self._handle))

    def _bytes(self, function: str) -> bytes:
        size = ctypes.c_size_t()
        self._library.ask(f"{function}Size", self._handle, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._library.ask(function, self._handle, buffer)
        return buffer.raw
