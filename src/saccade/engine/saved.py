"""Saves tensors for backward, and restores them with the layout that they had in forward.

Launches are remembered by the layout that forward saw. But saved-tensor hooks may return a tensor with other strides, or at an
address that is no multiple of 16. Such hooks are `torch.autograd.graph.save_on_cpu` and others that offload or compress activations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saccade.errors import InvalidArgument


def save(ctx: Any, *tensors: Tensor | None) -> None:
    """Call `ctx.save_for_backward`, and keep the memory layout of the tensors."""
    # a compiler traces strides as symbols, and saves tensors itself
    if torch.compiler.is_compiling():
        ctx.save_for_backward(*tensors)
        ctx.layouts = None
        return
    # autograd saves no tensor that was made in inference mode
    ctx.save_for_backward(*[_copied(t, t.stride()) if t is not None and t.is_inference() else t for t in tensors])
    ctx.layouts = [None if t is None else (t.shape, t.stride(), t.dtype) for t in tensors]
    ctx.hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def saved(ctx: Any) -> tuple[Any, ...]:
    """The saved tensors in their original layout; those that came back with another one are copied.

    Raises:
        InvalidArgument: a hook, or `.data`, replaced a saved tensor by one of another shape or dtype.
    """
    tensors, layouts = ctx.saved_tensors, ctx.layouts
    if layouts is None:
        return tensors
    if not ctx.hooked and all(
        t is None or (t.shape, t.stride(), t.dtype) == layout for t, layout in zip(tensors, layouts, strict=True)
    ):
        return tensors
    return tuple(None if t is None else _as_it_lay(t, *layout) for t, layout in zip(tensors, layouts, strict=True))


def _as_it_lay(tensor: Tensor, shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if tensor.shape != shape or tensor.dtype != dtype:
        raise InvalidArgument(
            f"backward found {tensor.dtype} of shape {list(tensor.shape)} where forward had saved {dtype} of shape {list(shape)}; a "
            "saved-tensor hook must return what it was given, and .data must keep its shape"
        )
    aligned = type(tensor) is not Tensor or tensor.data_ptr() % 16 == 0
    if tensor.stride() == strides and aligned:
        return tensor
    return _copied(tensor, strides)


def _copied(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """A copy with these strides. A tensor that was broadcast in forward is copied once and broadcast again."""
    broadcast = [stride == 0 and extent > 1 for stride, extent in zip(strides, tensor.shape, strict=True)]
    once = tensor[tuple(slice(0, 1) if shared else slice(None) for shared in broadcast)]
    copy = torch.empty_strided(once.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(once)
    return copy.expand(tensor.shape)
