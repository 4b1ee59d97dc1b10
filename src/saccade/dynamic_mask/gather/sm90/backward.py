"""Launcher of the backward of sm_90a (`cuda/backward_sm90.cu`): what it takes, its shapes, the launch as data."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.dynamic_mask.gather.sm90 import forward as forward_sm90
from saccade.dynamic_mask.gather.sm90.forward import suited
from saccade.dynamic_mask.selection.lists import writer
from saccade.dynamic_mask.selection.lists_triton import longest_list
from saccade.engine.layout import strides_like_heads
from saccade.hardware import multiprocessors
from saccade.launch.constants import LOG2E
from saccade.launch.cuda import HEADERS, CudaLaunch, strides
from saccade.launch.triton import pow2
from saccade.nvrtc import Options, Source

BACKWARD = Source(Path(__file__).parent / "cuda" / "backward_sm90.cu", (HEADERS,))
takes = forward_sm90.takes
_PART_ROWS = 128  # rows that are multiplied together
_PARTS = {64: 2, 128: 1}  # head dim -> parts of a block: at D = 128 shared memory holds one
_BLOCK_N = 64


@dataclass(frozen=True)
class BackwardConfig:
    """stages: tiles of 64 keys in the ring."""

    stages: int = 2

    def shared_bytes(self, head_dim: int) -> int:
        """Dynamic shared memory: Q and dO; P and dS of every part (at D = 128 dS takes the place of V); ones; tiles of K and V with four
        numbers a key and two barriers; a row of floats for each key of either gradient; delta; barriers."""
        rows = rows_of(head_dim)
        pairs, ones = (4, 2048) if head_dim == 64 else (1, 1024)
        ring = self.stages * (4 * head_dim * _BLOCK_N + 16 * _BLOCK_N + 16)
        areas = 2 * _BLOCK_N * (4 * head_dim + 32)
        return 1024 + 4 * head_dim * rows + pairs * 128 * _PART_ROWS + ones + ring + areas + 4 * rows + 8 * 17


def rows_of(head_dim: int) -> int:
    """Rows of a block, whose list they share."""
    return _PARTS[head_dim] * _PART_ROWS


CONFIGS = {64: BackwardConfig(3), 128: BackwardConfig(2)}  # as many as shared memory holds


class Layout(NamedTuple):
    """Shapes of query and key, and strides."""

    query: tuple[int, ...]
    key: tuple[int, ...]
    query_strides: tuple[int, ...]
    key_strides: tuple[int, ...]
    value_strides: tuple[int, ...]
    dout_strides: tuple[int, ...]
    out_strides: tuple[int, ...]
    dq_strides: tuple[int, ...]


class Backward:
    """Backward of calls of one layout on one device: lists and zeros, then gradients, all sizes and launches known."""

    def __init__(
        self, layout: Layout, dtype: torch.dtype, has_scores: bool, max_new_keys: int, scale: float, config: BackwardConfig, device: torch.device
    ):  # fmt: skip
        (_, heads, q_len, head_dim), (batch, kv_heads, kv_len, _) = layout.query, layout.key
        block, rows = rows_of(head_dim) // pow2(heads // kv_heads), batch * kv_heads
        keys = rows * kv_len
        self._write = writer(rows, kv_len, q_len, block, max_new_keys, device, zeros=(2 * keys * head_dim, keys))
        call = backward_call(
            layout, dtype, has_scores, longest_list(kv_len, block, max_new_keys), scale, config, multiprocessors(device)
        )
        self._launch, self._half = call.ready(device), 4 * keys * head_dim
        self._layout, self._dtype, self._device = layout, dtype, device
        self._sums, self._dscores = (2, *layout.key), layout.key[:3]

    def __call__(
        self, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, query: Tensor, key: Tensor, value: Tensor, scores: Tensor | None,
        start: Tensor, stop: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """(dq, dk, dv, dscores), dk and dv in one memory, dscores float32 `[B, Hkv, Tk]`.

        scores: float32 `[B, Hkv, Tk]`; start and stop as everywhere; all but query, key, value, dout and out contiguous.
        """
        layout, device = self._layout, self._device
        dq = torch.empty_strided(layout.query, layout.dq_strides, dtype=self._dtype, device=device)
        sums = torch.empty(self._sums, dtype=torch.float32, device=device)
        dscores = torch.empty(self._dscores, dtype=torch.float32, device=device)
        list_memory, keys, counts, wholes = self._write(start, stop, sums, dscores)
        dk_ptr = sums.data_ptr()
        self._launch(
            query.data_ptr(), key.data_ptr(), value.data_ptr(), 0 if scores is None else scores.data_ptr(), start.data_ptr(),
            stop.data_ptr(), keys, counts, wholes, dout.data_ptr(), out.data_ptr(), lse.data_ptr(), 0 if dlse is None else dlse.data_ptr(),
            dq.data_ptr(), dk_ptr, dk_ptr + self._half, dscores.data_ptr(),
        )  # fmt: skip
        del list_memory  # only after everything is enqueued
        dk, dv = sums.to(self._dtype).unbind(0)
        return dq, dk, dv, dscores


_backward = functools.lru_cache(maxsize=1024)(Backward)


def backward(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, query: Tensor, key: Tensor, value: Tensor, key_scores: Tensor | None,
    start: Tensor, stop: Tensor, max_new_keys: int, scale: float, config: BackwardConfig | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv, dscores), as `launchers.backward`; dk and dv share memory."""
    query, dout, out, lse = suited(query), suited(dout), suited(out), lse.contiguous()
    dlse = None if dlse is None else dlse.float().contiguous()
    scores = None if key_scores is None else key_scores.float().contiguous()
    run = planned(
        layout_of(query, key, value, dout, out), query.dtype, scores is not None, max_new_keys, scale, query.device, config
    )
    dq, dk, dv, dscores = run(dout, dlse, out, lse, query, key, value, scores, start, stop)
    return dq, dk, dv, dscores if key_scores is None else dscores.to(key_scores.dtype)


