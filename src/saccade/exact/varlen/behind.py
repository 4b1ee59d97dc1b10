"""Zeros behind the last sequence, where torch's packed attention leaves its output and gradients uninitialised.

A call that no transformation observes writes them in place, by a kernel that returns where tokens are real. `where` reads and writes every token: for query,
key, value and output of 129,000 tokens, 12 heads and D = 128 that took 2.1 ms, and attention 0.9 ms (H100).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.engine.layout import on_16_bytes, shares_memory
from saccade.engine.tracing import eager
from saccade.env import interpreting_triton
from saccade.hardware import has_package

# elements of a tile, by rows
_ROWS, _COLUMNS = 32, 128


class Behind(NamedTuple):
    """The tokens behind the last sequence of a batch. offsets: int32 `[B + 1]`. in_place: whether a kernel may write them."""

    offsets: Tensor
    in_place: bool

    def of_input(self, tokens: Tensor) -> Tensor:
        """A packed tensor `[T, H, D]` as torch's kernels read it, in pieces of 16 bytes; its gradient is 0 behind the last sequence."""
        if not self.in_place:
            return self._where(tokens)
        tokens = tokens.contiguous() if shares_memory(tokens) else on_16_bytes(tokens)
        return _ZeroGradient.apply(tokens, self.offsets) if tokens.requires_grad else tokens  # type: ignore[no-untyped-call, no-any-return]

    def of_output(self, out: Tensor) -> Tensor:
        """The output, 0 behind the last sequence; torch's backward gets its gradient in pieces of 16 bytes."""
        if not (self.in_place and out.is_contiguous()):
            return self._where(out)
        # torch's backward has saved it, so it is written through its memory, which makes no new version
        zero_behind(out.detach(), self.offsets)
        return _DenseGradient.apply(out) if out.requires_grad else out  # type: ignore[no-untyped-call, no-any-return]

    def real(self, tokens: Tensor) -> Tensor:
        """Whether each token belongs to a sequence, `[T, 1]`."""
        return (torch.arange(tokens.shape[0], device=tokens.device) < self.offsets[-1])[:, None]

    def _where(self, tokens: Tensor) -> Tensor:
        # as rows of all heads, so that the last dimension is dense, in gradients too
        return tokens.flatten(1).where(self.real(tokens), 0.0).view(tokens.shape)


def behind(offsets: Tensor, *tensors: Tensor) -> Behind:
    """How to clear the tensors of a call: in place if no transformation observes it and Triton is there."""
    runs = has_package("triton") and (offsets.device.type == "cuda" or interpreting_triton())
    return Behind(offsets, runs and eager(offsets, *tensors))


def zero_behind(tokens: Tensor, offsets: Tensor) -> None:
    """Write zeros into the tokens behind the last sequence, in place. tokens: dense `[T, H, D]`."""
    from saccade.exact.varlen.zeros import zero_behind_kernel
    from saccade.launch.triton import launch_any

    rows = tokens.shape[0]
    if tokens.numel():
        numbers = (tokens[0].numel(), _ROWS, _COLUMNS)
        launch_any(zero_behind_kernel, -(-rows // _ROWS), (tokens, offsets), (rows, offsets.shape[0] - 1), numbers, num_warps=4)


class _ZeroGradient(torch.autograd.Function):
    """The tensor itself. Its gradient is memory that torch's backward has just made."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(offsets)
        return tokens.view_as(tokens)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (offsets,) = ctx.saved_tensors
        gradient = gradient.contiguous()
        zero_behind(gradient.detach(), offsets)
        return gradient, None


class _DenseGradient(torch.autograd.Function):
    """The tensor itself; its gradient as a dense copy, or unchanged if torch's kernels can read it."""

    @staticmethod
    def forward(ctx: Any, out: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous() if shares_memory(gradient) else on_16_bytes(gradient)
