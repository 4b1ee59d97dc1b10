"""Makes the autograd.Function of an operation from its record."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from saccade.engine.first_order import first_order
from saccade.engine.ranges import shown_as_ours
from saccade.engine.record import Fields
from saccade.engine.saved import save, saved


def function(
    name: str,
    fields: Fields,
    options: int,
    forward: Callable[[Any, tuple], tuple[tuple, tuple]],
    backward: Callable[..., tuple[tuple, Tensor | None]],
    unpack: Callable[[Tensor], tuple[Tensor, ...]] | None = None,
) -> Any:
    """An autograd.Function of the fields of a record, then of as many options; its results are out and lse.

    Args:
        forward: `(args, options) -> ((out, lse), saved)`; what is saved begins with the output, or None, and the lse.
        backward: `(args, rows, dout, dlse, saved, wanted, options) -> (the gradients of rows, that of the extra field)`. wanted: whether the last one
            is needed. rows: query, key and value, or the packed tensor.
        unpack: of the first argument, if it is one packed tensor: query, key and value.
    """
    rows = 3 if unpack is None else 1
    whole, tensors, extra = (n - 3 + rows for n in (fields.whole, fields.tensors, fields.extra))
    between, behind = (None,) * (extra - rows), (None,) * (whole - extra - 1 + options)
    nothing = (*[None] * rows, *between, None, *behind)
    arguments = _arguments(fields, rows, unpack)

    def run_forward(ctx, *given):
        chosen = given[whole:]
        results, kept = forward(arguments(given[:whole]), chosen)
        save(ctx, *given[:tensors], *kept)
        ctx.others = given[tensors:whole], chosen
        ctx.set_materialize_grads(False)
        return results

    def run_backward(ctx, dout: Tensor | None, dlse: Tensor | None):
        found, (numbers, chosen) = saved(ctx), ctx.others
        if dout is None and dlse is None:
            return nothing
        args = arguments((*found[:tensors], *numbers))
        if dout is None:
            dout = _zeros(args, found[tensors])
        wanted = found[extra] is not None and ctx.needs_input_grad[extra]
        dlse = of_seen(dlse, found[tensors + 1])
        gradients, last = backward(args, found[:rows], dout, dlse, found[tensors:], wanted, chosen)
        return (*gradients, *between, last if wanted else None, *behind)

    methods = {"forward": staticmethod(run_forward), "backward": staticmethod(first_order(run_backward))}
    return shown_as_ours(types.new_class(name, (torch.autograd.Function,), exec_body=lambda body: body.update(methods)))


def of_seen(dlse: Tensor | None, lse: Tensor) -> Tensor | None:
    """The gradient of the lse of queries that see a key, 0 for the others. A loss of the lse, -inf for these, may send infinity or NaN back, and
    kernels would multiply that by weights of 0."""
    return None if dlse is None else dlse.masked_fill(lse == float("-inf"), 0.0)


def _arguments(fields: Fields, rows: int, unpack: Callable[[Tensor], tuple[Tensor, ...]] | None) -> Callable[[tuple], Any]:
    """The record of what an autograd.Function is given."""
    record, same = fields.record, [(i - 3 + rows, j - 3 + rows) for i, j in fields.same]

    def arguments(given: tuple) -> Any:
        for i, j in same:
            if given[i] is None:
                given = (*given[:i], given[j], *given[i + 1 :])
        return record(*given) if unpack is None else record(*unpack(given[0]), *given[1:])

    return arguments if same or unpack is not None else lambda given: record(*given)


def _zeros(args: Any, out: Tensor | None) -> Tensor:
    """The gradient of an output that the loss does not use."""
    if out is not None:
        return torch.zeros_like(out)
    return args.query.new_zeros(()).expand(*args.query.shape[:-1], args.value.shape[-1])
