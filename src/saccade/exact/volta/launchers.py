"""Launchers of the Volta kernels. A `Call` is all that a launch needs, so that it can be looked at, or run elsewhere, without a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.engine.layout import empty_like_heads, on_16_bytes, unpack
from saccade.exact.args import AttentionArgs
from saccade.exact.volta.config import DELTA_THREADS, OWNED_KEYS, backward_tile, forward_tile
from saccade.hardware import arch_of
from saccade.launch.constants import LOG2E
from saccade.launch.cuda import HEADERS, Call, run, typed
from saccade.launch.dropout import drop_threshold
from saccade.nvrtc import Options, Source

_CUDA = Path(__file__).parent / "cuda"


class Features(NamedTuple):
    """What a call is besides its tensors: features that kernels are compiled for, and numbers. half_sums: forward adds products in float16."""

    is_causal: bool
    dropout_p: float
    scale: float
    half_sums: bool = False


def _run(make: Callable[..., Call], tensors: tuple[Tensor | None, ...], *options: Any) -> None:
    """Launch what `make(*tensors, *options, architecture)` describes."""
    run(make, tensors, options, arch_of)


def forward(args: AttentionArgs, half_sums: bool = False) -> tuple[Tensor, Tensor]:
    """out `[B, H, Tq, D]` laid out like query, lse float32 `[B, H, Tq]`."""
    query, key = args.query, args.key
    out = empty_like_heads(query)
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    if out.numel() == 0 or key.shape[2] == 0:  # nothing to compute, or no key to see
        return out.zero_(), lse.fill_(float("-inf"))
    tensors = (*_operands(args), out, lse)
    _run(forward_call, tensors, Features(args.is_causal, args.dropout_p, args.scale, half_sums))
    return out, lse


def backward(
    args: AttentionArgs,
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor | None,
    lse: Tensor,
    *,
    bias_grad: bool,
    packed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv (views of `packed`, if given) and dbias; deterministic under `torch.use_deterministic_algorithms`."""
    assert out is not None  # the backend saves it
    dq, dk, dv = (empty_like_heads(x) for x in args[:3]) if packed is None else unpack(packed)
    if args.query.numel() == 0 or args.key.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_(), torch.zeros_like(args.bias) if bias_grad and args.bias is not None else None
    dout, out, lse = on_16_bytes(dout), on_16_bytes(out), lse.contiguous()
    delta = torch.empty_like(lse)
    _run(delta_call, (dout, out, None if dlse is None else dlse.contiguous(), delta))
    operands = (*_operands(args), dout, lse, delta)
    features = Features(args.is_causal, args.dropout_p, args.scale)
    if torch.are_deterministic_algorithms_enabled():
        _run(backward_call, (*operands, None, dk, dv), features)
        _run(query_gradient_call, (*operands, dq), features)
    else:
        sums = torch.zeros(args.query.shape, dtype=torch.float32, device=dq.device)
        _run(backward_call, (*operands, sums, dk, dv), features)
        torch.mul(sums, args.scale, out=dq)
    if not bias_grad or args.bias is None:
        return dq, dk, dv, None
    dbias = torch.empty(args.bias.shape, dtype=torch.float32, device=dq.device)
    _run(bias_gradient_call, (*operands, dbias[(None,) * (4 - dbias.dim())]), features)
    return dq, dk, dv, dbias.to(args.bias.dtype)


