"""One autograd.Function per operation (two for attention: separate and packed inputs).

Old-style Functions (ctx in forward) on purpose: the `setup_context` form costs three times as much per call.
Second derivatives, jvp and vmap raise; nothing here returns a silent zero.
"""

from __future__ import annotations

import functools

import torch


class _Refuse(torch.autograd.Function):
    """Identity on a gradient that remembers what it was computed from, and raises where that is differentiated."""

    @staticmethod
    def forward(ctx, gradient, *sources):
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError("saccade's kernels have no second derivative; backend='reference' has one")


def first_order(backward):
    """Make a backward raise when it is differentiated.

    Not torch's `once_differentiable`: that looks at the incoming gradients alone, and after a linear loss they need no gradient, so
    that a penalty on dq would silently add nothing.
    """

    @functools.wraps(backward)
    def run(ctx, *gradients):
        # a plain tuple: torch.compile takes a named one for no gradient at all (torch 2.13)
        if not torch.is_grad_enabled():
            return tuple(backward(ctx, *gradients))
        with torch.no_grad():
            results = tuple(backward(ctx, *gradients))
        if torch.compiler.is_compiling():
            return results
        sources = [t for t in (*gradients, *ctx.saved_tensors) if t is not None and t.requires_grad]
        return tuple(None if r is None else _Refuse.apply(r, *sources) for r in results)

    return run
