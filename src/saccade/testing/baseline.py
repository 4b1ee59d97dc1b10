"""The textbook formula with the roundings that no kernel can avoid: the errors of kernels are measured against it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.engine.dense import attend
from saccade.testing.cases import Case
from saccade.testing.dropout import Seeds, dropout_of, seed_generators
from saccade.testing.inputs import Inputs, mask_of
from saccade.testing.likely import likely_errors
from saccade.testing.roundings import UNAVOIDABLE, Roundings
from saccade.testing.textbook import (
    Forward,
    TextbookCall,
    bias_of_rows,
    call_of,
    forward,
    gradients_of_scores,
    of_bias,
    of_calls,
    of_groups,
    product_in_half,
    rounded,
)

Outputs = dict[str, Tensor]
Runner = Callable[[Inputs], tuple[Tensor, Tensor | None]]


def differentiate(run: Runner, inputs: Inputs, seed: int, lse: bool) -> Outputs:
    """out, lse, dq, dk, dv and dbias of a run, whose random numbers are drawn from `seed`."""
    leaves = _leaves(inputs)
    seed_generators(seed, inputs.query.device)
    out, log_sum = run(leaves)
    outputs: Outputs = {"out": out.detach()}
    sources, gradients = [out], [inputs.dout]
    if log_sum is not None and lse:
        outputs["lse"] = log_sum.detach()
        if inputs.dlse is not None:
            sources.append(log_sum)
            gradients.append(inputs.dlse.to(log_sum.dtype))
    tensors = [leaves.query, leaves.key, leaves.value] if leaves.qkv is None else [leaves.qkv]
    tensors += [] if leaves.bias is None else [leaves.bias]
    grads = list(torch.autograd.grad(sources, tensors, gradients))
    if leaves.qkv is not None:
        grads[:1] = grads[0].permute(2, 0, 3, 1, 4).unbind(0)
    outputs.update(zip(("dq", "dk", "dv", "dbias"), grads, strict=False))
    return outputs


def joined_outputs(calls: Sequence[Outputs]) -> Outputs:
    """The outputs of several calls of one case, joined in their first dimension; of dbias that is a new one."""
    assert all(call.keys() == calls[0].keys() for call in calls), [sorted(call) for call in calls]
    return {name: (torch.stack if name == "dbias" else torch.cat)([call[name] for call in calls]) for name in calls[0]}


def _leaves(inputs: Inputs) -> Inputs:
    bias = None if inputs.bias is None else inputs.bias.detach().requires_grad_()
    if inputs.qkv is not None:
        # Views without a history. With one they would keep the node that adds up the gradient of qkv, which belongs to this stream. A backward
        # that is captured in a CUDA graph on another stream would wait for that node, which ends the capture.
        query, key, value = inputs.qkv.detach().permute(2, 0, 3, 1, 4).unbind(0)
        qkv = inputs.qkv.detach().requires_grad_()
    else:
        qkv = None
        query, key, value = (x.detach().requires_grad_() for x in (inputs.query, inputs.key, inputs.value))
    return Inputs(query, key, value, inputs.mask, bias, inputs.lengths, inputs.dout, inputs.dlse, qkv)


def oracle_of(case: Case, inputs: Inputs, seed: Seeds, lse: bool) -> Outputs:
    """The outputs of the plain formula in float64."""

    def run(x: Inputs) -> tuple[Tensor, Tensor]:
        keep, _ = dropout_of(case, x, seed)
        bias = None if x.bias is None else bias_of_rows(case, x.bias)
        return attend(
            x.query, x.key, x.value, scale=case.head_dim**-0.5, mask=mask_of(case, x), bias=bias, lengths=x.lengths, is_causal=case.is_causal,
            keep=keep, dropout_p=case.dropout_p,
        )  # fmt: skip

    return differentiate(run, dataclasses.replace(inputs.to(torch.float64), qkv=None), 0, lse)


class Baseline(NamedTuple):
    """The measure of a result.

    outputs: one or several forms of the baseline for each output, stacked; the larger error counts. Their dtypes are those of a right result.
    magnitude: the largest sum of absolute terms behind one of its numbers, float64 `[calls]`. likely: of each output an error that the baseline may
    well have, and the root mean square of all, float64 `[2, calls]`; {} if only the baseline's own errors count.
    """

    outputs: Outputs
    magnitude: Outputs
    likely: Outputs

    def only(self, names: Iterable[str]) -> Baseline:
        """The same of some outputs."""
        return self._replace(outputs={name: self.outputs[name] for name in names if name in self.outputs})


def baseline_of(case: Case, inputs: Inputs, seed: Seeds, lse: bool, roundings: Roundings = UNAVOIDABLE) -> Baseline:
    """The baseline of kernels with these roundings; without `lse` if that is False.

    With delta_of_out it has two forms, which differ in the weights that are rounded before P V. In one they are divided by their sum; in the other they
    are relative to the largest, as in kernels that divide at the end. The rounding of the numbers of out decides the error of delta. If a gradient has
    one or two terms, one of these roundings is its whole error. With half_sums the second form adds from the last query and key to the first: with two
    keys dv has few numbers, and their single error may be small by chance.
    """
    call = call_of(case, inputs, seed, lse, roundings.half_sums)
    made = forward(call)
    magnitude = _magnitudes(call, made)
    for name in ("dk", "dv"):
        magnitude[name] = of_groups(magnitude[name], case.heads // case.kv_heads)
    magnitude["dbias"] = torch.zeros(()) if inputs.bias is None else of_bias(case, inputs.bias, magnitude["dbias"])
    forms = _forms(case, inputs, call, made, roundings)
    names = [name for name in forms[0] if lse or name != "lse"]
    return Baseline(
        {name: torch.stack([form[name] for form in forms]) for name in names},
        # of terms that are not negative; the zero is for an output without a number
        {name: torch.nn.functional.pad(of_calls(case, magnitude[name]), (1, 0)).amax(1).double() for name in names},
        likely_errors(case, inputs, call, made, roundings),
    )


def _forms(case: Case, inputs: Inputs, call: TextbookCall, made: Forward, roundings: Roundings) -> list[Outputs]:
    forms = []
    if roundings.delta_of_out:
        forms.append(_outputs(case, inputs, call, made, delta_of_out=True))
        forms.append(_outputs(case, inputs, call, forward(call, late=True), delta_of_out=True, backwards=True))
    if roundings.rounded_weights and inputs.bias is None:
        forms.append(_outputs(case, inputs, call, made._replace(weights=rounded(made.weights, call.dtype))))
    elif roundings.rounded_weights or not forms:
        forms.append(_outputs(case, inputs, call, made))
    return forms


def _outputs(
    case: Case, inputs: Inputs, call: TextbookCall, made: Forward, delta_of_out: bool = False, backwards: bool = False
) -> Outputs:
    """The outputs of a run from its forward, rounded once at the end. backwards: sums in float16 are added from the end."""
    dscores = gradients_of_scores(call, made, delta_of_out)
    terms = rounded(dscores, call.dtype)

    def product(a: Tensor, b: Tensor, tile: int) -> Tensor:
        if not call.half_sums:
            return a @ b
        return product_in_half(a.flip(-1), b.flip(-2), tile) if backwards else product_in_half(a, b, tile)

    group = case.heads // case.kv_heads
    outputs = {
        "out": made.out,
        "dq": call.scale * product(terms, call.key, 64),
        "dk": of_groups(call.scale * product(terms.mT, call.query, 32), group),
        "dv": of_groups(product(rounded(made.dropped, call.dtype).mT, call.dout, 32), group),
    }
    outputs = {name: x.to(call.dtype) for name, x in outputs.items()}
    # in float64 the kernels and torch give a float64 lse too
    outputs["lse"] = made.log_sum.to(torch.promote_types(torch.float32, call.dtype))
    if inputs.bias is not None:
        outputs["dbias"] = of_bias(case, inputs.bias, dscores).to(inputs.bias.dtype)
    return outputs


def _magnitudes(call: TextbookCall, made: Forward) -> Outputs:
    """For each number of the outputs the sum of the absolute terms behind it, per query head and before any broadcast of the
    bias."""
    scores, log_sum, weights = made.scores, made.log_sum, made.weights
    exponent = torch.maximum(*(x.masked_fill(x == -math.inf, 0.0).abs() for x in (scores, log_sum[..., None].expand_as(scores))))
    # Forward: the reciprocal of the sum of weights, the product with it, the exponential, and that of a maximum that rises. Both exponentials come with
    # the rounding of their exponents. Backward: the exponential is right to two roundings.
    once, thrice = made.dropped * (4.0 + 2.0 * exponent), made.dropped * (3.0 + 3.0 * exponent)
    terms = weights * (3.0 + 3.0 * exponent)
    terms = terms * (
        call.dout.abs() @ call.value.abs().mT * call.keep / call.kept
        + (weights * call.dweights).abs().sum(dim=-1, keepdim=True)
        + call.dlse.abs()
    )
    products = call.scale * (call.query.abs() @ call.key.abs().mT) + (0.0 if call.bias is None else call.bias.abs())
    return {
        "out": once @ call.value.abs(),
        "lse": 1.0 + 3.0 * products.where(call.seen, 0.0),
        "dq": call.scale * (terms @ call.key.abs()),
        "dk": call.scale * (terms.mT @ call.query.abs()),
        "dv": thrice.mT @ call.dout.abs(),
        "dbias": terms,
    }
