"""Packed self-attention by tiles of tokens: a program takes TILE consecutive tokens of one head, whatever sequences they belong to.

`bounds_kernel` finds the sequence of each token, once for a tensor of cu_seqlens:

    bounds[:, t] = first row of the sequence of token t, the row behind its last, and its number

Forward reads keys from the start of its first token's sequence to the end of its last one's:

    S = scale Q K^T   where first[i] <= j < last[i]   -> running max and sum -> O = P V

Backward takes the pairs of its own tokens once for all gradients (five products). It takes the keys before and behind them twice: as keys of its
queries, and as queries of its keys (seven products). No sum leaves a program: there are no atomics, and results are deterministic.

    P = exp2(S - lse), delta = rowsum(dO * O) - dlse, dP = dO V^T, dS = P * (dP - delta), dQ = scale dS K, dK = scale dS^T Q, dV = P^T dO

One launch each way at any batch size and any length: neither lists nor lengths on the host. Tokens behind the last sequence have bounds
without a row between them, so their out and gradients are 0.

With a window, i - left <= j <= i + right, a tile reads the keys from `left` before its first token to `right` behind its last one. Backward reads as
far as the longer of both on either side. Work grows with the tokens times the width of the window.

A weight of 0 times a NaN is a NaN, and tokens of several sequences share a tile. So a program that finds a NaN in its results computes its
tile again, a sequence at a time: NaN of one sequence never reaches another.
Minimum traffic: q, k, v in, out and lse out; backward q, k, v, out, dout, lse in, dq, dk, dv out. Source: paper 002; the running sums after
FlashAttention-2 (Dao 2023, algorithm 1).
"""

import triton
import triton.language as tl

from saccade.exact.ragged.tiles import FULL, LN2, LOG2E
from saccade.exact.ragged.token_dropout import survived

# arguments that change from batch to batch, and a window, which is at most as wide as the tokens; without one it is never read
VARYING_TOKENS = ["total", "sequences", "steps", "words", "left", "right"]


