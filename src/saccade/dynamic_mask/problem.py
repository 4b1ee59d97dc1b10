"""`DynamicMaskProblem`, the frozen description of a call of `dynamic_mask_attention`, and the checks of its arguments."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.engine.arguments import (
    FLOATING,
    check_count,
    check_flag,
    check_keep,
    check_lengths,
    check_scale,
    check_shapes,
    check_tensors,
)
from saccade.engine.kinds import check_kinds
from saccade.engine.problem import DTYPE_NAMES
from saccade.errors import InvalidArgument
from saccade.hardware import arch_of


@dataclass(frozen=True)
class DynamicMaskProblem:
    """A call of `dynamic_mask_attention` without its data."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    device_type: str
    arch: int
    keep: int
    scale: float
    is_causal: bool
    lengths: bool
    documents: bool
    add_scores: bool
    needs_grad: bool
    last_strides: tuple[int, int, int] = (1, 1, 1)
    sinks: int = 0
    window: int = 0

    @property
    def most_kept(self) -> int:
        """A bound on the keys that a query keeps."""
        return min(self.keep + self.sinks + self.window, max(self.kv_len, 1))

    def __str__(self) -> str:
        words = [f"B={self.batch}", f"H={self.heads}", f"Hkv={self.kv_heads}", f"Tq={self.q_len}", f"Tk={self.kv_len}"]
        words += [f"D={self.head_dim}", f"keep={self.keep}", DTYPE_NAMES.get(self.dtype, str(self.dtype))]
        words += [f"{name}={n}" for name, n in (("sinks", self.sinks), ("window", self.window)) if n]
        flags = ((self.is_causal, "causal"), (self.lengths, "lengths"), (self.documents, "documents"), (self.needs_grad, "grad"))
        words += [word for present, word in flags if present]
        return f"dynamic_mask_attention({' '.join(words)} {f'sm_{self.arch}' if self.arch else self.device_type})"


def describe_dynamic_mask(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_scores: Tensor,
    keep: int,
    is_causal: bool,
    lengths: Tensor | None,
    document_ids: Tensor | None,
    add_scores: bool,
    scale: float | None,
    enable_gqa: bool,
    needs_grad: bool,
    sinks: int = 0,
    window: int = 0,
) -> DynamicMaskProblem:
    """Check the arguments of `dynamic_mask_attention` (except the values of tensors) and describe the call."""
    check_kinds(query=query, key=key, value=value)
    check_tensors(query, key, value)
    _check_rank(query)
    is_causal, enable_gqa = check_flag("is_causal", is_causal), check_flag("enable_gqa", enable_gqa)
    add_scores = check_flag("add_scores", add_scores)
    heads, kv_heads = check_shapes(query, key, value, enable_gqa)
    check_kinds(key_scores=key_scores)
    _check_scores_of(key_scores, key)
    check_selection(key_scores, keep, lengths, document_ids)
    if key_scores.device != query.device:
        raise InvalidArgument(f"key_scores is on {key_scores.device}, query on {query.device}; they must be the same")
    q_len, kv_len = query.shape[2], key.shape[2]
    sinks, window = check_always(sinks, window, is_causal, kv_len)
    if q_len > kv_len and (is_causal or document_ids is not None):
        why = "is_causal=True" if is_causal else "document_ids"
        raise InvalidArgument(f"{q_len} queries for {kv_len} keys; with {why} query i is at position Tk - Tq + i, so Tq <= Tk")
    return DynamicMaskProblem(
        batch=query.shape[0],
        heads=heads,
        kv_heads=kv_heads,
        q_len=q_len,
        kv_len=kv_len,
        head_dim=query.shape[3],
        value_dim=value.shape[3],
        dtype=query.dtype,
        device_type=query.device.type,
        arch=arch_of(query.device),
        # a larger number keeps every key too, and might not fit an int64
        keep=min(check_keep(keep), max(kv_len, 1)),
        scale=check_scale(scale, query.shape[3]),
        is_causal=is_causal,
        lengths=lengths is not None,
        documents=document_ids is not None,
        add_scores=add_scores,
        needs_grad=needs_grad,
        last_strides=(query.stride(3), key.stride(3), value.stride(3)),
        sinks=sinks,
        window=window,
    )


def check_whole(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_scores: Tensor,
    lengths: Tensor | None,
    document_ids: Tensor | None,
    enable_gqa: bool,
) -> None:
    """Check the shapes of whole DTensors: parts of one rank may fit each other where the whole does not, and ranks must refuse a call together."""
    _check_rank(query)
    check_shapes(query, key, value, check_flag("enable_gqa", enable_gqa))
    _check_scores_of(key_scores, key)
    _check_scores(key_scores)
    _check_rows(key_scores, lengths, document_ids)


def _check_rank(query: Tensor) -> None:
    if query.dim() != 4:
        raise InvalidArgument(f"query has shape {list(query.shape)}; it must be [B, H, Tq, D]")


