"""Data for a named problem. It is rounded to the working dtype first, so that promoting it to float64 is exact."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from saccade.testing.cases import Case

AnyCase = TypeVar("AnyCase", bound=Case)
LAYOUTS = ("bthd", "bhtd", "tbhd", "packed", "expanded")


@dataclass(frozen=True)
class Inputs:
    """The tensors of a call. `qkv` owns the memory of query, key and value if the case is packed; `bias` is a float32 or
    working-dtype `attn_mask` with gradient; dout and dlse are the incoming gradients."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    bias: Tensor | None
    lengths: Tensor | None
    dout: Tensor
    dlse: Tensor | None
    qkv: Tensor | None = None

    @property
    def attn_mask(self) -> Tensor | None:
        """The argument of the public functions: the boolean mask or the bias."""
        return self.mask if self.bias is None else self.bias

    def to(self, dtype: torch.dtype) -> Inputs:
        """The same numbers, with floating tensors in another dtype (dlse stays at least float32)."""
        moved = {}
        for field in dataclasses.fields(self):
            tensor = getattr(self, field.name)
            moved[field.name] = tensor.to(dtype) if tensor is not None and tensor.is_floating_point() else tensor
        return Inputs(**moved)


def joined(case: AnyCase, calls: Sequence[Inputs]) -> tuple[AnyCase, Inputs]:
    """Several calls of one case as a single problem, whose batch rows are those of all: see `Case.calls`."""

    def rows(name: str) -> Tensor | None:
        tensors = [getattr(call, name) for call in calls]
        return None if tensors[0] is None else torch.cat(tensors)

    masks = [call.mask for call in calls if call.mask is not None]
    masks = [mask.reshape((1,) * (4 - mask.dim()) + mask.shape).expand(case.batch, -1, -1, -1) for mask in masks]
    biases = [call.bias for call in calls if call.bias is not None]
    query, key, value, dout = (torch.cat([getattr(call, name) for call in calls]) for name in ("query", "key", "value", "dout"))
    return dataclasses.replace(case, batch=len(calls) * case.batch, calls=len(calls)), Inputs(
        query,
        key,
        value,
        torch.cat(masks) if masks else None,
        torch.stack(biases) if biases else None,
        rows("lengths"),
        dout,
        rows("dlse"),
    )


def make(
    case: Case,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int = 0,
    layout: str = "bthd",
    source: torch.Generator | None = None,
) -> Inputs:
    """Random tensors for `case`, the same numbers on every device and in every layout.

    layout: "bthd" (views of `[B, T, H, D]`), "bhtd" (contiguous), "tbhd" (views of `[T, B, H, D]`, and dout too), "packed" (views of one
        `[B, S, 3, H, D]`, where Tq = Tk and H = Hkv), or "expanded" (batch rows share memory: every row is the first).
    source: a generator of the device to draw there, which is faster, and whose numbers are its own.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}; allowed are {LAYOUTS}")
    source = (source or torch.Generator()).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source, device=source.device).to(dtype)

    b, h, hkv, q, k, d = case.batch, case.heads, case.kv_heads, case.q_len, case.kv_len, case.head_dim
    query, key, value, dout = normal(b, q, h, d), normal(b, k, hkv, d), normal(b, k, hkv, d), normal(b, q, h, d)
    mask = _mask(case, source) if case.mask == "bool" else None
    bias = None if case.bias is None else normal(*case.bias).to(device)
    dlse = torch.randn(b, h, q, generator=source, device=source.device).to(device) if case.lse_grad else None
    lengths = lengths_of(case).to(device) if case.lengths else None
    mask = None if mask is None else mask.to(device)
    dout = dout.to(device).transpose(1, 2)
    if case.packed or layout == "packed":
        qkv = torch.stack((query, key, value), dim=2).to(device)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        return Inputs(query, key, value, mask, bias, lengths, dout, dlse, qkv if case.packed else None)
    query, key, value = (x.to(device).transpose(1, 2) for x in (query, key, value))
    if layout == "bhtd":
        query, key, value = (x.contiguous() for x in (query, key, value))
    elif layout == "tbhd":
        query, key, value, dout = (time_first(x) for x in (query, key, value, dout))
    elif layout == "expanded":
        query, key, value = (x[:1].expand(b, -1, -1, -1) for x in (query, key, value))
    return Inputs(query, key, value, mask, bias, lengths, dout, dlse)


def mask_of(case: Case, inputs: Inputs) -> Tensor | None:
    """The tensor that hides keys in addition to lengths and a causal mask: the mask, or a window as `[Tq, Tk]`."""
    if case.window is None:
        return inputs.mask
    assert inputs.mask is None, "a call has a mask or a window"
    rows, keys = (torch.arange(x.shape[2], device=x.device) for x in (inputs.query, inputs.key))
    left, right = case.window
    ahead = keys - rows[:, None]
    return (ahead >= (-case.q_len if left is None else -left)) & (ahead <= (case.kv_len if right is None else right))


def time_first(tensor: Tensor) -> Tensor:
    """`[B, H, T, D]` as a view of `[T, B, H, D]`, the memory order of `nn.MultiheadAttention`."""
    return tensor.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)


def _mask(case: Case, source: torch.Generator) -> Tensor:
    shape = case.mask_shape or (case.batch, case.heads, case.q_len, case.kv_len)
    mask = torch.rand(*shape, generator=source, device=source.device) < 0.7
    if mask.numel() and mask.shape[-2] > 1:  # a mask of one row is that of all queries
        mask[..., -1, :] = False  # queries without a visible key
    if mask.numel() and mask.dim() == 4 and mask.shape[1] > 1:
        mask[-1, 0] = False  # and a head in which no query sees a key
        mask[-1, 1] = True
    return mask


def lengths_of(case: Any) -> Tensor:
    """int32 `[B]` for a case: 0 first, the full length last, and values spread over the range in between."""
    if case.batch == 1:
        return torch.tensor([(case.kv_len + 1) // 2], dtype=torch.int32)
    return torch.linspace(0, case.kv_len, case.batch).round().to(torch.int32)
