"""Summing dbias without atomics: which programs share a bias, and how their partial sums become one gradient.

Problems that read the same bias matrix form a group. Problem indices are laid out so that `index % groups` is the group, and the
number of persistent programs is a multiple of `groups`: each program then meets one group only, keeps its sum on chip, and writes
one partial `[Tq, Tk]`. The partials of a group are added by one deterministic torch reduction.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class BiasSharing:
    """How a bias of shape `[b, h, q, k]` (each 1 or full) is shared by the `[B, H]` problems."""

    shape: tuple[int, int, int, int]
    batch: int
    heads: int
    q_len: int
    kv_len: int
    programs: int
    dtype: torch.dtype

    @classmethod
    def of(cls, bias: Tensor, batch: int, heads: int, q_len: int, kv_len: int, target_programs: int) -> BiasSharing:
        """Lay out about `target_programs` programs over the groups of this bias."""
        b, h, q, k = (1,) * (4 - bias.dim()) + tuple(bias.shape)
        groups = (batch if b > 1 else 1) * (heads if h > 1 else 1)
        chunks = max(1, min(batch * heads // groups, target_programs // groups))
        return cls((b, h, q, k), batch, heads, q_len, kv_len, groups * chunks, bias.dtype)

    @property
    def groups(self) -> int:
        """Number of different bias matrices."""
        b, h, _, _ = self.shape
        return (self.batch if b > 1 else 1) * (self.heads if h > 1 else 1)

    @property
    def batch_inner(self) -> bool:
        """Whether the batch index runs fastest, which is needed when the heads share a bias and the batch does not."""
        b, h, _, _ = self.shape
        return b > 1 and h == 1 and self.heads > 1

    @property
    def final(self) -> bool:
        """Whether the partial sums are already the gradient."""
        return self.programs == self.groups and self.shape[2:] == (self.q_len, self.kv_len)

    def workspace(self, device: torch.device) -> Tensor:
        """Partial sums `[programs, Tq, Tk]`, float32 unless they are already the gradient."""
        dtype = self.dtype if self.final else torch.float32
        return torch.empty(self.programs, self.q_len, self.kv_len, dtype=dtype, device=device)

    def reduce(self, partial: Tensor, bias: Tensor) -> Tensor:
        """The gradient, in the shape and dtype of the bias."""
        _, _, q, k = self.shape
        if partial.dtype != self.dtype or self.programs != self.groups or (q, k) != (self.q_len, self.kv_len):
            partial = partial.view(-1, self.groups, self.q_len, self.kv_len).sum(dim=0)
            if q == 1 and self.q_len > 1:
                partial = partial.sum(dim=1, keepdim=True)
            if k == 1 and self.kv_len > 1:
                partial = partial.sum(dim=2, keepdim=True)
        return partial.to(self.dtype).reshape(bias.shape)
