"""Launchers of the Volta kernels. A `CudaLaunch` holds everything that a launch needs, so that it can be inspected, or run elsewhere, without a GPU."""

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
from saccade.launch.cuda import HEADERS, CudaLaunch, run, strides
from saccade.launch.dropout import drop_threshold
from saccade.nvrtc import Options, Source

_CUDA = Path(__file__).parent / "cuda"


class Features(NamedTuple):
    """A call without its tensors: features that kernels are compiled for, and numbers. half_sums: products are added in float16."""

    is_causal: bool
    dropout_p: float
    scale: float
    half_sums: bool = False


def _run(make: Callable[..., CudaLaunch], tensors: tuple[Tensor | None, ...], *options: Any) -> None:
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
    half_sums: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv (views of `packed`, if given) and dbias; deterministic under `torch.use_deterministic_algorithms`. half_sums: as in forward, because
    lse must fit the recomputed scores."""
    assert out is not None  # the backend saves it
    dq, dk, dv = (empty_like_heads(x) for x in args[:3]) if packed is None else unpack(packed)
    if args.query.numel() == 0 or args.key.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_(), torch.zeros_like(args.bias) if bias_grad and args.bias is not None else None
    dout, out, lse = on_16_bytes(dout), on_16_bytes(out), lse.contiguous()
    features, operands = Features(args.is_causal, args.dropout_p, args.scale, half_sums), _operands(args)
    query, key, _, added, lengths, _ = operands
    # shift, delta, and two numbers of rows whose lse is too coarse
    rows = torch.empty(4, *lse.shape, dtype=torch.float32, device=lse.device).split((1, 1, 2))
    dlse = None if dlse is None else dlse.contiguous()
    _run(delta_call, (query, key, added, lengths, dout, out, lse, dlse, *rows), features)
    operands = (*operands, dout, *rows)
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
) -> CudaLaunch:  # fmt: skip
    """The launch of `volta_forward`; operands as `_operands` makes them."""
    batch, heads, q_len, head_dim = query.shape
    tile = forward_tile(head_dim, q_len, mask is not None, arch)
    tiles = -(-q_len // tile.rows)
    defines = {
        **_defines(head_dim, mask, lengths, seed, features), "WARPS": tile.warps, "SHARED_BYTES": tile.shared_bytes, "ROW_TILES": tile.row_tiles, "KEYS": tile.keys,
        "BLOCKS": tile.blocks,
    }  # fmt: skip
    arguments = {
        **_given(query, key, value, mask, lengths, seed), "out": out, "lse": lse, **strides(out=out.stride()[:3]),
        "q_tiles": tiles, "threshold": drop_threshold(features.dropout_p),
        "factor": features.scale * LOG2E, "survival": 1.0 - features.dropout_p,
    }  # fmt: skip
    grid = (batch * heads * tiles, 1)
    return CudaLaunch(
        _source("volta_forward"), "volta_forward", Options.of(defines), grid, 32 * tile.warps, tile.shared_bytes,
        arguments,
    )  # fmt: skip


def delta_call(
    query: Tensor, key: Tensor, mask: Tensor | None, lengths: Tensor | None, dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None,
    shift: Tensor, delta: Tensor, far: Tensor, features: Features, arch: int,
) -> CudaLaunch:  # fmt: skip
    """The launch of `volta_delta`, which writes what backward reads of each row: shift and delta, float32 `[B, H, Tq]`, and far, two of them."""
    batch, heads, q_len, head_dim = query.shape
    rows = batch * heads * q_len
    defines = {
        "HEAD_DIM": head_dim, "THREADS": DELTA_THREADS, "DLSE": dlse is not None, "CAUSAL": features.is_causal, "MASK": _mask_kind(mask),
        "LENGTHS": lengths is not None, "HALF_SUMS": features.half_sums,
    }  # fmt: skip
    arguments = {
        "query": query, "key": key, "mask": mask, "lengths": lengths, "dout": dout, "out": out, "lse": lse, "dlse": dlse,
        "shift": shift, "delta": delta, "far": far, **strides(query=query.stride()[:3], key=key.stride()[:3]),
        **_mask_strides(mask), **strides(dout=dout.stride()[:3], out=out.stride()[:3]),
        "rows": rows, "heads": heads, "group": heads // key.shape[1], "q_len": q_len, "kv_len": key.shape[2],
        "factor": features.scale * LOG2E,
    }  # fmt: skip
    grid = (-(-rows // (DELTA_THREADS // 8)), 1)
    return CudaLaunch(_source("volta_delta"), "volta_delta", Options.of(defines), grid, DELTA_THREADS, 0, arguments)


def backward_call(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, lengths: Tensor | None, seed: Tensor | None, dout: Tensor,
    shift: Tensor, delta: Tensor, far: Tensor, dquery: Tensor | None, dkey: Tensor, dvalue: Tensor, features: Features, arch: int,
) -> CudaLaunch:  # fmt: skip
    """The launch of `volta_backward`; dquery float32 `[B, H, Tq, D]`, None for only dK and dV."""
    batch, kv_heads, kv_len, head_dim = key.shape
    tile = backward_tile(head_dim, arch)
    tiles = -(-kv_len // OWNED_KEYS)
    defines = {
        **_defines(head_dim, mask, lengths, seed, features), "WARPS": tile.warps, "SHARED_BYTES": tile.shared_bytes, "ROWS": tile.rows, "BLOCKS": tile.blocks,
        "ATOMIC": dquery is not None,
    }  # fmt: skip
    arguments = {
        **_given(query, key, value, mask, lengths, seed), "dout": dout, "shift": shift, "delta": delta, "far": far,
        "dquery": dquery, "dkey": dkey, "dvalue": dvalue,
        **strides(dout=dout.stride()[:3], dkey=dkey.stride()[:3], dvalue=dvalue.stride()[:3]),
        "kv_tiles": tiles, "threshold": drop_threshold(features.dropout_p), **_factors(features), "scale": features.scale,
    }  # fmt: skip
    grid = (batch * kv_heads * tiles, 1)
    return CudaLaunch(
        _source("volta_backward"), "volta_backward", Options.of(defines), grid, 32 * tile.warps, tile.shared_bytes,
        arguments,
    )  # fmt: skip


def query_gradient_call(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, lengths: Tensor | None, seed: Tensor | None, dout: Tensor,
    shift: Tensor, delta: Tensor, far: Tensor, dquery: Tensor, features: Features, arch: int,
) -> CudaLaunch:  # fmt: skip
    """The launch of `volta_query_gradient`, the deterministic dQ."""
    batch, heads, q_len, head_dim = query.shape
    tile = backward_tile(head_dim, arch)
    tiles = -(-q_len // tile.rows)
    defines = {
        **_defines(head_dim, mask, lengths, seed, features), "WARPS": tile.warps, "SHARED_BYTES": tile.shared_bytes, "ROWS": tile.rows, "BLOCKS": tile.blocks,
    }  # fmt: skip
    arguments = {
        **_given(query, key, value, mask, lengths, seed), "dout": dout, "shift": shift, "delta": delta, "far": far, "dquery": dquery,
        **strides(dout=dout.stride()[:3], dquery=dquery.stride()[:3]),
        "q_tiles": tiles, "threshold": drop_threshold(features.dropout_p), **_factors(features), "scale": features.scale,
    }  # fmt: skip
    grid = (batch * heads * tiles, 1)
    return CudaLaunch(
        _source("volta_query_gradient"), "volta_query_gradient", Options.of(defines), grid, 32 * tile.warps,
        tile.shared_bytes, arguments,
    )  # fmt: skip


def bias_gradient_call(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, lengths: Tensor | None, seed: Tensor | None, dout: Tensor,
    shift: Tensor, delta: Tensor, far: Tensor, dbias: Tensor, features: Features, arch: int,
) -> CudaLaunch:  # fmt: skip
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
    arguments = {
        **_given(query, key, value, mask, lengths, seed), "dout": dout, "shift": shift, "delta": delta, "far": far, "dbias": dbias,
        **strides(dout=dout.stride()[:3]),
        "bias_heads": bias_heads, "q_programs": q_programs, "k_programs": k_programs, "batch_steps": batch // rows,
        "head_steps": heads // bias_heads, "q_steps": q_steps, "k_steps": k_steps, "bias_queries": bias_queries, "bias_keys": bias_keys,
        "threshold": drop_threshold(features.dropout_p), **_factors(features),
    }  # fmt: skip
    grid = (rows * bias_heads * q_programs * k_programs, 1)
    return CudaLaunch(
        _source("volta_bias_gradient"), "volta_bias_gradient", Options.of(defines), grid, 32 * tile.warps,
        tile.shared_bytes, arguments,
    )  # fmt: skip


def _operands(args: AttentionArgs) -> tuple[Tensor | None, ...]:
    """query, key, value, mask or bias, lengths, seed: the first pointers of every kernel but that of delta."""
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
    return {
        "HEAD_DIM": head_dim, "CAUSAL": features.is_causal, "MASK": _mask_kind(mask), "LENGTHS": lengths is not None,
        "DROPOUT": seed is not None, "HALF_SUMS": features.half_sums,
    }  # fmt: skip


def _mask_kind(mask: Tensor | None) -> int:
    """The macro MASK of `cuda/visible.cuh`."""
    return 0 if mask is None else 1 if mask.dtype == torch.bool else 2 if mask.dtype == torch.float16 else 3


def _mask_strides(mask: Tensor | None) -> dict[str, int]:
    return strides(mask=(0, 0, 0, 0) if mask is None else mask.stride())


def _given(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, lengths: Tensor | None, seed: Tensor | None
) -> dict[str, Any]:
    """The arguments of the operands, and the sizes, by name."""
    return {
        "query": query, "key": key, "value": value, "mask": mask, "lengths": lengths, "seed": seed,
        **strides(query=query.stride()[:3], key=key.stride()[:3], value=value.stride()[:3]),
        **_mask_strides(mask),
        "heads": query.shape[1], "group": query.shape[1] // key.shape[1], "q_len": query.shape[2], "kv_len": key.shape[2],
    }  # fmt: skip


def _factors(features: Features) -> dict[str, float]:
    return {"factor": features.scale * LOG2E, "inverse": 1.0 / (1.0 - features.dropout_p)}


@functools.cache
def _source(kernel: str) -> Source:
    return Source(_CUDA / f"{kernel.removeprefix('volta_')}.cu", (HEADERS,))
