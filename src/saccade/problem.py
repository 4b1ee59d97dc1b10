"""`Problem`: one frozen description of a call, and every check of the arguments that needs no data.

Letters used everywhere: B batch, H query heads, Hkv key/value heads, Tq queries, Tk keys, D head dim, Dv value dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.arguments import check_flag, check_probability, check_scale
from saccade.errors import InvalidArgument
from saccade.hardware import arch_of

_SHORT_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}


@dataclass(frozen=True)
class Problem:
    """What is asked, without the data: the key of dispatch, configuration, error texts and benchmark rows."""

    operation: str
    batch_shape: tuple[int, ...]
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    device_type: str
    device_index: int | None
    arch: int
    rank: int
    last_strides: tuple[int, int, int]
    scale: float
    is_causal: bool = False
    dropout_p: float = 0.0
    mask: str | None = None  # None, "bool" or "bias"
    mask_shape: tuple[int, ...] | None = None
    bias_grad: bool = False
    lengths: bool = False
    needs_grad: bool = False
    return_lse: bool = False
    enable_gqa: bool = False
    packed: bool = False
    host_counts: bool = True  # False where the call is compiled or captured

    @property
    def batch(self) -> int:
        """Product of the batch dimensions."""
        return math.prod(self.batch_shape)

    @property
    def device(self) -> torch.device:
        """The device that all tensors of the call lie on."""
        return torch.device(self.device_type) if self.device_index is None else torch.device(self.device_type, self.device_index)

    def __str__(self) -> str:
        parts = [f"B={self.batch}", f"H={self.heads}"]
        if self.kv_heads != self.heads:
            parts.append(f"Hkv={self.kv_heads}")
        parts += [f"Tq={self.q_len}", f"Tk={self.kv_len}", f"D={self.head_dim}"]
        if self.value_dim != self.head_dim:
            parts.append(f"Dv={self.value_dim}")
        parts.append(_SHORT_NAMES.get(self.dtype, str(self.dtype)))
        if self.is_causal:
            parts.append("causal")
        if self.mask is not None:
            shape = "x".join(map(str, self.mask_shape or ()))
            parts.append(f"{'mask' if self.mask == 'bool' else 'bias'}[{shape}]{'+grad' if self.bias_grad else ''}")
        flags = (
            (self.lengths, "lengths"),
            (self.dropout_p > 0, f"dropout={self.dropout_p:g}"),
            (self.return_lse, "lse"),
            (self.packed, "packed"),
            (self.needs_grad, "grad"),
        )
        parts += [text for present, text in flags if present]
        parts.append(f"sm_{self.arch}" if self.arch else self.device_type)
        return f"{self.operation}({' '.join(parts)})"


def describe_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    lengths: Tensor | None,
    return_lse: bool,
    packed: bool,
    needs_grad: bool,
) -> Problem:
    """Check the arguments of `attention` and describe the call.

    Raises:
        InvalidArgument: with the values given and what is allowed.
    """
    _check_tensors(query, key, value)
    is_causal, enable_gqa = check_flag("is_causal", is_causal), check_flag("enable_gqa", enable_gqa)
    return_lse, dropout_p = check_flag("return_lse", return_lse), check_probability("dropout_p", dropout_p)
    heads, kv_heads = _check_shapes(query, key, value, enable_gqa)
    mask = _check_mask(query, key, attn_mask, is_causal, heads)
    check_lengths(query, lengths)
    head_dim = query.shape[-1]
    return Problem(
        operation="attention",
        batch_shape=tuple(query.shape[:-3]),
        heads=heads,
        kv_heads=kv_heads,
        q_len=query.shape[-2],
        kv_len=key.shape[-2],
        head_dim=head_dim,
        value_dim=value.shape[-1],
        dtype=query.dtype,
        device_type=query.device.type,
        device_index=query.device.index,
        arch=arch_of(query.device),
        rank=query.dim(),
        last_strides=(query.stride(-1), key.stride(-1), value.stride(-1)),
        scale=check_scale(scale, head_dim),
        is_causal=is_causal,
        dropout_p=dropout_p,
        mask=mask,
        mask_shape=None if attn_mask is None else tuple(attn_mask.shape),
        bias_grad=mask == "bias" and attn_mask is not None and attn_mask.requires_grad and needs_grad,
        lengths=lengths is not None,
        needs_grad=needs_grad,
        return_lse=return_lse,
        enable_gqa=enable_gqa,
        packed=packed,
        host_counts=not replayed(query),
    )


def replayed(tensor: Tensor) -> bool:
    """Whether the call is compiled or captured in a CUDA graph, so that its host time is not paid at each run."""
    return torch.compiler.is_compiling() or (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def must_broadcast(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> bool:
    """Whether batch, rank or heads differ in a way that torch broadcasts. False where they cannot: `describe_attention` says why."""
    if not all(isinstance(x, Tensor) and x.dim() >= 2 for x in (query, key, value)):
        return False
    if query.shape[:-2] == key.shape[:-2] == value.shape[:-2]:
        return False
    wanted = _broadcast_shapes(query, key, value, enable_gqa)
    return wanted is not None and any(x.shape[:-2] != shape for x, shape in zip((query, key, value), wanted, strict=True))


def broadcast(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Views of one rank and batch, and with as many heads, or as many in each group. Only after `must_broadcast`."""
    wanted = _broadcast_shapes(query, key, value, enable_gqa) or ()
    query, key, value = (x.expand(*shape, *x.shape[-2:]) for x, shape in zip((query, key, value), wanted, strict=True))
    return query, key, value


