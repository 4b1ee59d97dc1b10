"""The kernels of `dynamic_mask_scores`. They import Triton, so their launchers import this module late.

Both are bound by memory: the products of a value with Hkv heads take far less time than its bytes. Forward reads each value once. Backward reads
it once and writes its gradient once. Backward does not recompute a product z, which would take a pass over whole rows before the first gradient.
Instead forward saves the derivatives of the scores: 8 * Hkv bytes a token, whose values have 2 * Hkv * D. It saves them and not z, because each
chunk of a row needs them. Exponentials for each chunk would take a quarter of the time of the bytes (computed from instruction counts, not measured).
"""

import triton
import triton.language as tl

_LOG2E = tl.constexpr(1.4426950408889634)
_LOG2E_REST = tl.constexpr(1.925963033500981e-8)  # of log2(e) beyond float32
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _exp(x):
    """exp(x) to within two roundings; the hardware's exp2 of x log2(e) has |x| of them from its argument."""
    # beyond these bounds the result is 0 or inf; inf - inf would be NaN. A NaN passes both comparisons
    x = tl.where(x < -200.0, -200.0, x)
    x = tl.where(x > 200.0, 200.0, x)
    power = x * _LOG2E
    rest = tl.fma(x, tl.full(x.shape, _LOG2E, tl.float32), -power) + x * _LOG2E_REST
    return tl.exp2(power) * (1.0 + rest * _LN2)


@triton.jit
def _softplus(z):
    """(softplus(z), sigmoid(z)), softplus to the same relative error at any z.

    Small values of it rank keys too, so log(1 + u) is taken as 2 atanh(u / (2 + u)), by a series: 1 + u has lost the digits of a small u.
    Beyond z = 20, where torch returns z, both add less than a rounding to it.
    """
    u = _exp(-tl.abs(z))
    r = u / (2.0 + u)  # at most 1/3
    square = r * r
    series = 1.0 / 15.0
    series = series * square + 1.0 / 13.0
    series = series * square + 1.0 / 11.0
    series = series * square + 1.0 / 9.0
    series = series * square + 1.0 / 7.0
    series = series * square + 1.0 / 5.0
    series = series * square + 1.0 / 3.0
    series = series * square + 1.0
    steps = tl.maximum(z, 0.0) + 2.0 * r * series
    return steps, tl.where(z >= 0.0, 1.0, u) / (1.0 + u)


