"""The reference in the form of a family of kernels, with gradients by torch: what takes over where a kernel does not compile."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.engine.by_torch import gradients_by_torch
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
    found = gradients_by_torch(args, attend, dout, dlse, bias_grad)
    into = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in args[:3]] if packed is None else packed.unbind(1)
    dq, dk, dv = (to.copy_(gradient) for to, gradient in zip(into, found, strict=False))
    return dq, dk, dv, found[3] if bias_grad else None


STAND_IN = VarlenLaunchers(_forward, _backward)
