"""Steps that the public functions take before a call is described and run: gradients, autocast, masks, the Philox key of
dropout."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from saccade.engine.backend import Backend
from saccade.engine.problem import Problem
from saccade.engine.tracing import transforms

_OptionalTensor = TypeVar("_OptionalTensor", Tensor, Tensor | None)


def gradient_needed(*tensors: Tensor | None) -> bool:
    """Whether a call must be recorded for a gradient."""
    # under forward-mode AD the autograd.Function must run so that it raises: the bare op would silently drop the tangent
    if torch.autograd.forward_ad._current_level >= 0:
        return True
    if not torch.is_grad_enabled():
        return False
    if any(isinstance(t, Tensor) and t.requires_grad for t in tensors):
        return True
    levels = transforms()
    return levels > 0 and any(_wraps_gradient(t, levels) for t in tensors if isinstance(t, Tensor))


def _wraps_gradient(tensor: Tensor, levels: int) -> bool:
    """Whether a tensor that torch.func.vmap maps over wraps one that requires a gradient, which it does not say itself."""
    for level in range(levels, 0, -1):
        tensor, _ = torch._C._functorch._unwrap_batched(tensor, level)
        if tensor.requires_grad:
            return True
    return False


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors, cast to the dtype of autocast if it is enabled."""
    first = tensors[0]
    if not isinstance(first, Tensor) or not _autocasts(first.device.type):
        return tensors
    dtype = torch.get_autocast_dtype(first.device.type)
    castable = (torch.float32, torch.float16, torch.bfloat16)
    return tuple(t.to(dtype) if isinstance(t, Tensor) and t.dtype in castable else t for t in tensors)


def cast(call: tuple) -> tuple:
    """A call whose first three arguments are query, key and value, cast as by `autocast`; the same tuple if nothing is to be cast."""
    query = call[0]
    if not isinstance(query, Tensor) or not _autocasts(query.device.type):
        return call
    return (*autocast(*call[:3]), *call[3:])


def uncast(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """A context without autocast: what a backend in plain torch computes in float32 must stay in float32."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if _autocasts(kind) else contextlib.nullcontext()


def _autocasts(kind: str) -> bool:
    # some devices, such as "meta", have no autocast, and is_autocast_enabled raises for them
    return (kind in ("cuda", "cpu") or torch.amp.is_autocast_available(kind)) and torch.is_autocast_enabled(kind)


def recordable(tensor: _OptionalTensor) -> _OptionalTensor:
    """The tensor, or a copy of one that was made in inference mode, which autograd cannot save."""
    return tensor.clone() if tensor is not None and tensor.is_inference() and not torch.is_inference_mode_enabled() else tensor


def has_values(tensor: Tensor) -> bool:
    """Whether it has values, unlike meta and fake tensors, which have only a shape."""
    return not (tensor.is_meta or hasattr(tensor, "fake_mode"))


def values_known(tensor: Tensor) -> bool:
    """Whether the values of a tensor can be read now: the call is not traced, faked, mapped over or captured."""
    return not (
        torch.compiler.is_compiling()
        or not has_values(tensor)
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or (tensor.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def split_mask(problem: Problem, attn_mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """`(boolean mask, bias)`, one of which is `attn_mask` and the other None. If a boolean mask was expanded over the queries, only its first
    row is returned."""
    if attn_mask is None:
        return None, None
    if problem.mask != "bool":
        return None, attn_mask
    expanded = attn_mask.dim() > 1 and attn_mask.shape[-2] != 1 == (problem.mask_shape or (0, 0))[-2]
    return (attn_mask.narrow(-2, 0, 1) if expanded else attn_mask), None


def draw_seed(problem: Problem, chosen: Backend) -> Tensor | None:
    """The Philox key of a call, int64 `[1]`; None without dropout."""
    # drawn on the device from torch's generator, so that it follows manual_seed and is replayed by checkpointing and by CUDA
    # graphs
    if problem.dropout_p == 0 or chosen.own_dropout:
        return None
    return torch.randint(0, 2**62, (1,), dtype=torch.int64, device=problem.device)


def read_later(number: Tensor) -> Callable[[], float]:
    """Start to copy a number from its device; the returned function waits until the device has computed it, and returns it.

    `number.item()` would wait for everything that was launched, so that host and device would take turns.
    """
    if not number.is_cuda:
        return number.item  # type: ignore[return-value]
    host = torch.empty((), dtype=number.dtype, device="cpu", pin_memory=True)
    arrived = torch.cuda.Event()
    host.copy_(number, non_blocking=True)
    arrived.record(torch.cuda.current_stream(number.device))

    def read() -> float:
        arrived.synchronize()
        return host.item()

    return read
