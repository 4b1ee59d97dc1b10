"""A causal call on sm_90a as a whole: selection, lists and attention in four launches and four allocations, all sizes known beforehand; and
its backward, whose layout and launches the call knows.

For prepared eager calls. A short call is mostly host time, and separate steps take half as much again (`launchers.watched`, `launchers.forward`,
`launchers.backward`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from saccade.dynamic_mask.gather.sm90 import backward as backward_sm90
from saccade.dynamic_mask.gather.sm90 import forward as forward_sm90
from saccade.dynamic_mask.gather.sm90.forward import Layout
from saccade.dynamic_mask.selection import expiry_cuda, lists, lists_cuda
from saccade.launch.cache import LaunchCache
from saccade.launch.flag import Flag, borrow
from saccade.nvrtc import on_current_stream


class Causal:
    """Calls of one layout on one device that keep `keep` keys a query, whose lists have the shape `shape`."""

    def __init__(
        self,
        layout: Layout,
        dtype: torch.dtype,
        keep: int,
        adds_scores: bool,
        scale: float,
        shape: lists_cuda.Shape,
        device: torch.device,
    ):
        batch, kv_heads, kv_len, _ = layout.key
        rows = batch * kv_heads
        self.layout, self.dtype, self.device, self.adds_scores = layout, dtype, device, adds_scores
        self._keep, self._scale = keep, scale
        self._backward = LaunchCache()  # by strides
        self._sort, self._find, tree_bytes = expiry_cuda.launches(rows, kv_heads, kv_len, keep, device)
        write = lists_cuda.writer(shape, device)
        self._write, self._attend = write.launch, forward_sm90.launch(layout, dtype, adds_scores, keep, scale, device)
        self._intervals, self._stops = (2, batch, kv_heads, kv_len), 4 * rows * kv_len  # bytes from starts to stops
        # trees, and behind them keys, counts and wholes of the lists
        trees = -(-tree_bytes // 16) * 16
        self._keys, self._counts, self._wholes = (trees + n for n in write.offsets)
        self._bytes = trees + write.bytes

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, key_scores: Tensor, lengths: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Callable[[], bool]]:
        """(out, lse, intervals, faulty): starts and stops, int32 `[2, B, Hkv, Tk]`; faulty as of `expiry.watched_intervals`. lengths: int32."""
        layout, device = self.layout, self.device
        out = torch.empty_strided(layout.query, layout.out_strides, dtype=self.dtype, device=device)
        lse = torch.empty(layout.query[:3], dtype=torch.float32, device=device)
        intervals = torch.empty(self._intervals, dtype=torch.int32, device=device)
        memory = torch.empty(self._bytes, dtype=torch.uint8, device=device)
        flag, scores = borrow(device), key_scores.detach().float().contiguous()
        on_current_stream(
            device.index, self._enqueue, flag, query.data_ptr(), key.data_ptr(), value.data_ptr(), scores.data_ptr(),
            0 if lengths is None else lengths.data_ptr(), intervals.data_ptr(), memory.data_ptr(), out.data_ptr(), lse.data_ptr(),
        )  # fmt: skip
        return out, lse, intervals, flag.read

    def _enqueue(
        self, stream: int, flag: Flag, query: int, key: int, value: int, scores: int, lengths: int, starts: int, trees: int, out: int,
        lse: int,
    ) -> None:  # fmt: skip
        stops, keys, counts, wholes = starts + self._stops, trees + self._keys, trees + self._counts, trees + self._wholes
        self._sort.enqueue(stream, (scores, lengths, trees, starts, stops, flag.address))
        flag.record(stream)
        self._find.enqueue(stream, (lengths, trees, stops))
        self._write.enqueue(stream, (starts, stops, keys, counts, wholes, 0, 0))
        bias = scores if self.adds_scores else 0
        self._attend.enqueue(stream, (query, key, value, bias, starts, stops, keys, counts, wholes, out, lse))

    def backward(
        self, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, query: Tensor, key: Tensor, value: Tensor,
        key_scores: Tensor | None, intervals: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:  # fmt: skip
        """(dq, dk, dv, dscores) as of `launchers.backward`; None if it goes step by step: under `torch.use_deterministic_algorithms`, or for
        rows that would have to be copied."""
        if (query.data_ptr() | key.data_ptr() | value.data_ptr() | dout.data_ptr() | out.data_ptr()) % 16:
            return None
        if torch.are_deterministic_algorithms_enabled():
            return None
        # not only dout's: saved-tensor hooks may return tensors with another layout
        strides = dout.stride(), out.stride(), query.stride(), key.stride(), value.stride()
        run = self._backward.get_or_make(strides, lambda: self._make_backward(dout, out, query, key, value))
        if run is None:
            return None
        dlse = None if dlse is None else dlse.float().contiguous()
        scores = None if key_scores is None else key_scores.float().contiguous()
        dq, dk, dv, dscores = run(dout, dlse, out, lse.contiguous(), query, key, value, scores, *intervals.contiguous().unbind(0))
        return dq, dk, dv, dscores if key_scores is None else dscores.to(key_scores.dtype)

    def _make_backward(
        self, dout: Tensor, out: Tensor, query: Tensor, key: Tensor, value: Tensor
    ) -> backward_sm90.Backward | None:
        if not (all(forward_sm90.aligned(x) for x in (dout, out, query)) and backward_sm90.takes(query, key, value)):
            return None
        layout = backward_sm90.layout_of(query, key, value, dout, out)
        return backward_sm90.planned(layout, self.dtype, self.adds_scores, self._keep, self._scale, self.device)


def find(
    query: Tensor, key: Tensor, value: Tensor, keep: int, adds_scores: bool, scale: float, launches: LaunchCache
) -> Causal | None:
    """The object that runs an eager causal call; None if the call goes step by step. launches: remembered from calls that differ only in data."""
    if (query.data_ptr() | key.data_ptr() | value.data_ptr()) % 16:
        return None
    return launches.get_or_make("causal", lambda: _make(query, key, value, keep, adds_scores, scale))


def _make(query: Tensor, key: Tensor, value: Tensor, keep: int, adds_scores: bool, scale: float) -> Causal | None:
    if not (query.numel() and key.numel() and forward_sm90.takes(query, key, value) and forward_sm90.aligned(query)):
        return None
    layout, device = forward_sm90.layout_of(query, key, value), query.device
    batch, kv_heads, kv_len, _ = key.shape
    block = forward_sm90.block_of(layout)
    shape = lists.cuda_shape(batch * kv_heads, kv_len, query.shape[2], block, keep, device)
    return None if shape is None else Causal(layout, query.dtype, keep, adds_scores, scale, shape, device)
