"""Launching a Triton or Gluon kernel again without asking Triton what it has been told before. Knows nothing of attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from saccade.env import interpreting_triton

_LIMIT = 4096  # launches remembered, which only a stream of ever new shapes reaches
_runners: dict[tuple, Any] = {}


def launch(kernel: Any, programs: int | tuple[int, int], tensors: Sequence[Tensor], numbers: tuple, **options: Any) -> None:
    """Run `kernel` on `programs` programs with the tensors first and the numbers (constexprs too) behind them.

    Triton's own launch costs about 20 us of host time a kernel; here the compiled kernel is remembered by all that it may depend on:
    the numbers, the options, and dtype, device and 16-byte alignment of each tensor. It gets addresses in place of tensors.
    """
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
    kinds = tuple([(t.dtype, t.device, a % 16 == 0) for t, a in zip(tensors, addresses, strict=True)])
    key = (kernel, grid, numbers, tuple(options.items()), kinds)
    runner = _runners.get(key)
    if runner is not None:
        runner(*addresses, *numbers)
        return
    compiled = kernel[grid](*tensors, *numbers, **options)
    if not interpreting_triton():
        if len(_runners) >= _LIMIT:
            _runners.clear()
        _runners[key] = compiled[grid]  # bound to kernel and grid; asks for the current stream at each call
