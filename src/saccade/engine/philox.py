"""Philox4x32-10 in plain torch: the dropout mask that every backend must draw.

Source: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011), section 3.3.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ROUNDS = 10
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF


def _mul_hi_lo(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    # a 32 x 32 bit product does not fit a signed int64, so it is assembled from products with 16-bit halves of b
    low, high = a * (b & 0xFFFF), a * (b >> 16)
    carry = high + (low >> 16)
    return carry >> 16, ((carry & 0xFFFF) << 16) | (low & 0xFFFF)


def philox(key: int | Tensor, c0: Tensor, c1: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four uint32 words (held in int64) for each counter `(c0, c1, 0, 0)` under a 64-bit key, an int or int64 `[1]`."""
    k0, k1 = key & _LOW, (key >> 32) & _LOW
    c0, c1 = torch.broadcast_tensors(c0 & _LOW, c1 & _LOW)
    c2, c3 = torch.zeros_like(c0), torch.zeros_like(c0)
    for _ in range(_ROUNDS):
        hi0, lo0 = _mul_hi_lo(_M0, c0)
        hi1, lo1 = _mul_hi_lo(_M1, c2)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return c0, c1, c2, c3


def dropout_keep(seed: Tensor, dropout_p: float, batch: int, heads: int, q_len: int, kv_len: int) -> Tensor:
    """The weights of a call that survive, bool `[B, H, Tq, Tk]`. With a seed `[calls, 1, 1, 1]`, those of several: bool `[calls, B, H, Tq, Tk]`.

    Weight (i, j) of problem n = b * H + h takes word j % 4 of counter (i * ceil(Tk / 4) + j // 4, n), shifted to 24 bits. It
    survives if this, as a fraction of 2^24, is at least float32(dropout_p), the number that kernels are given.
    """
    device = seed.device
    groups = (kv_len + 3) // 4
    counter = torch.arange(q_len, device=device)[:, None] * groups + torch.arange(groups, device=device)
    problem = torch.arange(batch * heads, device=device)[:, None, None]
    words = torch.stack(philox(seed, counter, problem), dim=-1)  # [.., B*H, Tq, groups, 4]
    uniform = (words >> 8).double() * 2.0**-24
    given = torch.tensor(dropout_p, dtype=torch.float32, device=device).double()
    return uniform.flatten(-2)[..., :kv_len].unflatten(-3, (batch, heads)) >= given
