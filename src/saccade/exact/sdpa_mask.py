"""Masks and biases in the form in which torch's `scaled_dot_product_attention` takes them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from saccade.engine.tracing import eager


def bias_for_torch(bias: Tensor, dtype: torch.dtype, device_type: str) -> Tensor:
    """A bias beside a query of this dtype, for torch's function. CPU kernels add float32 to scores of 16 bits; fused CUDA kernels take only the query's dtype.

    A finite number stays finite: finfo.min of float32 would hide a key as -inf of 16 bits.
    """
    if bias.dtype == dtype:
        return bias
    if device_type != "cuda":
        return bias.to(torch.promote_types(dtype, torch.float32))
    narrow = bias.to(dtype)
    with torch.no_grad():  # a gradient passes as through any rounding
        narrow.masked_fill_((narrow == float("-inf")) & (bias != float("-inf")), torch.finfo(dtype).min)
    return narrow


def misread_on_a_cpu(bias: Any, query: Any) -> bool:
    """Whether torch's CPU kernels would read the memory of a float32 bias as float64, as they do beside float64 queries (torch 2.13)."""
    return getattr(bias, "dtype", None) is torch.float32 and getattr(query, "dtype", None) is torch.float64


def mask_for_torch(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask as torch would add it, with -inf where torch's cuDNN kernels take the least finite number.

    With the least finite number, a fully masked row becomes the mean of the values. Gradients of some shapes are then NaN (64 x 64 in 16
    bits, torch 2.11). A row of -inf is 0 in all of torch's CUDA kernels, with zero gradients (measured for cuDNN, EFFICIENT and MATH, three
    dtypes, four shapes). The conversion costs as much as torch's own, and the result needs no correction.
    """
    # remembered tensors must be neither fake nor in the memory of a graph
    if not eager(mask) or torch.cuda.is_current_stream_capturing():
        return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, float("-inf"))
    return torch.where(mask, *_seen_and_hidden(dtype, mask.device))


@functools.cache
def _seen_and_hidden(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """0 and -inf as tensors of no dimension. They are on the device: copying them from the host at each call would wait."""
    return torch.tensor(0.0, dtype=dtype, device=device), torch.tensor(float("-inf"), dtype=dtype, device=device)
