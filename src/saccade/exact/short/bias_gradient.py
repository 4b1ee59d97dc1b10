"""Summing dbias without atomics: which programs share a bias, and how their partial sums become one gradient.

Problems that read the same bias matrix form a group. With a bias for each of W windows, a group is one head in the same window of
every image. Problem indices are laid out so that `index % groups` is the group, and the number of persistent programs is a multiple
of `groups`. So each program meets one group only, keeps its sum on chip, and writes one partial `[Tq, Tk]`. The partials of a group
are added by one deterministic torch reduction.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.native.recording import shares


@dataclass(frozen=True)
class BiasSharing:
    """How a bias of shape `[b, h, q, k]` (each 1 or full; b also the number of windows, which divides the batch) is shared by the
    `[B, H]` problems."""

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
        groups = b * h
        most = batch * heads // groups
        chunks = _even_chunks(groups, most, target_programs) if 1 < b < batch else max(1, min(most, target_programs // groups))
        return cls((b, h, q, k), batch, heads, q_len, kv_len, groups * chunks, bias.dtype)

    @property
    def groups(self) -> int:
        """Number of different bias matrices."""
        return self.shape[0] * self.shape[1]

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
        shape = self.programs, self.q_len, self.kv_len
        if self.final:
            return torch.empty(shape, dtype=self.dtype, device=device)
        return shares(shape, self.groups, device)

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


def _even_chunks(groups: int, most: int, slots: int) -> int:
    """Into how many programs each group is divided, so that nearly all of the programs that run at once have work until the end.

    Groups of windows are about as many as those programs: 192 of 264 in Swin-T's first stage, where one program each would leave a
    quarter of an H200 without work. So the fewest that fill nine tenths; not measured yet.
    """
    fitting = (n for n in range(1, most) if 10 * groups * n >= 9 * slots * -(-groups * n // slots))
    return next(fitting, most)
