"""The reference with the interface of a family of kernels and gradients by torch. It takes over where a kernel does not
compile."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.engine.by_torch import gradients_by_torch
from saccade.engine.layout import empty_like_heads, unpack
from saccade.exact.args import AttentionArgs, Launchers
from saccade.exact.reference import attend


def _forward(args: AttentionArgs) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        out, lse = attend(args)
    return empty_like_heads(args.query, out.shape[3]).copy_(out), lse.to(torch.float32)


def _backward(
    args: AttentionArgs,
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor | None,
    lse: Tensor,
    *,
    bias_grad: bool,
    packed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    found = gradients_by_torch(args, attend, dout, dlse, bias_grad)
    into = [empty_like_heads(x) for x in args[:3]] if packed is None else unpack(packed)
    dq, dk, dv = (to.copy_(gradient) for to, gradient in zip(into, found, strict=False))
    return dq, dk, dv, found[3] if bias_grad else None


STAND_IN = Launchers(_forward, _backward)
