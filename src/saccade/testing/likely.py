"""The likely errors of a baseline, from the roundings behind them. If an output has few numbers, the errors found in them may be small by chance.

A budget from only the errors of its baseline would be too small. In 18 of 337,000 random problems the error of a right kernel was up to 2.2 times that
budget. In 2 of 822,000 the error of lse was over it.

The mean of a rounding is 0, and its mean square is a third of the square of the most that it can be. Roundings are independent of each other. So the
mean squares of their effects add up, each with the square of its coefficient in the result.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from saccade.testing.cases import Case
from saccade.testing.inputs import Inputs
from saccade.testing.roundings import Roundings
from saccade.testing.textbook import Forward, TextbookCall, gradients_of_scores, of_bias, of_calls, of_groups

# in root mean squares of a tensor's least certain number: with many similar numbers, the largest error is 0.7 to 1.0 of that
_LIKELY = 2.0
# products that are added before a sum is rounded: in float16 by the tensor cores of Volta, and about so many by whatever adds in float32
_ADDED = 4
# A number is rounded by at most half of its last place. That is eps / 2 of it at the beginning of an octave, and less behind it. Here squared, on average.
_OF_OCTAVE = 0.54


def likely_errors(case: Case, inputs: Inputs, call: TextbookCall, made: Forward, roundings: Roundings) -> dict[str, Tensor]:
    """For each output a likely error of its baseline, and the root mean square of all its errors: float64 `[2, calls]`."""
    unit = torch.finfo(call.dtype).eps / 2 / math.sqrt(3)
    dscores = gradients_of_scores(call, made, roundings.delta_of_out)
    weights, dropped = made.weights, made.dropped
    sums = _Sums(unit if call.half_sums or call.dtype == torch.float32 else 0.0)
    score, dweight = sums.square(call.scale * call.query, call.key.mT), sums.square(call.dout, call.value.mT)
    # what a number of each misses; delta is one for a row
    of_weights = dropped.square() * (unit**2 * _inexact(dropped, call) + score)
    of_scores = dscores.square() * score + weights.square() * dweight
    rounded_weights = roundings.rounded_weights and inputs.bias is None  # as in the baseline
    of_delta = _square_of_delta(call, made, unit, roundings.delta_of_out, rounded_weights)
    rounded = of_scores + (1 + rounded_weights) * unit**2 * dscores.square()
    group, squared = case.heads // case.kv_heads, call.scale**2
    squares = {
        "out": of_weights @ call.value.square() + sums.square(dropped, call.value),
        "lse": (weights.square() * score).sum(-1),
        "dq": squared * (rounded @ call.key.square() + of_delta * (weights @ call.key).square() + sums.square(dscores, call.key)),
        "dk": squared * of_groups(_of_keys(rounded, weights, of_delta, call) + sums.square(dscores.mT, call.query), group),
        "dv": of_groups(of_weights.mT @ call.dout.square() + sums.square(dropped.mT, call.dout), group),
    }
    if inputs.bias is not None:
        terms = of_scores + (roundings.rounded_terms * unit) ** 2 * dscores.square()
        squares["dbias"] = _square_of_bias(case, inputs.bias, terms, weights, of_delta)
    return {name: _summed_up(case, x) for name, x in squares.items()}


class _Sums:
    """Sums that are rounded on their way. unit: the root mean square of a rounding, relative; 0 if their roundings do not count."""

    def __init__(self, unit: float) -> None:
        self.unit = unit

    def square(self, a: Tensor, b: Tensor) -> Tensor | float:
        """The mean square of what `a b` misses. A sum is on its way to the result, on average at a third of its square, and wanders by half of the sum
        of the squares of its products."""
        if not self.unit:
            return 0.0
        return _OF_OCTAVE * self.unit**2 * max(1.0, a.shape[-1] / _ADDED) * ((a.square() @ b.square()) / 2 + (a @ b).square() / 3)


def _inexact(x: Tensor, call: TextbookCall) -> Tensor | float:
    """1 where a number has to be rounded to the working dtype, 0 where it is one of its numbers: the weight of the only key that a query sees is 1,
    and its out is that key's value."""
    return 1.0 if call.dtype == torch.float32 else (x.to(call.dtype).to(x.dtype) != x).to(x.dtype)


def _square_of_delta(call: TextbookCall, made: Forward, unit: float, delta_of_out: bool, rounded_weights: bool) -> Tensor:
    """The mean square of the error of the row sums of `P dP`, `[B, H, Tq, 1]`: taken from the rounded out, from rounded weights, or from float32 weights."""
    if delta_of_out:
        products = call.dout * made.out * _inexact(made.out, call)
    elif rounded_weights or call.dtype == torch.float32:
        products = made.weights * call.dweights * _inexact(made.weights, call)
    else:
        return torch.zeros_like(made.out[..., :1])
    return unit**2 * products.square().sum(-1, keepdim=True)


def _of_keys(rounded: Tensor, weights: Tensor, of_delta: Tensor, call: TextbookCall) -> Tensor:
    return (rounded + weights.square() * of_delta).mT @ call.query.square()


def _square_of_bias(case: Case, bias: Tensor, terms: Tensor, weights: Tensor, of_delta: Tensor) -> Tensor:
    """The mean square of what dbias misses. The error of a row's delta adds up over all keys of the row if they share a number of the bias."""
    if bias.shape[-1] == 1:
        return of_bias(case, bias, terms.sum(-1, keepdim=True) + of_delta * weights.sum(-1, keepdim=True).square())
    return of_bias(case, bias, terms + of_delta * weights.square())


def _summed_up(case: Case, squares: Tensor) -> Tensor:
    # if squares overflow, only the baseline's own errors count: an infinite budget would allow anything
    each = of_calls(case, squares.double()).nan_to_num(0.0, posinf=0.0)
    if not each.numel():
        return torch.zeros(2, case.calls, dtype=torch.float64, device=each.device)
    return torch.stack((_LIKELY * each.amax(1).sqrt(), each.mean(1).sqrt()))
