"""The record of `attention_varlen`: what travels to a kernel, declared once."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from torch import Tensor

from saccade.engine.record import LAUNCHERS_ONLY, Differentiable, DifferentiableOrNone, Same, Size

# which keys a query sees: all; key j <= query i, as torch's function; key j <= query i + Tk - Tq of its sequence, as flash-attn
FULL, UPPER_LEFT, BOTTOM_RIGHT = 0, 1, 2
# the same as words, which C++ takes
ALIGNMENTS = ("full", "upper", "lower")


class VarlenArgs(NamedTuple):
    """The tensors and numbers of one call, after checking.

    Shapes: query `[Tq, H, D]`, key and value `[Tk, Hkv, D]`, cu_seqlens int32 `[B + 1]`, bias `[H, max_q, max_k]`, seed int64 `[1]` (the
    Philox key, None without dropout). causal: FULL, UPPER_LEFT or BOTTOM_RIGHT. Kernels that take dense rows too find there a bias
    `[W, H, Tq, Tk]`, of which row b reads b % W, and a boolean mask `[B, H, Tq, Tk]`, both perhaps of strides 0; no op of packed sequences takes
    the mask, which is therefore last.
    """

    query: Differentiable
    key: Differentiable
    value: Differentiable
    cu_seqlens_q: Tensor
    cu_seqlens_k: Annotated[Tensor, Same("cu_seqlens_q")]
    bias: DifferentiableOrNone
    seed: Tensor | None
    max_q: Size
    max_k: Size
    dropout_p: float
    causal: int
    scale: float
    mask: Annotated[Tensor | None, LAUNCHERS_ONLY] = None
