"""torch.library ops of `dynamic_mask_scores`, one opaque op each for forward and backward, and its autograd.Function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from saccade.dynamic_mask.scores import reference
from saccade.engine.calls import uncast
from saccade.engine.first_order import first_order
from saccade.engine.namespace import fragment
from saccade.engine.ranges import shown_as_ours
from saccade.engine.saved import save, saved
from saccade.engine.tracing import eager, register
from saccade.launch.disabled import FAILURES, disable

# "auto" may fall back to plain torch, "fused" runs or raises
KERNELS = ("dynamic_mask_scores", "fused")

_library = fragment()
_library.define(
    "dynamic_mask_scores_forward(Tensor values, Tensor weight, Tensor A, Tensor? bias, str form, bool save, str backend) -> (Tensor, Tensor)"
)
_library.define(
    "dynamic_mask_scores_backward(Tensor dscores, Tensor derivatives, Tensor values, Tensor weight, str backend) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)


def forward(
    values: Tensor, weight: Tensor, A: Tensor, bias: Tensor | None, form: str, save: bool, backend: str
) -> tuple[Tensor, Tensor]:
    """scores, float32 `[B, Hkv, S]`, and their derivatives by z and by A, `[2, B, Hkv, S]`, empty unless they are to be saved."""
    plain = eager(values, weight, A, bias) and not values.is_meta
    return (_forward if plain else _FORWARD)(values, weight, A, bias, form, save, backend)


def backward(
    dscores: Tensor, derivatives: Tensor, values: Tensor, weight: Tensor, backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dvalues, dweight, dA, dbias), the last two in float32."""
    plain = eager(dscores, derivatives, values, weight) and not values.is_meta
    return (_backward if plain else _BACKWARD)(dscores, derivatives, values, weight, backend)


@shown_as_ours
class DynamicMaskScores(torch.autograd.Function):
    """The scores of values, weight, A and bias."""

    @staticmethod
    def forward(ctx, values, weight, A, bias, form, backend):
        scores, derivatives = forward(values, weight, A, bias, form, True, backend)
        save(ctx, values, weight, derivatives)
        ctx.options = backend, A.dtype, A.dtype if bias is None else bias.dtype
        return scores

    @staticmethod
    @first_order
    def backward(ctx, dscores: Tensor):
        values, weight, derivatives = saved(ctx)
        backend, of_factor, of_bias = ctx.options
        with uncast(values):  # a user may run backward inside autocast
            dvalues, dweight, factor, bias = backward(dscores, derivatives, values, weight, backend)
        return dvalues, dweight, factor.to(of_factor), bias.to(of_bias) if ctx.needs_input_grad[3] else None, None, None


def _by_kernels(kernels: Callable[[], Any], plain: Callable[[], Any], backend: str) -> Any:
    try:
        return kernels()
    except FAILURES as error:
        if backend != "auto":
            raise
        disable(KERNELS, "plain torch", error)
        return plain()


def _forward(values, weight, A, bias, form, save, backend):
    from saccade.dynamic_mask.scores import launchers

    def plain():
        products = reference.products_of(values, weight, bias)
        scores = reference.formed(products, A, form).contiguous()
        return scores, reference.derivatives_of(products, A, form) if save else scores.new_empty(0)

    return _by_kernels(lambda: launchers.forward(values, weight, A, bias, form, save), plain, backend)


def _backward(*call):
    from saccade.dynamic_mask.scores import launchers

    *given, backend = call
    return _by_kernels(lambda: launchers.backward(*given), lambda: reference.gradients_of(*given), backend)


def _backward_of_op(*call):
    dvalues, dweight, factor, bias = _backward(*call)
    return dvalues, dweight, factor.clone(), bias.clone()  # results of an op may not share memory


def _fake_forward(values, weight, A, bias, form, save, backend):
    batch, tokens = values.shape[0], values.shape[-2]
    scores = values.new_empty((batch, weight.shape[0], tokens), dtype=torch.float32)
    return scores, scores.new_empty((2, *scores.shape) if save else (0,))


def _fake_backward(dscores, derivatives, values, weight, backend):
    of_heads = (dscores.new_empty(weight.shape[:1]) for _ in range(2))
    return torch.empty_like(values), weight.new_empty(weight.shape), *of_heads


def _flops(products: int, before: int) -> Callable[..., int]:
    """The formula of an op with so many products, which takes so many tensors before the values."""

    def formula(*given: Any, out_val: Any = None, **named: Any) -> int:
        values, weight = (given[i] if i < len(given) else named[n] for i, n in ((before, "values"), (before + 1, "weight")))
        return 2 * products * values.numel() * weight.shape[0]

    return formula


_FORWARD = register(_library, "dynamic_mask_scores_forward", _forward, _fake_forward, _flops(1, 0))
_BACKWARD = register(_library, "dynamic_mask_scores_backward", _backward_of_op, _fake_backward, _flops(2, 2))
