"""Tells whether a call is observed (traced, faked, mapped over), and registers the opaque ops that observers see instead of
it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from saccade.engine.backend import Backend
from saccade.engine.flops import count_by
from saccade.engine.namespace import NAMESPACE, packet


@functools.cache
def load(backend: Backend) -> Any:
    """The launchers of a backend; its kernels are imported at the first call."""
    assert backend.launchers is not None, f"backend {backend.name} is plain torch and has no launchers"
    return backend.launchers()


_PLAIN = {Tensor, torch.nn.Parameter, type(None)}


def eager(*tensors: Any) -> bool:
    """Whether these, tensors or None, are plain tensors that are not traced, faked, mapped over or recorded, and whose memory holds their values.

    The implementation may then be called instead of the op, whose dispatch costs 5 of the 16 us of a small call. Dispatch also gives kernels a
    copy of a tensor such as `z.conj().imag`, which is a view of numbers with the other sign, or the gradient of `torch.sgn`, which has no memory.
    """
    return (
        {type(t) for t in tensors} <= _PLAIN
        and not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._len_torch_function_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._get_tracing_state() is None
        and not any(t is not None and (t.is_neg() or t._is_zerotensor()) for t in tensors)
    )


def observer() -> str:
    """A clause that names what observes or replaces torch's operations; empty if nothing does. A replayed CUDA graph would hide them from
    it."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return "the call is traced"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a transform of torch.func computes it, whose parameters have no memory"
    if torch._C._len_torch_dispatch_stack():
        return "a TorchDispatchMode sees its operations, as a FLOP counter does"
    return ""


def register(
    library: torch.library.Library,
    name: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    flops: Callable[..., int] | None = None,
) -> Any:
    """Register the implementation (CPU and CUDA), the fake and the FLOP formula of an op that `library` has defined; returns the
    op."""
    library.impl(name, implementation, "CPU")
    library.impl(name, implementation, "CUDA")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    op = packet(name)
    if flops is not None:
        count_by(op, flops)
    return op.default


def transforms() -> int:
    """The number of transforms of torch.func that are active."""
    return torch._C._functorch.maybe_current_level() or 0


# a compiled graph is made for the transforms around it; see `saccade.hardware` for why the attribute is set
transforms._dynamo_marked_constant = True  # type: ignore[attr-defined]
