"""Launchers of the Triton kernels: lists, sorted keys, grids."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.kernels.dynamic_mask.gather import _gather_dkv_kernel, _gather_dq_kernel, _gather_fwd_kernel
from saccade.ops import empty_like_heads
from saccade.selection import block_lists

_LOG2E = 1.4426950408889634
# keys whose intervals begin in the same stretch of this many positions are sorted together for the deterministic backward
GRAIN = 2048


@dataclass(frozen=True)
class Config:
    """block_q: queries of a program (times the heads of a group). block_n: keys at a time. From prototypes on one H200."""

    block_q: int = 32
    block_n: int = 32
    warps: int = 8
    stages: int = 2


def pick(group: int, head_dim: int) -> Config:
    """32 queries x 4 heads were best of 16, 32 and 64 at D = 128 (a prototype); other groups keep 128 rows."""
    rows = 128 if head_dim <= 128 else 64
    return Config(block_q=max(16, rows // _pow2(group)) if group < 8 else max(2, rows // _pow2(group)))


def forward(
    query: Tensor, key: Tensor, value: Tensor, key_scores: Tensor | None, start: Tensor, stop: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """out laid out like query, lse float32 `[B, H, Tq]`."""
    out = empty_like_heads(query)
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    if out.numel() == 0 or key.shape[2] == 0:
        return out.zero_(), lse.fill_(float("-inf"))
    shape = _Shape.of(query, key)
    keys, count, blocks = _lists(start, stop, query.shape[2], shape.config.block_q)
    scores, has_scores = _scores(key_scores, lse)
    _gather_fwd_kernel[(blocks * shape.owners,)](
        query, key, value, scores, start.contiguous(), stop.contiguous(), keys, count, out, lse,
        query.stride()[:3], key.stride()[:3], value.stride()[:3], out.stride()[:3],
        shape.kv_heads, shape.q_len, shape.kv_len, shape.head_dim, keys.shape[-1], blocks, scale * _LOG2E,
        *shape.constants, has_scores, shape.config.stages, shape.precision, num_warps=shape.config.warps,
    )  # fmt: skip
    return out, lse


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_scores: Tensor | None,
    start: Tensor,
    stop: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dscores); deterministic under `torch.use_deterministic_algorithms`."""
    dq = empty_like_heads(query)
    deterministic = torch.are_deterministic_algorithms_enabled()
    wide = key.dtype if deterministic else torch.float32
    make = torch.empty if deterministic else torch.zeros
    dk, dv = (make(x.shape, dtype=wide, device=x.device) for x in (key, value))
    dscores = make(key.shape[:3], dtype=torch.float32, device=key.device)
    if query.numel() == 0 or key.shape[2] == 0:
        return dq.zero_(), dk.zero_().to(key.dtype), dv.zero_().to(value.dtype), dscores.zero_()
    dout = dout if dout.stride(3) == 1 else dout.contiguous()
    delta = (dout.float() * out.float()).sum(-1)
    if dlse is not None:
        delta = delta - dlse
    shape = _Shape.of(query, key)
    keys, count, blocks = _lists(start, stop, query.shape[2], shape.config.block_q)
    scores, has_scores = _scores(key_scores, lse)
    start, stop = start.contiguous(), stop.contiguous()
    strides = (query.stride()[:3], key.stride()[:3], value.stride()[:3], dout.stride()[:3])
    sizes = (shape.kv_heads, shape.q_len, shape.kv_len, shape.head_dim)
    _gather_dq_kernel[(blocks * shape.owners,)](
        query, key, value, scores, start, stop, keys, count, dout, lse, delta.contiguous(), dq, dk, dv, dscores,
        *strides, dq.stride()[:3], *sizes, keys.shape[-1], blocks, scale,
        *shape.constants, has_scores, not deterministic, 1, shape.precision, num_warps=shape.config.warps,
    )  # fmt: skip
    if deterministic:
        order, spans, tiles = _sorted_keys(start, stop, shape.q_len, shape.config.block_n)
        _gather_dkv_kernel[(tiles * shape.owners,)](
            query, key, value, scores, start, stop, order, spans, dout, lse, delta.contiguous(), dk, dv, dscores,
            *strides, *sizes, tiles, scale, *shape.constants, has_scores, 1, shape.precision, num_warps=shape.config.warps,
        )  # fmt: skip
    dscores = dscores if key_scores is None else dscores.to(key_scores.dtype)
    return dq, dk.to(key.dtype), dv.to(value.dtype), dscores


@dataclass(frozen=True)
class _Shape:
    owners: int  # batch x key heads
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    config: Config
    constants: tuple[int, ...]  # GROUP, GROUP_PAD, BLOCK_Q, BLOCK_N, BLOCK_D
    precision: str

    @classmethod
    def of(cls, query: Tensor, key: Tensor) -> _Shape:
        batch, heads, q_len, head_dim = query.shape
        kv_heads, kv_len = key.shape[1:3]
        group = heads // kv_heads
        config = pick(group, head_dim)
        constants = (group, _pow2(group), config.block_q, config.block_n, max(16, _pow2(head_dim)))
        precision = "ieee" if query.dtype == torch.float32 else "tf32"
        return cls(batch * kv_heads, kv_heads, q_len, kv_len, head_dim, config, constants, precision)


def _lists(start: Tensor, stop: Tensor, q_len: int, block: int) -> tuple[Tensor, Tensor, int]:
    keys, count, _ = block_lists(start, stop, q_len, block)
    return keys.to(torch.int32), count.to(torch.int32), keys.shape[2]


def _scores(key_scores: Tensor | None, placeholder: Tensor) -> tuple[Tensor, bool]:
    return (placeholder, False) if key_scores is None else (key_scores.contiguous(), True)


def _sorted_keys(start: Tensor, stop: Tensor, q_len: int, block: int) -> tuple[Tensor, Tensor, int]:
    """(order `[B, Hkv, Tk]`, spans `[B, Hkv, tiles, 2]` in queries, tiles): keys by coarse start, then stop; unseen ones last."""
    batch, heads, kv_len = start.shape
    base = kv_len - q_len
    low = (start.long() - base).clamp(min=0)
    high = stop.long() - base
    seen = high > low
    rank = torch.where(seen, (low // GRAIN) * (4 * (q_len + kv_len)) + high, torch.iinfo(torch.int64).max)
    order = torch.argsort(rank, dim=-1, stable=True)
    tiles = -(-kv_len // block)
    missing = tiles * block - kv_len
    ordered = [torch.where(seen, low, q_len).gather(2, order), torch.where(seen, high, 0).gather(2, order)]
    first = torch.nn.functional.pad(ordered[0], (0, missing), value=q_len).view(batch, heads, tiles, block).amin(-1)
    last = torch.nn.functional.pad(ordered[1], (0, missing)).view(batch, heads, tiles, block).amax(-1)
    return order.to(torch.int32), torch.stack((first, last), -1).to(torch.int32).contiguous(), tiles


def _pow2(n: int) -> int:
    return 1 << (n - 1).bit_length() if n > 1 else 1
