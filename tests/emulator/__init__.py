"""Runs CUDA C++ kernels on a CPU: the unchanged sources, with the headers of single instructions replaced by arithmetic."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from saccade.launch.cuda import HEADERS, check_pointers

HERE = Path(__file__).parent
_CTYPES = {"int32": ctypes.c_int32, "uint32": ctypes.c_uint32, "int64": ctypes.c_int64, "float32": ctypes.c_float}
COMPILER = shutil.which("g++")
SHARED_FOLDER = "EMULATED_KERNELS"


def ready(call: Any, device: torch.device) -> Callable[..., None]:
    """A replacement for `CudaLaunch.ready` that takes pointers and runs on the CPU, so that host code runs as for a GPU."""
    assert device.type == "cpu"

    def launch(*pointers: int, maps: Sequence[tuple] = (), grid: int = 0, follows: tuple | None = None) -> None:
        given = {
            **dict(zip(call.parameters.pointers, pointers, strict=True)),
            **dict(zip(call.parameters.maps, [tensor_map(*given) for given in maps], strict=True)),
        }
        run(call._replace(arguments={**call.arguments, **given}, grid=(grid, 1) if grid else call.grid))

    launch.enqueue = lambda stream, pointers: launch(*pointers)
    return launch


class TensorMap(ctypes.Structure):
    """The tensor map that the copies of tma.cuh take: the sizes and strides of `saccade.nvrtc.tensor_map`, in the order of the driver."""

    _fields_ = (
        ("address", ctypes.c_uint64), ("sizes", ctypes.c_int64 * 4), ("strides", ctypes.c_int64 * 3), ("columns", ctypes.c_int32),
        ("rows", ctypes.c_int32), ("filled_up", ctypes.c_char * 56),
    )  # fmt: skip


def tensor_map(address: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]) -> TensorMap:
    """As `saccade.nvrtc.tensor_map`, of four dimensions."""
    assert address % 16 == 0
    assert all(stride % 16 == 0 for stride in strides)
    assert box[:2] == (1, 1)
    return TensorMap(address, tuple(sizes[::-1]), tuple(strides[::-1]), box[3], box[2])


def launch(make: Callable[..., Any], tensors: tuple[Tensor | None, ...], *options: Any) -> None:
    """As `saccade.launch.cuda.run`, on tensors of the CPU."""
    call = make(*tensors, *options)
    check_pointers(call, tensors)
    run(call)


def run(call: Any) -> None:
    """Run the launch of a family's `CudaLaunch` on tensors of the CPU, or on addresses."""
    library = _library(call.source.path, call.kernel, call.options.defines)
    sizes = (ctypes.c_int * 64)()
    library.sizes(sizes)
    stored = []
    values = call.parameters.in_order(call.kernel, call.arguments)
    for (name, kind), value, size in zip(call.parameters.kinds.items(), values, sizes, strict=False):
        if kind == "pointer":
            assert value is None or isinstance(value, Tensor | int)
            stored.append(ctypes.c_void_p(value.data_ptr() if isinstance(value, Tensor) else value))
        elif kind == "tensor_map":
            stored.append(value)
        else:
            stored.append(_CTYPES[kind](value))
        assert ctypes.sizeof(stored[-1]) == size, (call.kernel, name, kind, size)
    assert sizes[len(stored)] == 0, "the kernel takes more arguments"
    pointers = (ctypes.c_void_p * len(stored))(*(ctypes.addressof(x) for x in stored))
    library.run(*call.grid, call.threads, pointers)


@functools.cache
def _own_folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="saccade-emulator-")


@contextlib.contextmanager
def _folder(name: str) -> Iterator[tuple[Path, bool]]:
    """A folder for what is compiled, and whether it is still to be filled: processes of one run of pytest share it (conftest.py), for compiling takes
    most of the time of most tests."""
    shared = Path(os.environ.get(SHARED_FOLDER) or _own_folder().name)
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = shared / name
        if fresh := not (made / "made").exists():
            shutil.rmtree(made, ignore_errors=True)
            made.mkdir()
        yield made, fresh
        (made / "made").touch()


@functools.cache
def _device() -> Path:
    """A folder with device.hpp precompiled and device.cpp compiled, which take a compiler longer than a kernel."""
    with _folder("device") as (folder, fresh):
        if fresh:
            for file in ("device.hpp", "device.cpp"):
                shutil.copy(HERE / file, folder)
            _compile("-x", "c++-header", folder / "device.hpp", "-o", folder / "device.hpp.gch")
            _compile("-c", folder / "device.cpp", "-o", folder / "device.o")
    return folder


def _compile(*arguments: str | Path) -> None:
    # always the same flags, as the precompiled header needs them
    flags = ("-std=c++20", "-Og", "-w", "-fPIC", "-ffp-contract=off", "-fno-exceptions", "-fno-rtti", "-fvisibility=hidden")
    done = subprocess.run([COMPILER, *flags, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@functools.cache
def _library(source: Path, kernel: str, defines: tuple[tuple[str, str], ...]) -> ctypes.CDLL:
    name = hashlib.sha256(repr((str(source), kernel, defines)).encode()).hexdigest()[:16]
    with _folder(name) as (folder, fresh):
        if fresh:
            _make_library(folder, source, kernel, defines)
    return ctypes.CDLL(str(folder / "kernel.so"))


def _make_library(folder: Path, source: Path, kernel: str, defines: tuple[tuple[str, str], ...]) -> None:
    # the family's own files and those that families share; the emulator's come last and replace files of the same name
    for file in (*HEADERS.glob("*.cuh"), *source.parent.glob("*.cu*"), *HERE.glob("*.cuh")):
        # dynamic shared memory is the emulator's array
        text = re.sub(r"extern __shared__ __align__\(\d+\)", "extern", file.read_text())
        (folder / file.name).write_text(
            re.sub(r"extern( __shared__)? unsigned char memory\[\]", "auto& memory = shared_memory", text)
        )
    (folder / "main.cpp").write_text(
        f'#include "device.hpp"\n#include "{source.name}"\n'
        '#define EXPORTED extern "C" __attribute__((visibility("default")))\n'
        f"EXPORTED void run(int x, int y, int threads, void** arguments) {{ run_kernel({kernel}, x, y, threads, arguments); }}\n"
        f"EXPORTED void sizes(int* out) {{ sizes_of({kernel}, out); }}\n"
    )
    macros = (f"-D{n}={v}" for n, v in defines)
    device = _device()
    _compile("-shared", f"-I{device}", *macros, folder / "main.cpp", device / "device.o", "-o", folder / "kernel.so")
