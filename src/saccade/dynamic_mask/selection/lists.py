"""Lists the keys that each block of queries has to read: in CUDA C++ where NVRTC is available and the lists fit, else in
Triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from saccade.dynamic_mask.selection import lists_cuda, lists_triton
from saccade.dynamic_mask.selection.lists_triton import Lists
from saccade.hardware import arch_of
from saccade.nvrtc import obstacles

# (start, stop, *zeros) -> the tensor that holds the lists, and the addresses of keys, counts and wholes
Writer = Callable[..., tuple[Any, int, int, int]]


def build_lists(start: Tensor, stop: Tensor, q_len: int, block: int, max_new_keys: int) -> Lists:
    """The keys of every block of `block` queries (the last query is at position Tk - 1), in order of position, so that a gather
    walks forward.

    Args:
        start, stop: int32 `[B, Hkv, Tk]`, contiguous: positions `start <= i < stop` see the key; start does not decrease along
        the keys.
        max_new_keys: a bound on how many keys two queries see together, without the keys that lie between the two.
    """
    batch, heads, kv_len = start.shape
    shape = cuda_shape(batch * heads, kv_len, q_len, block, max_new_keys, start.device)
    if shape is not None:
        return lists_cuda.build_lists(start, stop, shape)
    return lists_triton.build_lists(start, stop, q_len, block, max_new_keys)


def writer(
    rows: int, kv_len: int, q_len: int, block: int, max_new_keys: int, device: torch.device, zeros: tuple[int, int] = (0, 0)
) -> Writer:
    """A function that makes the same lists for rows = B * Hkv and returns addresses, as the kernels in CUDA C++ take them; None
    where Triton makes the lists.

    zeros: sizes of two contiguous float32 tensors, the first a multiple of four, that it also fills with zeros for the next
        kernel to add to, which saves two launches.
    """
    shape = cuda_shape(rows, kv_len, q_len, block, max_new_keys, device)
    if shape is not None:
        return lists_cuda.writer(shape, device, zeros)

    def write(start: Tensor, stop: Tensor, *zeros: Tensor) -> tuple[Lists, int, int, int]:
        for x in zeros:
            x.zero_()
        lists = lists_triton.build_lists(start, stop, q_len, block, max_new_keys)
        return lists, lists.keys.data_ptr(), lists.counts.data_ptr(), lists.wholes.data_ptr()

    return write


def cuda_shape(
    rows: int, kv_len: int, q_len: int, block: int, max_new_keys: int, device: torch.device
) -> lists_cuda.Shape | None:
    """The description of the launch in CUDA C++; None if Triton makes the lists."""
    if device.type != "cuda" or obstacles(arch_of(device)):
        return None
    shape = lists_cuda.shape_of(rows, kv_len, q_len, block, max_new_keys, device)
    return shape if lists_cuda.fits(shape) else None
