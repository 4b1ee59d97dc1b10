"""A packed call and its gradient, with the names of its tensors: for tests that compare launches by what they read and write."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import saccade


def named_call(leaves: Sequence[Tensor], ends: tuple[Tensor, Tensor], longest: tuple[int, int], **options) -> dict[str, Tensor]:
    """Run `attention_varlen` on query, key and value, or its packed form on one tensor, by `ragged`, forward and backward."""
    if len(leaves) == 1:
        out = saccade.attention_varlen_qkvpacked(*leaves, ends[0], longest[0], backend="ragged", **options)
    else:
        out = saccade.attention_varlen(*leaves, *ends, *longest, backend="ragged", **options)
    dout = torch.zeros_like(out)
    found = torch.autograd.grad(out, leaves, dout)
    rows, gradients = (x[0].unbind(1) if len(x) == 1 else x for x in (leaves, found))
    names = dict(zip(("q", "k", "v", "dq", "dk", "dv"), (*rows, *gradients), strict=True))
    return names | {"ends": ends[0], "out": out, "dout": dout}
