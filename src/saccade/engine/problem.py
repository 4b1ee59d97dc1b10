"""`Problem`, the frozen description of a call, and the function that checks arguments and makes one. No check reads data.

Letters used everywhere: B batch, H query heads, Hkv key/value heads, Tq queries, Tk keys, D head dim, Dv value dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from saccade import native
from saccade.engine.arguments import (
    check_flag,
    check_lengths,
    check_mask,
    check_probability,
    check_scale,
    check_shapes,
    check_tensors,
)
from saccade.engine.kinds import check_kinds
from saccade.engine.layout import shares_memory
from saccade.engine.window import Window, shown_window
from saccade.hardware import arch_of

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}


@dataclass(frozen=True)
class Problem:
    """A call without its data. Dispatch, configurations, error texts and benchmark rows all depend on it."""

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
    bias_dtype: torch.dtype | None = None  # if it differs from the dtype of query
    bias_grad: bool = False
    lengths: bool = False
    key_mask: bool = False  # of each batch row, together with a bias
    needs_grad: bool = False
    return_lse: bool = False
    enable_gqa: bool = False
    packed: bool = False
    # W, if tensors are `[images, W, H, T, D]`: batch rows are then images times W windows, and a bias `[W, H, Tq, Tk]` is that of
    # the windows in every image
    windows: int = 0
    # of keys around each query; None if it hides nothing
    window: Window | None = None
    # False if the call is compiled, captured or replayed by C++
    host_counts: bool = True
    # False if the call is compiled or captured; for kernels that C++ cannot launch
    python_counts: bool = True

    @property
    def batch(self) -> int:
        """Product of the batch dimensions."""
        return math.prod(self.batch_shape)

    @property
    def row_mask(self) -> bool:
        """Whether all queries share the mask or bias."""
        shape = self.mask_shape or ()
        return len(shape) < 2 or shape[-2] == 1

    @property
    def mask_rows(self) -> int:
        """Rows of the mask or bias along the batch; 1 if the batch shares it."""
        return ((1,) * 4 + (self.mask_shape or ()))[-4]

    @property
    def device(self) -> torch.device:
        """The device of all tensors of the call."""
        return torch.device(self.device_type) if self.device_index is None else torch.device(self.device_type, self.device_index)

    @property
    def on_this_machine(self) -> bool:
        """Whether the device is in this machine, not one that `explain --arch` describes."""
        if self.device_type != "cuda":
            return True
        here = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return (self.device_index or 0) < here and arch_of(self.device) == self.arch

    def __str__(self) -> str:
        parts = [f"B={self.batch}", f"H={self.heads}"]
        if self.kv_heads != self.heads:
            parts.append(f"Hkv={self.kv_heads}")
        parts += [f"Tq={self.q_len}", f"Tk={self.kv_len}", f"D={self.head_dim}"]
        if self.value_dim != self.head_dim:
            parts.append(f"Dv={self.value_dim}")
        parts.append(DTYPE_NAMES.get(self.dtype, str(self.dtype)))
        if self.is_causal:
            parts.append("causal")
        if self.mask is not None:
            shape = "x".join(map(str, self.mask_shape or ()))
            parts.append(f"{'mask' if self.mask == 'bool' else 'bias'}[{shape}]{'+grad' if self.bias_grad else ''}")
        flags = (
            (self.windows > 0, f"windows={self.windows}"),
            (self.window is not None, shown_window(self.window or (None, None))),
            (self.lengths, "lengths"),
            (self.key_mask, "key_mask"),
            (self.dropout_p > 0, f"dropout={self.dropout_p:g}"),
            (self.return_lse, "lse"),
            (self.packed, "packed"),
            (self.needs_grad, "grad"),
        )
        parts += [text for present, text in flags if present]
        parts.append(f"sm_{self.arch}" if self.arch else self.device_type)
        return f"{self.operation}({' '.join(parts)})"


def describe(
    operation: str,
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
    """Check the arguments that `attention` and `nm_sparse_attention` share, and describe the call.

    Raises:
        InvalidArgument: with the values given and what is allowed.
    """
    check_kinds(query=query, key=key, value=value, attn_mask=attn_mask, lengths=lengths)
    check_tensors(query, key, value)
    is_causal, enable_gqa = check_flag("is_causal", is_causal), check_flag("enable_gqa", enable_gqa)
    return_lse, dropout_p = check_flag("return_lse", return_lse), check_probability("dropout_p", dropout_p)
    heads, kv_heads = check_shapes(query, key, value, enable_gqa)
    mask = check_mask(query, key, attn_mask, is_causal, heads)
    check_lengths(query, lengths)
    head_dim, counts = query.shape[-1], not compiled_or_captured(query)
    problem = Problem(
        operation=operation,
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
        mask_shape=None if attn_mask is None else shape_of_mask(attn_mask),
        bias_dtype=None if mask != "bias" or attn_mask is None or attn_mask.dtype == query.dtype else attn_mask.dtype,
        bias_grad=mask == "bias" and attn_mask is not None and attn_mask.requires_grad and needs_grad,
        lengths=lengths is not None,
        needs_grad=needs_grad,
        return_lse=return_lse,
        enable_gqa=enable_gqa,
        packed=packed,
        host_counts=counts,
        python_counts=counts,
    )
    return replayed_by_cpp(problem, attn_mask)


def replayed_by_cpp(problem: Problem, attn_mask: Tensor | None) -> Problem:
    """The problem; its host time does not count if C++ replays such calls."""
    # checked last, so that no compiled graph depends on whether the C++ module is loaded
    if not problem.host_counts or native.calls is None or not replayable(problem):
        return problem
    if problem.mask == "bias" and attn_mask is not None and shares_memory(attn_mask):
        return problem  # C++ takes no expanded bias
    return replace(problem, host_counts=False)


def shape_of_mask(mask: Tensor) -> tuple[int, ...]:
    """The shape that kernels read: 1 query if a mask was expanded over the queries, and 1 batch row if a bias was expanded over the
    batch."""
    shape, axes = list(mask.shape), (-2,) if mask.dtype == torch.bool else (-2, -4)
    for axis in axes:
        if mask.dim() >= -axis and mask.stride(axis) == 0 and shape[axis] > 0:
            shape[axis] = 1
    return tuple(shape)


def replayable(problem: Problem) -> bool:
    """Whether C++ can replay such a call (`saccade.native`)."""
    if problem.mask == "bias" and problem.heads != problem.kv_heads:
        return False  # the gradient of a bias leaves dK and dV of each query head, which Python adds up
    # the node that C++ makes hands no gradient of the log-sum-exp on
    differentiates_lse = problem.return_lse and problem.needs_grad
    return problem.rank == 4 and not differentiates_lse and problem.window is None


def compiled_or_captured(tensor: Tensor) -> bool:
    """Whether the call is compiled or captured in a CUDA graph, so that its host time is not paid at each execution."""
    return torch.compiler.is_compiling() or (tensor.is_cuda and captured())


def captured() -> bool:
    """Whether the current stream is captured in a CUDA graph. A torch without CUDA cannot be asked."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
