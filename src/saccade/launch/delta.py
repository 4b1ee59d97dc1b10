"""The row sums that several backward passes need before their products: `delta = rowsum(dout * out) - dlse`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.launch.triton import launch, pow2
from saccade.recorder import ACTIVE

# queries of a program: 64 x 256 values of dout and of out would not fit the registers of four warps
_ROWS = 32


def delta_of(dout: Tensor, out: Tensor, dlse: Tensor | None) -> Tensor:
    """rowsum(dout * out) - dlse, float32 `[B, H, Tq]`."""
    batch, heads, q_len, head_dim = out.shape
    delta = torch.empty(batch, heads, q_len, dtype=torch.float32, device=out.device)
    if ACTIVE.recorder is not None:
        ACTIVE.recorder.note_scratch(delta, 0)
    tensors = (dout, out, delta if dlse is None else dlse.contiguous(), delta)
    numbers = (dout.stride()[:3], out.stride()[:3], heads, q_len, head_dim, _ROWS, max(16, pow2(head_dim)), dlse is not None)
    launch(_delta_kernel, batch * heads * -(-q_len // _ROWS), tensors, numbers)
    return delta


@triton.jit
def _load_rows(tensor, strides, b, h, rows, dims, inside):
    """`[BLOCK_Q, BLOCK_D]` rows of `[B, H, T, D]` at (b, h) as float32, 0 outside; 64-bit offsets."""
    ptrs = tensor + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]
    ptrs += rows.to(tl.int64)[:, None] * strides[2] + dims[None, :]
    return tl.load(ptrs, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _delta_kernel(
    dout, out, dlse, delta, dout_strides, out_strides, heads, q_len, head_dim,
    BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr, HAS_DLSE: tl.constexpr,
):  # fmt: skip
    """One program computes BLOCK_Q rows of one head."""
    blocks = tl.cdiv(q_len, BLOCK_Q)
    problem = tl.program_id(0) // blocks
    b, h = problem // heads, problem % heads
    queries = tl.program_id(0) % blocks * BLOCK_Q + tl.arange(0, BLOCK_Q)
    dims = tl.arange(0, BLOCK_D)
    inside = (queries < q_len)[:, None] & (dims < head_dim)[None, :]
    do = _load_rows(dout, dout_strides, b, h, queries, dims, inside)
    o = _load_rows(out, out_strides, b, h, queries, dims, inside)
    sums = tl.sum(do * o, 1)
    rows = problem.to(tl.int64) * q_len + queries
    if HAS_DLSE:
        sums -= tl.load(dlse + rows, mask=queries < q_len, other=0.0)
    tl.store(delta + rows, sums, mask=queries < q_len)
