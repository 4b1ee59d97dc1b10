"""Whether an encoder under another attention computes what the stock one does: its error against the same weights in a higher precision,
beside the error that the stock one has there.

    vectors:    error(ours) <= 2 error(stock) + half a rounding, the worst item of each
    gradients:  error(ours) <= 3 error(stock) + half a rounding, for each matrix of queries, keys and values, and biases of relative positions

An error is the root mean square of the difference over that of what is wanted. Dropout is off in both, since draws differ.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from encoders import Batch, Encoder
from torch import Tensor

_WEIGHTS = (
    "query", "key", "value", "q_proj", "k_proj", "v_proj", "qkv", "relative_position_bias_table", "SelfAttention.q", "SelfAttention.k", "SelfAttention.v",
    "relative_attention_bias",
)  # fmt: skip
_ITEMS = 32  # of the reference at a time, so that it fits beside the rest


class Disagreement(Exception):
    """An encoder is further from the exact result than its budget."""


@dataclass(frozen=True)
class Variant:
    """An encoder, and which layout of a batch it is given."""

    encoder: Encoder
    packed: bool = False

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """Its arguments for a batch."""
        if not self.packed:
            return batch.padded
        assert batch.packed is not None, "only text is packed"
        return batch.packed


def over_budget(stock: Variant, others: dict[str, Variant], batches: list[Batch], gradients: bool) -> dict[str, float]:
    """Name -> error over budget, 1 is the limit; the worst of vectors and, if asked, gradients of the first batch.

    Raises:
        Disagreement: one of them is beyond its budget or not finite.
    """
    exact, rounding = _exact(stock.encoder), torch.finfo(stock.encoder.head.weight.dtype).eps / 2
    with torch.no_grad():
        wanted = torch.cat([exact(part) for batch in batches for part, _ in _parts(batch, exact)])
    theirs = _item_errors(_vectors(stock, batches), wanted).max()
    found = {
        name: _item_errors(_vectors(other, batches), wanted).max() / (2 * theirs + rounding) for name, other in others.items()
    }
    if gradients:
        wanted_grads = _exact_gradients(exact, batches[0])
        allowed = 3 * _matrix_errors(_gradients(stock, batches[0]), wanted_grads) + rounding
        for name, other in others.items():
            ratios = _matrix_errors(_gradients(other, batches[0]), wanted_grads) / allowed
            found[name] = torch.maximum(found[name], ratios.max())
    ratios = {name: float(ratio) for name, ratio in found.items()}
    for name, ratio in ratios.items():
        if not ratio <= 1:  # a NaN too
            raise Disagreement(f"{name} differs from stock: its error is {ratio:.3g} times what is allowed")
    return ratios


def _exact(stock: Encoder) -> Encoder:
    """The same weights in the next higher precision."""
    higher = torch.float64 if stock.head.weight.dtype == torch.float32 else torch.float32
    eager: Encoder = getattr(stock, "_orig_mod", stock)  # of a compiled one
    return copy.deepcopy(eager).to(higher).eval()


def _parts(batch: Batch, exact: Encoder) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """Pieces of a padded batch in the precision of the reference, and their labels."""
    for start in range(0, len(batch.labels), _ITEMS):
        inputs = batch.part(start, start + _ITEMS)
        real = {n: x.to(exact.head.weight.dtype) if x.is_floating_point() else x for n, x in inputs.items()}
        yield real, batch.labels[start : start + _ITEMS]


@torch.no_grad()
def _vectors(variant: Variant, batches: list[Batch]) -> Tensor:
    return torch.cat([variant.encoder(variant.inputs(batch)) for batch in batches])


def _matrices(encoder: Encoder) -> list[Tensor]:
    named = encoder.model.named_parameters()
    return [weight for name, weight in named if weight.dim() == 2 and any(part in name for part in _WEIGHTS)]


def _gradients(variant: Variant, batch: Batch) -> list[Tensor]:
    loss = variant.encoder.loss(variant.inputs(batch), batch.labels)
    return list(torch.autograd.grad(loss, _matrices(variant.encoder)))


def _exact_gradients(exact: Encoder, batch: Batch) -> list[Tensor]:
    found = [torch.zeros_like(weight) for weight in _matrices(exact)]
    for inputs, labels in _parts(batch, exact):
        loss = exact.loss(inputs, labels) * (len(labels) / len(batch.labels))
        for total, part in zip(found, torch.autograd.grad(loss, _matrices(exact)), strict=True):
            total += part
    return found


def _item_errors(found: Tensor, wanted: Tensor) -> Tensor:
    """The relative error of each row."""
    return (found.to(wanted.dtype) - wanted).norm(dim=-1) / wanted.norm(dim=-1)


def _matrix_errors(found: list[Tensor], wanted: list[Tensor]) -> Tensor:
    return torch.stack([(f.to(w.dtype) - w).norm() / w.norm() for f, w in zip(found, wanted, strict=True)])
