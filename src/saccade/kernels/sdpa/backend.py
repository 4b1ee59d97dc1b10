"""torch's `scaled_dot_product_attention`: takes what no kernel of ours takes, or takes faster.

Two promises of `attention` that torch does not make are added here: `lengths` with garbage (NaN too) in padded keys, and
output 0 with zero gradient for a query that sees no key. On CUDA, layouts that torch's fused kernels refuse, or read at
misaligned addresses (seen with torch 2.11), are copied first.
"""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from saccade.kernels.contract import AttentionArgs, Backend
from saccade.problem import Problem


def _why_not(problem: Problem) -> list[str]:
    if problem.return_lse:
        return ["torch's function does not return the log-sum-exp (return_lse=True)"]
    return []


def _attend(args: AttentionArgs, problem: Problem) -> tuple[Tensor, None]:
    key, value, mask, is_causal = args.key, args.value, args.mask, args.is_causal
    if args.lengths is not None:
        valid = torch.arange(key.shape[2], device=key.device) < args.lengths[:, None]  # [B, Tk]
        # a weight of 0 times a NaN is NaN, so padding has to be cleared and not only masked
        key, value = (x.where(valid[:, None, :, None], 0.0) for x in (key, value))
        mask = valid[:, None, None, :] if mask is None else mask & valid[:, None, None, :]
        if is_causal:
            mask = mask & torch.ones(args.query.shape[2], key.shape[2], dtype=torch.bool, device=key.device).tril()
            is_causal = False
    if args.mask is not None and mask is not None:
        # as for lengths: a key that no query sees may hold anything, and 0 * NaN is NaN
        key, value = _cleared(key, value, mask, args.query.shape)
    bias = args.bias
    if bias is not None:
        bias = bias.to(args.query.dtype)
        if mask is not None:
            bias = bias.masked_fill(~mask, float("-inf"))
    grouped = False
    if (
        problem.heads != problem.kv_heads
    ):  # a branch: of symbolic sizes the comparison is no bool, and torch's function takes no other
        grouped = True
    if grouped and (mask is not None or bias is not None) and problem.device_type == "cuda":
        # under a mask torch's fused CUDA kernels refuse grouped heads, and its math path would form every score
        key, value = (x.repeat_interleave(problem.heads // problem.kv_heads, dim=-3) for x in (key, value))
        grouped = False
    query, added = args.query, mask if bias is None else bias
    if problem.device_type == "cuda" and query.dim() == 4:
        query, key, value = (_aligned(x) for x in (query, key, value))
        if added is not None and added.dim() > 0 and (added.shape[-1] != problem.kv_len or added.stride(-1) != 1):
            # a mask broadcast over the keys: "last dimension must be contiguous", or a misaligned address
            added = added.expand(*added.shape[:-1], problem.kv_len).contiguous()
    empty = 0 in (*query.shape[:3], key.shape[-2])
    # cuDNN fails on tensors without elements
    with sdpa_kernel(SDPBackend.MATH) if empty and problem.device_type == "cuda" else contextlib.nullcontext():
        out = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=added,
            dropout_p=args.dropout_p,
            is_causal=is_causal,
            scale=args.scale,
            enable_gqa=grouped,
        )
    if problem.device_type == "cuda" and out.requires_grad and not torch.compiler.is_compiling():
        out.register_hook(_aligned)  # torch's backward reads a misaligned gradient without a check: "misaligned address"
    if mask is not None:
        # torch's fused kernels differ on rows without a visible key (mean of the values, or NaN): ours is 0
        out = out.where(mask.any(dim=-1, keepdim=True), 0.0)
    return out, None


def _aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a dense copy where it, or a row, head or batch row of it, does not start on 16 bytes."""
    width = tensor.element_size()
    strides = [stride for stride, extent in zip(tensor.stride()[:-1], tensor.shape, strict=False) if extent > 1]
    # compiled code copies misaligned inputs by itself, and torch 2.11 does not trace the offset
    offset = 0 if torch.compiler.is_compiling() else tensor.storage_offset()
    if tensor.stride(-1) == 1 and offset * width % 16 == 0 and not any(stride * width % 16 for stride in strides):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _cleared(key: Tensor, value: Tensor, mask: Tensor, query_shape: torch.Size) -> tuple[Tensor, Tensor]:
    seen = mask.expand(*query_shape[:-1], key.shape[-2]).any(dim=-2)  # [B, H, Tk]
    if seen.dim() == 3 and seen.shape[1] != key.shape[1]:
        seen = seen.unflatten(1, (key.shape[1], -1)).any(dim=2)
    return key.where(seen.unsqueeze(-1), 0.0), value.where(seen.unsqueeze(-1), 0.0)


BACKEND = Backend(
    name="sdpa",
    operation="attention",
    summary="torch.nn.functional.scaled_dot_product_attention",
    why_not=_why_not,
    prefers=lambda problem: True,
    attend=_attend,
)