def forward_call(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, lengths: Tensor | None, seed: Tensor | None, out: Tensor,
    lse: Tensor, features: Features, arch: int,
) -> Call:  # fmt: skip
    """The launch of `volta_forward`; operands as `_operands` makes them."""
    batch, heads, q_len, head_dim = query.shape
    tile = forward_tile(head_dim, q_len, mask is not None, arch)
    tiles = -(-q_len // tile.rows)
    defines = {
        **_defines(head_dim, mask, lengths, seed, features), "WARPS": tile.warps, "SHARED_BYTES": tile.shared_bytes, "ROW_TILES": tile.row_tiles, "KEYS": tile.keys,
        "BLOCKS": tile.blocks,
        "HALF_SUMS": features.half_sums,
    }  # fmt: skip
    arguments = (
        *typed("pointer", query, key, value, mask, lengths, seed, out, lse),
        *typed("int64", *_strides(query, key, value), *_mask_strides(mask), *_strides(out)),
        *typed("int32", heads, heads // key.shape[1], q_len, key.shape[2], tiles, drop_threshold(features.dropout_p)),
        *typed("float32", features.scale * LOG2E, 1.0 - features.dropout_p),
    )
    return Call(
        _source("volta_forward"),
        "volta_forward",
        Options.of(defines),
        (batch * heads * tiles, 1),
        32 * tile.warps,
        tile.shared_bytes,
        arguments,
    )


def delta_call(dout: Tensor, out: Tensor, dlse: Tensor | None, delta: Tensor, arch: int) -> Call:
    """The launch of `volta_delta`."""
    batch, heads, q_len, head_dim = out.shape
    rows = batch * heads * q_len
    defines = {"HEAD_DIM": head_dim, "THREADS": DELTA_THREADS, "DLSE": dlse is not None}
    arguments = (
        *typed("pointer", dout, out, dlse, delta),
        *typed("int64", *_strides(dout, out), rows),
        *typed("int32", heads, q_len),
    )
    return Call(
        _source("volta_delta"),
        "volta_delta",
        Options.of(defines),
        (-(-rows // (DELTA_THREADS // 8)), 1),
        DELTA_THREADS,
        0,
        arguments,
    )


def backward_call(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, lengths: Tensor | None, seed: Tensor | None, dout: Tensor,
    lse: Tensor, delta: Tensor, dquery: Tensor | None, dkey: Tensor, dvalue: Tensor, features: Features, arch: int,
) -> Call:  # fmt: skip
    """The launch of `volta_backward`; dquery float32 `[B, H, Tq, D]`, None for dK and dV alone."""
    batch, heads, q_len, head_dim = query.shape
    kv_heads, kv_len = key.shape[1:3]
    tile = backward_tile(head_dim, arch)
    tiles = -(-kv_len // OWNED_KEYS)
    defines = {
        **_defines(head_dim, mask, lengths, seed, features), "WARPS": tile.warps, "SHARED_BYTES": tile.shared_bytes, "ROWS": tile.rows, "BLOCKS": tile.blocks,
        "ATOMIC": dquery is not None,
    }  # fmt: skip
    arguments = (
        *typed("pointer", query, key, value, mask, lengths, seed, dout, lse, delta, dquery, dkey, dvalue),
        *typed("int64", *_strides(query, key, value), *_mask_strides(mask), *_strides(dout, dkey, dvalue)),
        *typed("int32", heads, heads // kv_heads, q_len, kv_len, tiles, drop_threshold(features.dropout_p)),
        *typed("float32", features.scale * LOG2E, 1.0 / (1.0 - features.dropout_p), features.scale),
    )
    grid = (batch * kv_heads * tiles, 1)
    return Call(
        _source("volta_backward"), "volta_backward", Options.of(defines), grid, 32 * tile.warps, tile.shared_bytes, arguments
    )


def query_gradient_call(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, lengths: Tensor | None, seed: Tensor | None, dout: Tensor,
    lse: Tensor, delta: Tensor, dquery: Tensor, features: Features, arch: int,
) -> Call:  # fmt: skip
    """The launch of `volta_query_gradient`, the deterministic dQ."""
    batch, heads, q_len, head_dim = query.shape
    tile = backward_tile(head_dim, arch)
    tiles = -(-q_len // tile.rows)
    defines = {
        **_defines(head_dim, mask, lengths, seed, features), "WARPS": tile.warps, "SHARED_BYTES": tile.shared_bytes, "ROWS": tile.rows, "BLOCKS": tile.blocks,
    }  # fmt: skip
    arguments = (
        *typed("pointer", query, key, value, mask, lengths, seed, dout, lse, delta, dquery),
        *typed("int64", *_strides(query, key, value), *_mask_strides(mask), *_strides(dout, dquery)),
        *typed("int32", heads, heads // key.shape[1], q_len, key.shape[2], tiles, drop_threshold(features.dropout_p)),
        *typed("float32", features.scale * LOG2E, 1.0 / (1.0 - features.dropout_p), features.scale),
    )
    grid = (batch * heads * tiles, 1)
    return Call(
        _source("volta_query_gradient"),
        "volta_query_gradient",
        Options.of(defines),
        grid,
        32 * tile.warps,
        tile.shared_bytes,
        arguments,
    )


def bias_gradient_call(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, lengths: Tensor | None, seed: Tensor | None, dout: Tensor,
    lse: Tensor, delta: Tensor, dbias: Tensor, features: Features, arch: int,
) -> Call:  # fmt: skip
    """The launch of `volta_bias_gradient`; dbias float32, contiguous `[B or 1, H or 1, Tq or 1, Tk or 1]`, mask the bias, expanded."""
    batch, heads, q_len, head_dim = query.shape
    kv_len, tile = key.shape[2], backward_tile(head_dim, arch)
    rows, bias_heads, bias_queries, bias_keys = dbias.shape
    q_tiles, k_tiles = -(-q_len // tile.rows), -(-kv_len // OWNED_KEYS)
    q_programs, q_steps = (1, q_tiles) if bias_queries == 1 else (q_tiles, 1)
    k_programs, k_steps = (1, k_tiles) if bias_keys == 1 else (k_tiles, 1)
    defines = {
        **_defines(head_dim, mask, lengths, seed, features), "WARPS": tile.warps, "SHARED_BYTES": tile.shared_bytes, "ROWS": tile.rows, "BLOCKS": tile.blocks,
    }  # fmt: skip
    arguments = (
        *typed("pointer", query, key, value, mask, lengths, seed, dout, lse, delta, dbias),
        *typed("int64", *_strides(query, key, value), *_mask_strides(mask), *_strides(dout)),
        *typed("int32", heads, heads // key.shape[1], q_len, kv_len, bias_heads, q_programs, k_programs),
        *typed("int32", batch // rows, heads // bias_heads, q_steps, k_steps, bias_queries, bias_keys),
        *typed("int32", drop_threshold(features.dropout_p)),
        *typed("float32", features.scale * LOG2E, 1.0 / (1.0 - features.dropout_p)),
    )
    grid = (rows * bias_heads * q_programs * k_programs, 1)
    return Call(
        _source("volta_bias_gradient"),
        "volta_bias_gradient",
        Options.of(defines),
        grid,
        32 * tile.warps,
        tile.shared_bytes,
        arguments,
    )


def _operands(args: AttentionArgs) -> tuple[Tensor | None, ...]:
    """query, key, value, mask or bias, lengths, seed: the first pointers of every kernel."""
    query, key, value, mask, bias, lengths, seed, *_ = args
    if mask is not None:
        key, value = _cleared(key, value, mask, query)
    added = mask if bias is None else bias
    if added is not None and added.dtype not in (torch.bool, torch.float16, torch.float32):
        added = added.float()
    if added is not None:
        added = added.expand(*query.shape[:3], key.shape[2])
    return on_16_bytes(query), on_16_bytes(key), on_16_bytes(value), added, lengths, seed


def _cleared(key: Tensor, value: Tensor, mask: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values with zeros where no query sees them: they may hold NaN, which a weight of 0 would not hide."""
    seen = mask.expand(*query.shape[:3], key.shape[2]).any(dim=2)
    seen = seen.unflatten(1, (key.shape[1], -1)).any(dim=2)[..., None]
    return key.where(seen, 0.0), value.where(seen, 0.0)


def _defines(
    head_dim: int, mask: Tensor | None, lengths: Tensor | None, seed: Tensor | None, features: Features
) -> dict[str, Any]:
    kind = 0 if mask is None else 1 if mask.dtype == torch.bool else 2 if mask.dtype == torch.float16 else 3
    return {
        "HEAD_DIM": head_dim, "CAUSAL": features.is_causal, "MASK": kind, "LENGTHS": lengths is not None,
        "DROPOUT": seed is not None,
    }  # fmt: skip


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(stride for x in tensors for stride in x.stride()[:3])


def _mask_strides(mask: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0, 0) if mask is None else mask.stride()


@functools.cache
def _source(kernel: str) -> Source:
    return Source(_CUDA / f"{kernel.removeprefix('volta_')}.cu", (HEADERS,))
