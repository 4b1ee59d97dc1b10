"""Every environment variable the library reads, in one place.

| variable | default | meaning |
|---|---|---|
| `TRITON_INTERPRET` | unset | Triton's own switch: `1` runs the Triton kernels on the CPU, in Python. Read at import of Triton. |
| `SACCADE_PRINT_CONFIG` | unset | `1` prints each kernel configuration to stderr the first time it is chosen. |
| `SACCADE_NATIVE` | `1` | `0` makes every call from Python: no C++ is compiled to repeat calls. |
| `SACCADE_CHECK_LENGTHS` | unset | `1` checks the values of `cu_seqlens` on a GPU too, which waits for the device at each call. |
| `CXX` | `c++`, `g++` or `clang++` | The C++ compiler for that. |
| `SACCADE_CACHE_DIR` | the user's cache folder | Folder for kernels compiled from CUDA C++. |
| `XDG_CACHE_HOME` | `~/.cache` | The user's cache folder, where platformdirs is not installed to find it. |
"""

import os
from pathlib import Path


def interpreting_triton() -> bool:
    """Whether Triton kernels run in the interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def print_config() -> bool:
    """Whether to print each newly chosen kernel configuration."""
    return os.environ.get("SACCADE_PRINT_CONFIG", "0") == "1"


def cache_folder() -> Path:
    """The requested folder, or our part of the user's cache folder."""
    if given := os.environ.get("SACCADE_CACHE_DIR", ""):
        return Path(given).expanduser()
    try:
        import platformdirs
    except ModuleNotFoundError:
        # a copy from the kernels hub comes without our dependencies
        home = os.environ.get("XDG_CACHE_HOME", "")
        return (Path(home) if home else Path.home() / ".cache") / "saccade"
    return platformdirs.user_cache_path("saccade", appauthor=False)


def native_wanted() -> bool:
    """Whether C++ may be compiled to repeat calls."""
    return os.environ.get("SACCADE_NATIVE", "1") != "0"


def check_lengths() -> bool:
    """Whether the values of cu_seqlens are read and checked where that waits for a device."""
    return os.environ.get("SACCADE_CHECK_LENGTHS", "0") == "1"


def cxx() -> str | None:
    """The requested C++ compiler."""
    return os.environ.get("CXX") or None


def interpreting_environment() -> dict[str, str]:
    """This process's environment with Triton's interpreter switched on, for a child: the switch is read at import."""
    return {**os.environ, "TRITON_INTERPRET": "1"}
