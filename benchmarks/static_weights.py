"""Weights pruned once and for all to 2:4, as Mishra et al. (2021) prune them: of each four consecutive inputs of a row the two weights
of largest magnitude stay. Stored densely with zeros, or as torch's semi-structured tensors for sparse tensor cores."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from nm_check import error_over_budget
from nm_encoder import Layer, through
from torch import Tensor, nn
from torch.sparse import SparseSemiStructuredTensor, to_sparse_semi_structured

from saccade.nm_sparse import analysis


@torch.no_grad()
def pruned(layers: list[Layer]) -> list[Layer]:
    """Copies whose matrices are 2:4, stored densely."""
    found = copy.deepcopy(layers)
    for linear in linears(found):
        linear.weight.masked_fill_(~analysis.kept_by_pattern(linear.weight.abs(), "2:4"), 0)
    return found


@torch.no_grad()
def compressed(layers: list[Layer]) -> list[Layer]:
    """Copies of `pruned` layers whose matrices are torch's semi-structured tensors, by cuSPARSELt. They have no gradient."""
    found = copy.deepcopy(layers)
    for linear in linears(found):
        weight = stored(linear.weight.detach())
        # not as a parameter, as torch's tutorial has it: wrapping detaches, which forgets the layout that `stored` asks for
        del linear.weight
        linear.weight = weight
    return found


def stored(weight: Tensor) -> Tensor:
    """torch's semi-structured tensor of a 2:4 matrix on a GPU.

    Up to torch 2.11 the product of a linear layer would be stored by columns, and attention would first copy Q, K and V, unless this
    flag lets cuSPARSELt write rows; later versions always write rows.
    """
    before = SparseSemiStructuredTensor._FUSE_TRANSPOSE
    SparseSemiStructuredTensor._FUSE_TRANSPOSE = True
    try:
        return to_sparse_semi_structured(weight)
    finally:
        SparseSemiStructuredTensor._FUSE_TRANSPOSE = before


def linears(layers: list[Layer]) -> Iterator[nn.Linear]:
    """The four of each layer."""
    return (part for layer in layers for part in layer.modules() if isinstance(part, nn.Linear))


@torch.no_grad()
def error_of_weights(sparse: list[Layer], dense: list[Layer], x: Tensor) -> float:
    """Error over budget of layers against the same weights stored densely, in float64; the worst of each matrix alone and of all
    layers under dense attention. Not under N:M attention: Q and K that differ by a rounding may prune other keys, which is no error.

    x: `[B, T, E]`, in the dtype of the weights.
    """
    worst = 0.0
    for ours, theirs in zip(linears(sparse), linears(dense), strict=True):
        given = torch.randn(2, 64, theirs.in_features, generator=torch.Generator().manual_seed(0)).to(x)
        worst = max(worst, error_over_budget(ours, functools.partial(_linear, theirs), [given]))
    exact = copy.deepcopy(dense)

    def definition(tokens: Tensor) -> Tensor:
        return through([layer.to(tokens.dtype) for layer in exact], tokens, F.scaled_dot_product_attention)

    def found(tokens: Tensor) -> Tensor:
        return through(sparse, tokens, F.scaled_dot_product_attention)

    return max(worst, error_over_budget(found, definition, [x]))


def _linear(linear: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, linear.weight.to(x.dtype), linear.bias.to(x.dtype))
