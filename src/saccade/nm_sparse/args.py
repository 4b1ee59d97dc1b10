"""The interface between `nm_sparse_attention` and its families of kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, NamedTuple

from torch import Tensor

from saccade.engine.prepare import WITH_START
from saccade.engine.record import Differentiable, DifferentiableOrNone
from saccade.engine.sharded import BATCH, BHTD, scores_dims


class NMSparseCall(NamedTuple):
    """The arguments of `nm_sparse_attention`, in its order."""

    query: Annotated[Tensor, WITH_START, BHTD]
    key: Annotated[Tensor, WITH_START, BHTD]
    value: Annotated[Tensor, WITH_START, BHTD]
    attn_mask: Annotated[Tensor | None, scores_dims]
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool
    pattern: str
    block_mask: Annotated[Tensor | None, scores_dims]
    lengths: Annotated[Tensor | None, BATCH]
    dense_first: int
    dense_recent: int
    return_lse: bool
    backend: str


class NMSparseArgs(NamedTuple):
    """The tensors and numbers of one `nm_sparse_attention` call, after checking; the same for every backend.

    Shapes: query, key, value, mask, bias and seed as in `AttentionArgs`; block_mask bool `[B or 1, H or 1, Tq / 64, Tk / 64]`,
    rounded up. In each `pattern_m` consecutive keys, `pattern_n` are kept; dense_first, dense_recent: multiples of `pattern_m`, the
    keys that are never pruned (`reference.never_pruned` has the rule).
    """

    query: Differentiable
    key: Differentiable
    value: Differentiable
    mask: Tensor | None
    bias: DifferentiableOrNone
    block_mask: Tensor | None
    seed: Tensor | None
    pattern_n: int
    pattern_m: int
    dropout_p: float
    is_causal: bool
    scale: float
    dense_first: int = 0
    dense_recent: int = 0


class NMSparseLaunchers(NamedTuple):
    """Entry points of a family of `nm_sparse_attention`.

    forward:  `(NMSparseArgs, stores) -> (out, lse, kept)`; `kept` is the selection that this forward made, empty unless `stores`:
              int32 `[B, H, Tq, words]`, one bit per slot, with slot s at bit s % 32 of word s // 32. Key j has slot (j // M) * P
              + j % M, where P is the smallest power of two that is at least M; `words` is ceil(ceil(Tk / M) * P / 32). Unused
              bits are 0.
    backward: `(NMSparseArgs, dout, dlse | None, out, lse, kept, *, bias_grad) -> (dq, dk, dv, dbias | None)`: the gradients for
              exactly the selection `kept`, whichever backend made it. Only one family has a backward, which serves all.
    """

    forward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | None]] | None = None
