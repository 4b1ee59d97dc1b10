"""Facts about this machine: devices, compute capability, and installed optional packages."""

import contextlib
import functools
import importlib.metadata
import importlib.util
from collections.abc import Iterator

import torch

# architectures with 99 KiB of shared memory per program
SMALL_SHARED = (86, 89, 120, 121)


_ARCHITECTURES: dict[torch.device, int] = {}


def arch_of(device: torch.device) -> int:
    """Compute capability of a CUDA device as one number, 90 for sm_90; 0 for every other device."""
    # not `functools.cache`, through which torch.compile traces with a warning
    found = _ARCHITECTURES.get(device)
    if found is None:
        found = 0
        if device.type == "cuda" and torch.version.hip is None:
            major, minor = torch.cuda.get_device_capability(device)
            found = 10 * major + minor
        _ARCHITECTURES[device] = found
    return found


# a compiled graph keeps the answer: see `allows_tf32`
arch_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Number of streaming multiprocessors; 1 on a CPU, where the interpreter runs one program at a time."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


# of the largest data-centre and desktop GPUs of an architecture
_USUAL_MULTIPROCESSORS = {70: 80, 75: 72, 80: 108, 86: 84, 89: 142, 90: 132, 100: 148, 103: 160, 120: 188, 121: 48}


def usual_multiprocessors(arch: int) -> int:
    """Number of multiprocessors of a typical GPU of an architecture, to describe one that this machine lacks."""
    return _USUAL_MULTIPROCESSORS.get(arch, 132)


def allows_tf32() -> bool:
    """Whether torch may multiply float32 as TF32 on a GPU (`torch.backends.cuda.matmul`, under its old or new setting)."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


# torch.compile cannot trace the getter, so a compiled graph keeps the answer. This sets what
# `torch.compiler.assume_constant_result` would set, but that imports torch._dynamo and, with it, numpy
allows_tf32._dynamo_marked_constant = True  # type: ignore[attr-defined]


_FOUND: dict[str, bool] = {}


def has_package(name: str) -> bool:
    """Whether a package can be imported, without importing it."""
    # a dictionary, filled at import with what dispatch needs: torch.compile traces through a cached function and stops at
    # find_spec
    if name not in _FOUND:
        try:
            _FOUND[name] = importlib.util.find_spec(name) is not None
        except (ImportError, ValueError):
            # a blocked or half-removed package counts as absent
            _FOUND[name] = False
    return _FOUND[name]


has_package("triton")


@contextlib.contextmanager
def assumed(name: str) -> Iterator[None]:
    """A package counts as installed meanwhile, to describe another machine."""
    before = has_package(name)
    _FOUND[name] = True
    try:
        yield
    finally:
        _FOUND[name] = before


def package_version(name: str) -> str | None:
    """Installed version of a distribution, None when it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