@triton.jit(do_not_specialize=VARYING_TOKENS[:3])
def bounds_kernel(cu, bounds, total, sequences, steps, BLOCK: tl.constexpr):
    """bounds int32 `[3, total]`. steps: halvings that leave one of `sequences`; a token behind the last one keeps the end of all."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low = tl.zeros((BLOCK,), tl.int32)
    high = low + sequences
    for _ in tl.range(0, steps):
        middle = (low + high) // 2
        behind = tl.load(cu + middle + 1, mask=middle < sequences, other=2147483647) <= token
        low = tl.where(behind & (low < high), middle + 1, low)
        high = tl.where(behind, high, middle)
    real = low < sequences
    # The numbers are unchecked. Clamped, wrong ones give a wrong result and no read outside of the tensors.
    end = tl.minimum(tl.maximum(tl.load(cu + sequences), 0), total)
    first = tl.where(real, tl.load(cu + low, mask=real, other=0), end)
    last = tl.where(real, tl.load(cu + low + 1, mask=real, other=0), end)
    inside = token < total
    tl.store(bounds + token, tl.minimum(tl.maximum(first, 0), total), mask=inside)
    tl.store(bounds + total.to(tl.int64) + token, tl.minimum(tl.maximum(last, 0), total), mask=inside)
    tl.store(bounds + 2 * total.to(tl.int64) + token, low, mask=inside)


@triton.jit
def _rows(tensor, head_stride, ROW: tl.constexpr, h, rows, inside, head_dim, BLOCK_D: tl.constexpr, MASK_D: tl.constexpr):
    """(pointers, mask) of rows of a head."""
    dims = tl.arange(0, BLOCK_D)
    ptrs = tensor + h.to(tl.int64) * head_stride + rows[:, None].to(tl.int64) * ROW + dims[None, :]
    mask = inside[:, None]
    if MASK_D:
        mask &= (dims < head_dim)[None, :]
    return ptrs, mask


@triton.jit
def _load(tensor, head_stride, ROW: tl.constexpr, h, rows, inside, head_dim, BLOCK_D: tl.constexpr, MASK_D: tl.constexpr):
    ptrs, mask = _rows(tensor, head_stride, ROW, h, rows, inside, head_dim, BLOCK_D, MASK_D)
    return tl.load(ptrs, mask=mask, other=0.0)


@triton.jit
def _store(tensor, head_stride, ROW: tl.constexpr, h, rows, inside, head_dim, tile, BLOCK_D: tl.constexpr, MASK_D: tl.constexpr):
    ptrs, mask = _rows(tensor, head_stride, ROW, h, rows, inside, head_dim, BLOCK_D, MASK_D)
    tl.store(ptrs, tile.to(tensor.dtype.element_ty), mask=mask)


@triton.jit
def _group(bounds, total, begin, stop, TILE: tl.constexpr):
    """The rows `begin` to `stop - 1`: (their numbers, which exist, which belong to a sequence, bounds of each one's sequence, bounds of all keys
    that they see). Bounds are the first row and the one after the last."""
    rows = begin + tl.arange(0, TILE)
    exist = rows < stop
    first = tl.load(bounds + rows, mask=exist, other=0)
    last = tl.load(bounds + total.to(tl.int64) + rows, mask=exist, other=0)
    low = tl.load(bounds + begin)
    high = tl.load(bounds + total.to(tl.int64) + stop - 1)
    return rows, exist, exist & (first < last), first, last, low, high


@triton.jit
def _next(bounds, total, begin, stop, behind, low, found_nan, alone):
    """(begin, stop, alone) of the next group: behind this one; or the first sequence of this one, if a NaN was found among several."""
    several = found_nan & (alone == 0) & (tl.load(bounds + stop - 1) != low)
    alone = tl.where(several, 1, alone)
    begin = tl.where(several, begin, stop)
    end = tl.load(bounds + total.to(tl.int64) + tl.minimum(begin, behind - 1))
    stop = tl.where((alone == 1) & (end > begin), tl.minimum(end, behind), behind)
    return begin, stop, alone


@triton.jit
def _has_nan(tile):
    # one reduction over all axes: Triton 3.6 cannot compile a maximum of maxima for sm_100
    return tl.max((tile != tile).to(tl.int32)) != 0


@triton.jit
def _visible(rows, first, last, keys, window, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """The pairs of queries (down) and keys (across) that belong to one sequence, to a causal mask, and to a window."""
    seen = (keys[None, :] >= first[:, None]) & (keys[None, :] < last[:, None])
    if CAUSAL != FULL:
        seen &= keys[None, :] <= rows[:, None]
    if HAS_WINDOW:
        seen &= (keys[None, :] >= rows[:, None] - window[0]) & (keys[None, :] <= rows[:, None] + window[1])
    return seen


@triton.jit(do_not_specialize=VARYING_TOKENS)
def forward_tokens_kernel(
    query, key, value, bits, bounds, out, lse, total, sequences, steps, words, left, right, head_strides, head_dim, scale, dropout_p,
    ROWS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_DROPOUT: tl.constexpr, MASK_D: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """out and lse of a tile of tokens. bits, words: of `survivors_kernel`, if HAS_DROPOUT."""
    h = tl.program_id(0) % HEADS
    begin = tl.program_id(0) // HEADS * TILE
    behind = tl.minimum(begin + TILE, total)
    stop, alone = behind, 0 * behind
    while begin < behind:
        rows, exist, real, first, last, low, high = _group(bounds, total, begin, stop, TILE)
        start_of_keys, end = low, high
        if CAUSAL != FULL:
            end = tl.minimum(high, stop)
        if HAS_WINDOW:
            start_of_keys = tl.maximum(low, begin - left)
            end = tl.minimum(end, stop + right)
        q = _load(query, head_strides[0], ROWS[0], h, rows, real, head_dim, BLOCK_D, MASK_D)
        row_max = tl.full((TILE,), float("-inf"), tl.float32)
        row_sum = tl.zeros((TILE,), tl.float32)
        acc = tl.zeros((TILE, BLOCK_D), tl.float32)
        for start in tl.range(start_of_keys, end, STEP, num_stages=STAGES):
            keys = start + tl.arange(0, STEP)
            k = _load(key, head_strides[1], ROWS[1], h // GROUP, keys, keys < end, head_dim, BLOCK_D, MASK_D)
            v = _load(value, head_strides[2], ROWS[2], h // GROUP, keys, keys < end, head_dim, BLOCK_D, MASK_D)
            # S = scale Q K^T, in base 2
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2E)
            seen = _visible(rows, first, last, keys, (left, right), CAUSAL, HAS_WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(scores, 1))
            # a query that has seen no key yet: -inf - -inf would be NaN
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
            weights = tl.exp2(scores - shift[:, None])
            rescale = tl.exp2(row_max - shift)
            row_sum = row_sum * rescale + tl.sum(weights, 1)
            if HAS_DROPOUT:
                kept = survived(bits, (h, total, words), rows, real, (first, start), left, STEP, False, HAS_WINDOW)
                weights = tl.where(kept, weights / (1.0 - dropout_p), 0.0)
            acc = tl.dot(weights.to(q.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
            row_max = new_max
        acc *= tl.where(row_sum == 0.0, 0.0, 1.0 / row_sum)[:, None]
        _store(out, head_strides[3], ROWS[3], h, rows, exist, head_dim, acc, BLOCK_D, MASK_D)
        log_sum = tl.where(row_sum == 0.0, float("-inf"), (row_max + tl.log2(row_sum)) * LN2)
        tl.store(lse + h.to(tl.int64) * total + rows, log_sum, mask=exist)
        begin, stop, alone = _next(bounds, total, begin, stop, behind, low, _has_nan(acc), alone)


@triton.jit
def _side(
    tiles, numbers, gradients, tensors, strides, where, span, SHAPE: tl.constexpr, HAS: tl.constexpr, PRECISION: tl.constexpr
):
    """The gradients of a tile from the tokens `start` to `end` beside it: as keys of its queries, and as queries of its keys."""
    q, do, k, v = tiles
    shift, delta, factor, head_dim = numbers
    dq, dk, dv = gradients
    window, start, end = span
    ROWS: tl.constexpr = SHAPE[0]
    STEP: tl.constexpr = SHAPE[1]
    BLOCK_D: tl.constexpr = SHAPE[2]
    CAUSAL: tl.constexpr = HAS[0]
    HAS_WINDOW: tl.constexpr = HAS[1]
    HAS_DROPOUT: tl.constexpr = HAS[2]
    HAS_DLSE: tl.constexpr = HAS[3]
    AS_KEYS: tl.constexpr = HAS[4]
    AS_QUERIES: tl.constexpr = HAS[5]
    MASK_D: tl.constexpr = HAS[6]
    query, key, value, dout, _, _, _ = tensors
    rows, first, last, h, owner, total, begin, bounds, bits, words, dropout_p = where
    TILE: tl.constexpr = rows.shape[0]
    for at in tl.range(start, end, STEP, num_stages=1):
        others = at + tl.arange(0, STEP)
        exist = others < end
        if AS_KEYS:
            k2 = _load(key, strides[1], ROWS[1], owner, others, exist, head_dim, BLOCK_D, MASK_D)
            v2 = _load(value, strides[2], ROWS[2], owner, others, exist, head_dim, BLOCK_D, MASK_D)
            seen = _visible(rows, first, last, others, window, CAUSAL, HAS_WINDOW) & exist[None, :]
            weights = tl.where(seen, tl.exp2(tl.dot(q, tl.trans(k2), input_precision=PRECISION) * factor - shift[:, None]), 0.0)
            dweights = tl.dot(do, tl.trans(v2), input_precision=PRECISION)
            if HAS_DROPOUT:
                kept = survived(bits, (h, total, words), rows, first < last, (first, at), window[0], STEP, False, HAS_WINDOW)
                dweights = tl.where(kept, dweights / (1.0 - dropout_p), 0.0)
            dscores = weights * (dweights - delta[:, None])
            dq = tl.dot(dscores.to(q.dtype), k2, dq, input_precision=PRECISION)
        if AS_QUERIES:
            q2 = _load(query, strides[0], ROWS[0], h, others, exist, head_dim, BLOCK_D, MASK_D)
            do2 = _load(dout, strides[3], ROWS[3], h, others, exist, head_dim, BLOCK_D, MASK_D)
            shift2, delta2 = _row_numbers(
                tensors, strides, ROWS, (h, others, exist, total, head_dim), do2, BLOCK_D, HAS_DLSE, MASK_D
            )
            # both tokens have one sequence; keys down, queries across
            seen = (others[None, :] >= first[:, None]) & (others[None, :] < last[:, None]) & exist[None, :]
            if CAUSAL != FULL:
                seen &= rows[:, None] <= others[None, :]
            if HAS_WINDOW:
                seen &= (rows[:, None] >= others[None, :] - window[0]) & (rows[:, None] <= others[None, :] + window[1])
            weights = tl.where(seen, tl.exp2(tl.dot(k, tl.trans(q2), input_precision=PRECISION) * factor - shift2[None, :]), 0.0)
            dweights = tl.dot(v, tl.trans(do2), input_precision=PRECISION)
            dropped = weights
            if HAS_DROPOUT:
                begins = tl.load(bounds + others, mask=exist, other=0)
                kept = survived(bits, (h, total, words), others, exist, (begins, begin), window[0], TILE, True, HAS_WINDOW)
                dropped = tl.where(kept, weights / (1.0 - dropout_p), 0.0)
                dweights = tl.where(kept, dweights / (1.0 - dropout_p), 0.0)
            dv = tl.dot(dropped.to(q.dtype), do2, dv, input_precision=PRECISION)
            dscores = weights * (dweights - delta2[None, :])
            dk = tl.dot(dscores.to(q.dtype), q2, dk, input_precision=PRECISION)
    return dq, dk, dv


@triton.jit
def _row_numbers(
    tensors, strides, ROWS: tl.constexpr, where, do, BLOCK_D: tl.constexpr, HAS_DLSE: tl.constexpr, MASK_D: tl.constexpr
):
    """(lse in base 2, delta) of rows; +inf for a row without a key, so that its weights are 0 and not NaN."""
    h, rows, inside, total, head_dim = where
    _, _, _, _, out, lse, dlse = tensors
    place = h.to(tl.int64) * total + rows
    log_sum = tl.load(lse + place, mask=inside, other=float("-inf"))
    o = _load(out, strides[4], ROWS[4], h, rows, inside, head_dim, BLOCK_D, MASK_D)
    delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
    if HAS_DLSE:
        delta -= tl.load(dlse + place, mask=inside, other=0.0)
    return tl.where(log_sum == float("-inf"), float("inf"), log_sum * LOG2E), delta


@triton.jit(do_not_specialize=VARYING_TOKENS)
def backward_tokens_kernel(
    query, key, value, bits, bounds, dout, out, lse, dlse, dquery, dkey, dvalue, total, sequences, steps, words, left, right,
    head_strides, head_dim, scale, dropout_p, ROWS: tl.constexpr, OWNERS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
    STEP: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    HAS_DLSE: tl.constexpr, MASK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Every gradient of a tile of tokens, for a key head and the query heads of its group."""
    owner = tl.program_id(0) % OWNERS
    begin = tl.program_id(0) // OWNERS * TILE
    behind = tl.minimum(begin + TILE, total)
    stop, alone = behind, 0 * behind
    tensors, factor = (query, key, value, dout, out, lse, dlse), scale * LOG2E
    while begin < behind:
        rows, exist, real, first, last, low, high = _group(bounds, total, begin, stop, TILE)
        start_of_others, end_of_others = low, high
        if HAS_WINDOW:
            # keys of these queries, and queries of these keys
            reach = tl.maximum(left, right)
            start_of_others = tl.maximum(low, begin - reach)
            end_of_others = tl.minimum(high, stop + reach)
        k = _load(key, head_strides[1], ROWS[1], owner, rows, real, head_dim, BLOCK_D, MASK_D)
        v = _load(value, head_strides[2], ROWS[2], owner, rows, real, head_dim, BLOCK_D, MASK_D)
        dk = tl.zeros((TILE, BLOCK_D), tl.float32)
        dv = tl.zeros((TILE, BLOCK_D), tl.float32)
        found_nan = alone != alone
        for member in tl.static_range(GROUP):
            h = owner * GROUP + member
            q = _load(query, head_strides[0], ROWS[0], h, rows, real, head_dim, BLOCK_D, MASK_D)
            do = _load(dout, head_strides[3], ROWS[3], h, rows, real, head_dim, BLOCK_D, MASK_D)
            shift, delta = _row_numbers(
                tensors, head_strides, ROWS, (h, rows, real, total, head_dim), do, BLOCK_D, HAS_DLSE, MASK_D
            )
            # the pairs of the tile itself: S = scale Q K^T, dV = P^T dO, dP = dO V^T, dQ = dS K, dK = dS^T Q
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * factor
            seen = _visible(rows, first, last, rows, (left, right), CAUSAL, HAS_WINDOW)
            weights = tl.where(seen, tl.exp2(scores - shift[:, None]), 0.0)
            dweights = tl.dot(do, tl.trans(v), input_precision=PRECISION)
            dropped = weights
            if HAS_DROPOUT:
                kept = survived(bits, (h, total, words), rows, real, (first, begin), left, TILE, False, HAS_WINDOW)
                dropped = tl.where(kept, weights / (1.0 - dropout_p), 0.0)
                dweights = tl.where(kept, dweights / (1.0 - dropout_p), 0.0)
            dv = tl.dot(tl.trans(dropped.to(q.dtype)), do, dv, input_precision=PRECISION)
            dscores = weights * (dweights - delta[:, None])
            rounded = dscores.to(q.dtype)
            dk = tl.dot(tl.trans(rounded), q, dk, input_precision=PRECISION)
            dq = tl.dot(rounded, k, input_precision=PRECISION)
            where = (rows, first, last, h, owner, total, begin, bounds, bits, words, dropout_p)
            # Tokens before the tile, and behind it: of the first and of the last sequence that reaches beyond it. A tile behind the last sequence has
            # none, though `low` lies before it.
            dq, dk, dv = _side(
                (q, do, k, v), (shift, delta, factor, head_dim), (dq, dk, dv), tensors, head_strides, where,
                ((left, right), start_of_others, tl.minimum(begin, high)), (ROWS, STEP, BLOCK_D),
                (CAUSAL, HAS_WINDOW, HAS_DROPOUT, HAS_DLSE, True, CAUSAL == FULL, MASK_D), PRECISION,
            )  # fmt: skip
            dq, dk, dv = _side(
                (q, do, k, v), (shift, delta, factor, head_dim), (dq, dk, dv), tensors, head_strides, where,
                ((left, right), stop, end_of_others), (ROWS, STEP, BLOCK_D),
                (CAUSAL, HAS_WINDOW, HAS_DROPOUT, HAS_DLSE, CAUSAL == FULL, True, MASK_D), PRECISION,
            )  # fmt: skip
            _store(dquery, head_strides[5], ROWS[5], h, rows, exist, head_dim, dq * scale, BLOCK_D, MASK_D)
            found_nan |= _has_nan(dq)
        _store(dkey, head_strides[6], ROWS[6], owner, rows, exist, head_dim, dk * scale, BLOCK_D, MASK_D)
        _store(dvalue, head_strides[7], ROWS[7], owner, rows, exist, head_dim, dv, BLOCK_D, MASK_D)
        found_nan |= _has_nan(dk) | _has_nan(dv)
        begin, stop, alone = _next(bounds, total, begin, stop, behind, low, found_nan, alone)
