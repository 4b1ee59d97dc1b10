"""The meaning of `dynamic_mask_scores`, in plain torch; on float64 it is the oracle."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def scores_of(values: Tensor, weight: Tensor, A: Tensor, bias: Tensor | None, form: str) -> Tensor:
    """`[B, Hkv, S]`, float32, or float64 for float64 values."""
    return formed(products_of(values, weight, bias), A, form)


def products_of(values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """z `[B, S, Hkv]`, float32 (float64 for float64): in 16 bits many keys would tie."""
    working = torch.promote_types(values.dtype, torch.float32)
    return F.linear(_by_token(values).to(working), weight.to(working), None if bias is None else bias.to(working))


def formed(products: Tensor, A: Tensor, form: str) -> Tensor:
    """The scores `[B, Hkv, S]` of products `[B, S, Hkv]` of values and weights."""
    working = torch.promote_types(products.dtype, torch.float32)
    steps = A.to(working) * F.softplus(products.to(working))
    return (steps.exp() if form == "exp" else steps).transpose(1, 2)


def gradients_of(
    dscores: Tensor, products: Tensor, values: Tensor, weight: Tensor, A: Tensor, form: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dvalues, dweight, dA, dbias) in float32, for products `[B, Hkv, S]` that forward saved."""
    z, ds, slope = products.transpose(1, 2), dscores.transpose(1, 2), A.float()
    steps = F.softplus(z)
    if form == "exp":
        ds = ds * (slope * steps).exp()
    dz = ds * slope * z.sigmoid()
    rows = _by_token(values)
    dweight = dz.flatten(0, 1).mT @ rows.float().flatten(0, 1)
    dvalues = dz @ weight.float()
    if values.dim() == 4:
        dvalues = dvalues.unflatten(2, (values.shape[1], values.shape[3])).transpose(1, 2)
    return torch.empty_like(values).copy_(dvalues), dweight.to(weight.dtype), (ds * steps).sum((0, 1)), dz.sum((0, 1))


def _by_token(values: Tensor) -> Tensor:
    """`[B, S, E]` of values that may be `[B, Hkv, S, D]`."""
    return values if values.dim() == 3 else values.transpose(1, 2).flatten(2)
