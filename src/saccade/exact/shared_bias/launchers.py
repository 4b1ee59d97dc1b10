"""Launchers of the family, forward and backward: they allocate results, run the kernels and add up partial sums in order."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from saccade.engine.layout import empty_like_heads, unpack
from saccade.exact.args import AttentionArgs
from saccade.exact.shared_bias import launches
from saccade.exact.shared_bias.call import Given, SharedBiasCall, call_of, dense_last
from saccade.exact.shared_bias.config import Config


def forward(args: AttentionArgs, config: Config | None = None) -> tuple[Tensor, Tensor]:
    """out `[B, H, Tq, D]` laid out like query, lse float32 `[B, H, Tq]`."""
    args = _with_dense_rows(args)
    out = empty_like_heads(args.query)
    lse = torch.empty(args.query.shape[:3], dtype=torch.float32, device=args.query.device)
    if out.numel() == 0 or args.key.numel() == 0:
        return out.zero_(), lse.fill_(float("-inf"))
    call = call_of(args, config, False)
    launches.forward(call, call.given(args), out, lse)
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
    dq, dk, dv = (empty_like_heads(x) for x in _with_dense_rows(args)[:3]) if packed is None else unpack(packed)
    if args.query.numel() == 0 or args.key.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_(), torch.zeros_like(args.bias) if bias_grad else None
    found = rows_of(args, dout, dlse, out, lse, bias_grad=bias_grad, config=config)
    launches.keys(*found, dk, dv)
    launches.queries(*found, dq)
    return dq, dk, dv, gradient_of(found, args.bias) if bias_grad else None


class Rows(NamedTuple):
    """A call with the numbers of its queries, float32 `[3, B, H, Tq]`: the shift, inverse and terms of `rows_kernel`."""

    call: SharedBiasCall
    given: Given
    dout: Tensor
    numbers: Tensor


def rows_of(
    args: AttentionArgs,
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *,
    bias_grad: bool,
    config: Config | None = None,
    may_copy: bool = True,
) -> Rows:
    """The numbers from which backward recomputes weights, also for kernels of other families. may_copy: as of `SharedBiasCall`; the kernel of the
    numbers reads only the bias of rows with a far lse."""
    args, dout = _with_dense_rows(args), dense_last(dout)
    call = call_of(args, config, bias_grad, may_copy)
    given = call.given(args)
    return Rows(call, given, dout, launches.rows(call, given, dout, dlse, dense_last(out), lse))


def gradient_of(rows: Rows, bias: Tensor) -> Tensor:
    """The gradient in the shape and dtype of the bias."""
    return in_shape_of(bias_gradient(*rows), bias)


def bias_gradient(call: SharedBiasCall, given: Given, dout: Tensor, numbers: Tensor) -> Tensor:
    """The gradient of the bias, float32 `[W, Hb, Tq, Tk]`."""
    dbias = _sums(call, launches.bias_chunks(call))
    launches.bias(call, given, dout, numbers, dbias)
    return _total(dbias)


def _with_dense_rows(args: AttentionArgs) -> AttentionArgs:
    rows = [dense_last(x) for x in args[:3]]
    same = all(x is y for x, y in zip(rows, args[:3], strict=True))
    # copies have other strides than the prepared call holds
    return args if same else args._replace(query=rows[0], key=rows[1], value=rows[2], launches=None)


def _sums(call: SharedBiasCall, chunks: int) -> Tensor:
    """Memory for the sums of each chunk, float32 `[Z, W, Hb, Tq, Tk]`."""
    shape = (chunks, call.windows, call.bias_owners, call.q_len, call.kv_len)
    return torch.empty(shape, dtype=torch.float32, device=call.device)


def _total(dbias: Tensor) -> Tensor:
    """The sum over chunks."""
    return dbias[0] if dbias.shape[0] == 1 else dbias.sum(0)


def in_shape_of(total: Tensor, bias: Tensor) -> Tensor:
    """The gradient in the shape and dtype of the bias: summed over the queries or keys that share a number."""
    if total.shape != bias.shape:
        total = total.sum_to_size((1,) * (4 - bias.dim()) + tuple(bias.shape)).view(bias.shape)
    return total.to(bias.dtype)
