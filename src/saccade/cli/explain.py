"""`saccade explain`: the dispatcher's answer for a call described by numbers, with no tensor allocated."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from saccade.backends import OPERATIONS
from saccade.cli.device import device_of, dtype_of
from saccade.dispatch import explain
from saccade.errors import InvalidArgument
from saccade.hardware import arch_of
from saccade.problem import Problem, describe_attention


@dataclass(frozen=True)
class Call:
    """A call in numbers; `mask` and `bias` are shapes written as 1x8x128x128."""

    operation: str = "attention"
    batch: int = 1
    heads: int = 1
    kv_heads: int = 1
    q_len: int = 1
    kv_len: int = 1
    head_dim: int = 64
    dtype: str = "bf16"
    is_causal: bool = False
    lengths: bool = False
    dropout_p: float = 0.0
    mask: str | None = None
    bias: str | None = None
    bias_grad: bool = False
    needs_grad: bool = False
    return_lse: bool = False


def answer(call: Call, device: str | None, arch: int | None) -> str:
    """What `saccade.explain` would print on `device`, or on a GPU of compute capability `arch`."""
    if arch is None:
        return explain(_candidates(call), problem_of(call, device_of(device)))
    if device is not None:
        raise InvalidArgument(f"device {device!r} and arch {arch} are both given; arch describes a device that need not be here")
    if not 70 <= arch < 200:
        raise InvalidArgument(f"arch is {arch}; it is a compute capability times ten, 80 for sm_80")
    problem = problem_of(call, torch.device("cpu"))
    return explain(_candidates(call), replace(problem, device_type="cuda", device_index=0, arch=arch))


def problem_of(call: Call, device: torch.device) -> Problem:
    """The `Problem` of this call on a device. Checked on meta tensors, which have every property but data."""
    _candidates(call)
    sizes = (call.batch, call.heads, call.kv_heads, call.q_len, call.kv_len, call.head_dim)
    if min(sizes) < 0:
        raise InvalidArgument(f"B, H, Hkv, Tq, Tk and D are {sizes}; none may be negative")
    dtype = dtype_of(call.dtype)
    query = torch.empty(call.batch, call.heads, call.q_len, call.head_dim, dtype=dtype, device="meta")
    key = torch.empty(call.batch, call.kv_heads, call.kv_len, call.head_dim, dtype=dtype, device="meta")
    lengths = torch.empty(call.batch, dtype=torch.int32, device="meta") if call.lengths else None
    problem = describe_attention(
        query, key, key, _mask_of(call, dtype), call.dropout_p, call.is_causal, None, call.heads != call.kv_heads,
        lengths, call.return_lse, False, call.needs_grad,
    )  # fmt: skip
    return replace(problem, device_type=device.type, device_index=device.index, arch=arch_of(device))


def _candidates(call: Call):
    if call.operation not in OPERATIONS:
        raise InvalidArgument(f"op is {call.operation!r}; allowed are {', '.join(map(repr, OPERATIONS))}")
    return OPERATIONS[call.operation]


def _mask_of(call: Call, dtype: torch.dtype) -> torch.Tensor | None:
    if call.mask is not None and call.bias is not None:
        raise InvalidArgument(f"mask {call.mask!r} and bias {call.bias!r} are both given; a call takes one of them")
    if call.mask is not None:
        return torch.empty(_shape("mask", call.mask), dtype=torch.bool, device="meta")
    if call.bias is not None:
        return torch.empty(_shape("bias", call.bias), dtype=dtype, device="meta", requires_grad=call.bias_grad)
    return None


def _shape(name: str, text: str) -> tuple[int, ...]:
    parts = text.split("x")
    if not all(part.isdigit() for part in parts):
        raise InvalidArgument(f"{name} is {text!r}; a shape is written as 1x8x128x128")
    return tuple(map(int, parts))
