"""Launches of a decoding call: how the places are split, the workspace, and a launch that bypasses Triton's binding of
arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from saccade.dynamic_mask.args import Places
from saccade.dynamic_mask.decode.kernel import _decode_kernel
from saccade.engine.layout import empty_like_heads
from saccade.env import interpreting_triton
from saccade.hardware import multiprocessors
from saccade.launch.constants import LOG2E
from saccade.launch.triton import first_launch, pow2

# bytes of keys, and of values, that a program holds at a time
_TILE_BYTES = 16384
# the combining program reads the parts one by one
_MAX_SPLITS = 32
_SCAN = 2048
# numbers that the combining program holds at once: 32 registers a thread
_AT_ONCE = 8192


@dataclass(frozen=True)
class DecodeConfig:
    """splits: programs per key head. block_n: places at a time. `kernel.py` has an estimate; measured were 11.7 us per token on
    an H200 (docs/notes/dynamic_mask.md)."""

    splits: int
    block_n: int
    warps: int = 8


def pick_decode(owners: int, size: int, row_bytes: int, processors: int) -> DecodeConfig:
    """As many programs as multiprocessors, but at most one for each tile. owners: batch x key heads.
    size: places of a head. row_bytes: bytes of one key."""
    block_n = min(64, max(16, _TILE_BYTES // row_bytes))
    tiles = -(-size // block_n)
    splits = min(_pow2_floor(max(1, processors // owners)), pow2(tiles), _MAX_SPLITS)
    return DecodeConfig(splits, block_n)


class Decode:
    """The launches of one signature: the shapes, strides, dtypes and alignment of the new tokens, and the options, must be those
    of the first call.

    The places may change their contents, but not the alignment of their addresses. The object owns its workspace, so its calls
    must be ordered on the device.
    """

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, key_scores: Tensor, lengths: Tensor | None, places: Places,
        scale: float, add_scores: bool, return_lse: bool, sinks: int = 0, window: int = 0,
    ) -> None:  # fmt: skip
        batch, heads, self.q_len, head_dim = query.shape
        kv_heads, size = places.scores.shape[1:]
        self.owners, group, self.return_lse = batch * kv_heads, heads // kv_heads, return_lse
        block_d = max(16, pow2(head_dim))
        config = pick_decode(max(1, self.owners), size, block_d * key.element_size(), multiprocessors(key.device))
        parts = (self.owners, config.splits, group)
        device = key.device
        self.workspace = (
            torch.empty(*parts, head_dim, dtype=torch.float32, device=device),
            torch.empty(parts, dtype=torch.float32, device=device),
            torch.empty(parts, dtype=torch.float32, device=device),
            torch.zeros(self.owners, dtype=torch.int32, device=device),
        )
        self.strides = query.stride()[:3], key.stride()[:3] + value.stride()[:3] + key_scores.stride()
        at_once = _pow2_floor(max(1, _AT_ONCE // (pow2(group) * block_d)))
        precision = "ieee" if query.dtype == torch.float32 else "tf32"
        self.static = (
            kv_heads, self.q_len, size, -(-size // config.splits), head_dim, scale * LOG2E, size - sinks - window, sinks, window,
            group, pow2(group), max(16, pow2(group)), config.splits, min(at_once, config.splits),
            min(_SCAN, pow2(size)), config.block_n, block_d,
            lengths is not None, add_scores, return_lse, precision, sinks + window > 0,
        )  # fmt: skip
        self.grid = (self.owners * config.splits, 1, 1)
        self.warps = config.warps
        self.runner: Any = None

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, key_scores: Tensor, lengths: Tensor | None, places: Places
    ) -> tuple[Tensor, Tensor | None]:
        """(out laid out like query, lse float32 `[B, H, T]` or None); the places then hold what later tokens can see."""
        out = empty_like_heads(query)
        lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device) if self.return_lse else None
        if out.numel() == 0:
            return out, lse
        unused = self.workspace[1]
        tensors = (
            query, key, value, key_scores, unused if lengths is None else lengths, *places, *self.workspace, out,
            unused if lse is None else lse,
        )  # fmt: skip
        scalars = (*self.strides[0], *self.strides[1], *out.stride()[:3], *self.static)
        if query.is_cuda and query.device.index != torch.cuda.current_device():
            # Triton launches on the current device, whatever device the tensors are on
            with torch.cuda.device(query.device):
                self._launch(tensors, scalars)
        else:
            self._launch(tensors, scalars)
        return out, lse

    def _launch(self, tensors: tuple[Tensor, ...], scalars: tuple) -> None:
        # tokens in order: each must see the entries as the token before it left them
        for step in range(self.q_len):
            if self.runner is not None:
                self.runner(*[t.data_ptr() for t in tensors], step, *scalars)
                continue
            options = {"num_warps": self.warps, "enable_fp_fusion": True}
            compiled = first_launch(_decode_kernel, self.grid, (*tensors, step, *scalars), options)
            if not interpreting_triton():
                self.runner = compiled[self.grid]  # looks up the current stream at each call


def _pow2_floor(n: int) -> int:
    return 1 << (n.bit_length() - 1)
