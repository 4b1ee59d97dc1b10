"""Launchers of the short family, forward and backward: they allocate results, find the launch of a call, run it and sum partial
results."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.engine.layout import empty_like_heads, unpack
from saccade.exact.args import AttentionArgs
from saccade.exact.problem import problem_of
from saccade.exact.short import plans_triton, sm90
from saccade.exact.short.choice import choose
from saccade.exact.short.config import Config
from saccade.exact.short.launch import BackwardPlan, Launch, aligned, launches_of, metadata, takes_tma
from saccade.exact.short.plans_triton import BackwardCall
from saccade.exact.short.sm90 import Sm90Launch
from saccade.launch.disabled import FAILURES, disable
from saccade.native.recording import refuse


def forward(args: AttentionArgs, config: Config | None = None) -> tuple[Tensor, Tensor]:
    """out `[B, H, Tq, D]` laid out like query, lse float32 `[B, H, Tq]`."""
    query, key, value, mask, bias, lengths, seed, *_ = args
    out = empty_like_heads(query)
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    if out.numel() == 0 or key.shape[2] == 0:  # nothing to compute, or no keys
        return out.zero_(), lse.fill_(float("-inf"))
    launches, signed = launches_of(args), ("forward", aligned(args), config)
    launch = launches.get(signed) or launches.remember(signed, _plan_forward(args, out, config))
    # takes the place of absent optional tensors, which the kernel never reads
    q = query
    tensors = (
        q, key, value, q if bias is None else bias, q if mask is None else mask, q if lengths is None else lengths,
        q if seed is None else seed, out, lse,
    )  # fmt: skip
    try:
        launch(*tensors)
    except FAILURES as error:
        launches.pop(signed)
        if config is not None or not isinstance(launch, Sm90Launch):
            raise
        disable(launch.built.name, "the Triton kernel of this call", error)
        return forward(args)
    return out, lse


def backward(
    args: AttentionArgs,
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor | None,
    lse: Tensor,
    *,
    bias_grad: bool,
    packed: Tensor | None,
    config: Config | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv (views of `packed` if given) and dbias."""
    query, key, value, mask, bias, lengths, seed, *_ = args
    dq, dk, dv = (empty_like_heads(x) for x in args[:3]) if packed is None else unpack(packed)
    if query.numel() == 0 or key.numel() == 0:
        dbias = torch.zeros_like(bias) if bias is not None and bias_grad else None
        return dq.zero_(), dk.zero_(), dv.zero_(), dbias
    dout = dout if dout.stride(3) == 1 else dout.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    dlse_aligned = None if dlse is None else dlse.data_ptr() % 16 == 0
    launches, signed = launches_of(args), (aligned(args), metadata(dout), dlse_aligned, bias_grad, packed is None, config)
    plan = launches.get(signed)
    if plan is None:
        call = BackwardCall(args, dout, dlse is not None, (dq, dk, dv), bias_grad)
        plan = launches.remember(signed, _plan_backward(call, config))
    if plan.kv_share > 1:
        refuse()  # torch sums dK and dV
    dk_heads, dv_heads = (plan.per_query_head(x) for x in (dk, dv))
    q = query
    tensors = [
        q, key, value, q if bias is None else bias, q if mask is None else mask, q if lengths is None else lengths,
        q if seed is None else seed, dout, lse, q if dlse is None else dlse, dq, dk_heads, dv_heads,
    ]  # fmt: skip
    partial = None if plan.sharing is None else plan.sharing.workspace(query.device)
    try:
        plan.launch(*tensors, q if partial is None else partial)
    except FAILURES as error:
        launches.pop(signed)
        if config is not None or not isinstance(plan.launch, Sm90Launch):
            raise
        disable(plan.launch.built.name, "the Triton kernel of this call", error)
        return backward(args, dout, dlse, out, lse, bias_grad=bias_grad, packed=packed)
    if plan.kv_share > 1:
        for heads, total in ((dk_heads, dk), (dv_heads, dv)):
            total.copy_(heads.unflatten(1, (-1, plan.kv_share)).sum(dim=2))
    dbias = None if plan.sharing is None else plan.sharing.reduce(partial, bias)
    return dq, dk, dv, dbias


def _plan_forward(args: AttentionArgs, out: Tensor, config: Config | None) -> Launch | Sm90Launch:
    config = config or choose("fwd", problem_of(args), takes_tma(*args[:3]))
    return (sm90 if config.sm90 else plans_triton).plan_forward(args, out, config)


def _plan_backward(call: BackwardCall, config: Config | None) -> BackwardPlan:
    if config is None:
        config = choose("bwd", problem_of(call.args, return_lse=call.has_dlse), takes_tma(*call.args[:3], call.dout))
    if not config.sm90:
        return plans_triton.plan_backward(call, config)
    launch = sm90.plan_backward(call.args, call.dout, call.has_dlse, call.gradients, config)
    return BackwardPlan(launch, 1, None, call.args.query.shape[1])
