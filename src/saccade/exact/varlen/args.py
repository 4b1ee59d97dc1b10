"""What travels to a kernel of `attention_varlen`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

# which keys a query sees: all; key j <= query i, as torch's function; key j <= query i + Tk - Tq of its sequence, as flash-attn
FULL, UPPER_LEFT, BOTTOM_RIGHT = 0, 1, 2


class VarlenArgs(NamedTuple):
    """The tensors and numbers of one call, after checking.

    Shapes: query `[Tq, H, D]`, key and value `[Tk, Hkv, D]`, cu_seqlens int32 `[B + 1]`, bias `[H, max_q, max_k]`, seed int64 `[1]` (the
    Philox key, None without dropout). causal: FULL, UPPER_LEFT or BOTTOM_RIGHT. Kernels that take dense rows too find there a bias
    `[W, H, Tq, Tk]`, of which row b reads b % W, and a boolean mask `[B, H, Tq, Tk]`, both perhaps of strides 0; no op of packed sequences takes
    the mask, which is therefore last.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    bias: Tensor | None
    seed: Tensor | None
    max_q: int
    max_k: int
    dropout_p: float
    causal: int
    scale: float
    mask: Tensor | None = None


class VarlenLaunchers(NamedTuple):
    """Entry points of a family whose gradients are its own.

    forward:  `VarlenArgs -> (out, lse)`, lse float32 `[H, Tq]`
    backward: `(VarlenArgs, dout, dlse | None, out, lse, *, bias_grad, packed) -> (dq, dk, dv, dbias | None)`; the gradients are written into
              views of `packed`, an empty `[T, 3, H, D]`, where one is given.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | None]]
