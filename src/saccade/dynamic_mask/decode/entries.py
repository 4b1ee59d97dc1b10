"""Tokens with their keys, values and scores: what a decoding cache holds, and what comes new to it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.engine.arguments import check_count
from saccade.engine.calls import values_known
from saccade.engine.kinds import check_kinds
from saccade.errors import InvalidArgument

_MOST = 2**31 - 1  # more sinks, or a wider window, include every token, because positions are int32


@dataclass
class Entries:
    """Kept tokens in the order of their positions; unused entries come first and have position -1."""

    key: Tensor  # [B, Hkv, n, D]
    value: Tensor  # [B, Hkv, n, Dv]
    scores: Tensor  # [B, Hkv, n] float32
    position: Tensor  # [B, Hkv, n] int32

    def joined(self, other: Entries) -> Entries:
        return Entries(*(torch.cat(pair, dim=2) for pair in zip(self.tensors(), other.tensors(), strict=True)))

    def taken(self, index: Tensor) -> Entries:
        wide = index[..., None]
        return Entries(*(x.gather(2, wide.expand(*index.shape, x.shape[3]) if x.dim() == 4 else index) for x in self.tensors()))

    def best(self, keep: int, sinks: int, window: int) -> Entries:
        """Those that a later token may see, in the order of their positions: the `keep` best by (score, position). With sinks and a window they
        are `sinks + window` more: the first `sinks` and the last `window` tokens."""
        # padding and unused entries have position -1 and rank last
        real = self.position >= 0
        order = torch.argsort(self.position, dim=-1, stable=True)
        scores = self.scores.masked_fill(~real, float("-inf")).gather(2, order)
        sinks, window = min(sinks, _MOST), min(window, _MOST)
        if (sinks or window) and order.shape[2]:
            # Before all others, so that all heads hold the same number of entries. A key that is among the `keep` best of all is also
            # among the best `keep` of those that are neither sinks nor in the window, if it is one of them.
            at = self.position.gather(2, order)
            newest = at.amax(-1, keepdim=True)
            scores = scores.masked_fill((at >= 0) & ((at < sinks) | (at > newest - window)), float("inf"))
        count = min(keep + sinks + window, order.shape[2])
        best = order.gather(2, torch.argsort(scores, dim=-1, stable=True))[..., -count:]
        return self.taken(best.gather(2, torch.argsort(self.position.gather(2, best), dim=-1, stable=True)))

    def parts(self, first: int) -> Tensor:
        """The documents of entries and, from index `first` on, of new tokens, int64 `[B, n]`, in the order unused entries, tokens, padding. All
        heads of a row have the same number of tokens, so one head is enough."""
        used = self.position[:, 0] >= 0
        other = torch.where(torch.arange(used.shape[1], device=used.device) < first, 0, 2)
        return torch.where(used, 1, other)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.key, self.value, self.scores, self.position


def none_of(key: Tensor, value: Tensor) -> tuple[Entries, Tensor]:
    """No entries of such tokens, and how many each batch row has seen."""
    position = torch.empty((*key.shape[:2], 0), dtype=torch.int32, device=key.device)
    counted = torch.zeros(len(key), dtype=torch.int64, device=key.device)
    # not empty slices, which would keep the memory of all tokens alive
    keys, values = (x.new_empty((*x.shape[:2], 0, x.shape[3])) for x in (key, value))
    return Entries(keys, values, position.float(), position), counted


def real_of(new: Tensor, lengths: Tensor | None) -> Tensor:
    """New tokens `[B, Hkv, T, ...]`, with padding replaced by zeros."""
    if lengths is None:
        return new
    real = torch.arange(new.shape[2], device=new.device) < lengths[:, None]
    return new.where(real.view(len(real), 1, new.shape[2], *([1] * (new.dim() - 3))), 0.0)


def rolled(new: Tensor, by: Tensor) -> Tensor:
    """`[B, H, T, ...]` with the last `by` (`[B]`) tokens of each row moved to its front."""
    count = new.shape[2]
    index = (torch.arange(count, device=new.device) - by[:, None]) % max(count, 1)
    index = index.view(len(index), 1, count, *([1] * (new.dim() - 3)))
    return new.gather(2, index.expand(new.shape))


def accepted_of(accepted: Tensor | int, batch: int, count: int, device: torch.device) -> Tensor:
    """The number of accepted tokens of each row, checked if that does not wait."""
    check_kinds(accepted=accepted)
    if not isinstance(accepted, Tensor):
        number = check_count("accepted", accepted, 0)
        if number > count:
            raise InvalidArgument(f"accepted ranges from {number} to {number}; the call had {count} tokens")
        accepted = torch.full((batch,), number, device="cpu")
    if accepted.dtype not in (torch.int32, torch.int64) or tuple(accepted.shape) != (batch,):
        raise InvalidArgument(
            f"accepted is {accepted.dtype} {list(accepted.shape)}; it must be int32 or int64 of shape [B] = [{batch}]"
        )
    if accepted.device.type == "cpu" and values_known(accepted) and batch:
        low, high = (int(x) for x in torch.aminmax(accepted))
        if low < 0 or high > count:
            raise InvalidArgument(f"accepted ranges from {low} to {high}; the call had {count} tokens")
    return accepted.to(device)
