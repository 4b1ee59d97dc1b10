"""Every environment variable the library reads, in one place.

| variable | default | meaning |
|---|---|---|
| `TRITON_INTERPRET` | unset | Triton's own switch: `1` runs the Triton kernels on the CPU, in Python. Read at import of Triton. |
| `SACCADE_PRINT_CONFIG` | unset | `1` prints each kernel configuration to stderr the first time it is chosen. |
| `SACCADE_NATIVE` | `1` | `0` makes every call from Python: no C++ is compiled to replay calls. |
| `SACCADE_DISABLE` | unset | `1` runs every call by torch's own operations, as `saccade.disabled()` does. |
| `SACCADE_CHECK_LENGTHS` | unset | `1` checks the values of `cu_seqlens` on a GPU too, which waits for the device at each call. |
| `CXX` | `c++`, `g++` or `clang++` | The C++ compiler, for replayed calls and for dynamic masks on a CPU; it may have arguments. |
| `SACCADE_CACHE_DIR` | the user's cache folder | Folder for compiled code: kernels from CUDA C++, libraries from C++. |
| `XDG_CACHE_HOME` | `~/.cache` | The user's cache folder, where platformdirs is not installed to find it. |
"""

import os
import tempfile
import warnings
from pathlib import Path


def _is_on(name: str, default: str = "0") -> bool:
    """A switch of ours. Values other than 0 and 1 count as the default, so a warning says what is allowed."""
    value = os.environ.get(name) or default
    if value not in ("0", "1"):
        warnings.warn(f"{name} is {value!r}; allowed are 0 and 1, and {default} is taken", stacklevel=3)
        return default == "1"
    return value == "1"


def interpreting_triton() -> bool:
    """Whether Triton kernels run in the interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def print_config() -> bool:
    """Whether to print each newly chosen kernel configuration."""
    return _is_on("SACCADE_PRINT_CONFIG")


def cache_folder() -> Path:
    """The requested folder, or our part of the user's cache folder, or one of this user among temporary files if there is no home."""
    given = os.environ.get("SACCADE_CACHE_DIR", "")
    try:
        return (Path(given) if given else _user_cache()).expanduser()
    except RuntimeError:  # no home directory, or an unknown user
        pass
    try:
        temporary = tempfile.gettempdir()
    except OSError:
        temporary = "/tmp"
    found = Path(temporary) / f"saccade-{os.getuid() if hasattr(os, 'getuid') else 'cache'}"
    if given:
        warnings.warn(
            f"SACCADE_CACHE_DIR is {given!r}, and there is no such home; compiled code is kept in {found}", stacklevel=2
        )
    return found


def _user_cache() -> Path:
    """As platformdirs finds it, which may raise RuntimeError if this user has no home."""
    try:
        import platformdirs
    except ModuleNotFoundError:
        # a copy from the kernels hub comes without our dependencies
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "saccade"
    return platformdirs.user_cache_path("saccade", appauthor=False)


def native_wanted() -> bool:
    """Whether C++ may be compiled to replay calls."""
    return _is_on("SACCADE_NATIVE", "1")


def disabled() -> bool:
    """Whether no kernel of ours may run in this process."""
    return _is_on("SACCADE_DISABLE")


def check_lengths() -> bool:
    """Whether the values of cu_seqlens are read and checked even if that waits for a device."""
    return _is_on("SACCADE_CHECK_LENGTHS")


def cxx() -> str | None:
    """The requested C++ compiler."""
    return os.environ.get("CXX") or None


def compiling_environment(folder: Path) -> dict[str, str]:
    """This process's environment for a compiler, whose temporary files go into a folder that is deleted afterwards."""
    return {**os.environ, "TMPDIR": str(folder)}


def interpreting_environment() -> dict[str, str]:
    """This process's environment with Triton's interpreter switched on, for a child: the switch is read at import."""
    return {**os.environ, "TRITON_INTERPRET": "1"}
