"""The kernels of paper 002, written anew from its page: forward after its listing, backward after its one sentence ("recalculate scores using lse,
calculate whole sequence in one go"). A program has a whole sequence of one head. They are a peer in `short_full`; the paper's own times are in
`benchmarks/paper`, of its own H100.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources


@triton.jit
def _rows(base, stride, length, dim, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr):
    """A whole sequence `[BLOCK_S, BLOCK_D]`, zeros beyond it."""
    s, d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    return tl.load(base + s[:, None] * stride + d[None, :], mask=(s < length)[:, None] & (d < dim)[None, :], other=0.0)


@triton.jit
def _store(base, stride, length, dim, rows, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr):
    s, d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    inside = (s < length)[:, None] & (d < dim)[None, :]
    tl.store(base + s[:, None] * stride + d[None, :], rows.to(base.dtype.element_ty), mask=inside)


@triton.jit
def forward_kernel(
    query, key, value, out, lse, strides, out_strides, heads, length, dim, scale, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """S = scale Q K^T, lse = log sum exp S, O = exp(S - lse) V"""
    b, h = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    at, seen = b * strides[0] + h * strides[1], tl.arange(0, BLOCK_S) < length
    q = _rows(query + at, strides[2], length, dim, BLOCK_S, BLOCK_D)
    k = _rows(key + at, strides[2], length, dim, BLOCK_S, BLOCK_D)
    v = _rows(value + at, strides[2], length, dim, BLOCK_S, BLOCK_D)
    scores = tl.where(seen[None, :], tl.dot(q, tl.trans(k)) * scale, float("-inf"))
    most = tl.max(scores, 1)
    weights = tl.exp(scores - most[:, None])
    total = tl.sum(weights, 1)
    rows = tl.dot((weights / total[:, None]).to(q.dtype), v)
    _store(out + b * out_strides[0] + h * out_strides[1], out_strides[2], length, dim, rows, BLOCK_S, BLOCK_D)
    tl.store(lse + (b * heads + h) * length + tl.arange(0, BLOCK_S), tl.log(total) + most, mask=seen)


@triton.jit
def backward_kernel(
    query, key, value, dout, out, lse, dquery, dkey, dvalue, strides, out_strides, grad_strides, heads, length, dim, scale,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """P = exp(S - lse), dV = P^T dO, dS = P * (dO V^T - rowsum(dO * O)), dQ = scale dS K, dK = scale dS^T Q"""
    b, h = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    at, to = b * strides[0] + h * strides[1], b * grad_strides[0] + h * grad_strides[1]
    of_out, seen = b * out_strides[0] + h * out_strides[1], tl.arange(0, BLOCK_S) < length
    q = _rows(query + at, strides[2], length, dim, BLOCK_S, BLOCK_D)
    k = _rows(key + at, strides[2], length, dim, BLOCK_S, BLOCK_D)
    v = _rows(value + at, strides[2], length, dim, BLOCK_S, BLOCK_D)
    do = _rows(dout + of_out, out_strides[2], length, dim, BLOCK_S, BLOCK_D)
    o = _rows(out + of_out, out_strides[2], length, dim, BLOCK_S, BLOCK_D)
    sums = tl.load(lse + (b * heads + h) * length + tl.arange(0, BLOCK_S), mask=seen, other=float("inf"))
    delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
    weights = tl.where(seen[None, :], tl.exp(tl.dot(q, tl.trans(k)) * scale - sums[:, None]), 0.0)
    _store(dvalue + to, grad_strides[2], length, dim, tl.dot(tl.trans(weights.to(do.dtype)), do), BLOCK_S, BLOCK_D)
    ds = (weights * (tl.dot(do, tl.trans(v)) - delta[:, None]) * scale).to(q.dtype)
    _store(dquery + to, grad_strides[2], length, dim, tl.dot(ds, k), BLOCK_S, BLOCK_D)
    _store(dkey + to, grad_strides[2], length, dim, tl.dot(tl.trans(ds), q), BLOCK_S, BLOCK_D)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        assert query.stride() == key.stride() == value.stride()
        assert query.stride(3) == 1
        batch, heads, length, dim = query.shape
        out = torch.empty(batch, length, heads, dim, dtype=query.dtype, device=query.device).transpose(1, 2)
        lse = torch.empty(batch, heads, length, dtype=torch.float32, device=query.device)
        numbers = query.stride()[:3], out.stride()[:3], heads, length, dim, dim**-0.5
        forward_kernel[(batch, heads)](query, key, value, out, lse, *numbers, **_blocks(query))
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, out, lse = ctx.saved_tensors
        batch, heads, length, dim = query.shape
        # one packed gradient, as the paper has one of QKV
        packed = torch.empty(batch, length, 3, heads, dim, dtype=query.dtype, device=query.device)
        dq, dk, dv = packed.permute(2, 0, 3, 1, 4).unbind(0)
        dout = dout if dout.stride() == out.stride() else torch.empty_like(out).copy_(dout)
        numbers = query.stride()[:3], out.stride()[:3], dq.stride()[:3], heads, length, dim, dim**-0.5
        try:
            backward_kernel[(batch, heads)](query, key, value, dout, out, lse, dq, dk, dv, *numbers, **_blocks(query))
        except OutOfResources as error:  # the listing holds whole sequences: 288 KiB at 128 tokens of D = 256
            raise ValueError(f"the paper's backward does not hold {length} tokens of D = {dim}: {error}") from error
        return dq, dk, dv


def _blocks(query: Tensor) -> dict[str, int]:
    return {
        "BLOCK_S": max(16, triton.next_power_of_2(query.shape[2])),
        "BLOCK_D": max(16, triton.next_power_of_2(query.shape[3])),
    }


def paper_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """out `[B, H, T, D]` of query, key and value that lie alike, for short T: a program holds whole sequences."""
    found: Tensor = _Attention.apply(query, key, value)  # type: ignore[no-untyped-call]
    return found
