"""What compiles here: cuda-core, NVRTC and its version, the CUDA headers; and one sentence for each thing that is missing."""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path
from typing import NamedTuple

from saccade.errors import CompileError, CompilerUnavailable
from saccade.nvrtc.architecture import architecture_named
from saccade.nvrtc.library import loaded

_INSTALL = 'pip install "saccade[cu12]" (or "saccade[cu13]", without sm_70)'  # on Linux torch's CUDA wheels bring it too
# in the folders of the wheels of NVIDIA: that of CUDA 12 lies in cuda_nvrtc, that of 13 in cu13
_PATTERNS = ("*/lib/libnvrtc.so.*", "*/bin/nvrtc64_*.dll", "*/bin/*/nvrtc64_*.dll")
_NAME = re.compile(r"libnvrtc\.so\.\d+|nvrtc64_\d+_\d+\.dll")


class Nvrtc(NamedTuple):
    """An NVRTC of this process: its version, the compute capabilities it compiles for, and its file."""

    version: tuple[int, int]
    capabilities: tuple[int, ...]
    path: Path | None = None

    @property
    def name(self) -> str:
        """The version as people write it, "12.9"."""
        return f"{self.version[0]}.{self.version[1]}"


@functools.cache
def find_all() -> tuple[Nvrtc, ...]:
    """Every NVRTC here, the newest first: of wheels, else of the machine. CompilerUnavailable with what to install, where there is none."""
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
    """The newest NVRTC, which compiles for all that it knows."""
    return find_all()[0]


def require(architecture: str) -> Nvrtc:
    """The newest NVRTC that compiles for that architecture; CompilerUnavailable if none does, or without cuda-core, which loads and keeps
    what it makes.
    """
    try:
        from cuda.core.utils import FileStreamProgramCache  # noqa: F401 (cuda-core before 1.0 has none)
    except ImportError as error:
        raise CompilerUnavailable(f"CUDA C++ kernels need cuda-core, which is not here ({error}): {_INSTALL}") from None
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
            f"sm_{architecture} needs NVRTC 12 (12.9 is the last that compiles for it, and may lie beside another), found NVRTC "
            f'{nvrtc.name}: pip install "saccade[cu12]"'
        )
    return (
        f"NVRTC {nvrtc.name} does not compile for sm_{architecture}, only up to sm_{max(nvrtc.capabilities, default=0)}: "
        'pip install --upgrade "saccade[cu12]" (12.8 and later know sm_120)'
    )


def obstacles(architecture: str | int) -> tuple[str, ...]:
    """Sentences on why CUDA C++ cannot be compiled for an architecture here; empty if it can. For `why_not` of backends."""
    given_up = _given_up.get(architecture_named(architecture)) if _given_up else None
    return _obstacles(architecture) if given_up is None else (given_up,)


# a compiled graph keeps the answer. It is what `torch.compiler.assume_constant_result` sets, but that imports torch._dynamo and, with it, numpy
obstacles._dynamo_marked_constant = True  # type: ignore[attr-defined]
_given_up: dict[str, str] = {}  # architecture -> what failed there


def give_up(error: CompileError) -> bool:
    """Compile no more for the architecture where a source of ours failed: `obstacles` says so from now on, and other kernels run. False if the
    error is none of NVRTC, or if that was said before."""
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
    """The folder of `cuda_fp16.h` and its like, of NVRTC's own `major` version if there is one; empty if none is found.

    torch's CUDA wheels bring it, Triton's wheel too. A toolkit of the machine may be of another version than NVRTC.
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
    except (ImportError, OSError, RuntimeError):  # not found, or a machine that lets us start no process
        return []
    return [Path(located)] if located else []


def _nvidia_folders() -> list[Path]:
    nvidia = importlib.util.find_spec("nvidia")
    return [] if nvidia is None else [Path(place) for place in (nvidia.submodule_search_locations or ())]


def _wheel_folders() -> list[Path]:
    """Folders of headers in wheels of NVIDIA and of Triton, neither of them imported (that would fix Triton's interpreter switch)."""
    found = [include for folder in _nvidia_folders() for include in sorted(folder.glob("*/include"))]
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin is not None:
        found.append(Path(triton.origin).parent / "backends" / "nvidia" / "include")
    return found


def _machine_folders() -> list[Path]:
    """Folder of headers of a toolkit on this machine. Asked last: the search starts a process."""
    try:
        from cuda import pathfinder

        located = pathfinder.find_nvidia_header_directory("cudart")
    except (ImportError, OSError, RuntimeError):  # a machine that lets us start no process
        return []
    return [Path(located)] if located else []


def _cuda_major(folder: Path) -> int:
    """Major version of the toolkit that a header folder belongs to, 0 if it does not say."""
    try:
        text = (folder / "cuda.h").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    stated = re.search(r"#define CUDA_VERSION (\d+)", text)
    return int(stated[1]) // 1000 if stated else 0
