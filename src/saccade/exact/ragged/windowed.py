"""Dense rows with a sliding window by the kernels of packed tokens: every row is a sequence of Tq tokens.

Rows that are views of `[B, T, H, D]` are read and written in place; others are copied.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saccade.engine.layout import empty_like_heads
from saccade.engine.window import has_window
from saccade.exact.args import AttentionArgs
from saccade.exact.ragged import launchers
from saccade.exact.ragged.launches import Gradients
from saccade.exact.varlen.args import FULL, UPPER_LEFT, VarlenArgs


def takes(args: AttentionArgs) -> bool:
    """Whether a call has a window."""
    return has_window(args)


def forward(args: AttentionArgs) -> tuple[Tensor, Tensor]:
    """out laid out like query, lse float32 `[B, H, T]`."""
    out = empty_like_heads(args.query)
    if out.numel() == 0:
        return out, torch.empty(args.query.shape[:3], dtype=torch.float32, device=out.device)
    found, lse = launchers.forward(_packed(args), out=_place_of(out))
    return _into(out, found), _dense_lse(lse, args.query.shape[0])


def backward(
    args: AttentionArgs, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, *, into: Gradients | None
) -> tuple[Tensor, Tensor, Tensor, None]:
    """dq, dk and dv, those of `into` if they are given."""
    gradients = into or tuple([empty_like_heads(x) for x in args[:3]])
    if args.query.numel() == 0:
        dq, dk, dv = gradients
        return dq.zero_(), dk.zero_(), dv.zero_(), None
    packed_lse = _packed_lse(lse)
    dlse = None if dlse is None else _packed_lse(dlse)
    places: Any = tuple(map(_place_of, gradients))
    *found, _ = launchers.backward(_packed(args), _tokens(dout), dlse, _tokens(out), packed_lse, bias_grad=False, into=places)
    dq, dk, dv = map(_into, gradients, found)
    return dq, dk, dv, None


def _packed(args: AttentionArgs) -> VarlenArgs:
    batch, _, length, _ = args.query.shape
    ends = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=args.query.device)
    causal = UPPER_LEFT if args.is_causal else FULL
    numbers = (length, length, args.dropout_p, causal, args.scale, args.window_left, args.window_right)
    query, key, value = map(_tokens, args[:3])
    return VarlenArgs(query, key, value, ends, ends, None, args.seed, *numbers)


def _tokens(rows: Tensor) -> Tensor:
    """`[B, H, T, D]` as `[B * T, H, D]`."""
    return rows.transpose(1, 2).flatten(0, 1)


def _place_of(rows: Tensor) -> Tensor:
    """The memory to which kernels write the tokens of `[B, H, T, D]`: the tensor itself, or separate memory if the rows do not follow each other."""
    by_token = rows.transpose(1, 2)
    batch, length = by_token.shape[:2]
    if batch == 1 or by_token.stride(0) == length * by_token.stride(1):
        return by_token.flatten(0, 1)
    return torch.empty((batch * length, *by_token.shape[2:]), dtype=rows.dtype, device=rows.device)


def _into(rows: Tensor, tokens: Tensor) -> Tensor:
    if tokens.data_ptr() == rows.data_ptr():
        return rows
    return rows.copy_(tokens.unflatten(0, (rows.shape[0], -1)).transpose(1, 2))


def _packed_lse(lse: Tensor) -> Tensor:
    return lse.transpose(0, 1).flatten(1).contiguous()


def _dense_lse(lse: Tensor, batch: int) -> Tensor:
    return lse.unflatten(1, (batch, -1)).transpose(0, 1).contiguous()
