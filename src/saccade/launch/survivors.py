"""The weights that survive dropout, for Triton kernels: one Philox call draws the words of four adjacent keys."""

import triton
import triton.language as tl


@triton.jit
def of_four_keys(words, dropout_p, KEYS: tl.constexpr):
    """int8 `[.., groups, 2, 2]` or `[.., groups, 4]`, to be reshaped to `[.., KEYS]`. words: four tiles `[.., groups]`, one for each key of a group.

    Joined tiles cost no instruction. Beside a boolean mask, Triton 3.6 misplaces their numbers in tiles of 16 keys, in either dtype and with
    any number of warps: half of the weights were dropped (docs/notes/triton-join.md has a small program). A selection is right there.
    """
    r0, r1, r2, r3 = words
    if KEYS < 32:
        AXIS: tl.constexpr = len(r0.shape)
        place = tl.arange(0, 4)
        for _ in tl.static_range(AXIS):
            place = tl.expand_dims(place, 0)
        low = tl.where(place == 0, tl.expand_dims(r0, AXIS), tl.expand_dims(r1, AXIS))
        high = tl.where(place == 2, tl.expand_dims(r2, AXIS), tl.expand_dims(r3, AXIS))
        kept = _survives(tl.where(place < 2, low, high), dropout_p)
    else:
        even = tl.join(_survives(r0, dropout_p), _survives(r2, dropout_p))
        odd = tl.join(_survives(r1, dropout_p), _survives(r3, dropout_p))
        kept = tl.join(even, odd)  # [.., groups, 2 (word // 2), 2 (word % 2)]
    return kept


@triton.jit
def _survives(word, dropout_p):
    uniform = (word >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08  # 2^-24: exact in float32
    return (uniform >= dropout_p).to(tl.int8)
