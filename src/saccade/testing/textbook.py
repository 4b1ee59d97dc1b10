"""The textbook formula in float32 with a few roundings, in pieces: a call, its forward, the gradients of its scores, and the sums behind a bias."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.engine.dense import visible
from saccade.engine.softmax import softmax
from saccade.testing.cases import Case
from saccade.testing.dropout import Seeds, dropout_of
from saccade.testing.inputs import Inputs, mask_of


class TextbookCall(NamedTuple):
    """A call in float32, with a key head for every query head."""

    query: Tensor
    key: Tensor
    value: Tensor
    dout: Tensor
    bias: Tensor | None
    dlse: Tensor
    keep: Tensor | float  # 1 where dropout keeps a weight, 0 elsewhere
    kept: float  # the probability of that
    seen: Tensor
    scale: float
    dtype: torch.dtype
    half_sums: bool  # whether products are added in float16
    dweights: Tensor  # the gradients of the weights, without any rounding of forward


class Forward(NamedTuple):
    """The results of forward. scores: scaled, with the bias, and -inf where hidden; dropped: the weights after dropout."""

    scores: Tensor
    log_sum: Tensor
    weights: Tensor
    dropped: Tensor
    out: Tensor


def call_of(case: Case, inputs: Inputs, seed: Seeds, lse: bool, half_sums: bool = False) -> TextbookCall:
    """The inputs as float32, with a key head and a bias for every query head and batch row."""
    query, key, value, dout = (x.float() for x in (inputs.query, inputs.key, inputs.value, inputs.dout))
    key, value = (x.repeat_interleave(case.heads // case.kv_heads, dim=1) for x in (key, value))
    bias = None if inputs.bias is None else bias_of_rows(case, inputs.bias.float())
    dlse = inputs.dlse.float()[..., None] if inputs.dlse is not None and lse else torch.zeros(())
    kept_by_dropout, kept = dropout_of(case, inputs, seed)
    keep = 1.0 if kept_by_dropout is None else kept_by_dropout.float()
    seen = visible(case.q_len, case.kv_len, mask_of(case, inputs), inputs.lengths, case.is_causal, query.device)
    dweights = (product_in_half if half_sums else torch.matmul)(dout, value.mT) * keep / kept
    return TextbookCall(
        query, key, value, dout, bias, dlse, keep, kept, seen, case.head_dim**-0.5, inputs.query.dtype, half_sums, dweights
    )


def forward(call: TextbookCall, late: bool = False) -> Forward:
    """late: the weights are rounded relative to the largest, and their sum divides the result at the end."""
    scores = _finished(call, call.query @ call.key.mT)
    if not (call.half_sums or late):
        weights, log_sum = softmax(scores)
        dropped = weights * call.keep / call.kept
        return Forward(scores, log_sum, weights, dropped, rounded(dropped, call.dtype) @ call.value)
    found = _finished(call, product_in_half(call.query, call.key.mT)) if call.half_sums else scores
    _, log_sum = softmax(found)
    # backward finds the same scores again
    weights = torch.exp(found - log_sum.masked_fill(log_sum == -math.inf, 0.0)[..., None])
    largest = torch.nn.functional.pad(found, (0, 1), value=-math.inf).amax(dim=-1, keepdim=True)  # there may be no key
    raised = torch.exp(found - largest.clamp_min(torch.finfo(torch.float32).min))
    total = (raised.sum(dim=-1, keepdim=True) * call.kept).clamp_min(1e-9)
    terms = rounded(raised * call.keep, call.dtype)
    out = (product_in_half(terms, call.value, 16) if call.half_sums else terms @ call.value) / total
    return Forward(scores, log_sum, weights, weights * call.keep / call.kept, out)


def _finished(call: TextbookCall, products: Tensor) -> Tensor:
    """Scores from products: scaled, with the bias, and -inf where a query does not see a key."""
    biased = call.scale * products if call.bias is None else call.scale * products + call.bias
    return biased.masked_fill(~call.seen.expand_as(products), -math.inf)


def gradients_of_scores(call: TextbookCall, made: Forward, delta_of_out: bool) -> Tensor:
    """dS. delta_of_out: the row sums of `P dP` come from dout and the rounded out."""
    products = call.dout * rounded(made.out, call.dtype) if delta_of_out else made.weights * call.dweights
    return made.weights * (call.dweights - products.sum(dim=-1, keepdim=True) + call.dlse)


def of_calls(case: Case, tensor: Tensor) -> Tensor:
    """A tensor of all calls that are judged together as `[calls, numbers of each]`."""
    return tensor.reshape(case.calls, tensor.numel() // case.calls)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest numbers that a dtype has."""
    return x.to(dtype).to(x.dtype)


def product_in_half(a: Tensor, b: Tensor, tile: int = 0) -> Tensor:
    """`a b`, with the sum rounded to float16 after every four products; with `tile`, that many products are summed before they
    are added to the total."""
    none = a[..., :0] @ b[..., :0, :]  # zeros of the shape of the result
    total, part = none, none
    for k in range(0, a.shape[-1], 4):
        part = rounded(part + a[..., k : k + 4] @ b[..., k : k + 4, :], torch.float16)
        if tile and (k + 4) % tile == 0:
            total, part = rounded(total + part, torch.float16), none
    return rounded(total + part, torch.float16)


def bias_of_rows(case: Case, bias: Tensor) -> Tensor:
    """The bias of every batch row, `[B, ..]`: of all that share it, in every image that has its window, and in every call."""
    rows = case.batch // case.calls
    each = bias.reshape(_shapeof_bias(case, bias))
    each = each.repeat(1, rows // case.windows, 1, 1, 1) if case.windows else each.expand(-1, rows, -1, -1, -1)
    return each.flatten(0, 1)


def of_bias(case: Case, bias: Tensor, of_scores: Tensor) -> Tensor:
    """The sums of the scores `[B, H, Tq, Tk]` over the pairs that share a number of the bias, shaped like the bias."""
    terms = of_scores.unflatten(0, (case.calls, case.batch // case.calls))
    if case.windows:
        terms = terms.unflatten(1, (-1, case.windows)).sum(dim=1)
    return terms.sum_to_size(_shapeof_bias(case, bias)).reshape(bias.shape)


def _shapeof_bias(case: Case, bias: Tensor) -> tuple[int, ...]:
    """`[calls, B or W or 1, H or 1, Tq or 1, Tk or 1]`."""
    each = tuple(bias.shape if case.calls == 1 and bias.dim() <= 4 else bias.shape[1:])
    return (case.calls, *(1,) * (4 - len(each)), *each)


def of_groups(x: Tensor, group: int) -> Tensor:
    """The sums over the query heads of a group, for their key head."""
    return x.unflatten(1, (-1, group)).sum(dim=2)
