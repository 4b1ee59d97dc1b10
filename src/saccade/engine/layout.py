"""The memory layout of results, and views of packed inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


def empty_like_heads(tensor: Tensor, last_dim: int | None = None) -> Tensor:
    """A new dense tensor with the shape `[B, H, T, D]` of `tensor`. Batch, heads and time have the order that they have in the memory of `tensor`. If
    strides do not show an order (a size of 1, shared memory, symbols), it is one of three: `[B, T, H, D]`, `[B, H, T, D]` or `[T, B, H, D]`.

    This is the layout that models expect: an input that is a view of `[B, T, H, D]` gives a view of a contiguous `[B, T, H, D]`.
    """
    strides = strides_like_heads(tensor, last_dim)
    return torch.empty_strided(
        (*tensor.shape[:3], tensor.shape[3] if last_dim is None else last_dim), strides, dtype=tensor.dtype, device=tensor.device
    )


def strides_like_heads(tensor: Tensor, last_dim: int | None = None) -> tuple[int, int, int, int]:
    """The strides of the tensor that `empty_like_heads` makes."""
    batch, heads, time, dim = tensor.shape
    dim = dim if last_dim is None else last_dim
    outer = tensor.stride()[:3]
    # plain numbers: a comparison of symbols would add a guard to a traced program
    if all(type(n) is int for n in (*outer, batch, heads, time, dim)) and len({0, *outer}) == 4 and min(batch, heads, time) > 1:
        strides, step = [0, 0, 0], dim
        for axis in sorted(range(3), key=outer.__getitem__):
            strides[axis], step = step, step * tensor.shape[axis]
        return strides[0], strides[1], strides[2], 1
    if _is_time_first(tensor):
        return heads * dim, dim, batch * heads * dim, 1
    if tensor.stride(1) < tensor.stride(2):
        return time * heads * dim, dim, heads * dim, 1
    return heads * time * dim, time * dim, dim, 1


def _is_time_first(tensor: Tensor) -> bool:
    """Whether time is outside the batch, and the batch outside heads. The stride of one head says nothing, and a batch whose rows share memory has
    none."""
    of_batch, of_heads, of_time, _ = tensor.stride()
    if not _known(of_batch < of_time) or not _known(of_batch > 0):
        return False
    return tensor.shape[1] == 1 or _known(of_heads < of_batch)


def _known(condition: bool | torch.SymBool) -> bool:
    """A condition; False if a trace does not know it, as of sizes that depend on data."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # its import takes 0.7 s

    return guard_or_false(condition)


def repeat_heads(tensor: Tensor, group: int, dim: int = 1) -> Tensor:
    """Key heads repeated once for each query head that shares them, copies adjacent. `repeat_interleave` does the same, but `torch.jit.trace` turns it
    into an index on the CPU, which CUDA refuses."""
    sizes = tensor.shape[: dim + 1], tensor.shape[dim + 1 :]
    return tensor.unsqueeze(dim + 1).expand(*sizes[0], group, *sizes[1]).flatten(dim, dim + 1)


def unpack(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """query, key, value as `[B, H, S, D]` views of a packed `[B, S, 3, H, D]`."""
    query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    return query, key, value


def on_16_bytes(tensor: Tensor) -> Tensor:
    """The tensor, or a dense copy if kernels cannot read it. 16-byte loads and the copy engine need a contiguous last dim, and the
    tensor, each row, head and batch row at a multiple of 16 bytes. The stride of an axis of size 1 is never used, so it is ignored."""
    whole = 16 // tensor.element_size()
    odd = any(size > 1 and stride % whole for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True))
    if odd or tensor.stride(-1) != 1 or tensor.data_ptr() % 16:
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor


def shares_memory(tensor: Tensor) -> bool:
    """Whether elements of an expanded tensor share memory, which saved-tensor hooks cannot restore."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


class Rows(NamedTuple):
    """The layout of an operation's query, key and value.

    unpack: query, key and value as views of one packed tensor. like: a new dense tensor with the shape of one of them; its last dim may be given.
    lse: the shape of the log-sum-exp for a query.
    """

    unpack: Callable[[Tensor], tuple[Tensor, ...]]
    like: Callable[..., Tensor]
    lse: Callable[[Tensor], tuple[int, ...]]


def _like_tokens(tensor: Tensor, last_dim: int | None = None) -> Tensor:
    shape = tensor.shape if last_dim is None else (*tensor.shape[:-1], last_dim)
    return torch.empty(shape, dtype=tensor.dtype, device=tensor.device)


# [B, H, T, D] and [B, T, 3, H, D]; [T, H, D] and [T, 3, H, D]
HEADS = Rows(unpack, empty_like_heads, lambda query: tuple(query.shape[:3]))
TOKENS = Rows(lambda qkv: qkv.unbind(1), _like_tokens, lambda query: (query.shape[1], query.shape[0]))
