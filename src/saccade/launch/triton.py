"""Launching a Triton kernel again without asking Triton what it has been told before. Knows nothing of attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from saccade.env import interpreting_triton
from saccade.errors import CompileError
from saccade.hardware import arch_of
from saccade.nvrtc import loading_allowed

_LIMIT = 4096  # launches remembered, which only a stream of ever new shapes reaches
_runners: dict[tuple, tuple[Any, Any]] = {}


def launch(kernel: Any, programs: int | tuple[int, int], tensors: Sequence[Tensor], numbers: tuple, **options: Any) -> None:
    """Run `kernel` on `programs` programs with the tensors first and the numbers (constexprs too) behind them.

    Triton's own launch costs about 20 us of host time a kernel; here the compiled kernel is remembered by all that it may depend on:
    the numbers, the options, the device, and dtype and 16-byte alignment of each tensor. It gets addresses in place of tensors.

    Products and sums are fused: Triton 3.10 will no longer do so unless asked.
    """
    options.setdefault("enable_fp_fusion", True)
    grid = (programs, 1, 1) if isinstance(programs, int) else (*programs, 1)
    device = tensors[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        # Triton launches on the current device, whatever device the tensors lie on
        with torch.cuda.device(device):
            _launch(kernel, grid, tensors, numbers, options)
    else:
        _launch(kernel, grid, tensors, numbers, options)


def _launch(kernel: Any, grid: tuple[int, int, int], tensors: Sequence[Tensor], numbers: tuple, options: dict[str, Any]) -> None:
    addresses = [t.data_ptr() for t in tensors]
    aligned = tuple([a % 16 == 0 for a in addresses])
    # by its id: a kernel's own hash is that of its source, worked out in Python at every look
    key = (id(kernel), grid, numbers, tuple(options.items()), tuple([t.dtype for t in tensors]), aligned, tensors[0].device.index)
    runner = _runners.get(key)
    if runner is not None:
        runner[0](*addresses, *numbers)
        return
    compiled = first_launch(kernel, grid, (*tensors, *numbers), options)
    if not interpreting_triton():
        if len(_runners) >= _LIMIT:
            _runners.clear()
        # bound to kernel and grid, asks for the current stream at each call; the kernel is kept so that no other gets its id
        _runners[key] = compiled[grid], kernel


def launch_any(
    kernel: Any, programs: int, tensors: Sequence[Tensor], varying: tuple[int, ...], numbers: tuple, **options: Any
) -> None:
    """`launch` for numbers that change from call to call, as the tokens of a ragged batch do: `varying` comes between tensors and numbers.

    The kernel names them in `do_not_specialize`, so that one binary serves all of their values below 2^31; the number of programs is free too.
    """
    options.setdefault("enable_fp_fusion", True)
    device = tensors[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            _launch_any(kernel, programs, tensors, varying, numbers, options)
    else:
        _launch_any(kernel, programs, tensors, varying, numbers, options)


def _launch_any(
    kernel: Any, programs: int, tensors: Sequence[Tensor], varying: tuple[int, ...], numbers: tuple, options: dict[str, Any]
) -> None:
    grid = (programs, 1, 1)
    addresses = [t.data_ptr() for t in tensors]
    aligned = tuple([a % 16 == 0 for a in addresses])
    key = (id(kernel), "any", numbers, tuple(options.items()), tuple([t.dtype for t in tensors]), aligned, tensors[0].device.index)
    found = _runners.get(key)
    if found is not None:
        found[0][grid](*addresses, *varying, *numbers)
        return
    compiled = first_launch(kernel, grid, (*tensors, *varying, *numbers), options)
    if not interpreting_triton():
        if len(_runners) >= _LIMIT:
            _runners.clear()
        _runners[key] = compiled, kernel


def first_launch(kernel: Any, grid: tuple[int, int, int], arguments: tuple, options: dict[str, Any]) -> Any:
    """Compile and run a kernel by Triton's own launcher; the compiled kernel.

    Raises:
        CompileError: Triton cannot compile it, or the device cannot load what it made. Its compiler fails in as many ways as it has parts, so
            everything that is no error of a running device counts.
    """
    try:
        with loading_allowed(_device_of(arguments)):
            return kernel[grid](*arguments, **options)
    except Exception as error:
        if not _compiles() or isinstance(error, (torch.AcceleratorError, torch.OutOfMemoryError)) or _is_of_device(error):
            raise
        import triton

        name = getattr(kernel, "__name__", str(kernel))
        summary = (
            f"Triton {triton.__version__} cannot compile {name} (torch {torch.__version__}, sm_{arch_of(_device_of(arguments))})"
        )
        raise CompileError(summary, (), f"{type(error).__name__}: {error}") from error


def _compiles() -> bool:
    return not interpreting_triton()


def _is_of_device(error: Exception) -> bool:
    """Whether the driver reports a fault, other than that it cannot load a kernel."""
    text = str(error)
    return text.startswith("Triton Error [CUDA]") and not any(
        word in text for word in ("image", "PTX", "invalid source", "unsupported")
    )


def _device_of(arguments: tuple) -> torch.device:
    # a TMA descriptor has its tensor as `base`
    found = (getattr(x, "base", x) for x in arguments)
    return next((x.device for x in found if isinstance(x, Tensor)), torch.device("cpu"))


def pow2(n: int) -> int:
    """The power of two that is `n` or the next above it; 1 at least. Triton's own takes 5 us of host time."""
    return 1 << (n - 1).bit_length() if n > 1 else 1
