"""Graph outputs that are views: they are made after the compiled graph, so that no incoming gradient is copied.

torch's compiler requires contiguous gradients of outputs with dynamic shapes. Gradients of attention lie as query, key and value do before they are
transposed: a copy of each took 1.3 of 14.9 ms of a BERT-base step of 5,181 tokens (H100). If the three leave as one product, its gradient is the
packed tensor that backward of attention writes. Concatenating three took 0.29 of 8.9 ms of such a step (H200).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from saccade.encoders import joined
from saccade.integrations.packed_qkv import PACKED_QKV

Dims = tuple[int, int]


class Out(NamedTuple):
    """How an output is made of those of the graph.

    source: the graph's output, by number. part: of a product of three, each `[..., heads * dim]`; None for the output itself. heads: (heads, dim).
    dims: the dimensions that are exchanged last, or None.
    """

    source: int
    part: int | None = None
    heads: Dims | None = None
    dims: Dims | None = None


def move_views_out(graph: fx.GraphModule) -> list[Out]:
    """Move transposes of outputs, and the split of a product into three, out of a graph, in place; returns how each output is made."""
    output = next(node for node in graph.graph.nodes if node.op == "output")
    stripped = [_before_transpose(value) for value in output.args[0]]
    products = _whole_products([value for value, _ in stripped])
    values: list[Any] = []
    outs = []
    for i, (value, dims) in enumerate(stripped):
        product, part, heads = products.get(i, (value, None, None))
        if part is None or product not in values:
            values.append(product)
        outs.append(Out(len(values) - 1 if part is None else values.index(product), part, heads, dims))
    if any(out != Out(i) for i, out in enumerate(outs)):
        output.args = (type(output.args[0])(values),)
        graph.graph.eliminate_dead_code()
        graph.recompile()
    return outs


def _before_transpose(value: Any) -> tuple[Any, Dims | None]:
    transposed = isinstance(value, fx.Node) and value.op == "call_method" and value.target == "transpose" and not value.kwargs
    if not transposed or not isinstance(value.args[0], fx.Node) or value.args[0].op == "placeholder":
        return value, None
    return value.args[0], value.args[1:]


def _whole_products(values: Sequence[Any]) -> dict[int, tuple[fx.Node, int, Dims]]:
    """By output: (product, part, heads), of products that leave as three parts of one shape and in no other way."""
    found = {i: part for i, value in enumerate(values) if (part := _part(value)) is not None}
    by_product: dict[fx.Node, list[int]] = {}
    for i, (product, _, _) in found.items():
        by_product.setdefault(product, []).append(i)
    whole = [
        places
        for places in by_product.values()
        if [found[i][1] for i in places] == [0, 1, 2] and len({found[i][2] for i in places}) == 1
    ]
    return {i: found[i] for places in whole for i in places}


def _part(value: Any) -> tuple[fx.Node, int, Dims] | None:
    """(product, part, heads) of a view `[..., heads, dim]` of a third of a product that `fused.join_products` made."""
    if not isinstance(value, fx.Node) or value.op != "call_method" or value.target not in ("view", "reshape"):
        return None
    third = value.args[0]
    if not isinstance(third, fx.Node) or third.target is not operator.getitem:
        return None
    split, part = third.args[0], third.args[1]
    if not isinstance(split, fx.Node) or split.target is not torch.split:
        return None
    product = next(iter(split.args), None)
    # a model's own split has other forms: one size, or another dimension
    if not isinstance(product, fx.Node) or product.target is not joined.product:
        return None
    shape, before = (_shape(node) for node in (value, third))
    heads = tuple(shape[-2:])
    fits = len(shape) == len(before) + 1 and [*map(str, shape[:-2])] == [*map(str, before[:-1])]
    if not fits or not all(isinstance(n, int) for n in heads) or [*split.args[1]] != [heads[0] * heads[1]] * 3:  # type: ignore[misc]
        return None
    return product, part, heads  # type: ignore[return-value]


def _shape(node: fx.Node) -> Sequence[Any]:
    example = node.meta.get("example_value")
    return example.shape if isinstance(example, Tensor) else ()


def with_views(compiled: Callable[..., Any], outs: list[Out]) -> Callable[..., Any]:
    """The compiled graph with the outputs that it had before `move_views_out`."""
    if all(out == Out(i) for i, out in enumerate(outs)):
        return compiled

    def run(*inputs: Any) -> list[Any]:
        found = compiled(*inputs)
        thirds: dict[int, Tensor] = {}
        made = []
        for out in outs:
            value = found[out.source]
            if out.part is not None and out.heads is not None:
                if out.source not in thirds:
                    thirds[out.source] = value.unflatten(-1, (3, *out.heads))
                value = thirds[out.source].select(-3, out.part)
            made.append(value if out.dims is None else value.transpose(*out.dims))
            if out.part == 0:
                setattr(made[-1], PACKED_QKV, thirds[out.source].flatten(0, -4))
        return made

    return run
