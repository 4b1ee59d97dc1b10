"""What travels to a kernel of `nm_sparse_attention`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class NMSparseArgs(NamedTuple):
    """The tensors and numbers of one `nm_sparse_attention` call, after checking; the same for every backend.

    Shapes: query, key, value, mask, bias and seed as in `AttentionArgs`; block_mask bool `[B or 1, H or 1, Tq / 64, Tk / 64]`, rounded
    up. Of each `pattern_m` consecutive keys, `pattern_n` are kept.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    bias: Tensor | None
    block_mask: Tensor | None
    seed: Tensor | None
    pattern_n: int
    pattern_m: int
    dropout_p: float
    is_causal: bool
    scale: float


class NMSparseLaunchers(NamedTuple):
    """Entry points of a family of `nm_sparse_attention`.

    forward:  `(NMSparseArgs, stores) -> (out, lse, kept)`; `kept` is the selection that this forward made, or empty unless `stores`:
              int32 `[B, H, Tq, words]`, one bit a slot, slot s at bit s % 32 of word s // 32. Key j lies at slot (j // M) * P + j % M,
              P the power of two that is M or next above it; `words` is ceil(ceil(Tk / M) * P / 32). Unused bits are 0.
    backward: `(NMSparseArgs, dout, dlse | None, out, lse, kept, *, bias_grad) -> (dq, dk, dv, dbias | None)`: the gradients for exactly
              the selection `kept`, whichever backend made it. Only the family whose backward serves all has one.
    """

    forward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | None]] | None = None
