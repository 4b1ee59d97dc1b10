"""Launchers of the masking kernels: allocation, grids, and the constants of the kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.engine.layout import empty_like_heads
from saccade.launch.delta import delta_of
from saccade.launch.triton import launch
from saccade.nm_sparse.args import NMSparseArgs
from saccade.nm_sparse.backward_sm90 import launchers as backward_sm90
from saccade.nm_sparse.bits import words_of
from saccade.nm_sparse.masked.backward import _masked_dbias_kernel, _masked_dkv_kernel, _masked_dq_kernel
from saccade.nm_sparse.masked.config import Config, pick
from saccade.nm_sparse.masked.forward import _masked_fwd_kernel
from saccade.nm_sparse.problem import BLOCK


def forward(args: NMSparseArgs, stores: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, kept): out laid out like query, lse float32 `[B, H, Tq]`, kept the bits of `NMSparseLaunchers`."""
    query, key = args.query, args.key
    batch, heads, q_len, _ = query.shape
    out = empty_like_heads(query)
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    words = words_of(key.shape[2], args.pattern_m)
    # zeros, because tiles beyond the causal edge, or hidden by the block mask, are never visited
    kept = torch.zeros((batch, heads, q_len, words) if stores else (0,), dtype=torch.int32, device=query.device)
    if out.numel() == 0 or key.shape[2] == 0:
        return out.zero_(), lse.fill_(float("-inf")), kept
    shape = _Shape.of(args, "fwd")
    mask, bias = _wide(args, args.mask), _wide(args, args.bias)
    blocks = None
    if args.block_mask is not None:
        blocks = args.block_mask.expand(batch, heads, *args.block_mask.shape[2:])
    tensors = (query, key, args.value, *_present(lse, mask, bias, blocks, args.seed), out, lse, kept if stores else lse)
    strides = (*(x.stride()[:3] for x in (query, key, args.value, out)), *map(_strides, (mask, bias, blocks)))
    numbers = (heads, q_len, key.shape[2], shape.head_dim, words, shape.q_blocks, args.scale, args.dropout_p, int(stores))
    constants = (
        shape.heads_per_key, *shape.tile, args.pattern_n, args.pattern_m, shape.padded, args.is_causal, mask is not None, bias is not None,
        blocks is not None, args.seed is not None, BLOCK, shape.precision,
        args.dense_first, args.dense_recent,
    )  # fmt: skip
    launch(_masked_fwd_kernel, shape.q_blocks * batch * heads, tensors, (*strides, *numbers, *constants), **shape.options)
    return out, lse, kept