def layout_of(query: Tensor, key: Tensor, value: Tensor, dout: Tensor, out: Tensor) -> Layout:
    """The shapes and strides of a call with these tensors."""
    strides = query.stride(), key.stride(), value.stride(), dout.stride(), out.stride()
    return Layout(query.shape, key.shape, *strides, strides_like_heads(query))


def planned(
    layout: Layout, dtype: torch.dtype, has_scores: bool, max_new_keys: int, scale: float, device: torch.device, config: BackwardConfig | None = None
) -> Backward:  # fmt: skip
    """The function that runs backward for calls of a layout; config: by default that of the head dim."""
    return _backward(layout, dtype, has_scores, max_new_keys, scale, config or CONFIGS[layout.query[3]], device)


def backward_call(
    layout: Layout, dtype: torch.dtype, has_scores: bool, longest: int, scale: float, config: BackwardConfig, processors: int
) -> CudaLaunch:
    """The launch of `backward_sm90`. longest: keys of a list; lists are of blocks of `rows_of(D)` rows."""
    (
        (batch, heads, q_len, head_dim),
        (_, kv_heads, kv_len, _),
        query_strides,
        key_strides,
        value_strides,
        dout_strides,
        out_strides,
        dq_strides,
    ) = layout
    group = heads // kv_heads
    owners, blocks = batch * kv_heads, -(-q_len // (rows_of(head_dim) // pow2(group)))
    arguments = {
        **strides(query=query_strides[:3], key=key_strides[:2], value=value_strides[:2]),
        **strides(dout=dout_strides[:3], out=out_strides[:3], dquery=dq_strides[:3]),
        "key_row": 2 * key_strides[2], "value_row": 2 * value_strides[2],
        "kv_heads": kv_heads, "group": group, "group_shift": pow2(group).bit_length() - 1, "q_len": q_len, "kv_len": kv_len,
        "longest": longest, "blocks": blocks, "owners": owners, "total": owners * blocks,
        "exponent": scale * LOG2E, "scale": scale,
    }  # fmt: skip
    options = backward_options(head_dim, dtype, has_scores, config)
    grid = (min(owners * blocks, processors), 1)
    # Not a dependent launch: its blocks would arrive while those of the lists still hold their places. The kernel would take 0.55 ms in place
    # of 0.48 at D = 64 and n = 16,384 (docs/notes/dynamic_mask.md).
    return CudaLaunch(BACKWARD, "backward_sm90", options, grid, 384, config.shared_bytes(head_dim), arguments, "90a")


def backward_options(head_dim: int, dtype: torch.dtype, has_scores: bool, config: BackwardConfig) -> Options:
    """How the kernel is compiled for a call."""
    shape = {"HEAD_DIM": head_dim, "BLOCK_N": _BLOCK_N, "STAGES": config.stages, "INDICES": True}
    shape["SHARED_BYTES"] = config.shared_bytes(head_dim)
    return Options.of({**shape, "HAS_SCORES": has_scores, "BF16": dtype == torch.bfloat16})
