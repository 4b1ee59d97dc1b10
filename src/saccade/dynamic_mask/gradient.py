"""Autograd of `dynamic_mask_attention`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from saccade.dynamic_mask import op
from saccade.dynamic_mask.args import DynamicMaskArgs
from saccade.engine.calls import uncast
from saccade.engine.first_order import first_order
from saccade.engine.gradient import function, of_seen
from saccade.engine.ranges import shown_as_ours
from saccade.engine.saved import save, saved
from saccade.engine.tracing import eager
from saccade.launch.disabled import FAILURES


class CausalOptions(NamedTuple):
    """The arguments of `CausalDynamicMask` that are not tensors. keep: keys that each position keeps."""

    adds_scores: bool
    keep: int
    scale: float
    backend: str


def _apply(args: DynamicMaskArgs, options: tuple) -> tuple[tuple, tuple]:
    results = op.forward(args, *options)
    return results, results


def _apply_backward(args, rows, dout, dlse, saved, wanted, options) -> tuple[tuple, Tensor]:
    out, lse = saved
    with uncast(out):  # a user may run backward inside autocast
        *gradients, dscores = op.backward(args, dout, dlse, out, lse, *options)
    return tuple(gradients), dscores


# `(out, lse) = dynamic_mask_attention(query, key, value, key_scores)` for keys kept by the positions `start..stop`
DynamicMask = function("DynamicMask", op.FIELDS, 1, _apply, _apply_backward)


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
        dlse, found = of_seen(dlse, lse), None
        if dout is not None and eager(dout, dlse):
            try:
                found = ctx.call.backward(dout, dlse, out, lse, query, key, value, key_scores, intervals)
            except FAILURES:
                if ":" not in ctx.options.backend:  # a backend requested by its name
                    raise
        if found is None and (dout is not None or dlse is not None):
            _, keep, scale, backend = ctx.options
            start, stop = intervals.unbind(0)
            args = DynamicMaskArgs(query, key, value, key_scores, start, stop, keep, True, scale)
            with uncast(out):
                found = op.backward(args, torch.zeros_like(out) if dout is None else dout, dlse, out, lse, backend)
        dq, dk, dv, dscores = found or (None,) * 4
        return dq, dk, dv, None if key_scores is None else dscores, None, None, None
