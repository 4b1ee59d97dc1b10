"""Launchers of the family, forward and backward: they allocate results, run the kernels and add up partial sums in order."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.engine.layout import empty_like_heads, unpack
from saccade.exact.args import AttentionArgs
from saccade.exact.shared_bias import launches
from saccade.exact.shared_bias.call import Call, dense_last
from saccade.exact.shared_bias.config import Config


def forward(args: AttentionArgs, config: Config | None = None) -> tuple[Tensor, Tensor]:
    """out `[B, H, Tq, D]` laid out like query, lse float32 `[B, H, Tq]`."""
    args = _with_dense_rows(args)
    out = empty_like_heads(args.query)
    lse = torch.empty(args.query.shape[:3], dtype=torch.float32, device=args.query.device)
    if out.numel() == 0 or args.key.numel() == 0:
        return out.zero_(), lse.fill_(float("-inf"))
    launches.forward(Call(args, config), out, lse)
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
    assert out is not None, "the backend saves out"
    assert args.bias is not None, "the backend takes calls with a bias"
    bias, args = args.bias, _with_dense_rows(args)
    dq, dk, dv = (empty_like_heads(x) for x in args[:3]) if packed is None else unpack(packed)
    if args.query.numel() == 0 or args.key.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_(), torch.zeros_like(bias) if bias_grad else None
    call, dout = Call(args, config, bias_grad), dense_last(dout)
    numbers = launches.rows(call, dout, dlse, dense_last(out), lse)
    launches.keys(call, dout, numbers, dk, dv)
    if bias_grad and call.config.joined is not None:
        return dq, dk, dv, _of_shape(_joined(call, dout, numbers, dq), bias)
    launches.queries(call, dout, numbers, dq)
    dbias = None
    if bias_grad:
        dbias = _sums(call, launches.bias_chunks(call))
        launches.bias(call, dout, numbers, dbias)
    return dq, dk, dv, None if dbias is None else _of_shape(dbias, bias)


def _with_dense_rows(args: AttentionArgs) -> AttentionArgs:
    return args._replace(query=dense_last(args.query), key=dense_last(args.key), value=dense_last(args.value))


def _sums(call: Call, chunks: int) -> Tensor:
    """Memory for the sums of each chunk, float32 `[Z, W, Hb, Tq, Tk]`."""
    shape = (chunks, call.windows, call.bias_owners, call.q_len, call.kv_len)
    return torch.empty(shape, dtype=torch.float32, device=call.query.device)


def _joined(call: Call, dout: Tensor, numbers: Tensor, dq: Tensor) -> Tensor:
    sections = launches.sections(call)
    dbias = _sums(call, launches.joined_chunks(call))
    if sections == 1:
        launches.joined(call, dout, numbers, dq, 0, dbias)
        return dbias
    parts = torch.empty((sections, *dq.shape), dtype=torch.float32, device=dq.device)
    launches.joined(call, dout, numbers, parts[0], parts.stride(0), dbias)
    dq.copy_(parts.sum(0))
    return dbias


def _of_shape(dbias: Tensor, bias: Tensor) -> Tensor:
    """The gradient in the shape and dtype of the bias: first the sum over chunks, then over the queries or keys that share a number."""
    total = dbias[0] if dbias.shape[0] == 1 else dbias.sum(0)
    shape = (1,) * (4 - bias.dim()) + tuple(bias.shape)
    return total.sum_to_size(shape).view(bias.shape).to(bias.dtype)
