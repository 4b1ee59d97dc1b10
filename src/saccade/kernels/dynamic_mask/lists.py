"""Which keys a block of queries has to read: in CUDA C++ where NVRTC is at hand and the lists are not too long, else in Triton."""

from __future__ import annotations

from torch import Tensor

from saccade.hardware import arch_of
from saccade.kernels.dynamic_mask import lists_cuda, lists_triton
from saccade.kernels.dynamic_mask.lists_cuda import Written
from saccade.kernels.dynamic_mask.lists_triton import Lists
from saccade.nvrtc import obstacles


def build_lists(start: Tensor, stop: Tensor, q_len: int, block: int, most: int) -> Lists:
    """Lists of every block of `block` queries, the last at position Tk - 1; in order of position, so that a gather walks forward.

    Args:
        start, stop: int32 `[B, Hkv, Tk]`, contiguous: positions `start <= i < stop` see the key; start does not decrease along the keys.
        most: bound on the keys that two queries see between them, besides those that lie between the two.
    """
    return (lists_cuda if _native(start, q_len, block, most) else lists_triton).build_lists(start, stop, q_len, block, most)


def write_lists(start: Tensor, stop: Tensor, q_len: int, block: int, most: int) -> Written:
    """The same lists by their addresses, for the kernels in CUDA C++."""
    if _native(start, q_len, block, most):
        return lists_cuda.write_lists(start, stop, q_len, block, most)
    lists = lists_triton.build_lists(start, stop, q_len, block, most)
    return Written(lists, *(x.data_ptr() for x in lists), *lists.keys.shape)


def _native(start: Tensor, q_len: int, block: int, most: int) -> bool:
    return start.is_cuda and not obstacles(arch_of(start.device)) and lists_cuda.takes(start, q_len, block, most)
