"""Autograd of `dynamic_mask_attention`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from saccade.dynamic_mask import op
from saccade.engine.calls import uncast
from saccade.engine.first_order import first_order
from saccade.engine.ranges import shown_as_ours
from saccade.engine.saved import save, saved
from saccade.engine.tracing import eager
from saccade.launch.aside import FAILURES


class Gradients(NamedTuple):
    """The gradients that `DynamicMask.backward` returns: one field for each argument of its forward, in that order."""

    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    key_scores: Tensor | None = None
    start: None = None
    stop: None = None
    keep: None = None
    is_causal: None = None
    scale: None = None
    backend: None = None


class CausalGradients(NamedTuple):
    """The gradients that `CausalDynamicMask.backward` returns."""

    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    key_scores: Tensor | None = None
    lengths: None = None
    call: None = None
    options: None = None


class CausalOptions(NamedTuple):
    """The arguments of `CausalDynamicMask` that are not tensors. keep: keys that each position keeps."""

    adds_scores: bool
    keep: int
    scale: float
    backend: str


@shown_as_ours
class DynamicMask(torch.autograd.Function):
    """`(out, lse) = dynamic_mask_attention(query, key, value, key_scores)` for keys kept by the positions `start..stop`."""

    @staticmethod
    def forward(ctx, query, key, value, key_scores, start, stop, keep, is_causal, scale, backend):
        out, lse = op.forward(query, key, value, key_scores, start, stop, keep, is_causal, scale, backend)
        save(ctx, query, key, value, key_scores, start, stop, out, lse)
        ctx.numbers = keep, is_causal, scale, backend
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @first_order
    def backward(ctx, dout: Tensor | None, dlse: Tensor | None):
        query, key, value, key_scores, start, stop, out, lse = saved(ctx)
        call = (query, key, value, key_scores, start, stop, *ctx.numbers)
        dq, dk, dv, dscores = _dynamic_mask_gradients(dout, dlse, out, lse, call)
        return Gradients(dq, dk, dv, None if key_scores is None else dscores)


@shown_as_ours
class CausalDynamicMask(torch.autograd.Function):
    """`(out, lse, faulty)` from a call that also selects (`op.causal_call`); its options are a `CausalOptions`."""

    @staticmethod
    def forward(ctx, query, key, value, key_scores, lengths, call, options):
        out, lse, intervals, faulty = call(query, key, value, key_scores, lengths)
        save(ctx, query, key, value, key_scores if options.adds_scores else None, intervals, out, lse)
        ctx.call, ctx.options = call, options
        ctx.set_materialize_grads(False)
        return out, lse, faulty

    @staticmethod
    def unrecorded(query, key, value, key_scores, lengths, call, options):
        """The same without a gradient."""
        out, lse, _, faulty = call(query, key, value, key_scores, lengths)
        return out, lse, faulty

    @staticmethod
    @first_order
    def backward(ctx, dout: Tensor | None, dlse: Tensor | None, _: None):
        query, key, value, key_scores, intervals, out, lse = saved(ctx)
        found = None
        if dout is not None and eager(dout, dlse):
            try:
                found = ctx.call.backward(dout, dlse, out, lse, query, key, value, key_scores, intervals)
            except FAILURES:
                if ":" not in ctx.options.backend:  # a backend requested by its name
                    raise
        if found is None:
            _, keep, scale, backend = ctx.options
            call = (query, key, value, key_scores, *intervals.unbind(0), keep, True, scale, backend)
            found = _dynamic_mask_gradients(dout, dlse, out, lse, call)
        dq, dk, dv, dscores = found
        return CausalGradients(dq, dk, dv, None if key_scores is None else dscores)


def _dynamic_mask_gradients(
    dout: Tensor | None, dlse: Tensor | None, out: Tensor, lse: Tensor, call: tuple
) -> tuple[Tensor | None, ...]:
    """The gradients of query, key, value and key_scores. call: the arguments of `op.forward`."""
    if dout is None and dlse is None:
        return (None,) * 4
    if dout is None:
        dout = torch.zeros_like(out)
    with uncast(out):  # a user may run backward inside autocast
        return op.backward(dout, dlse, out, lse, *call)
