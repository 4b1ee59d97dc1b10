"""Two kernels for keys that ranks offer each other (`saccade.distributed`): rank keys by (score, position), and copy chosen rows of K, V and scores.

With torch's operations both would take some fifty launches, longer than the attention of a short stretch: 3 ms of host time, where forward takes 0.7
ms (65,536 tokens on an H100).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.launch.triton import launch, pow2

_RANKED, _COPIED = 1024, 16  # keys of a program


@triton.jit
def rank_kernel(
    scores_ptr, entries_ptr, fault_ptr, stride_part, stride_b, stride_h, stride_n, heads, part, length,
    MARK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Entry of key i = part * p + j: its score in float32 as an ordered integer above, i below. MARK: store 1 to fault where a score is not finite."""
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < length
    place = (at // part).to(tl.int64) * stride_part + (at % part).to(tl.int64) * stride_n
    base = (row // heads).to(tl.int64) * stride_b + (row % heads).to(tl.int64) * stride_h
    score = tl.load(scores_ptr + base + place, mask=inside, other=0.0).to(tl.float32)
    # -0.0 and 0.0 are equal scores, whose bits are not
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    if MARK:
        faulty = tl.max(((bits & 0x7F800000) == 0x7F800000).to(tl.int32), 0)
        # all programs that store write the same value
        tl.store(fault_ptr, tl.full((), 1, tl.int64), mask=faulty == 1)
    rank = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    entry = (rank.to(tl.int64) << 32) + at
    tl.store(entries_ptr + row.to(tl.int64) * length + at, entry, mask=inside)


@triton.jit
def _copy(source_ptr, target_ptr, source, target, inside, dim: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of `dim` numbers at offsets source to offsets target."""
    d = tl.arange(0, BLOCK_D)
    valid = inside[:, None] & (d < dim)[None, :]
    rows = tl.load(source_ptr + source[:, None] + d[None, :], mask=valid, other=0.0)  # [BLOCK, BLOCK_D]
    tl.store(target_ptr + target[:, None] + d[None, :], rows, mask=valid)


@triton.jit
def copy_kernel(
    key_ptr, value_ptr, scores_ptr, places_ptr, new_key_ptr, new_value_ptr, new_scores_ptr,
    key_strides, value_strides, score_strides, new_key_strides, new_value_strides, new_score_strides, heads, part, count,
    LISTED: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Row `places[i]` (i itself if not LISTED) of each head to row i. Strides are (part, b, h, n) of the source, (b, h, n) of the target."""
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    b, h = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    place = at.to(tl.int64)
    if LISTED:
        place = tl.load(places_ptr + row.to(tl.int64) * count + at, mask=inside, other=0)
    p, n, i = place // part, place % part, at.to(tl.int64)
    source = p * key_strides[0] + b * key_strides[1] + h * key_strides[2] + n * key_strides[3]
    target = b * new_key_strides[0] + h * new_key_strides[1] + i * new_key_strides[2]
    _copy(key_ptr, new_key_ptr, source, target, inside, KEY_DIM, BLOCK_K)
    source = p * value_strides[0] + b * value_strides[1] + h * value_strides[2] + n * value_strides[3]
    target = b * new_value_strides[0] + h * new_value_strides[1] + i * new_value_strides[2]
    _copy(value_ptr, new_value_ptr, source, target, inside, VALUE_DIM, BLOCK_V)
    source = p * score_strides[0] + b * score_strides[1] + h * score_strides[2] + n * score_strides[3]
    target = b * new_score_strides[0] + h * new_score_strides[1] + i * new_score_strides[2]
    tl.store(new_scores_ptr + target, tl.load(scores_ptr + source, mask=inside, other=0.0), mask=inside)


def rank(scores: Tensor, fault: Tensor | None) -> Tensor:
    """int64 `[B, Hkv, P * n]` of scores `[P, B, Hkv, n]`. fault: int64 of one number, which becomes 1 if a score is not finite in float32."""
    parts, batch, heads, part = scores.shape
    length = parts * part
    entries = torch.empty((batch, heads, length), dtype=torch.int64, device=scores.device)
    if not entries.numel():
        return entries
    numbers = (*scores.stride(), heads, part, length, fault is not None, _RANKED)
    programs = batch * heads, -(-length // _RANKED)
    launch(rank_kernel, programs, (scores, entries, entries if fault is None else fault), numbers, num_warps=4)
    return entries


def copy(source: tuple[Tensor, Tensor, Tensor], places: Tensor | None, target: tuple[Tensor, Tensor, Tensor]) -> None:
    """Rows of K, V and scores `[P, B, Hkv, n, ..]` at places `[B, Hkv, m]` in P * n, or the first m, to target `[B, Hkv, m, ..]`."""
    (key, value, scores), (new_key, new_value, new_scores) = source, target
    batch, heads, count = new_scores.shape
    if not new_scores.numel():
        return
    dims = key.shape[-1], value.shape[-1]
    numbers = (
        key.stride()[:4], value.stride()[:4], scores.stride(), new_key.stride()[:3], new_value.stride()[:3], new_scores.stride(), heads,
        key.shape[3], count, places is not None, *dims, *(pow2(max(1, d)) for d in dims), _COPIED,
    )  # fmt: skip
    tensors = (key, value, scores, scores if places is None else places, new_key, new_value, new_scores)
    launch(copy_kernel, (batch * heads, -(-count // _COPIED)), tensors, numbers, num_warps=4)
