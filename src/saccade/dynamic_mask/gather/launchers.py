"""Launchers of the GPU kernels: they make the lists or sort the keys, choose the kernel and compute its grid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.dynamic_mask.gather.kernels import _gather_dkv_kernel, _gather_dq_kernel, _gather_fwd_kernel
from saccade.dynamic_mask.gather.sm90 import backward as backward_sm90
from saccade.dynamic_mask.gather.sm90 import forward as forward_sm90
from saccade.dynamic_mask.selection.lists import build_lists
from saccade.engine.layout import empty_like_heads
from saccade.hardware import SMALL_SHARED, arch_of
from saccade.launch.constants import LOG2E
from saccade.launch.delta import delta_of
from saccade.launch.triton import launch, pow2

# the deterministic backward groups keys whose intervals begin within the same stretch of this many positions
GRAIN = 2048


@dataclass(frozen=True)
class Config:
    """block_q: queries per program (times the heads of a group). block_n: keys at a time. forward: (warps, stages) of forward.
    warps: of backward, which holds more numbers. Triton's forward on one H200 takes 2.7 ms with (4, 3) and
    4.2 ms with (8, 2): w = 1024, n = 32,768, D = 128, four heads per group."""

    block_q: int = 32
    block_n: int = 32
    forward: tuple[int, int] = (8, 2)
    warps: int = 8


def pick(group: int, head_dim: int, element_size: int, arch: int = 90) -> Config:
    """128 rows x 128 dims of 16 bits, or a quarter of that if shared memory is small. With 4 heads, 32 queries were the fastest
    among 16, 32 and 64."""
    small = arch in SMALL_SHARED
    rows = (8192 if small else 32768) // (pow2(max(16, head_dim)) * element_size)
    rows = min(128, max(16, rows))
    block_q = max(1, rows // pow2(group))
    wide = pow2(head_dim) * element_size > 256
    return Config(
        block_q,
        16 if small or wide else 32,
        forward=(4, 3) if element_size == 2 and not small else (4, 2),
        warps=4 if rows <= 32 else 8,
    )


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_scores: Tensor | None,
    start: Tensor,
    stop: Tensor,
    max_new_keys: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """out laid out like query, lse float32 `[B, H, Tq]`."""
    if query.numel() == 0 or key.shape[2] == 0:
        out = empty_like_heads(query).zero_()
        return out, torch.full(query.shape[:3], float("-inf"), dtype=torch.float32, device=query.device)
    start, stop = start.contiguous(), stop.contiguous()
    if forward_sm90.takes(query, key, value):
        scores = None if key_scores is None else key_scores.float().contiguous()
        return forward_sm90.forward(query, key, value, scores, start, stop, max_new_keys, scale)
    out = empty_like_heads(query)
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    scores, has_scores = _scores(key_scores, lse)
    shape = _Shape.of(query, key)
    lists = build_lists(start, stop, shape.q_len, shape.config.block_q, max_new_keys)
    blocks = lists.counts.shape[1]
    tensors = (query, key, value, scores, start, stop, lists.keys, lists.counts, out, lse)
    strides = (query.stride()[:3], key.stride()[:3], value.stride()[:3], out.stride()[:3])
    sizes = (*shape.sizes, lists.keys.shape[-1], blocks, scale * LOG2E)
    warps, stages = shape.config.forward
    constants = (*shape.constants, has_scores, stages, shape.precision)
    launch(_gather_fwd_kernel, blocks * shape.owners, tensors, (*strides, *sizes, *constants), num_warps=warps)
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
    max_new_keys: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dscores); deterministic under `torch.use_deterministic_algorithms`."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    start, stop = start.contiguous(), stop.contiguous()
    some = query.numel() > 0 and key.shape[2] > 0
    if some and not deterministic and backward_sm90.takes(query, key, value):
        return backward_sm90.backward(dout, dlse, out, lse, query, key, value, key_scores, start, stop, max_new_keys, scale)
    dq = empty_like_heads(query)
    wide = key.dtype if deterministic else torch.float32
    make = torch.empty if deterministic else torch.zeros
    dk, dv = (make(x.shape, dtype=wide, device=x.device) for x in (key, value))
    dscores = make(key.shape[:3], dtype=torch.float32, device=key.device)
    if not some:
        return dq.zero_(), dk.zero_().to(key.dtype), dv.zero_().to(value.dtype), dscores.zero_()
    dout = dout if dout.stride(3) == 1 else dout.contiguous()
    delta = delta_of(dout, out, dlse)
    scores, has_scores = _scores(key_scores, lse)
    call = _Backward(
        query, key, value, scores, has_scores, start, stop, max_new_keys, scale, dout, lse, delta, dq, dk, dv, dscores
    )
    _backward_triton(call, deterministic)
    dscores = dscores if key_scores is None else dscores.to(key_scores.dtype)
    return dq, dk.to(key.dtype), dv.to(value.dtype), dscores


class _Backward(NamedTuple):
    """The tensors that the Triton kernels of backward read and write. scores: any float32 tensor if `has_scores` is not set."""

    query: Tensor
    key: Tensor
    value: Tensor
    scores: Tensor
    has_scores: bool
    start: Tensor
    stop: Tensor
    max_new_keys: int
    scale: float
    dout: Tensor
    lse: Tensor
    delta: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dscores: Tensor


def _backward_triton(call: _Backward, deterministic: bool) -> None:
    """One pass that sums dk, dv and dscores with atomics; or, if deterministic, first dq and then the others by programs that own
    keys."""
    shape = _Shape.of(call.query, call.key)
    lists = build_lists(call.start, call.stop, shape.q_len, shape.config.block_q, call.max_new_keys)
    blocks = lists.counts.shape[1]
    # written by the first kernel for the second
    anchors = (torch.empty_like(call.lse), torch.empty_like(call.lse)) if deterministic else (call.lse, call.lse)
    tensors = (
        call.query, call.key, call.value, call.scores, call.start, call.stop, lists.keys, lists.counts,
        call.dout, call.lse, call.delta, *anchors, call.dq, call.dk, call.dv, call.dscores,
    )  # fmt: skip
    numbers = (*_strides(call), call.dq.stride()[:3], *shape.sizes, lists.keys.shape[-1], blocks, call.scale)
    constants = (*shape.constants, call.has_scores, not deterministic, 1, shape.precision)
    launch(_gather_dq_kernel, blocks * shape.owners, tensors, (*numbers, *constants), num_warps=shape.config.warps)
    if deterministic:
        _gradients_of_sorted_keys(call, shape, anchors)


def _gradients_of_sorted_keys(call: _Backward, shape: _Shape, anchors: tuple[Tensor, Tensor]) -> None:
    order, spans, tiles = _sorted_keys(call.start, call.stop, shape.q_len, shape.config.block_n)
    tensors = (
        call.query, call.key, call.value, call.scores, call.start, call.stop, order, spans,
        call.dout, call.lse, call.delta, *anchors, call.dk, call.dv, call.dscores,
    )  # fmt: skip
    numbers = (*_strides(call), *shape.sizes, tiles, call.scale, *shape.constants, call.has_scores, 1, shape.precision)
    launch(_gather_dkv_kernel, tiles * shape.owners, tensors, numbers, num_warps=shape.config.warps)


def _strides(call: _Backward) -> tuple[tuple[int, ...], ...]:
    return tuple(x.stride()[:3] for x in (call.query, call.key, call.value, call.dout))


@dataclass(frozen=True)
class _Shape:
    owners: int  # batch x key heads
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    config: Config
    # GROUP, GROUP_PAD, BLOCK_Q, BLOCK_N, BLOCK_D
    constants: tuple[int, ...]
    precision: str

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.kv_heads, self.q_len, self.kv_len, self.head_dim

    @classmethod
    def of(cls, query: Tensor, key: Tensor) -> _Shape:
        batch, heads, q_len, head_dim = query.shape
        kv_heads, kv_len = key.shape[1:3]
        group = heads // kv_heads
        config = pick(group, head_dim, query.element_size(), arch_of(query.device))
        constants = (group, pow2(group), config.block_q, config.block_n, max(16, pow2(head_dim)))
        precision = "ieee" if query.dtype == torch.float32 else "tf32"
        return cls(batch * kv_heads, kv_heads, q_len, kv_len, head_dim, config, constants, precision)


def _scores(key_scores: Tensor | None, placeholder: Tensor) -> tuple[Tensor, bool]:
    # always float32, because the kernels of sm_90 read nothing else
    return (placeholder, False) if key_scores is None else (key_scores.float().contiguous(), True)


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
