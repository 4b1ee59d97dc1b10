"""A bias as the fused kernels read it, 16 bytes at a time, and the values of keys that it hides (`cuda/shown_values.cu`)."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from saccade.launch.cuda import CudaLaunch, run, strides
from saccade.nm_sparse.key_bits import narrowed
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


def shown_values(bias: Tensor, value: Tensor, is_causal: bool) -> Tensor:
    """Whether each of the values `[B, Hkv, Tk, D]` may be multiplied by weights of 0, bool `[B, Hkv, Tk, 1]`. Finite ones may, and those of
    keys that a bias of `bias_rows` shows to a query of the heads that share them."""
    shown = torch.empty(*value.shape[:3], dtype=torch.bool, device=value.device)
    run(shown_values_call, (value, bias, shown), (is_causal,), lambda device: None)
    return shown[..., None]


def shown_values_call(value: Tensor, bias: Tensor, shown: Tensor, is_causal: bool, _: None) -> CudaLaunch:
    """The launch as data, without running it."""
    batch, kv_heads, kv_len, head_dim = value.shape
    by_head, by_query = bias.shape[1] > 1 and bias.stride(1) != 0, bias.shape[2] > 1 and bias.stride(2) != 0
    arguments = {
        "value": value, "bias": bias, "shown": shown, "kv_heads": kv_heads, "kv_len": kv_len, "head_dim": head_dim,
        "heads": bias.shape[1] // kv_heads if by_head else 1, "rows": bias.shape[2] if by_query else 1,
        **strides(value=value.stride()[:3], bias=bias.stride()[:3]),
    }  # fmt: skip
    exponent, hidden = _EXPONENTS[value.dtype], _EXPONENTS[bias.dtype] | 1 << (8 * bias.element_size() - 1)
    options = Options.of(
        {
            "THREADS": THREADS,
            "CAUSAL": is_causal,
            "VALUE_BYTES": value.element_size(),
            "BIAS": bias.element_size(),
            "EXPONENT": f"{exponent}u",
            "HIDDEN": f"{hidden}u",
        }
    )
    grid = (batch * kv_heads, -(-kv_len // (THREADS // 32)))
    return CudaLaunch(SOURCE, "shown_values", options, grid, THREADS, 0, arguments)