@triton.jit(do_not_specialize=["tokens", "tiles"])
def scores_kernel(
    values, weight, factors, bias, scores, derivatives, tokens, tiles, stride_b, stride_s, stride_g,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, EXP: tl.constexpr, HAS_BIAS: tl.constexpr, SAVE: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """scores `[B, HEADS, S]` of values `[B, S, GROUPS, WIDTH]`, and derivatives `[2, B, HEADS, S]` of them, by z and by A (here factors).

    A program owns BLOCK_S tokens of a batch row; `tiles` programs share a row.
    """
    row = (tl.program_id(0) // tiles).to(tl.int64)
    s = (tl.program_id(0) % tiles) * BLOCK_S + tl.arange(0, BLOCK_S)
    h, e = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_E)
    lines = values + row * stride_b + s.to(tl.int64)[:, None] * stride_s + e[None, :]
    columns = weight + h[None, :] * (GROUPS * WIDTH) + e[:, None]
    CHUNKS: tl.constexpr = (WIDTH + BLOCK_E - 1) // BLOCK_E
    z = tl.zeros((BLOCK_S, BLOCK_H), tl.float32)
    for chunk in tl.range(0, GROUPS * CHUNKS, num_stages=STAGES):
        group, start = chunk // CHUNKS, (chunk % CHUNKS) * BLOCK_E
        inside = start + e < WIDTH
        # [BLOCK_S, BLOCK_E] and [BLOCK_E, BLOCK_H]
        x = tl.load(lines + tl.cast(group, tl.int64) * stride_g + start, mask=(s < tokens)[:, None] & inside[None, :], other=0.0)
        w = tl.load(columns + group * WIDTH + start, mask=inside[:, None] & (h < HEADS)[None, :], other=0.0)
        z = tl.dot(x, w, z, input_precision="ieee")
    if HAS_BIAS:
        z += tl.load(bias + h, mask=h < HEADS, other=0.0).to(tl.float32)[None, :]
    steps, rise = _softplus(z)
    factor = tl.load(factors + h, mask=h < HEADS, other=0.0).to(tl.float32)[None, :]
    found, by_factor = factor * steps, steps
    by_z = factor * rise
    if EXP:
        found = _exp(found)
        by_z, by_factor = by_z * found, by_factor * found
    place = (row * HEADS + h.to(tl.int64)[None, :]) * tokens + s[:, None]
    real = (s < tokens)[:, None] & (h < HEADS)[None, :]
    tl.store(scores + place, found, mask=real)
    if SAVE:
        tl.store(derivatives + place, by_z, mask=real)
        tl.store(derivatives + place + (tl.num_programs(0) // tiles).to(tl.int64) * HEADS * tokens, by_factor, mask=real)


@triton.jit
def _narrowed(dz, x):
    """(dz in the dtype of x, the factor that was divided out of it)."""
    if x.dtype == tl.float16:
        # gradients are often smaller than float16's numbers; by a power of two, so that the largest of a tile lies at 2^15.
        # An infinite one is left out, since the factor of its tile would make all others NaN.
        size = tl.abs(dz)
        peak = tl.max(tl.max(tl.where(size < float("inf"), size, 0.0), 1), 0)
        power = (peak.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        factor = tl.maximum(power, 1e-30) * 0.000030517578125
        return (dz / factor).to(x.dtype), factor
    return dz.to(x.dtype), 1.0


@triton.jit(do_not_specialize=["tokens", "tiles", "all_tiles", "own_tiles"])
def scores_gradient_kernel(
    dscores, derivatives, values, weight, dvalues, dweight, sums, tokens, tiles, all_tiles, own_tiles,
    stride_b, stride_s, stride_g, gradient_b, gradient_s, gradient_g,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dvalues, and the parts of one range of tokens in dweight `[ranges, HEADS, E]` and sums `[ranges, 2, HEADS]`, of A and of bias.

    A program owns a chunk of E and `own_tiles` tiles of BLOCK_S tokens, which it takes in order; so sums are the same in every run.
    """
    CHUNKS: tl.constexpr = (WIDTH + BLOCK_E - 1) // BLOCK_E
    part, chunk = tl.program_id(0) // (GROUPS * CHUNKS), tl.program_id(0) % (GROUPS * CHUNKS)
    group, start = chunk // CHUNKS, (chunk % CHUNKS) * BLOCK_E
    h, e = tl.arange(0, BLOCK_H), start + tl.arange(0, BLOCK_E)
    column = group * WIDTH + e
    of_weight = (h < HEADS)[:, None] & (e < WIDTH)[None, :]
    w = tl.load(weight + h[:, None] * (GROUPS * WIDTH) + column[None, :], mask=of_weight, other=0.0)  # [BLOCK_H, BLOCK_E]
    behind = (all_tiles // tiles).to(tl.int64) * HEADS * tokens  # from a derivative by z to that by A
    dw = tl.zeros((BLOCK_H, BLOCK_E), tl.float32)
    dfactor = tl.zeros((BLOCK_S, BLOCK_H), tl.float32)
    dbias = tl.zeros((BLOCK_S, BLOCK_H), tl.float32)
    for tile in tl.range(part * own_tiles, tl.minimum(part * own_tiles + own_tiles, all_tiles), num_stages=STAGES):
        row = (tile // tiles).to(tl.int64)
        s = (tile % tiles) * BLOCK_S + tl.arange(0, BLOCK_S)
        place = (row * HEADS + h.to(tl.int64)[None, :]) * tokens + s[:, None]
        real = (s < tokens)[:, None] & (h < HEADS)[None, :]
        ds = tl.load(dscores + place, mask=real, other=0.0)  # [BLOCK_S, BLOCK_H]
        dz = ds * tl.load(derivatives + place, mask=real, other=0.0)
        if chunk == 0:
            dfactor += ds * tl.load(derivatives + place + behind, mask=real, other=0.0)
            dbias += dz
        inside = (s < tokens)[:, None] & (e < WIDTH)[None, :]
        line, wide = s.to(tl.int64)[:, None], tl.cast(group, tl.int64)
        x = tl.load(values + row * stride_b + line * stride_s + wide * stride_g + e[None, :], mask=inside, other=0.0)
        narrow, factor = _narrowed(dz, x)
        dx = tl.dot(narrow, w, input_precision="ieee") * factor
        tl.store(dvalues + row * gradient_b + line * gradient_s + wide * gradient_g + e[None, :], dx.to(x.dtype), mask=inside)
        dw += tl.dot(tl.trans(narrow), x, input_precision="ieee") * factor
    tl.store(dweight + (part * HEADS + h[:, None]).to(tl.int64) * (GROUPS * WIDTH) + column[None, :], dw, mask=of_weight)
    if chunk == 0:
        own = sums + part * (2 * HEADS) + h
        tl.store(own, tl.sum(dfactor, 0), mask=h < HEADS)
        tl.store(own + HEADS, tl.sum(dbias, 0), mask=h < HEADS)
