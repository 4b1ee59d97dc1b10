"""The memory layout of results, and views of packed inputs."""

from __future__ import annotations

import torch
from torch import Tensor


def empty_like_heads(tensor: Tensor, last_dim: int | None = None) -> Tensor:
    """A new dense tensor with the shape `[B, H, T, D]` of `tensor`, whose heads, time and batch follow each other in memory as those of `tensor`.

    This is the layout that models expect: an input that is a view of `[B, T, H, D]` gives a view of a contiguous `[B, T, H, D]`, and one of
    `[T, B, H, D]`, as `nn.MultiheadAttention` makes it, a view of that.
    """
    strides = strides_like_heads(tensor, last_dim)
    return torch.empty_strided(
        (*tensor.shape[:3], tensor.shape[3] if last_dim is None else last_dim), strides, dtype=tensor.dtype, device=tensor.device
    )


def strides_like_heads(tensor: Tensor, last_dim: int | None = None) -> tuple[int, int, int, int]:
    """The strides of the tensor that `empty_like_heads` makes."""
    batch, heads, time, dim = tensor.shape
    dim = dim if last_dim is None else last_dim
    if tensor.stride(1) >= tensor.stride(2):
        return heads * time * dim, time * dim, dim, 1
    if _is_time_first(tensor):
        return heads * dim, dim, batch * heads * dim, 1
    return time * heads * dim, dim, heads * dim, 1


def _is_time_first(tensor: Tensor) -> bool:
    """Whether a tensor that has time outside heads has it outside the batch too. In the layout of the batch the module's seven copies of a layer took
    2.3 ms of a step of 27 (a ViT of 64 images, `nn.TransformerEncoderLayer`)."""
    rows, heads, tokens, _ = tensor.stride()
    return tensor.shape[0] > 1 and tensor.shape[2] > 1 and 0 < rows < tokens and (heads < rows or tensor.shape[1] == 1)


def unpack(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """query, key, value as `[B, H, S, D]` views of a packed `[B, S, 3, H, D]`."""
    query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    return query, key, value


def on_16_bytes(tensor: Tensor) -> Tensor:
    """The tensor, or a dense copy where its last dim is not contiguous or where the tensor, a row, a head or a batch row does not
    begin at a multiple of 16 bytes, which 16-byte loads and the copy engine need. The stride of an axis of size 1 is ignored, as
    it is never used."""
    whole = 16 // tensor.element_size()
    odd = any(size > 1 and stride % whole for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True))
    if odd or tensor.stride(-1) != 1 or tensor.data_ptr() % 16:
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor


def shares_memory(tensor: Tensor) -> bool:
    """Whether elements of an expanded tensor are one in memory; hooks of saved tensors could not bring it back so."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
