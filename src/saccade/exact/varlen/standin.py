"""The reference in the form of a family of kernels, with gradients by torch: what takes over where a kernel does not compile."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.exact.varlen.args import VarlenArgs, VarlenLaunchers
from saccade.exact.varlen.reference import attend


def _forward(args: VarlenArgs) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        out, lse = attend(args)
    return out.contiguous(), lse.to(torch.float32).contiguous()


def _backward(
    args: VarlenArgs,
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *,
    bias_grad: bool,
    packed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in args[:3]]
        bias = args.bias if args.bias is None or not bias_grad else args.bias.detach().requires_grad_()
        again, log_sum = attend(args._replace(query=leaves[0], key=leaves[1], value=leaves[2], bias=bias))
        wanted = [*leaves, bias] if bias_grad and bias is not None else leaves
        outputs, incoming = ([again], [dout]) if dlse is None else ([again, log_sum], [dout, dlse.to(log_sum.dtype)])
        found = torch.autograd.grad(outputs, wanted, incoming, allow_unused=True)
    full = [torch.zeros_like(x) if g is None else g for g, x in zip(found, wanted, strict=True)]
    if packed is None:
        dq, dk, dv = full[:3]
    else:
        dq, dk, dv = (to.copy_(gradient) for to, gradient in zip(packed.unbind(1), full, strict=False))
    return dq, dk, dv, full[3] if len(full) > 3 else None


STAND_IN = VarlenLaunchers(_forward, _backward)
