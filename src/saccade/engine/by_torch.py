"""A reference in the form of a family of kernels: its gradients are computed by torch, and returned as kernels return theirs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from saccade.engine.backend import Launchers
from saccade.engine.layout import Rows


def _recorded() -> contextlib.AbstractContextManager[None]:
    """Turns autograd on inside an op: torch calls implementations of ops below autograd, where nothing is recorded."""
    key = torch._C.DispatchKey
    excluded = torch._C._dispatch_tls_local_exclude_set().remove(key.AutogradFunctionality).remove(key.ADInplaceOrView)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def gradients_by_torch(
    args: Any, call: Callable[[Any], tuple[Tensor, Tensor]], dout: Tensor, dlse: Tensor | None, bias_grad: bool
) -> tuple[Tensor, ...]:
    """The gradients of query, key, value and, with `bias_grad`, of bias. call: `args -> (out, lse)` in plain torch."""
    with torch.enable_grad(), _recorded():
        leaves = [x.detach().requires_grad_() for x in args[:3]]
        bias = args.bias.detach().requires_grad_(bias_grad) if args.bias is not None else None
        out, lse = call(args._replace(query=leaves[0], key=leaves[1], value=leaves[2], bias=bias))
        leaves += [bias] if bias_grad and bias is not None else []
        results, directions = ([out], [dout]) if dlse is None else ([out, lse], [dout, dlse.to(lse.dtype)])
        return torch.autograd.grad(results, leaves, directions)


def reference_launchers(attend: Callable[[Any], tuple[Tensor, Tensor]], rows: Rows) -> Launchers:
    """The launchers of a reference, which take over if a kernel does not compile. attend: `args -> (out, lse)` in plain torch."""

    def forward(args: Any) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            out, lse = attend(args)
        return rows.like(args.query, out.shape[-1]).copy_(out), lse.to(torch.float32).contiguous()

    def backward(
        args: Any, dout: Tensor, dlse: Tensor | None, out: Tensor | None, lse: Tensor, *, bias_grad: bool, packed: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        found = gradients_by_torch(args, attend, dout, dlse, bias_grad)
        into = [rows.like(x) for x in args[:3]] if packed is None else rows.unpack(packed)
        dq, dk, dv = (to.copy_(gradient) for to, gradient in zip(into, found, strict=False))
        return dq, dk, dv, found[3] if bias_grad else None

    return Launchers(forward, backward)
