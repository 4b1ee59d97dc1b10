"""Launcher of the forward of sm_90a (`cuda/forward_sm90.cu`): what it takes, its shapes, the launch as data."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.dynamic_mask.selection.lists import writer
from saccade.dynamic_mask.selection.lists_triton import longest_list
from saccade.engine.layout import strides_like_heads
from saccade.hardware import arch_of, multiprocessors
from saccade.launch.constants import LOG2E
from saccade.launch.cuda import HEADERS, CudaLaunch, strides
from saccade.launch.triton import pow2
from saccade.nvrtc import Bound, Options, Source, obstacles
from saccade.nvrtc.tensor_map import AnyRows

FORWARD = Source(Path(__file__).parent / "cuda" / "forward_sm90.cu", (HEADERS,))
MAX_GROUP = 64  # heads of a key head: a block has the rows of at least one query
_BLOCK_N = 64
_GATHER_WARPS = 4  # the value in gather.cuh


@dataclass(frozen=True)
class ForwardConfig:
    """warpgroups: those that multiply, 64 rows each; stages: tiles in the ring; turns: they issue their products in turn; registers: of
    a thread that multiplies, and of one that gathers; query_places: with two, Q of the next block is copied during the current one."""

    warpgroups: int
    stages: int
    turns: bool
    registers: tuple[int, int]
    query_places: int

    @property
    def rows(self) -> int:
        """The rows of a block: its queries times the heads of a group."""
        return 64 * self.warpgroups

    def shared_bytes(self, head_dim: int) -> int:
        """Dynamic shared memory: Q; K and V of the tiles, three numbers a key and two barriers a tile."""
        tile = 4 * head_dim * _BLOCK_N + 12 * _BLOCK_N + 16
        return 1024 + 2 * head_dim * self.rows * self.query_places + self.stages * tile


# measured on an H200, every other form too: docs/notes/dynamic_mask.md
CONFIGS = {64: ForwardConfig(4, 8, True, (112, 32), 2), 128: ForwardConfig(3, 5, True, (160, 32), 1)}


def takes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the kernels of sm_90a run a call: sm_90, 16 bits, D = 64 or 128, rows of keys and values on 16 bytes."""
    sized = query.element_size() == 2 and query.shape[3] in CONFIGS and query.shape[1] // key.shape[1] <= MAX_GROUP
    return sized and arch_of(query.device) == 90 and aligned(key) and aligned(value) and not obstacles("90a")


def aligned(tensor: Tensor) -> bool:
    """Whether rows of a 16-bit `[B, H, T, D]` begin at multiples of 16 bytes, and their distance fits 32 bits."""
    return tensor.data_ptr() % 16 == 0 and _aligned_strides(tensor.stride())


@functools.lru_cache(maxsize=4096)
def _aligned_strides(strides: tuple[int, ...]) -> bool:
    *outer, row, last = strides
    return last == 1 and not any(s % 8 for s in (*outer, row)) and 0 <= 2 * row < 2**32


def suited(tensor: Tensor) -> Tensor:
    """The same numbers, copied unless they are aligned."""
    return tensor if aligned(tensor) else tensor.clone(memory_format=torch.contiguous_format)


class Layout(NamedTuple):
    """Shapes and strides of a call; `out_strides` as `strides_like_heads` has them."""

    query: tuple[int, ...]
    query_strides: tuple[int, ...]
    key: tuple[int, ...]
    key_strides: tuple[int, ...]
    value_strides: tuple[int, ...]
    out_strides: tuple[int, ...]


def forward(
    query: Tensor, key: Tensor, value: Tensor, scores: Tensor | None, start: Tensor, stop: Tensor, max_new_keys: int, scale: float
) -> tuple[Tensor, Tensor]:
    """(out, lse) as `launchers.forward`; scores float32 `[B, Hkv, Tk]`, start and stop as everywhere, all contiguous."""
    out_strides, device = strides_like_heads(query), query.device
    query = suited(query)
    layout = layout_of(query, key, value)._replace(out_strides=out_strides)
    out = torch.empty_strided(query.shape, layout.out_strides, dtype=query.dtype, device=device)
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=device)
    batch, kv_heads, kv_len, _ = key.shape
    write = writer(batch * kv_heads, kv_len, query.shape[2], block_of(layout), max_new_keys, device)
    list_memory, keys, counts, wholes = write(start, stop)
    launch(layout, query.dtype, scores is not None, max_new_keys, scale, device)(
        query.data_ptr(), key.data_ptr(), value.data_ptr(), 0 if scores is None else scores.data_ptr(), start.data_ptr(),
        stop.data_ptr(), keys, counts, wholes, out.data_ptr(), lse.data_ptr(),
    )  # fmt: skip
    del list_memory  # only after everything is enqueued
    return out, lse


