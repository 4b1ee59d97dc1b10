"""Documents packed into one row, given by their offsets like packed batches."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from saccade.engine.calls import values_known
from saccade.engine.kinds import check_kinds
from saccade.engine.lengths import check_once
from saccade.errors import InvalidArgument


def documents_of(cu_seqlens: Tensor, key_scores: Tensor, document_ids: Tensor | None) -> Tensor:
    """The document of each token, int32 `[B, Tk]`: n for the tokens `cu_seqlens[n]` to `cu_seqlens[n + 1] - 1`. B is 1, or 0 on a shard without a row.

    The values are checked once per tensor, which waits for the device, unless they cannot be read yet (tracing, capture).

    Raises:
        InvalidArgument: they are no offsets of documents, or given beside document_ids, or the batch is above 1.
    """
    if document_ids is not None:
        raise InvalidArgument("document_ids and cu_seqlens are both given; each of them names the documents, so one is enough")
    check_kinds(cu_seqlens=cu_seqlens, key_scores=key_scores)
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.dim() != 1:
        given = f"{cu_seqlens.dtype} {list(cu_seqlens.shape)}" if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise InvalidArgument(f"cu_seqlens is {given}; it must be an int32 or int64 torch.Tensor of shape [N + 1]")
    check_one_row(key_scores)
    if cu_seqlens.device != key_scores.device:
        raise InvalidArgument(f"cu_seqlens is on {cu_seqlens.device}, key_scores on {key_scores.device}; they must be the same")
    kv_len = key_scores.shape[2]
    if cu_seqlens.shape[0] == 0:
        raise InvalidArgument("cu_seqlens is empty; it must be 0, then the end of each document")
    if values_known(cu_seqlens):
        check_once(cu_seqlens, ("documents", kv_len), lambda: _check_values(cu_seqlens, kv_len))
    positions = torch.arange(kv_len, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), positions, right=True, out_int32=True).expand(key_scores.shape[0], -1)


def check_one_row(key_scores: Tensor) -> None:
    """Raise if scores are of more rows than the one whose documents `cu_seqlens` can name."""
    if not isinstance(key_scores, Tensor) or key_scores.dim() != 3 or key_scores.shape[0] > 1:
        shown = str(list(key_scores.shape)) if isinstance(key_scores, Tensor) else type(key_scores).__name__
        raise InvalidArgument(f"key_scores is {shown}; with cu_seqlens all documents lie in one row, so it must be [1, Hkv, Tk]")


def _check_values(cu_seqlens: Tensor, kv_len: int) -> None:
    values = cu_seqlens.tolist()
    if values[0] != 0 or values[-1] != kv_len:
        raise InvalidArgument(f"cu_seqlens goes from {values[0]} to {values[-1]}; it must go from 0 to Tk = {kv_len}")
    for n, (first, last) in enumerate(itertools.pairwise(values)):
        if first > last:
            raise InvalidArgument(f"cu_seqlens goes from {first} to {last} at {n}; it must not decrease")
