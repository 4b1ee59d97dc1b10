"""The textbook formula with the roundings that no kernel can avoid: the errors of kernels are measured against it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.engine.dense import attend, visible
from saccade.engine.philox import dropout_keep
from saccade.engine.softmax import softmax
from saccade.testing.cases import Case
from saccade.testing.inputs import Inputs

Outputs = dict[str, Tensor]
Runner = Callable[[Inputs], tuple[Tensor, Tensor | None]]
Seeds = int | Sequence[int]  # of each call its own, where several are judged together


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


def seed_generators(seed: int, device: torch.device) -> None:
    """Start the random numbers of the CPU and of a GPU anew. `torch.manual_seed` also queues a call for every kind of device that is not
    there, with the stack that it came from: half a millisecond and a kilobyte each time."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def _leaves(inputs: Inputs) -> Inputs:
    bias = None if inputs.bias is None else inputs.bias.detach().requires_grad_()
    if inputs.qkv is not None:
        # views without a history: theirs would hold on to the node that adds up the gradient of qkv, which then belongs to this stream, and a
        # backward that is captured in a CUDA graph on another one would wait for it, which ends the capture
        query, key, value = inputs.qkv.detach().permute(2, 0, 3, 1, 4).unbind(0)
        qkv = inputs.qkv.detach().requires_grad_()
    else:
        qkv = None
        query, key, value = (x.detach().requires_grad_() for x in (inputs.query, inputs.key, inputs.value))
    return Inputs(query, key, value, inputs.mask, bias, inputs.lengths, inputs.dout, inputs.dlse, qkv)


def oracle_of(case: Case, inputs: Inputs, seed: Seeds, lse: bool) -> Outputs:
    """The outputs of the plain formula in float64."""

    def run(x: Inputs) -> tuple[Tensor, Tensor]:
        keep, _ = _dropout(case, x, seed)
        bias = None if x.bias is None else bias_of_rows(case, x.bias)
        return attend(
            x.query, x.key, x.value, scale=case.head_dim**-0.5, mask=x.mask, bias=bias, lengths=x.lengths, is_causal=case.is_causal,
            keep=keep, dropout_p=case.dropout_p,
        )  # fmt: skip

    return differentiate(run, dataclasses.replace(inputs.to(torch.float64), qkv=None), 0, lse)


class Call(NamedTuple):
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


class Forward(NamedTuple):
    """What forward computes. scores: scaled, with the bias, and -inf where hidden; dropped: the weights after dropout."""

    scores: Tensor
    log_sum: Tensor
    weights: Tensor
    dropped: Tensor
    out: Tensor


