"""Data for a named problem of dynamic mask attention. It is rounded to the working dtype first, so that promoting it to float64
is exact."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from saccade.dynamic_mask.testing.cases import DynamicMaskCase
from saccade.testing.inputs import lengths_of


@dataclass(frozen=True)
class DynamicMaskInputs:
    """The tensors of a call; key_scores are float32 (float64 for float64), dout and dlse are the incoming gradients."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_scores: Tensor
    lengths: Tensor | None
    document_ids: Tensor | None
    dout: Tensor
    dlse: Tensor | None

    def to(self, dtype: torch.dtype) -> DynamicMaskInputs:
        """The same numbers, with floating tensors in another dtype."""
        moved = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return DynamicMaskInputs(**{n: x.to(dtype) if x is not None and x.is_floating_point() else x for n, x in moved.items()})

    def leaves(self) -> DynamicMaskInputs:
        """The same, with new leaves for the tensors that take a gradient."""
        fresh = {name: getattr(self, name).detach().requires_grad_() for name in ("query", "key", "value", "key_scores")}
        return dataclasses.replace(self, **fresh)


def joined(case: DynamicMaskCase, calls: Sequence[DynamicMaskInputs]) -> tuple[DynamicMaskCase, DynamicMaskInputs]:
    """Several calls of one case as a single problem, whose batch rows are those of all: see `DynamicMaskCase.calls`."""
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(DynamicMaskInputs):
        tensors = [getattr(call, field.name) for call in calls]
        fields[field.name] = None if tensors[0] is None else torch.cat(tensors)
    return dataclasses.replace(case, batch=len(calls) * case.batch, calls=len(calls)), DynamicMaskInputs(**fields)


def make_dynamic_mask(
    case: DynamicMaskCase, dtype: torch.dtype, device: torch.device | str, seed: int = 0, source: torch.Generator | None = None
) -> DynamicMaskInputs:
    """Random tensors for `case` as views of `[B, T, H, D]`, with the same numbers on every device. source: a generator of the device to draw there,
    which is faster, and whose numbers are its own."""
    source = (source or torch.Generator()).manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source, device=source.device)

    def normal(tokens: int, heads: int) -> Tensor:
        return drawn(case.batch, tokens, heads, case.head_dim).to(dtype).to(device).transpose(1, 2)

    query, key, value = normal(case.q_len, case.heads), normal(case.kv_len, case.kv_heads), normal(case.kv_len, case.kv_heads)
    dout = normal(case.q_len, case.heads)
    scores = drawn(case.batch, case.kv_heads, case.kv_len)
    scores = scores.mul(1.5).round() if case.ties else scores
    dlse = drawn(case.batch, case.heads, case.q_len).to(device) if case.lse_grad else None
    documents = None
    if case.documents:
        documents = torch.randint(0, 4, (case.batch, case.kv_len), generator=source, device=source.device).sort(-1).values
    return DynamicMaskInputs(
        query, key, value, scores.to(torch.promote_types(dtype, torch.float32)).to(device),
        lengths_of(case).to(device) if case.lengths else None, None if documents is None else documents.to(device), dout, dlse,
    )  # fmt: skip
