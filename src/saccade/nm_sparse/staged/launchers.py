"""Launchers of the staged kernels. A `CudaLaunch` holds all that a launch needs, so that it can be inspected, or run elsewhere, without
a GPU.

`torch.compile` cannot trace them, because they pass addresses to the driver.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from saccade.engine.layout import on_16_bytes
from saccade.hardware import arch_of, multiprocessors
from saccade.launch.cuda import HEADERS, CudaLaunch, run, strides
from saccade.nm_sparse.staged.config import (
    WARP_ROWS,
    matmul_tile,
    matmul_width,
    most_shared,
    scores_tile,
    softmax_lanes,
    span,
)
from saccade.nvrtc import Options, Source

_CUDA = Path(__file__).parent / "cuda"
_DTYPE = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


class Limits(NamedTuple):
    """The limits of a device: bytes of shared memory per block, and the number of multiprocessors."""

    shared_bytes: int
    processors: int


def _run(make: Callable[..., CudaLaunch], tensors: tuple[Tensor | None, ...], *options: Any) -> None:
    """Launch what `make(*tensors, *options, limits)` describes."""
    run(make, tensors, options, limits_of)


@torch.compiler.disable
def scores(
    query: Tensor, key: Tensor, mask: Tensor | None, block_mask: Tensor | None, is_causal: bool, scale: float, keep: int, rows: int,
    cols: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(values `[B, H, rows, cols / 2]`, metadata int16) of pruned scores; mask as in `attention`, broadcastable to `[B, H, Tq, Tk]`;
    block_mask of four dims; B and H broadcast."""
    batch, heads = query.shape[:2]
    values = torch.empty(batch, heads, rows, cols // 2, dtype=query.dtype, device=query.device)
    metadata = torch.empty(batch, heads, rows, cols * query.element_size() // 32, dtype=torch.int16, device=query.device)
    if values.numel():
        query, key = (padded(x, 32 // x.element_size()) for x in (query, key))
        masks = (as_mask(query, key, mask), as_block_mask(query, block_mask))
        _run(scores_call, (query, key, *masks, values, metadata), is_causal, scale, keep)
    return values, metadata


@torch.compiler.disable
def softmax(values: Tensor, is_causal: bool, out: Tensor) -> None:
    """Softmax of kept scores `[B, H, rows, kept]` into `out`, which may be `values`."""
    if values.numel():
        _run(softmax_call, (values, out), is_causal)


@torch.compiler.disable
def matmul(weights: Tensor, metadata: Tensor, value: Tensor, is_causal: bool, q_len: int) -> Tensor:
    """Pruned weights `[B, H, rows, kept]` times value `[B, Hkv, Tk, Dv]`: `[B, H, Tq, Dv]`."""
    width = value.shape[3]
    wide = padded(value, 16 // value.element_size())
    batch, heads = weights.shape[:2]
    out = torch.empty(batch, heads, q_len, wide.shape[3], dtype=value.dtype, device=value.device)
    if weights.numel() == 0 or out.numel() == 0:
        return out.zero_()[..., :width]
    _run(matmul_call, (weights, metadata, wide, out), is_causal)
    return out[..., :width]


def scores_call(
    query: Tensor, key: Tensor, mask: Tensor | None, block_mask: Tensor | None, values: Tensor, metadata: Tensor, is_causal: bool,
    scale: float, keep: int, limits: Limits,
) -> CudaLaunch:  # fmt: skip
    """The launch of `nm_scores`; query and key from `padded`, mask from `as_mask`, block_mask from `as_block_mask`. keep: N of the pattern, 2 or 1."""
    batch, heads, q_len, head_dim = query.shape
    kv_len, (rows, kept) = key.shape[2], values.shape[2:]
    tile = scores_tile(head_dim, query.element_size(), q_len, limits.shared_bytes)
    q_tiles, tiles = -(-q_len // (tile.warps * WARP_ROWS)), 2 * kept // span(query.element_size())
    splits = max(1, min(4 * limits.processors // max(1, batch * heads * q_tiles), tiles // 4))
    kind = 0 if mask is None else 1 if mask.dtype == torch.bool else 3 if mask.dtype == torch.float32 else 2
    defines = {
        "DTYPE": _DTYPE[query.dtype], "HEAD_DIM": head_dim, "TWO_OF_FOUR": keep == 2, "MASK": kind, "CAUSAL": is_causal,
        "HIDES": block_mask is not None, "WARPS": tile.warps, "SHARED_BYTES": tile.shared_bytes, "STAGES": tile.stages, "BLOCKS": tile.blocks,
        "QUERY_STAYS": tile.query_stays,
        "PRESCALED": kind >= 2 or scale <= 0,
    }  # fmt: skip
    mask_strides = (0, 0, 0, 0) if mask is None else mask.stride()
    block_strides = (0, 0, 0) if block_mask is None else block_mask.stride()[:3]
    arguments = {
        "query": query, "key": key, "mask": mask, "block_mask": block_mask, "values": values, "metadata": metadata,
        **strides(query=query.stride()[:3], key=key.stride()[:3], mask=mask_strides, block_mask=block_strides),
        "heads": heads, "group": heads // key.shape[1], "q_len": q_len, "kv_len": kv_len, "rows": rows, "cols": 2 * kept,
        "q_tiles": q_tiles, "tiles_per_block": -(-tiles // splits), "scale": scale,
    }  # fmt: skip
    grid = (batch * heads * q_tiles, -(-tiles // -(-tiles // splits)))
    return CudaLaunch(
        _source("nm_scores"),
        "nm_scores",
        Options.of(defines),
        grid,
        32 * tile.warps,
        tile.shared_bytes,
        arguments,
    )


def softmax_call(values: Tensor, out: Tensor, is_causal: bool, limits: Limits) -> CudaLaunch:
    """The launch of `nm_softmax`."""
    rows, kept = values.shape[2:]
    chunks = kept * values.element_size() // 16
    shape = softmax_lanes(chunks)
    assert shape is not None  # checked by `why_not`
    lanes, vectors = shape
    threads = max(128, lanes)
    all_rows = values.shape[0] * values.shape[1] * rows
    defines = {"DTYPE": _DTYPE[values.dtype], "LANES": lanes, "VECTORS": vectors, "THREADS": threads, "CAUSAL": is_causal}
    arguments = {"scores": values, "weights": out, "all_rows": all_rows, "rows": rows, "chunks": chunks}
    grid = (-(-all_rows // (threads // lanes)), 1)
    return CudaLaunch(_source("nm_softmax"), "nm_softmax", Options.of(defines), grid, threads, 0, arguments)


def matmul_call(weights: Tensor, metadata: Tensor, value: Tensor, out: Tensor, is_causal: bool, limits: Limits) -> CudaLaunch:
    """The launch of `nm_matmul`; value and out aligned to 16 bytes."""
    batch, heads, q_len, value_dim = out.shape
    rows, kept = weights.shape[2:]
    width = matmul_width(value_dim)
    tile = matmul_tile(width, value.element_size(), q_len, limits.shared_bytes)
    q_tiles = -(-q_len // (tile.warps * WARP_ROWS))
    defines = {
        "DTYPE": _DTYPE[value.dtype], "WIDTH": width, "CAUSAL": is_causal, "WARPS": tile.warps, "SHARED_BYTES": tile.shared_bytes, "STAGES": tile.stages,
        "BLOCKS": tile.blocks, "STEPS": tile.steps,
    }  # fmt: skip
    arguments = {
        "weights": weights, "metadata": metadata, "value": value, "out": out,
        **strides(value=value.stride()[:3], out=out.stride()[:3]),
        "heads": heads, "group": heads // value.shape[1], "q_len": q_len, "kv_len": value.shape[2], "rows": rows, "cols": 2 * kept,
        "width": value_dim, "q_tiles": q_tiles,
    }  # fmt: skip
    grid = (batch * heads * q_tiles, -(-value_dim // width))
    return CudaLaunch(
        _source("nm_matmul"),
        "nm_matmul",
        Options.of(defines),
        grid,
        32 * tile.warps,
        tile.shared_bytes,
        arguments,
    )


def limits_of(device: torch.device) -> Limits:
    """The limits of a CUDA device."""
    return Limits(most_shared(arch_of(device)), multiprocessors(device))


@functools.cache
def _source(kernel: str) -> Source:
    return Source(_CUDA / f"{kernel.removeprefix('nm_')}.cu", (HEADERS,))


def padded(x: Tensor, multiple: int) -> Tensor:
    """`x`, or a copy, with a last dim that is a multiple of `multiple` and rows that begin at multiples of 16 bytes; a copy moves
    n * D numbers."""
    return pad(x, (0, -x.shape[-1] % multiple)) if x.shape[-1] % multiple else on_16_bytes(x)


def as_mask(query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor | None:
    """A mask with the strides of `[B, H, Tq, Tk]`, in a dtype that the kernel can read."""
    if mask is None:
        return None
    if mask.dtype not in (torch.bool, torch.float32, query.dtype):
        mask = mask.float()
    return mask.expand(*query.shape[:3], key.shape[2])


def as_block_mask(query: Tensor, block_mask: Tensor | None) -> Tensor | None:
    """A block mask for all batch rows and heads, with contiguous columns."""
    if block_mask is None:
        return None
    block_mask = block_mask if block_mask.stride(3) == 1 or block_mask.shape[3] == 1 else block_mask.contiguous()
    return block_mask.expand(*query.shape[:2], *block_mask.shape[2:])
