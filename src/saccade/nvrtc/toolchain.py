"""The compilers available here: cuda-core, NVRTC and its version, the CUDA headers; and one sentence for each that is missing."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from saccade.errors import CompileError, CompilerUnavailable
from saccade.nvrtc.architecture import architecture_named
from saccade.nvrtc.library import loaded

# on Linux torch's CUDA wheels include it too
_INSTALL = 'pip install "saccade-attention[cu12]" (or "saccade-attention[cu13]", without sm_70)'
# in the folders of NVIDIA's wheels: NVRTC of CUDA 12 is in cuda_nvrtc, that of CUDA 13 in cu13
_PATTERNS = ("*/lib/libnvrtc.so.*", "*/bin/nvrtc64_*.dll", "*/bin/*/nvrtc64_*.dll")
_NAME = re.compile(r"libnvrtc\.so\.\d+|nvrtc64_\d+_\d+\.dll")


class Nvrtc(NamedTuple):
    """One NVRTC: its version, the compute capabilities that it compiles for, and its file."""

    version: tuple[int, int]
    capabilities: tuple[int, ...]
    path: Path | None = None

    @property
    def name(self) -> str:
        """The version as text, such as "12.9"."""
        return f"{self.version[0]}.{self.version[1]}"


@functools.cache
def find_all() -> tuple[Nvrtc, ...]:
    """Every NVRTC found, the newest first: those of wheels, else that of the machine. Raises CompilerUnavailable, which says what
    to install, if there is none."""
    found, faults = [], []
    for path in _wheel_libraries() or _machine_libraries():
        try:
            library = loaded(path)
            found.append(Nvrtc(library.version(), library.capabilities(), path))
        except (OSError, RuntimeError) as error:
            faults.append(f"{path} cannot be loaded: {str(error).strip().partition(chr(10))[0]}")
    if not found:
        reason = "; ".join(faults) or "no library of it in the wheels of NVIDIA, nor on this machine"
        raise CompilerUnavailable(f"CUDA C++ kernels need NVRTC, which is not here ({reason}): {_INSTALL}")
    return tuple(sorted(found, reverse=True))


def find_nvrtc() -> Nvrtc:
    """The newest NVRTC, which compiles for all architectures that it knows."""
    return find_all()[0]


def require(architecture: str) -> Nvrtc:
    """The newest NVRTC that compiles for the architecture. Raises CompilerUnavailable if none does, or without cuda-core, which
    loads and stores its cubins.
    """
    try:
        from cuda.core.utils import FileStreamProgramCache  # noqa: F401 (cuda-core before 1.0 has none)
    except ImportError as error:
        # cuda-core imports bindings that some installations lack; the message of Python names them
        missing = "cuda-bindings" if "bindings" in str(error) else "cuda-core"
        raise CompilerUnavailable(f"CUDA C++ kernels need {missing}, which is not here ({error}): {_INSTALL}") from None
    able = next((nvrtc for nvrtc in find_all() if refusal(nvrtc, architecture) is None), None)
    if able is None:
        raise CompilerUnavailable(str(refusal(find_nvrtc(), architecture)))
    return able


def refusal(nvrtc: Nvrtc, architecture: str) -> str | None:
    """Why this NVRTC cannot compile for the architecture, and what to install; None if it can."""
    if int(architecture.rstrip("a")) in nvrtc.capabilities:
        return None
    if int(architecture.rstrip("a")) < min(nvrtc.capabilities, default=0):
        return (
            f"sm_{architecture} needs NVRTC 12 (12.9 is the last that compiles for it, and may be installed beside another), found NVRTC "
            f'{nvrtc.name}: pip install "saccade-attention[cu12]"'
        )
    return (
        f"NVRTC {nvrtc.name} does not compile for sm_{architecture}, only up to sm_{max(nvrtc.capabilities, default=0)}: "
        'pip install --upgrade "saccade-attention[cu12]" (12.8 and later know sm_120)'
    )


def obstacles(architecture: str | int) -> tuple[str, ...]:
    """Sentences on why CUDA C++ cannot be compiled for an architecture here; empty if it can. For `why_not` of backends."""
    if _assumed:
        return ()
    given_up = _given_up.get(architecture_named(architecture)) if _given_up else None
    return _obstacles(architecture) if given_up is None else (given_up,)


# a compiled graph keeps the answer. This sets what `torch.compiler.assume_constant_result` would set, but that imports
# torch._dynamo and, with it, numpy
obstacles._dynamo_marked_constant = True  # type: ignore[attr-defined]
_given_up: dict[str, str] = {}  # architecture -> the failure
_assumed = False


@contextlib.contextmanager
def assumed() -> Iterator[None]:
    """CUDA C++ counts as compilable for every architecture meanwhile, to describe another machine."""
    global _assumed
    before, _assumed = _assumed, True
    try:
        yield
    finally:
        _assumed = before


def give_up(error: CompileError) -> bool:
    """Compile no more for the architecture of an error in one of our sources: from now on `obstacles` reports it, and other
    kernels run. False if the error is not from NVRTC, or if the architecture was given up before."""
    if error.architecture is None or error.architecture in _given_up:
        return False
    _given_up[error.architecture] = f"NVRTC failed to compile a kernel in this process ({error.summary})"
    return True


@functools.cache
def _obstacles(architecture: str | int) -> tuple[str, ...]:
    try:
        require(architecture_named(architecture))
    except CompilerUnavailable as error:
        return (str(error),)
    return ()


@functools.cache
def toolkit_headers(major: int) -> tuple[Path, ...]:
    """The folder of `cuda_fp16.h` and similar headers, of NVRTC's own `major` version if possible; empty if none is found.

    torch's CUDA wheels and Triton's wheel include such a folder. A toolkit of the machine may have another version than NVRTC.
    """
    found = [folder for folder in _wheel_folders() if (folder / "cuda_fp16.h").is_file()]
    if major not in map(_cuda_major, found):
        found += _machine_folders()
    return tuple(sorted(found, key=lambda folder: _cuda_major(folder) != major)[:1])


def _wheel_libraries() -> list[Path]:
    return [
        p
        for folder in _nvidia_folders()
        for pattern in _PATTERNS
        for p in sorted(folder.glob(pattern))
        if _NAME.fullmatch(p.name)
    ]


def _machine_libraries() -> list[Path]:
    """NVRTC of a toolkit of the machine, or of conda."""
    try:
        from cuda import pathfinder

        located = pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path
    except (ImportError, OSError, RuntimeError):
        # not found, or the machine does not allow starting a process
        return []
    return [Path(located)] if located else []


def _nvidia_folders() -> list[Path]:
    nvidia = importlib.util.find_spec("nvidia")
    return [] if nvidia is None else [Path(place) for place in (nvidia.submodule_search_locations or ())]


def _wheel_folders() -> list[Path]:
    """Folders of headers in the wheels of NVIDIA and of Triton. Neither is imported, since importing Triton would fix its
    interpreter switch."""
    found = [include for folder in _nvidia_folders() for include in sorted(folder.glob("*/include"))]
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin is not None:
        found.append(Path(triton.origin).parent / "backends" / "nvidia" / "include")
    return found


def _machine_folders() -> list[Path]:
    """The folder of headers of a toolkit on this machine. It is searched last, because the search starts a process."""
    try:
        from cuda import pathfinder

        located = pathfinder.find_nvidia_header_directory("cudart")
    except (ImportError, OSError, RuntimeError):
        # the machine does not allow starting a process
        return []
    return [Path(located)] if located else []


def _cuda_major(folder: Path) -> int:
    """The major version of the toolkit to which a header folder belongs; 0 if unknown."""
    try:
        text = (folder / "cuda.h").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    stated = re.search(r"#define CUDA_VERSION (\d+)", text)
    return int(stated[1]) // 1000 if stated else 0