def backward(
    args: NMSparseArgs, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, kept: Tensor, *, bias_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(dq, dk, dv, dbias) for the selection `kept`, whichever backend made it; deterministic. On sm_90 `backward_sm90` computes
    dq, dk and dv where it supports the call. The gradient of a bias takes no memory but its own."""
    dq, dk, dv = (empty_like_heads(x) for x in (args.query, args.key, args.value))
    dbias = torch.empty(args.bias.shape, dtype=args.bias.dtype, device=dq.device) if bias_grad and args.bias is not None else None
    if args.query.numel() == 0 or args.key.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_(), None if dbias is None else dbias.zero_()
    dout = dout if dout.stride(3) == 1 else dout.contiguous()
    delta = delta_of(dout, out, dlse)
    if backward_sm90.takes(args):
        corrections = backward_sm90.gradients(args, dout, lse, kept, delta, dq, dk, dv)
        anchors = (lse, lse if corrections is None else corrections)
        given = _given(args, kept, dout, lse, delta, anchors)
    else:
        # with a bias, written by the dQ kernel for the next kernels
        anchors = (lse, lse) if args.bias is None else (torch.empty_like(lse), torch.empty_like(lse))
        given = _given(args, kept, dout, lse, delta, anchors)
        _launch_dq_and_dkv(args, given, dout, kept, dq, dk, dv)
    if dbias is not None:
        _bias_gradient(args, given, dout, kept, dbias)
    return dq, dk, dv, dbias


def _given(
    args: NMSparseArgs, kept: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, anchors: tuple[Tensor, Tensor]
) -> tuple[Tensor, ...]:
    """The tensors that each kernel of backward is given first."""
    present = _present(lse, _wide(args, args.bias), args.seed)
    return (args.query, args.key, args.value, *present, kept, dout, lse, delta, *anchors)


def _strides_and_sizes(args: NMSparseArgs, dout: Tensor, kept: Tensor) -> tuple[tuple, tuple]:
    strides = (*(x.stride()[:3] for x in (args.query, args.key, args.value, dout)), _strides(_wide(args, args.bias)))
    return strides, (args.query.shape[1], args.query.shape[2], args.key.shape[2], args.query.shape[3], kept.shape[3])


def _launch_dq_and_dkv(args: NMSparseArgs, given: tuple, dout: Tensor, kept: Tensor, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
    shape = _Shape.of(args, "bwd")
    strides, sizes = _strides_and_sizes(args, dout, kept)
    chances = (args.scale, args.dropout_p)
    fixed = (shape.heads_per_key, *shape.tile, args.pattern_m, shape.padded)
    flags = (args.is_causal, args.bias is not None, args.block_mask is not None, args.seed is not None, shape.precision)
    numbers = (*strides, dq.stride()[:3], *sizes, shape.q_blocks, *chances, *fixed, *flags)
    launch(_masked_dq_kernel, shape.q_blocks * dq.shape[0] * dq.shape[1], (*given, dq), numbers, **shape.options)
    numbers = (*strides, dk.stride()[:3], dv.stride()[:3], *sizes, shape.s_tiles, *chances, *fixed, *flags)
    launch(_masked_dkv_kernel, shape.s_tiles * dk.shape[0] * dk.shape[1], (*given, dk, dv), numbers, **shape.options)


def _bias_gradient(args: NMSparseArgs, given: tuple, dout: Tensor, kept: Tensor, dbias: Tensor) -> None:
    """Each program owns a tile of the bias and sums its gradient in float32, in order, over the axes that the bias broadcasts. Nothing
    is held in memory but the gradient; S and dP are computed once more, by dense products."""
    shape = _Shape.of(args, "bias")
    strides, sizes = _strides_and_sizes(args, dout, kept)
    wide = dbias[(None,) * (4 - dbias.dim())]
    rows, bias_heads, one_query, one_key = wide.shape[0], wide.shape[1], wide.shape[2] == 1, wide.shape[3] == 1
    q_programs, q_steps = (1, shape.q_blocks) if one_query else (shape.q_blocks, 1)
    s_programs, s_steps = (1, shape.s_tiles) if one_key else (shape.s_tiles, 1)
    steps = (args.query.shape[0] // rows, args.query.shape[1] // bias_heads, q_steps, s_steps)
    fixed = (shape.heads_per_key, *shape.tile, args.pattern_m, shape.padded)
    places = (bias_heads, q_programs, s_programs)
    flags = (one_query, one_key, args.seed is not None, shape.precision)
    numbers = (*strides, _strides(wide), *sizes, *places, *steps, args.scale, args.dropout_p, *fixed, *flags)
    launch(_masked_dbias_kernel, rows * bias_heads * q_programs * s_programs, (*given, wide), numbers, **shape.options)


@dataclass(frozen=True)
class _Shape:
    heads_per_key: int  # query heads per key head
    head_dim: int
    padded: int  # slots of a group of keys
    q_blocks: int
    s_tiles: int
    tile: tuple[int, int, int]  # BLOCK_Q, BLOCK_S, BLOCK_D
    options: dict[str, int]
    precision: str

    @classmethod
    def of(cls, args: NMSparseArgs, direction: str) -> _Shape:
        heads, q_len, head_dim = args.query.shape[1:]
        kv_heads, kv_len = args.key.shape[1:3]
        config: Config = pick(direction, head_dim, args.query.dtype)
        padded = 1 << (args.pattern_m - 1).bit_length()
        slots = -(-kv_len // args.pattern_m) * padded
        return cls(
            heads // kv_heads, head_dim, padded, -(-q_len // config.block_q), -(-slots // config.block_s),
            (config.block_q, config.block_s, _block_d(head_dim)), {"num_warps": config.warps, "num_stages": config.stages},
            "ieee" if args.query.dtype == torch.float32 else "tf32",
        )  # fmt: skip


def _wide(args: NMSparseArgs, tensor: Tensor | None) -> Tensor | None:
    """A mask or bias as `[B, H, Tq, Tk]`, stride 0 where it broadcasts."""
    return None if tensor is None else tensor.expand(*args.query.shape[:3], args.key.shape[2])


def _strides(tensor: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0, 0) if tensor is None else tensor.stride()


def _present(placeholder: Tensor, *tensors: Tensor | None) -> list[Tensor]:
    """The tensors, with absent ones replaced by a tensor that kernels never read."""
    return [placeholder if x is None else x for x in tensors]


def _block_d(head_dim: int) -> int:
    return max(16, 1 << (head_dim - 1).bit_length())
