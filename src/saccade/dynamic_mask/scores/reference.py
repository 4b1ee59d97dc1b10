"""The meaning of `dynamic_mask_scores`, in plain torch; on float64 it is the oracle."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def scores_of(values: Tensor, weight: Tensor, A: Tensor, bias: Tensor | None, form: str) -> Tensor:
    """`[B, Hkv, S]`, float32, or float64 for float64 values."""
    return formed(products_of(values, weight, bias), A, form)


def products_of(values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """z `[B, Hkv, S]`, float32 (float64 for float64): in 16 bits many keys would tie."""
    working = torch.promote_types(values.dtype, torch.float32)
    # weights first, so that the product has the layout of scores: gradients of a transposed product break graphs with dynamic sizes (torch 2.13)
    products = weight.to(working) @ _by_token(values).to(working).mT
    return products if bias is None else products + bias.to(working)[:, None]


def formed(products: Tensor, A: Tensor, form: str) -> Tensor:
    """The scores of products z, both `[B, Hkv, S]`."""
    working = torch.promote_types(products.dtype, torch.float32)
    steps = A.to(working)[:, None] * F.softplus(products.to(working))
    return steps.exp() if form == "exp" else steps


def derivatives_of(products: Tensor, A: Tensor, form: str) -> Tensor:
    """The derivatives `[2, B, Hkv, S]` of the scores by z and by A."""
    steps, factor = F.softplus(products), A.float()[:, None]
    growth = (factor * steps).exp() if form == "exp" else torch.ones_like(steps)
    return torch.stack((growth * factor * products.sigmoid(), growth * steps))


def gradients_of(dscores: Tensor, derivatives: Tensor, values: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dvalues, dweight, dA, dbias), the last two in float32."""
    dz = dscores * derivatives[0]
    dvalues = dz.mT @ weight.float()
    if values.dim() == 4:
        dvalues = dvalues.unflatten(2, (values.shape[1], values.shape[3])).transpose(1, 2)
    dweight = (dz @ _by_token(values).float()).sum(0).to(weight.dtype)
    return torch.empty_like(values).copy_(dvalues), dweight, (dscores * derivatives[1]).sum((0, 2)), dz.sum((0, 2))


def _by_token(values: Tensor) -> Tensor:
    """`[B, S, E]` of values that may be `[B, Hkv, S, D]`."""
    return values if values.dim() == 3 else values.transpose(1, 2).flatten(2)
