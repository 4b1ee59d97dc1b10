"""Compiles a Triton launch for any architecture, on a machine without a GPU, and reads properties of the binary.

    with recording(Launch) as launches:            # tensors may lie on the "meta" device: nothing runs
        forward(args_on_meta, config)
    resources = compile_launch(*launches[0], arch=90)

Triton must not be in interpreter mode (`TRITON_INTERPRET` unset before it is imported). Argument types, constants and pointer
alignment are derived by Triton's own launch code, so the binary is the one that a GPU would run.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tools.cubin import resource_usage

# the most shared memory that one program may use, in bytes
SHARED_LIMIT = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}


@dataclass(frozen=True)
class Resources:
    """The resources of a compiled kernel. stack: bytes of local memory per thread, which hold spills. shared: bytes per
    program."""

    kernel: str
    arch: int
    registers: int
    stack: int
    shared: int
    cubin: bytes = field(repr=False, compare=False)
    ttgir: str = field(repr=False, compare=False)
    ptx: str = field(repr=False, compare=False)

    @property
    def narrow_products(self) -> list[str]:
        """Products whose inner dimension is too short for the elements that a lane packs (4 lanes, `kWidth` each). Lanes then
        repeat one another, and Triton 3.6 sums the same elements twice."""
        found = re.findall(r"tensor<(?:\d+x)?\d+x(\d+)x\w+, #ttg.dot_op<{opIdx = 0, parent = #\w+, kWidth = (\d+)}>>", self.ttgir)
        return [f"inner {inner}, kWidth {width}" for inner, width in found if int(inner) < 4 * int(width)]

    @property
    def matrix_instructions(self) -> int:
        """How many instructions use the matrix units, in PTX, since disassembling takes a third of the time of compiling: mma (sm_80),
        wgmma (sm_90), tcgen05 (sm_100)."""
        return len(re.findall(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)", self.ptx))


@contextlib.contextmanager
def recording(launch_class: type) -> Iterator[list[tuple[Any, tuple[Tensor, ...]]]]:
    """Collect `(launch, tensors)` instead of running each launch of `launch_class`."""
    launches: list[tuple[Any, tuple[Tensor, ...]]] = []
    run = launch_class.__call__
    launch_class.__call__ = lambda self, *tensors: launches.append((self, tensors))  # type: ignore[assignment, method-assign]
    try:
        yield launches
    finally:
        launch_class.__call__ = run  # type: ignore[method-assign]


def compile_launch(launch: Any, tensors: Sequence[Tensor], arch: int) -> Resources:
    """Compile `launch` (with `kernel`, `static` and `options`, as in `exact.short.launch.Launch`) for sm_`arch`.

    Args:
        tensors: the leading arguments; only dtype and address alignment matter.
        arch: compute capability as one number, 90 for sm_90.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    if not isinstance(launch.kernel, JITFunction):
        raise RuntimeError(
            "the kernels were imported under TRITON_INTERPRET=1, which leaves nothing to compile; use a process without it"
        )
    target = GPUTarget("cuda", arch, 32)
    backend = make_backend(target)
    bind = create_function_from_signature(launch.kernel.signature, launch.kernel.params, backend)
    bound, specialization, options = bind(*launch.arguments(tuple(tensors)), *launch.static, **launch.options)
    options, signature, constants, attributes = launch.kernel._pack_args(backend, launch.options, bound, specialization, options)
    source = ASTSource(launch.kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=target, options=options.__dict__)
    (usage,) = resource_usage(compiled.asm["cubin"]).values()
    return Resources(
        launch.kernel.__name__,
        arch,
        usage.registers,
        usage.stack,
        compiled.metadata.shared,
        compiled.asm["cubin"],
        compiled.asm["ttgir"],
        compiled.asm["ptx"],
    )
