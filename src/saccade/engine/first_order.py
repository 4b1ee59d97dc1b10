"""Support for the autograd.Functions of the operations, which have first derivatives only.

The Functions deliberately have the old style (ctx in forward): the `setup_context` form costs three times as much per call.
Second derivatives, jvp and vmap raise; nothing here returns a silent zero.
"""

from __future__ import annotations

import functools

import torch

from saccade.engine.ranges import shown_as_ours


@shown_as_ours
class _Refuse(torch.autograd.Function):
    """The identity on a gradient. It remembers what the gradient was computed from, and raises if that is differentiated."""

    @staticmethod
    def forward(ctx, gradient, *sources):
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError("saccade's kernels have no second derivative; backend='reference' has one")


def first_order(backward):
    """Make a backward raise when it is differentiated.

    torch's `once_differentiable` does not serve: it looks only at the incoming gradients. After a linear loss these need no
    gradient, and a penalty on dq would silently add nothing.
    """

    @functools.wraps(backward)
    def run(ctx, *gradients):
        # a plain tuple, because torch.compile does not recognise the gradients in a named one (torch 2.13)
        if not torch.is_grad_enabled():
            return tuple(backward(ctx, *gradients))
        with torch.no_grad():
            results = tuple(backward(ctx, *gradients))
        if torch.compiler.is_compiling():
            return results
        sources = [t for t in (*gradients, *ctx.saved_tensors) if t is not None and t.requires_grad]
        return tuple(None if r is None else _Refuse.apply(r, *sources) for r in results)

    return run