def _check_scores_of(key_scores: Tensor, key: Tensor) -> None:
    if isinstance(key_scores, Tensor) and tuple(key_scores.shape) != tuple(key.shape[:3]):
        raise InvalidArgument(f"key_scores has shape {list(key_scores.shape)}; it must be [B, Hkv, Tk] = {list(key.shape[:3])}")


def check_always(sinks: int, window: int, is_causal: bool, kv_len: int) -> tuple[int, int]:
    """The numbers of keys that are always kept, each at most `kv_len`: more keep every key too, and might not fit an int64."""
    sinks, window = (min(check_count(name, n, 0), max(kv_len, 1)) for name, n in (("sinks", sinks), ("window", window)))
    if window and not is_causal:
        raise InvalidArgument(f"window is {window} with is_causal=False; only a causal call has last keys, so it must be 0")
    return sinks, window


def check_selection(key_scores: Tensor, keep: int, lengths: Tensor | None, document_ids: Tensor | None) -> None:
    """Check the arguments that decide which keys are kept, except the values of tensors."""
    check_kinds(key_scores=key_scores, lengths=lengths, document_ids=document_ids)
    _check_scores(key_scores)
    check_keep(keep)
    _check_rows(key_scores, lengths, document_ids)


def _check_scores(key_scores: Tensor) -> None:
    if not isinstance(key_scores, Tensor):
        raise InvalidArgument(f"key_scores is a {type(key_scores).__name__}; it must be a torch.Tensor of shape [B, Hkv, Tk]")
    if key_scores.dim() != 3:
        raise InvalidArgument(f"key_scores has shape {list(key_scores.shape)}; it must be [B, Hkv, Tk]")
    if key_scores.dtype not in FLOATING:
        raise InvalidArgument(f"key_scores has dtype {key_scores.dtype}; it must be floating point (it is ranked in float32)")


def _check_rows(key_scores: Tensor, lengths: Tensor | None, document_ids: Tensor | None) -> None:
    batch, _, kv_len = key_scores.shape
    if lengths is not None:
        check_lengths(key_scores, lengths, "key_scores", rank=3)
    if document_ids is not None:
        if not isinstance(document_ids, Tensor) or document_ids.dtype not in (torch.int32, torch.int64):
            kind = document_ids.dtype if isinstance(document_ids, Tensor) else type(document_ids).__name__
            raise InvalidArgument(f"document_ids is {kind}; it must be an int32 or int64 torch.Tensor of shape [B, Tk]")
        if tuple(document_ids.shape) != (batch, kv_len):
            raise InvalidArgument(f"document_ids has shape {list(document_ids.shape)}; it must be [B, Tk] = {[batch, kv_len]}")
        if document_ids.device != key_scores.device:
            raise InvalidArgument(
                f"document_ids is on {document_ids.device}, key_scores on {key_scores.device}; they must be the same"
            )


def _ranked(key_scores: Tensor) -> Tensor:
    """The scores in the precision in which they are ranked: float64 becomes float32, where 1e300 is infinite. Narrower dtypes need no conversion,
    because their finite values are finite in float32."""
    scores = key_scores.detach()
    return scores.float() if scores.dtype == torch.float64 else scores


def selection_faults(key_scores: Tensor, document_ids: Tensor | None) -> Tensor:
    """A number on the device that is finite unless `check_selection_values` would raise; computed without waiting."""
    # a single reduction, because isfinite().all() takes five launches, more host time than the kernel that chooses the keys
    scores = _ranked(key_scores)
    largest = torch.linalg.vector_norm(scores, float("inf")) if scores.numel() else scores.new_zeros(())
    if document_ids is None:
        return largest
    return largest.masked_fill(decreases(document_ids).any(), float("nan"))


def decreases(document_ids: Tensor) -> Tensor:
    """boolean `[B, Tk - 1]`: whether the next token has a smaller number. Numbers are compared, because their difference may overflow."""
    return document_ids[:, 1:] < document_ids[:, :-1]


def check_selection_values(key_scores: Tensor, document_ids: Tensor | None) -> None:
    """Raise if scores cannot be ranked or documents are out of order. Waits for the device."""
    finite = torch.isfinite(_ranked(key_scores))
    if not bool(finite.all()):
        first = (~finite).nonzero()[0].tolist()
        worst = key_scores[tuple(first)].item()
        where = " in float32, in which they are ranked" if math.isfinite(worst) else ""
        raise InvalidArgument(f"key_scores holds {worst} at {first}; scores must be finite{where} (hide padding with lengths)")
    if document_ids is not None and document_ids.numel() and bool(decreases(document_ids).any()):
        at = decreases(document_ids).nonzero()[0].tolist()
        pair = document_ids[at[0], at[1] : at[1] + 2].tolist()
        raise InvalidArgument(f"document_ids goes from {pair[0]} to {pair[1]} at {at}; within a row it must not decrease")
