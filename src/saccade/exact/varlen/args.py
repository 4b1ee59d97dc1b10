"""The record of `attention_varlen`: what travels to a kernel, declared once."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

from torch import Tensor

from saccade.engine.prepare import OFFSETS, TOKENS
from saccade.engine.record import LAUNCHERS_ONLY, Differentiable, DifferentiableOrNone, Same, Size
from saccade.engine.sharded import HEADS, NEITHER, Dims
from saccade.engine.window import NO_LIMIT
from saccade.exact.args import AttentionArgs, windows_of

# which keys a query sees: all; key j <= query i, as torch's function; key j <= query i + Tk - Tq of its sequence, as flash-attn. A window is aligned
# likewise, that of FULL as UPPER_LEFT; FULL_BOTTOM_RIGHT is FULL with a window that is aligned with the last key
FULL, UPPER_LEFT, BOTTOM_RIGHT, FULL_BOTTOM_RIGHT = 0, 1, 2, 3
ALIGNED_LAST = (BOTTOM_RIGHT, FULL_BOTTOM_RIGHT)
HIDE_LATER = (UPPER_LEFT, BOTTOM_RIGHT)
# the names by which C++ compares them
ALIGNMENTS = ("full", "upper", "lower", "full lower")
_BY_HEADS = Dims(None, 1)


class VarlenCall(NamedTuple):
    """The arguments of `attention_varlen` in the order in which `api.attend` takes them; causal: one of the numbers above."""

    query: Annotated[Tensor, TOKENS, _BY_HEADS]
    key: Annotated[Tensor, TOKENS, _BY_HEADS]
    value: Annotated[Tensor, TOKENS, _BY_HEADS]
    cu_seqlens_q: Annotated[Tensor, OFFSETS, NEITHER]
    cu_seqlens_k: Annotated[Tensor, OFFSETS, NEITHER]
    max_seqlen_q: Size
    max_seqlen_k: Size
    dropout_p: float
    causal: int
    scale: float | None
    enable_gqa: bool
    attn_bias: Annotated[Tensor | None, HEADS]
    window: tuple | None
    return_lse: bool
    backend: str


class VarlenPackedCall(NamedTuple):
    """The arguments of `attention_varlen_qkvpacked`, in its order."""

    qkv: Annotated[Tensor, Dims(None, 2)]
    cu_seqlens: Annotated[Tensor, NEITHER]
    max_seqlen: Size
    dropout_p: float
    is_causal: bool
    scale: float | None
    attn_bias: Annotated[Tensor | None, HEADS]
    window: tuple | None
    return_lse: bool
    backend: str


class VarlenArgs(NamedTuple):
    """The tensors and numbers of one call, after checking.

    Shapes: query `[Tq, H, D]`, key and value `[Tk, Hkv, D]`, cu_seqlens int32 `[B + 1]`, bias `[H, max_q, max_k]`, seed int64 `[1]` (the
    Philox key, None without dropout). causal: FULL, UPPER_LEFT, BOTTOM_RIGHT or, with a window, FULL_BOTTOM_RIGHT. Kernels that also take dense rows
    find there a bias `[W, H, Tq, Tk]`, whose matrix b % W is for row b, and a boolean mask `[B, H, Tq, Tk]`. Either may have strides of 0. The mask is
    the last field, because no op of packed sequences takes it.
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
    window_left: int = NO_LIMIT
    window_right: int = NO_LIMIT
    mask: Annotated[Tensor | None, LAUNCHERS_ONLY] = None


def of_dense(args: AttentionArgs) -> VarlenArgs:
    """Dense rows as the record of sequences: both fields of cu_seqlens hold their lengths, or None for whole rows."""
    causal = UPPER_LEFT if args.is_causal else FULL
    lengths: Any = args.lengths  # of whole rows nothing is read there
    batch, heads, q_len, _ = args.query.shape
    pairs = (heads, q_len, args.key.shape[2])
    bias, mask = args.bias, args.mask
    if bias is not None:
        bias = _expanded(bias, windows_of(bias, batch) or batch, pairs)
    if mask is not None:
        mask = _expanded(mask, batch, pairs)
    window = args.window_left, args.window_right
    return VarlenArgs(*args[:3], lengths, lengths, bias, args.seed, *pairs[1:], args.dropout_p, causal, args.scale, *window, mask)


def _expanded(tensor: Tensor, rows: int, pairs: tuple[int, int, int]) -> Tensor:
    """A view `[rows, H, Tq, Tk]`, with strides of 0 where the tensor broadcasts."""
    return tensor[(None,) * (4 - tensor.dim())].expand(rows, *pairs)