def layout_of(query: Tensor, key: Tensor, value: Tensor) -> Layout:
    """The shapes and strides of a call with these tensors."""
    return Layout(query.shape, query.stride(), key.shape, key.stride(), value.stride(), strides_like_heads(query))


def block_of(layout: Layout) -> int:
    """Queries of a block, which share a list."""
    return CONFIGS[layout.query[3]].rows // pow2(layout.query[1] // layout.key[1])


@functools.lru_cache(maxsize=1024)
def launch(layout: Layout, dtype: torch.dtype, has_scores: bool, max_new_keys: int, scale: float, device: torch.device) -> Bound:
    """The launch that runs calls of a layout on a device; max_new_keys: as of `lists.build_lists`. It takes the pointers of the kernel."""
    longest = longest_list(layout.key[2], block_of(layout), max_new_keys)
    config, runs = CONFIGS[layout.query[3]], all(rows.allowed() for rows in row_maps(layout))
    return forward_call(layout, dtype, has_scores, longest, scale, config, multiprocessors(device), runs).ready(device)


def forward_call(
    layout: Layout, dtype: torch.dtype, has_scores: bool, longest: int, scale: float, config: ForwardConfig, processors: int,
    runs: bool = True,
) -> CudaLaunch:  # fmt: skip
    """The launch of `forward_sm90`. longest: keys of a list; lists are of blocks of `config.rows`. runs: keys that follow each other are
    fetched by the copy engine."""
    (batch, heads, q_len, head_dim), query_strides, (_, kv_heads, kv_len, _), key_strides, value_strides, out_strides = layout
    blocks = -(-q_len // (config.rows // pow2(heads // kv_heads)))
    owners = batch * kv_heads
    arguments: dict[str, Any] = {
        **strides(query=query_strides[:3], key=key_strides[:2], value=value_strides[:2], out=out_strides[:3]),
        "key_row": 2 * key_strides[2], "value_row": 2 * value_strides[2],
        "kv_heads": kv_heads, "q_len": q_len, "kv_len": kv_len, "longest": longest, "blocks": blocks, "owners": owners,
        "scale": scale * LOG2E,
    }  # fmt: skip
    if runs:
        arguments |= zip(("key_map", "value_map"), row_maps(layout), strict=True)
    options = forward_options(head_dim, heads // kv_heads, dtype, has_scores, config, runs)
    grid = (min(owners * blocks, processors), 1)
    threads = 128 * (config.warpgroups + 1)
    shared = config.shared_bytes(head_dim)
    return CudaLaunch(FORWARD, "forward_sm90", options, grid, threads, shared, arguments, "90a", dependent=True)


def row_maps(layout: Layout) -> tuple[AnyRows, AnyRows]:
    """The maps by which the copy engine fetches rows of key and value that follow each other; a copy fetches a warp's share of a tile."""
    share = _BLOCK_N // _GATHER_WARPS
    key, value = (AnyRows(2 * strides[2], layout.query[3], share) for strides in (layout.key_strides, layout.value_strides))
    return key, value


def forward_options(
    head_dim: int, group: int, dtype: torch.dtype, has_scores: bool, config: ForwardConfig, runs: bool = True
) -> Options:
    """How the kernel is compiled for a call."""
    multiplies, gathers = config.registers
    shape = {"HEAD_DIM": head_dim, "BLOCK_N": _BLOCK_N, "STAGES": config.stages, "GROUP": group, "GROUP_PAD": pow2(group)}
    roles = {
        "SHARED_BYTES": config.shared_bytes(head_dim),
        "WARPGROUPS": config.warpgroups,
        "TURNS": config.turns,
        "QUERY_PLACES": config.query_places,
        "CONSUMER_REGISTERS": multiplies,
        "GATHERER_REGISTERS": gathers,
    }
    return Options.of({**shape, **roles, "HAS_SCORES": has_scores, "RUNS": runs, "BF16": dtype == torch.bfloat16})
