"""Launches written down and not made: a stand-in for a compiled Triton kernel, and for the driver's function by which C++ launches it."""

from __future__ import annotations

import ctypes
import inspect
import struct
from types import SimpleNamespace

import pytest
import torch
from recorded_cuda import ENCODE, functions

from saccade import native
from saccade.engine import prepare
from saccade.exact.short import launch as short_launch
from saccade.launch import triton as launch_triton
from saccade.native import triton as described
from saccade.native.build import Build

_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p
)
_CAPTURES = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))
# what the driver says of every stream: whether it is captured; a test may change it
capturing = [0]
_STREAM = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))


def number_of(kernel: str) -> int:
    return sum(kernel.encode())


class Compiled:
    """Stands in for a kernel that Triton has compiled: its launches are written down, (programs, [argument, ...])."""

    def __init__(self, kernel, arguments, seen):
        self.function, self.seen = number_of(kernel.__name__), seen
        parameters = inspect.signature(kernel.fn).parameters
        names = list(parameters)
        constant = {n for n, p in parameters.items() if "constexpr" in str(p.annotation)}
        self.kinds = tuple(["constexpr" if n in constant else self.kind(a) for n, a in zip(names, arguments, strict=True)])
        self.src = SimpleNamespace(signature=dict(zip(names, self.kinds, strict=True)))
        self.metadata = SimpleNamespace(num_warps=4, shared=64, num_ctas=1)

    def kind(self, argument):
        if isinstance(argument, tuple):
            return tuple([self.kind(x) for x in argument])
        return "*fp16" if isinstance(argument, torch.Tensor) else "fp32" if isinstance(argument, float) else "i32"

    def sizes(self):
        flat = [kind for kind, _ in described._flat(self.kinds, self.kinds) if kind != "constexpr"]
        return [8 if kind.startswith("*") else 4 for kind in flat], flat

    def __getitem__(self, grid):
        def run(*arguments):
            pairs = described._flat(self.kinds, arguments)
            values = [struct.unpack("f", struct.pack("f", v))[0] if k == "fp32" else v for k, v in pairs if k != "constexpr"]
            self.seen.append((self.function, grid[0], values))

        return run


_REAL = [(launch_triton, name, getattr(launch_triton, name)) for name in ("first_launch", "interpreting_triton")]


def interpreted(monkeypatch):
    """Kernels run in Triton's interpreter again."""
    for module, name, real in _REAL:
        monkeypatch.setattr(module, name, real)


def recording(monkeypatch, with_cuda=False):
    """C++ with a memory of its own, and Triton kernels that are written down and not run; for a fixture to yield from. Yields the launches of both.

    with_cuda: C++ launches the kernels of `recorded_cuda` too.
    """
    found, known = [], {}  # known: number -> `Compiled`
    encode, launch_cuda = functions(found)

    def first_launch(kernel, grid, arguments, options):
        made = Compiled(kernel, arguments, found)
        made = known.setdefault(made.function, made)
        made[grid](*[x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments])
        return made

    monkeypatch.setattr(launch_triton, "_check_free", lambda *given: None)  # an interpreted kernel has no parameters
    monkeypatch.setattr(launch_triton, "_runners", {})
    for module in (launch_triton, short_launch):
        monkeypatch.setattr(module, "first_launch", first_launch)
        monkeypatch.setattr(module, "interpreting_triton", lambda: False)
    monkeypatch.setenv("SACCADE_NATIVE", "1")
    build = Build()
    module = build.wait()
    if module is None:
        pytest.skip(build.refusal)

    def launch(function, x, y, z, threads, _, __, shared, stream, places, ___):
        if with_cuda and function not in known:
            return launch_cuda(function, x, y, z, threads, 1, 1, shared, stream, places, None)
        assert (y, z, threads, shared) == (1, 1, 128, 64)  # of `Compiled.metadata`
        _, kinds = known[function].sizes()
        read = {"*": ctypes.c_int64, "i": ctypes.c_int32, "f": ctypes.c_float}
        found.append((function, x, [read[kind[0]].from_address(places[i]).value for i, kind in enumerate(kinds)]))
        return 0

    monkeypatch.setattr(described, "_behind", lambda function, sizes: 0 if sizes == known[function].sizes()[0] else None)

    def captures(stream, into):
        into[0] = capturing[0]
        return 0

    keep = _LAUNCH(launch), _STREAM(lambda index, into: 0), ENCODE(encode), _CAPTURES(captures)
    module.use_driver(*(ctypes.cast(f, ctypes.c_void_p).value for f in keep))
    monkeypatch.setattr(native, "calls", module.Memory())
    prepare.forget()
    yield found
    module.use_driver(0, 0, 0)
    prepare.forget()
