"""A stand-in for a compiled Triton kernel, whose launches are written down."""

from __future__ import annotations

import inspect
import struct
from types import SimpleNamespace

import torch

from saccade.native import triton as described


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
