"""A bias as the fused kernels read it, 16 bytes at a time, and the values of keys that it hides (`cuda/shown_values.cu`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from saccade.launch.cuda import CudaLaunch, run, strides
from saccade.nm_sparse.args import NMSparseArgs
from saccade.nm_sparse.key_bits import narrowed
from saccade.nm_sparse.problem import BLOCK
from saccade.nvrtc import Options, Source

SOURCE = Source(Path(__file__).parent / "cuda" / "shown_values.cu")
THREADS = 256
# the bits that are all ones in an infinity or NaN
_EXPONENTS = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float32: 0x7F800000}


def bias_rows(bias: Tensor, query: Tensor, kv_len: int) -> Tensor:
    """The bias as a view `[B, H, Tq, columns]`, in the dtype of `query` or float32, stride 0 where it broadcasts.

    Columns are adjacent and rows begin at multiples of 16 bytes. `columns` is `kv_len`, or more for a copy, whose last columns hold
    anything. A bias is copied if it has another dtype, if its address or a stride is no multiple of 16 bytes, or if its columns are
    not adjacent (as with a size of 1). The copy has the memory of the rows that differ, each rounded up to 16 bytes.
    """
    bias = narrowed(bias)
    if bias.dtype not in (query.dtype, torch.float32):
        bias = bias.to(torch.float32)
    unit = 16 // bias.element_size()
    strides = [stride for stride, size in zip(bias.stride()[:3], bias.shape[:3], strict=True) if size > 1]
    apart = bias.shape[3] == kv_len and bias.stride(3) == 1
    if not apart or kv_len % unit or bias.data_ptr() % 16 or any(stride % unit for stride in strides):
        made = bias.new_empty(*bias.shape[:3], -(-kv_len // unit) * unit)
        made[..., :kv_len] = bias
        bias = made
    return bias.expand(*query.shape[:3], -1)


def with_bias(args: NMSparseArgs) -> NMSparseArgs:
    """The arguments with their bias as the kernels read it; values that it hides from all queries are zeros."""
    if args.bias is None:
        return args
    # a hidden value may be NaN, and a weight of 0 times NaN is NaN
    bias = bias_rows(args.bias, args.query, args.key.shape[2])
    shown = shown_values(bias, args.value, args.block_mask, args.is_causal)
    return args._replace(bias=bias, value=torch.where(shown, args.value, 0))


def shown_values(bias: Tensor, value: Tensor, block_mask: Tensor | None, is_causal: bool) -> Tensor:
    """Whether each of the values `[B, Hkv, Tk, D]` may be multiplied by weights of 0, bool `[B, Hkv, Tk, 1]`. Finite ones may, and those of
    keys that a query of the heads that share them sees: by a bias of `bias_rows`, the block mask and causality together."""
    shown = torch.empty(*value.shape[:3], dtype=torch.bool, device=value.device)
    if block_mask is None:
        run(shown_values_call, (value, bias, shown), (is_causal,), lambda device: None)
    else:
        tensors = (value, bias, shown, block_mask.expand(*bias.shape[:2], -1, -1))
        run(shown_by_blocks_call, tensors, (is_causal,), lambda device: None)
    return shown[..., None]


def shown_values_call(value: Tensor, bias: Tensor, shown: Tensor, is_causal: bool, _: None) -> CudaLaunch:
    """The launch without a block mask as data, without running it."""
    by_head, by_query = bias.shape[1] > 1 and bias.stride(1) != 0, bias.shape[2] > 1 and bias.stride(2) != 0
    return _call(value, bias, shown, by_head, by_query or is_causal, {"CAUSAL": is_causal, "BLOCK": 0}, {})


def shown_by_blocks_call(value: Tensor, bias: Tensor, shown: Tensor, block_mask: Tensor, is_causal: bool, _: None) -> CudaLaunch:
    """The launch with a block mask `[B, H, Tq / 64, Tk / 64]` as data, without running it."""
    names = ("block_batch", "block_head", "block_row", "block_column")
    blocks = {"block_mask": block_mask, **dict(zip(names, block_mask.stride(), strict=True))}
    return _call(value, bias, shown, True, True, {"CAUSAL": is_causal, "BLOCK": BLOCK}, blocks)


def _call(
    value: Tensor, bias: Tensor, shown: Tensor, by_head: bool, by_query: bool, rules: dict[str, int], blocks: dict[str, Any]
) -> CudaLaunch:
    """by_head, by_query: whether heads that share a key, and queries, may see different keys."""
    batch, kv_heads, kv_len, head_dim = value.shape
    arguments = {
        "value": value, "bias": bias, "shown": shown, "kv_heads": kv_heads, "kv_len": kv_len, "head_dim": head_dim,
        "heads": bias.shape[1] // kv_heads if by_head else 1, "rows": bias.shape[2] if by_query else 1,
        **strides(value=value.stride()[:3], bias=bias.stride()[:3]), **blocks,
    }  # fmt: skip
    exponent, hidden = _EXPONENTS[value.dtype], _EXPONENTS[bias.dtype] | 1 << (8 * bias.element_size() - 1)
    sizes = {"THREADS": THREADS, "VALUE_BYTES": value.element_size(), "BIAS": bias.element_size()}
    options = Options.of(sizes | rules | {"EXPONENT": f"{exponent}u", "HIDDEN": f"{hidden}u"})
    grid = (batch * kv_heads, -(-kv_len // (THREADS // 32)))
    return CudaLaunch(SOURCE, "shown_values", options, grid, THREADS, 0, arguments)
