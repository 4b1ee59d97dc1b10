"""`saccade explain`: what the dispatcher decides for a call described by numbers, without allocating a tensor."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from saccade.cli.device import device_of, dtype_of
from saccade.dynamic_mask.problem import DynamicMaskProblem
from saccade.engine.dispatch import explain, verdicts
from saccade.engine.operation import Operation
from saccade.engine.problem import Problem, replayable
from saccade.errors import InvalidArgument
from saccade.exact.problem import with_key_mask
from saccade.hardware import arch_of, assumed, has_package
from saccade.nm_sparse.problem import BLOCK
from saccade.nvrtc import obstacles, toolchain
from saccade.operations import OPERATIONS


@dataclass(frozen=True)
class DescribedCall:
    """A call in numbers; `mask` and `bias` are shapes written as 1x8x128x128.

    dtype: None for bf16, or fp16 on a GPU whose tensor cores have no bf16. is_causal: None for the default of the operation. keep,
    documents, sinks: only for `dynamic_mask_attention`. pattern, blocks, dense_first, dense_recent: only for `nm_sparse_attention`.
    window: as 64,64 or 64,none; for `dynamic_mask_attention` a number of keys. key_mask: only for `attention`.
    """

    operation: str = "attention"
    batch: int = 1
    heads: int = 1
    kv_heads: int = 1
    q_len: int = 1
    kv_len: int = 1
    head_dim: int = 64
    dtype: str | None = None
    is_causal: bool | None = None
    lengths: bool = False
    dropout_p: float = 0.0
    mask: str | None = None
    bias: str | None = None
    bias_grad: bool = False
    needs_grad: bool = False
    return_lse: bool = False
    keep: int | None = None
    documents: bool = False
    pattern: str = "2:4"
    blocks: bool = False
    sinks: int = 0
    window: str | None = None
    dense_first: int = 0
    dense_recent: int = 0
    key_mask: bool = False


# arguments that only some operations take; for the others, any value except the default of `DescribedCall` is an error
_DENSE = ("attention", "nm_sparse_attention")
_BIASED = (*_DENSE, "attention_varlen")
_TAKEN_BY = {
    "lengths": ("attention", "dynamic_mask_attention", "nm_sparse_attention"),
    "dropout_p": _BIASED,
    "mask": _DENSE,
    "bias": _BIASED,
    "bias_grad": _BIASED,
    "keep": ("dynamic_mask_attention",),
    "documents": ("dynamic_mask_attention",),
    "pattern": ("nm_sparse_attention",),
    "blocks": ("nm_sparse_attention",),
    "sinks": ("dynamic_mask_attention",),
    "window": ("attention", "attention_varlen", "dynamic_mask_attention"),
    "dense_first": ("nm_sparse_attention",),
    "dense_recent": ("nm_sparse_attention",),
    "key_mask": ("attention",),
}


# at 8 bytes each, torch's count of bytes still fits 64 bits
_MOST_NUMBERS = 2**60


def answer(call: DescribedCall, device: str | None, arch: int | None, as_json: bool = False) -> str:
    """The text that `saccade.explain` would print on `device`, or on a GPU of compute capability `arch`; or the same as one JSON
    object."""
    problem = _problem_on(call, device, arch)
    missing = [] if arch is None else _missing(arch)
    with _software_of_another_machine() if arch is not None else nullcontext():
        if not as_json:
            said = f"assumed, but not here: {'; '.join(missing)}\n" if missing else ""
            return said + explain(_candidates(call), problem)
        found = verdicts(_candidates(call), problem)
    chosen = next((v.backend for v in found if v.state == "chosen"), None)
    backends = [v._asdict() for v in found]
    return json.dumps({"problem": str(problem), "chosen": chosen, "assumed": missing, "backends": backends}, indent=2)


def _missing(arch: int) -> list[str]:
    """The things that this machine lacks to run kernels on such a GPU."""
    return [*["Triton"] * (not has_package("triton")), *obstacles(arch)]


@contextmanager
def _software_of_another_machine() -> Iterator[None]:
    """All that kernels need is installed: a question about another machine is about the call that it would run, not about tools missing here."""
    with assumed("triton"), toolchain.assumed():
        yield


def _problem_on(call: DescribedCall, device: str | None, arch: int | None) -> Problem | DynamicMaskProblem:
    if arch is None:
        return problem_of(call, device_of(device))
    if device is not None:
        raise InvalidArgument(f"device {device!r} and arch {arch} are both given; arch describes a device that need not be here")
    if not 70 <= arch < 200:
        raise InvalidArgument(f"arch is {arch}; it is a compute capability times ten, 80 for sm_80; allowed are 70 to 199")
    call = replace(call, dtype=call.dtype or _usual_dtype(arch))
    problem = _placed(problem_of(call, torch.device("cpu")), torch.device("cuda", 0), arch)
    if isinstance(problem, Problem) and replayable(problem):
        # in a program every call but the first is replayed from C++
        problem = replace(problem, host_counts=False)
    return problem


def _usual_dtype(arch: int) -> str:
    return "fp16" if 0 < arch < 80 else "bf16"


def problem_of(call: DescribedCall, device: torch.device) -> Problem | DynamicMaskProblem:
    """The description of this call on a device, made with meta tensors, which have every property except data."""
    _candidates(call)
    _refuse_foreign(call)
    sizes = (call.batch, call.heads, call.kv_heads, call.q_len, call.kv_len, call.head_dim)
    if min(sizes) < 0:
        raise InvalidArgument(f"B, H, Hkv, Tq, Tk and D are {sizes}; none may be negative")
    for name, shape in (("query", (*sizes[:2], sizes[3], sizes[5])), ("key", (sizes[0], sizes[2], *sizes[4:]))):
        _check_size(name, shape)
    if call.bias_grad and call.bias is None:
        raise InvalidArgument("bias_grad is True and no bias is given; give its shape, --bias 1x8x128x128")
    dtype = dtype_of(call.dtype or _usual_dtype(arch_of(device)))
    query = torch.empty(call.batch, call.heads, call.q_len, call.head_dim, dtype=dtype, device="meta")
    key = torch.empty(call.batch, call.kv_heads, call.kv_len, call.head_dim, dtype=dtype, device="meta")
    lengths = torch.empty(call.batch, dtype=torch.int32, device="meta") if call.lengths else None
    operation = OPERATIONS[call.operation]
    arguments = _arguments(call, operation, query, key, lengths)
    if call.key_mask:
        arguments |= _with_key_mask(call, arguments)
    taken = inspect.signature(operation.describe).parameters
    return _placed(operation.describe(**{name: arguments[name] for name in taken}), device, arch_of(device))


def _arguments(
    call: DescribedCall, operation: Operation, query: torch.Tensor, key: torch.Tensor, lengths: torch.Tensor | None
) -> dict[str, Any]:
    """Every argument that the description of an operation may take, by its name there."""
    if call.keep is None and "keep" in operation.everyday:
        raise InvalidArgument(f"keep is not given; {operation.name} needs the number of keys that each query keeps, --keep 1024")
    tiles = (call.batch, call.heads, -(-call.q_len // BLOCK), -(-call.kv_len // BLOCK))
    causal = operation.everyday.get("is_causal", False) if call.is_causal is None else call.is_causal
    return {
        "query": query, "key": key, "value": key, "attn_mask": _mask_of(call, query.dtype), "dropout_p": call.dropout_p,
        "is_causal": causal, "scale": None, "enable_gqa": call.heads != call.kv_heads, "lengths": lengths, "key_mask": None,
        "return_lse": call.return_lse, "packed": False, "needs_grad": call.needs_grad,
        "key_scores": torch.empty(key.shape[:3], device="meta"), "keep": call.keep, "add_scores": True,
        "sinks": call.sinks, **_window_of(call), "dense_first": call.dense_first, "dense_recent": call.dense_recent,
        "document_ids": torch.empty(call.batch, call.kv_len, dtype=torch.int32, device="meta") if call.documents else None,
        "pattern": call.pattern, "block_mask": torch.empty(tiles, dtype=torch.bool, device="meta") if call.blocks else None,
    }  # fmt: skip


def _with_key_mask(call: DescribedCall, arguments: dict[str, Any]) -> dict[str, Any]:
    """The masks of a call of `attention` with a `key_mask`."""
    keys = torch.empty(call.batch, call.kv_len, dtype=torch.bool, device="meta")
    names = ("query", "key", "value", "attn_mask", "is_causal", "enable_gqa", "window")
    mask, key_mask = with_key_mask(key_mask=keys, **{name: arguments[name] for name in names})
    return {"attn_mask": mask, "key_mask": key_mask}


def _window_of(call: DescribedCall) -> dict[str, Any]:
    keys = call.operation == "dynamic_mask_attention"
    if call.window is None:
        return {"window": 0 if keys else None}
    ends = [None if part.strip() == "none" else part.strip() for part in call.window.split(",")]
    if len(ends) != (1 if keys else 2) or not all(end is None or end.isdecimal() for end in ends) or (keys and ends[0] is None):
        form = "a number of keys, as 64" if keys else "(left, right), as 64,64 or 64,none"
        raise InvalidArgument(f"window is {call.window!r}; of {call.operation} it is {form}")
    numbers = [None if end is None else int(end) for end in ends]
    return {"window": numbers[0] if keys else tuple(numbers)}


def _placed(problem: Any, device: torch.device, arch: int) -> Any:
    index = {"device_index": device.index} if isinstance(problem, Problem) else {}
    return replace(problem, device_type=device.type, arch=arch, **index)


def _refuse_foreign(call: DescribedCall) -> None:
    defaults = {field.name: field.default for field in fields(DescribedCall)}
    for name, operations in _TAKEN_BY.items():
        if call.operation not in operations and getattr(call, name) != defaults[name]:
            owners = f"{' and '.join(operations)} {'has' if len(operations) == 1 else 'have'}"
            raise InvalidArgument(f"{name} is {getattr(call, name)!r}; {call.operation} has no such argument, {owners}")


def _candidates(call: DescribedCall):
    if call.operation not in OPERATIONS:
        raise InvalidArgument(f"op is {call.operation!r}; allowed are {', '.join(map(repr, OPERATIONS))}")
    return OPERATIONS[call.operation].backends


def _mask_of(call: DescribedCall, dtype: torch.dtype) -> torch.Tensor | None:
    if call.mask is not None and call.bias is not None:
        raise InvalidArgument(
            f"mask {call.mask!r} and bias {call.bias!r} are both given; a call takes one of them, and --key-mask beside a bias"
        )
    if call.mask is not None:
        return torch.empty(_shape("mask", call.mask), dtype=torch.bool, device="meta")
    if call.bias is not None:
        return torch.empty(_shape("bias", call.bias), dtype=dtype, device="meta", requires_grad=call.bias_grad)
    return None


def _shape(name: str, text: str) -> tuple[int, ...]:
    parts = text.split("x")
    if not all(part.isdecimal() for part in parts):
        raise InvalidArgument(f"{name} is {text!r}; a shape is written as 1x8x128x128")
    shape = tuple(map(int, parts))
    _check_size(name, shape)
    return shape


def _check_size(name: str, shape: tuple[int, ...]) -> None:
    # a size of 0 counts as 1, because torch multiplies the strides of empty tensors too
    if math.prod(max(extent, 1) for extent in shape) >= _MOST_NUMBERS:
        raise InvalidArgument(f"{name} would have shape {list(shape)}; allowed are fewer than 2^60 numbers")
