"""Support for the autograd.Functions of the operations, which have first derivatives only.

The Functions deliberately have the old style (ctx in forward): the `setup_context` form costs three times as much per call.
Second derivatives, jvp and the transforms of torch.func raise; nothing here returns a silent zero.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from saccade.engine.ranges import shown_as_ours
from saccade.engine.tracing import transforms
from saccade.errors import UnsupportedProblem


def applied(function: type[torch.autograd.Function], problem: Any, backend: str, *args: Any) -> Any:
    """`function.apply(*args)`. problem, backend: for the message if that is refused.

    Raises:
        UnsupportedProblem: a transform of torch.func is active, or an argument has a tangent of forward-mode AD.
    """
    if transforms():
        raise UnsupportedProblem(_refusal("a transform of torch.func", problem, backend))
    compiling = torch.compiler.is_compiling()  # traced tensors show no tangents
    if forward_ad._current_level >= 0 and (compiling or any(_has_tangent(x) for x in args)):
        raise UnsupportedProblem(_refusal("forward-mode AD", problem, backend))
    if compiling:
        args = _apart(args)
    return function.apply(*args)


def refuse_if_differentiated_forward(error: NotImplementedError, problem: Any, backend: str) -> None:
    """Raise `UnsupportedProblem` for an error of torch's own function, which asks for an issue where it has no forward derivative."""
    if forward_ad._current_level >= 0 and not isinstance(error, UnsupportedProblem):
        raise UnsupportedProblem(_refusal("forward-mode AD", problem, backend)) from error


def _apart(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments, with a view in place of each repeated tensor: torch.compile accepts a tensor only once among an autograd.Function's
    arguments."""
    made: list[Any] = []
    for x in args:
        made.append(x.view_as(x) if isinstance(x, Tensor) and any(x is other for other in made) else x)
    return tuple(made)


def _has_tangent(argument: Any) -> bool:
    return isinstance(argument, Tensor) and forward_ad.unpack_dual(argument).tangent is not None


def _refusal(mode: str, problem: Any, backend: str) -> str:
    return f"backend {backend!r} has a gradient for torch.autograd alone, and {mode} meets {problem}; backend='reference' can run there"


@shown_as_ours
class _Refuse(torch.autograd.Function):
    """The identity on a gradient. It remembers what the gradient was computed from, and raises if that is differentiated."""

    @staticmethod
    def forward(ctx, gradient, *sources):
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError("saccade's kernels have no second derivative; backend='reference' has one")


class _Once:
    """The ctx of a backward, which unpacks its saved tensors once: checkpointing's hooks return each of them only once."""

    def __init__(self, ctx):
        self._ctx, self.saved_tensors = ctx, ctx.saved_tensors

    def __getattr__(self, name):
        return getattr(self._ctx, name)


def first_order(backward):
    """Make a backward raise when it is differentiated.

    torch's `once_differentiable` does not suffice: it checks only the incoming gradients. After a linear loss these need no
    gradient, and a penalty on dq would silently add nothing.
    """

    @functools.wraps(backward)
    def run(ctx, *gradients):
        # a plain tuple, because torch.compile does not recognise the gradients in a named one (torch 2.13)
        if not torch.is_grad_enabled():
            return tuple(backward(ctx, *gradients))
        if torch.compiler.is_compiling():
            with torch.no_grad():
                return tuple(backward(ctx, *gradients))
        ctx = _Once(ctx)
        with torch.no_grad():
            results = tuple(backward(ctx, *gradients))
        sources = [t for t in (*gradients, *ctx.saved_tensors) if t is not None and t.requires_grad]
        return tuple(None if r is None else _Refuse.apply(r, *sources) for r in results)

    return run
