"""What compiles here: cuda-core, NVRTC and its version, the CUDA headers; and one sentence for each thing that is missing."""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path
from typing import NamedTuple

import torch

from saccade.errors import CompileError, CompilerUnavailable
from saccade.nvrtc.architecture import architecture_named

_INSTALL = 'pip install "saccade[cu12]" (or "saccade[cu13]" beside a torch for CUDA 13, without sm_70)'


class Nvrtc(NamedTuple):
    """The NVRTC of this process: its version, and the compute capabilities it compiles for."""

    version: tuple[int, int]
    capabilities: tuple[int, ...]

    @property
    def name(self) -> str:
        """As people write it, "12.9"."""
        return f"{self.version[0]}.{self.version[1]}"


@functools.cache
def find_nvrtc() -> Nvrtc:
    """NVRTC as cuda-core's bindings load it; CompilerUnavailable with what to install, where there is none."""
    try:
        from cuda.bindings import nvrtc
        from cuda.core.utils import FileStreamProgramCache  # noqa: F401 (cuda-core before 1.0 has none)
    except ImportError as error:
        raise CompilerUnavailable(f"CUDA C++ kernels need cuda-core, which is not here ({error}): {_INSTALL}") from None
    try:
        status, *version = nvrtc.nvrtcVersion()
        known = nvrtc.nvrtcGetSupportedArchs()
    except RuntimeError as error:  # the bindings are here, the library they load is not
        reason = str(error).strip().partition("\n")[0]
        raise CompilerUnavailable(f"CUDA C++ kernels need NVRTC, which cuda-core cannot load ({reason}): {_INSTALL}") from None
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS or known[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompilerUnavailable(f"NVRTC answers {status.name} when asked for its version: {_INSTALL}")
    return Nvrtc((version[0], version[1]), tuple(known[1]))


def require(architecture: str) -> Nvrtc:
    """NVRTC, if it compiles for that architecture; otherwise CompilerUnavailable."""
    nvrtc = find_nvrtc()
    sentence = refusal(nvrtc, architecture)
    if sentence is not None:
        raise CompilerUnavailable(sentence)
    return nvrtc


def refusal(nvrtc: Nvrtc, architecture: str) -> str | None:
    """Why this NVRTC cannot compile for the architecture, and what to install; None if it can."""
    if int(architecture.rstrip("a")) in nvrtc.capabilities:
        return None
    if int(architecture.rstrip("a")) < min(nvrtc.capabilities, default=0):
        return (
            f"sm_{architecture} needs NVRTC 12 (12.9 is the last that compiles for it), found NVRTC {nvrtc.name}: "
            'pip install "saccade[cu12]"'
        )
    return (
        f"NVRTC {nvrtc.name} does not compile for sm_{architecture}, only up to sm_{max(nvrtc.capabilities, default=0)}: "
        'pip install --upgrade "saccade[cu12]" (12.8 and later know sm_120)'
    )


@torch.compiler.assume_constant_result
def obstacles(architecture: str | int) -> tuple[str, ...]:
    """Sentences on why CUDA C++ cannot be compiled for an architecture here; empty if it can. For `why_not` of backends."""
    given_up = _given_up.get(architecture_named(architecture)) if _given_up else None
    return _obstacles(architecture) if given_up is None else (given_up,)


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
def toolkit_headers() -> tuple[Path, ...]:
    """The folder of `cuda_fp16.h` and its like, of NVRTC's own major version if there is one; empty if none is found.

    torch's CUDA wheels bring it, Triton's wheel too. A toolkit of the machine may be of another version than NVRTC.
    """
    major = find_nvrtc().version[0]
    found = [folder for folder in _wheel_folders() if (folder / "cuda_fp16.h").is_file()]
    if major not in map(_cuda_major, found):
        found += _machine_folders()
    return tuple(sorted(found, key=lambda folder: _cuda_major(folder) != major)[:1])


def _wheel_folders() -> list[Path]:
    """Folders of headers in wheels of NVIDIA and of Triton, neither of them imported (that would fix Triton's interpreter switch)."""
    nvidia, triton = importlib.util.find_spec("nvidia"), importlib.util.find_spec("triton")
    folders = [Path(place) for place in (nvidia.submodule_search_locations or ())] if nvidia is not None else []
    found = [include for folder in folders for include in sorted(folder.glob("*/include"))]
    if triton is not None and triton.origin is not None:
        found.append(Path(triton.origin).parent / "backends" / "nvidia" / "include")
    return found


def _machine_folders() -> list[Path]:
    """Folder of headers of a toolkit on this machine. Asked last: the search starts a process."""
    from cuda import pathfinder

    try:
        located = pathfinder.find_nvidia_header_directory("cudart")
    except (OSError, RuntimeError):  # a machine that lets us start no process
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