def _broadcast_shapes(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[torch.Size, ...] | None:
    leading = [x.shape[:-2] for x in (query, key, value)]
    if enable_gqa and min(map(len, leading)) > 0 and leading[0][-1] != leading[1][-1] == leading[2][-1]:
        batch = _joined([shape[:-1] for shape in leading])
        return None if batch is None else tuple(torch.Size((*batch, shape[-1])) for shape in leading)
    joined = _joined(leading)
    return None if joined is None else (joined,) * 3


def _joined(shapes: list[torch.Size]) -> torch.Size | None:
    try:
        return torch.broadcast_shapes(*shapes)
    except RuntimeError:
        return None


def check_packed(qkv: Tensor) -> None:
    """Check the input of `attention_qkvpacked`: `[B, S, 3, H, D]` with contiguous last dim."""
    if not isinstance(qkv, Tensor):
        raise InvalidArgument(f"qkv is a {type(qkv).__name__}; it must be a torch.Tensor of shape [B, S, 3, H, D]")
    if qkv.dim() != 5 or qkv.shape[2] != 3:
        raise InvalidArgument(f"qkv has shape {list(qkv.shape)}; it must be [B, S, 3, H, D]")
    if qkv.stride(-1) != 1 and qkv.shape[-1] != 1:
        raise InvalidArgument(f"qkv has strides {qkv.stride()}; the last one must be 1, call .contiguous() on it")


def _check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise InvalidArgument(f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor")
        if tensor.dim() < 2:
            raise InvalidArgument(f"{name} has shape {list(tensor.shape)}; it must be [B, H, T, D], or at least [T, D]")
    if not query.dtype == key.dtype == value.dtype:
        raise InvalidArgument(f"dtypes differ: query {query.dtype}, key {key.dtype}, value {value.dtype}; they must be one")
    if not query.is_floating_point():
        raise InvalidArgument(f"query, key and value are {query.dtype}; they must be floating point")
    if not query.device == key.device == value.device:
        raise InvalidArgument(f"devices differ: query {query.device}, key {key.device}, value {value.device}; they must be one")


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[int, int]:
    def shapes() -> str:  # 3 us of host time, for errors alone
        return f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"

    if query.shape[-1] != key.shape[-1]:
        raise InvalidArgument(f"head dims of query and key differ: {shapes()}")
    if key.shape[-2] != value.shape[-2]:
        raise InvalidArgument(f"key and value have different lengths: {shapes()}")
    if not query.dim() == key.dim() == value.dim():
        raise InvalidArgument(f"ranks differ: {shapes()}; each must be [B, H, T, D]")
    if query.dim() < 3:
        return 1, 1
    heads, kv_heads, value_heads = query.shape[-3], key.shape[-3], value.shape[-3]
    if kv_heads != value_heads:
        raise InvalidArgument(f"key has {kv_heads} heads, value {value_heads}; they must agree ({shapes()})")
    if heads != kv_heads:
        if not enable_gqa:
            raise InvalidArgument(
                f"query has {heads} heads, key and value {kv_heads}; pass enable_gqa=True to share them ({shapes()})"
            )
        if kv_heads == 0 or heads % kv_heads:
            raise InvalidArgument(f"{heads} query heads are no multiple of {kv_heads} key heads ({shapes()})")
    if not query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
        raise InvalidArgument(f"batch dimensions differ: {shapes()}")
    return heads, kv_heads


def _check_mask(query: Tensor, key: Tensor, attn_mask: Tensor | None, is_causal: bool, heads: int) -> str | None:
    if attn_mask is None:
        return None
    if not isinstance(attn_mask, Tensor):
        raise InvalidArgument(f"attn_mask is a {type(attn_mask).__name__}; it must be a torch.Tensor or None")
    if is_causal:
        raise InvalidArgument(
            f"attn_mask (shape {list(attn_mask.shape)}) and is_causal=True are both given; put the causal mask into attn_mask"
        )
    if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        raise InvalidArgument(
            f"attn_mask has dtype {attn_mask.dtype}; allowed are bool (True = attend) and floating point (added to the scores)"
        )
    if attn_mask.device != query.device:
        raise InvalidArgument(f"attn_mask is on {attn_mask.device}, query on {query.device}; they must be one")
    full = (*query.shape[:-3], heads, query.shape[-2], key.shape[-2]) if query.dim() >= 3 else (query.shape[-2], key.shape[-2])
    sizes = tuple(attn_mask.shape)
    if len(sizes) > len(full) or any(a not in (1, b) for a, b in zip(reversed(sizes), reversed(full), strict=False)):
        raise InvalidArgument(f"attn_mask has shape {list(sizes)}; it must broadcast to {list(full)}")
    return "bool" if attn_mask.dtype == torch.bool else "bias"


def check_lengths(query: Tensor, lengths: Tensor | None) -> None:
    """Check `lengths` of a query `[B, H, T, D]`, values aside."""
    if lengths is None:
        return
    if not isinstance(lengths, Tensor):
        raise InvalidArgument(f"lengths is a {type(lengths).__name__}; it must be an integer torch.Tensor of shape [B]")
    if lengths.dtype not in (torch.int32, torch.int64):
        raise InvalidArgument(f"lengths has dtype {lengths.dtype}; allowed are int32 and int64")
    if query.dim() != 4 or tuple(lengths.shape) != (query.shape[0],):
        raise InvalidArgument(f"lengths has shape {list(lengths.shape)}; it must be [B] for query {list(query.shape)}")
    if lengths.device != query.device:
        raise InvalidArgument(f"lengths is on {lengths.device}, query on {query.device}; they must be one")


def check_length_values(lengths: Tensor, kv_len: int) -> None:
    """Raise unless every length lies in 0..Tk. Waits for the device: call it once per tensor, not once per layer."""
    if lengths.numel() == 0:
        return
    low, high = (int(x) for x in torch.stack(torch.aminmax(lengths)).tolist())
    if low < 0 or high > kv_len:
        raise InvalidArgument(f"lengths range from {low} to {high}; allowed is 0 to Tk = {kv_len}")