def baseline_of(
    case: Case,
    inputs: Inputs,
    seed: Seeds,
    lse: bool,
    delta_of_out: bool = False,
    half_sums: bool = False,
    rounded_weights: bool = False,
) -> tuple[Outputs, Outputs]:
    """The baseline's outputs, and for each output the largest sum of absolute terms behind one of its numbers, float64 `[calls]`.

    delta_of_out: the row sums of `P dP` come from dout and the rounded out, as in kernels that see a row in pieces.
    half_sums: products are added in float16, four at a time, as kernels do that trade exactness for registers; products with
        values are summed in tiles of 16 keys, those of dq in tiles of 64 keys and those of dk and dv in tiles of 32 queries,
        and the tiles are added in float16.
    rounded_weights: the weights are rounded before dS and its row sums are taken, as in kernels that hold whole rows in the
        registers of one program. Without a bias, whose gradient would show it. Not together with delta_of_out.

    With delta_of_out there are two baselines, stacked in each output, and the larger error of them counts: the weights are rounded before
    P V once divided by their sum, and once relative to the largest, as in kernels that divide at the end. Which way the numbers of out are
    rounded decides the error of delta, and where a gradient has one or two terms, one of these is all its error. With half_sums the second
    adds from the last query and key to the first: with two keys dv has few numbers, and their one error may be small by luck.
    """
    assert not (delta_of_out and rounded_weights), "no kernel that holds whole rows takes delta from out"
    call = call_of(case, inputs, seed, lse)
    first = forward(call, half_sums)
    if rounded_weights and inputs.bias is None:
        first = first._replace(weights=_round(first.weights, call.dtype))
    outputs = _outputs(case, inputs, call, first, delta_of_out, half_sums)
    if delta_of_out:
        second = _outputs(case, inputs, call, forward(call, half_sums, late=True), delta_of_out, half_sums, backwards=True)
        outputs = {name: torch.stack((x, second[name])) for name, x in outputs.items()}
    magnitude = _magnitudes(call, first, gradients_of_scores(call, first, delta_of_out, half_sums)[0])
    for name in ("dk", "dv"):
        magnitude[name] = of_groups(magnitude[name], case.heads // case.kv_heads)
    if inputs.bias is None:
        del magnitude["dbias"]
    else:
        magnitude["dbias"] = of_bias(case, inputs.bias, magnitude["dbias"])
    # of terms that are not negative; the zero is for an output without a number
    return outputs, {name: torch.nn.functional.pad(of_calls(case, x), (1, 0)).amax(1).double() for name, x in magnitude.items()}


def of_calls(case: Case, tensor: Tensor) -> Tensor:
    """A tensor of all calls that are judged together as `[calls, numbers of each]`."""
    return tensor.reshape(case.calls, tensor.numel() // case.calls)


def call_of(case: Case, inputs: Inputs, seed: Seeds, lse: bool) -> Call:
    """The inputs as float32, with a key head and a bias for every query head and batch row."""
    query, key, value, dout = (x.float() for x in (inputs.query, inputs.key, inputs.value, inputs.dout))
    key, value = (x.repeat_interleave(case.heads // case.kv_heads, dim=1) for x in (key, value))
    bias = None if inputs.bias is None else bias_of_rows(case, inputs.bias.float())
    dlse = inputs.dlse.float()[..., None] if inputs.dlse is not None and lse else torch.zeros(())
    kept_by_dropout, kept = _dropout(case, inputs, seed)
    keep = 1.0 if kept_by_dropout is None else kept_by_dropout.float()
    seen = visible(case.q_len, case.kv_len, inputs.mask, inputs.lengths, case.is_causal, query.device)
    return Call(query, key, value, dout, bias, dlse, keep, kept, seen, case.head_dim**-0.5, inputs.query.dtype)


def forward(call: Call, half_sums: bool, late: bool = False) -> Forward:
    """late: the weights are rounded relative to the largest, and the sum that they have divides what comes of them."""
    scores = _finished(call, call.query @ call.key.mT)
    if not (half_sums or late):
        weights, log_sum = softmax(scores)
        dropped = weights * call.keep / call.kept
        return Forward(scores, log_sum, weights, dropped, _round(dropped, call.dtype) @ call.value)
    found = _finished(call, _product_in_half(call.query, call.key.mT)) if half_sums else scores
    _, log_sum = softmax(found)
    # backward finds the same scores again
    weights = torch.exp(found - log_sum.masked_fill(log_sum == -math.inf, 0.0)[..., None])
    largest = torch.nn.functional.pad(found, (0, 1), value=-math.inf).amax(dim=-1, keepdim=True)  # there may be no key
    raised = torch.exp(found - largest.clamp_min(torch.finfo(torch.float32).min))
    total = (raised.sum(dim=-1, keepdim=True) * call.kept).clamp_min(1e-9)
    rounded = _round(raised * call.keep, call.dtype)
    out = (_product_in_half(rounded, call.value, 16) if half_sums else rounded @ call.value) / total
    return Forward(scores, log_sum, weights, weights * call.keep / call.kept, out)


def _outputs(
    case: Case, inputs: Inputs, call: Call, made: Forward, delta_of_out: bool, half_sums: bool, backwards: bool = False
) -> Outputs:
    """What a run gives of a forward, rounded once at the end. backwards: sums in float16 are added from the end."""
    _, dscores = gradients_of_scores(call, made, delta_of_out, half_sums)
    rounded = _round(dscores, call.dtype)

    def product(a: Tensor, b: Tensor, tile: int) -> Tensor:
        if not half_sums:
            return a @ b
        return _product_in_half(a.flip(-1), b.flip(-2), tile) if backwards else _product_in_half(a, b, tile)

    group = case.heads // case.kv_heads
    outputs = {
        "out": made.out,
        "dq": call.scale * product(rounded, call.key, 64),
        "dk": of_groups(call.scale * product(rounded.mT, call.query, 32), group),
        "dv": of_groups(product(_round(made.dropped, call.dtype).mT, call.dout, 32), group),
    }
    outputs = {name: x.to(call.dtype) for name, x in outputs.items()} | {"lse": made.log_sum}
    if inputs.bias is not None:
        outputs["dbias"] = of_bias(case, inputs.bias, dscores).to(inputs.bias.dtype)
    return outputs


def _finished(call: Call, products: Tensor) -> Tensor:
    """Scores from products: scaled, with the bias, and -inf where a query does not see a key."""
    biased = call.scale * products if call.bias is None else call.scale * products + call.bias
    return biased.masked_fill(~call.seen.expand_as(products), -math.inf)


def gradients_of_scores(call: Call, made: Forward, delta_of_out: bool, half_sums: bool) -> tuple[Tensor, Tensor]:
    """(dP, dS): the gradients of the weights and of the scores."""
    product = _product_in_half if half_sums else torch.matmul
    dweights = product(call.dout, call.value.mT) * call.keep / call.kept
    products = call.dout * _round(made.out, call.dtype) if delta_of_out else made.weights * dweights
    delta = products.sum(dim=-1, keepdim=True)
    return dweights, made.weights * (dweights - delta + call.dlse)


def _magnitudes(call: Call, made: Forward, dweights: Tensor) -> Outputs:
    """For each number of the outputs the sum of the absolute terms behind it, per query head and before any broadcast of the
    bias."""
    scores, log_sum, weights = made.scores, made.log_sum, made.weights
    exponent = torch.maximum(*(x.masked_fill(x == -math.inf, 0.0).abs() for x in (scores, log_sum[..., None].expand_as(scores))))
    # Forward: the reciprocal of the sum of weights and the product with it, the exponential, and that of a maximum that rises, each with the rounding
    # of its exponent. Backward: the exponential is right to two roundings
    once, thrice = made.dropped * (4.0 + 2.0 * exponent), made.dropped * (3.0 + 3.0 * exponent)
    terms = weights * (3.0 + 3.0 * exponent)
    terms = terms * (
        call.dout.abs() @ call.value.abs().mT * call.keep / call.kept
        + (weights * dweights).abs().sum(dim=-1, keepdim=True)
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


def _round(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).to(x.dtype)


def _product_in_half(a: Tensor, b: Tensor, tile: int = 0) -> Tensor:
    """`a b`, with the sum rounded to float16 after every four products; with `tile`, that many products are summed before they
    are added to the total."""
    none = a[..., :0] @ b[..., :0, :]  # zeros of the shape of the result
    total, part = none, none
    for k in range(0, a.shape[-1], 4):
        part = _round(part + a[..., k : k + 4] @ b[..., k : k + 4, :], torch.float16)
        if tile and (k + 4) % tile == 0:
            total, part = _round(total + part, torch.float16), none
    return _round(total + part, torch.float16)


def bias_of_rows(case: Case, bias: Tensor) -> Tensor:
    """The bias of every batch row, `[B, ..]`: of all that share it, in every image that has its window, and in every call."""
    rows = case.batch // case.calls
    each = bias.reshape(_shapeof_bias(case, bias))
    each = each.repeat(1, rows // case.windows, 1, 1, 1) if case.windows else each.expand(-1, rows, -1, -1, -1)
    return each.flatten(0, 1)


def of_bias(case: Case, bias: Tensor, of_scores: Tensor) -> Tensor:
    """What the scores `[B, H, Tq, Tk]` add up to in the bias."""
    terms = of_scores.unflatten(0, (case.calls, case.batch // case.calls))
    if case.windows:
        terms = terms.unflatten(1, (-1, case.windows)).sum(dim=1)
    return terms.sum_to_size(_shapeof_bias(case, bias)).reshape(bias.shape)


def _shapeof_bias(case: Case, bias: Tensor) -> tuple[int, ...]:
    """`[calls, B or W or 1, H or 1, Tq or 1, Tk or 1]`."""
    each = tuple(bias.shape if case.calls == 1 and bias.dim() <= 4 else bias.shape[1:])
    return (case.calls, *(1,) * (4 - len(each)), *each)


def of_groups(x: Tensor, group: int) -> Tensor:
    """What the query heads of a group add up to in their key head."""
    return x.unflatten(1, (-1, group)).sum(dim=2)


def _dropout(case: Case, inputs: Inputs, seed: Seeds) -> tuple[Tensor | None, float]:
    """Which weights dropout keeps, bool `[B, H, Tq, Tk]`, and the probability of that."""
    if case.dropout_p == 0:
        return None, 1.0
    keys = []
    for each in [seed] if isinstance(seed, int) else seed:
        seed_generators(each, inputs.query.device)
        # drawn as `saccade.exact.api` draws it
        keys.append(torch.randint(0, 2**62, (1,), dtype=torch.int64, device=inputs.query.device))
    calls = torch.cat(keys)[:, None, None, None]
    keep = dropout_keep(calls, case.dropout_p, case.batch // case.calls, case.heads, case.q_len, case.kv_len)
    return keep.flatten(0, 1), 1.0 - case.dropout_p
