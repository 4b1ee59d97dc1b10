"""The textbook formula with the roundings that no kernel can avoid: what a kernel's error is measured against."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from saccade.engine.dense import visible
from saccade.engine.philox import dropout_keep
from saccade.engine.softmax import softmax
from saccade.testing.cases import Case
from saccade.testing.inputs import Inputs

Outputs = dict[str, Tensor]
Runner = Callable[[Inputs], tuple[Tensor, Tensor | None]]


def differentiate(run: Runner, inputs: Inputs, seed: int, lse: bool) -> Outputs:
    """out, lse, dq, dk, dv and dbias of a run, the random numbers replayed from `seed`."""
    leaves = _leaves(inputs)
    torch.manual_seed(seed)
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


def _leaves(inputs: Inputs) -> Inputs:
    bias = None if inputs.bias is None else inputs.bias.detach().requires_grad_()
    if inputs.qkv is not None:
        qkv = inputs.qkv.detach().requires_grad_()
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    else:
        qkv = None
        query, key, value = (x.detach().requires_grad_() for x in (inputs.query, inputs.key, inputs.value))
    return Inputs(query, key, value, inputs.mask, bias, inputs.lengths, inputs.dout, inputs.dlse, qkv)


def baseline_of(
    case: Case, inputs: Inputs, seed: int, lse: bool, delta_of_out: bool = False, half_sums: bool = False
) -> tuple[Outputs, dict[str, float]]:
    """The baseline's outputs, and for each the largest sum of absolute terms behind one of its numbers.

    delta_of_out: the row sums of `P dP` come from dout and the rounded out, as in kernels that see a row in pieces.
    half_sums: forward adds products in float16, four at a time, as kernels do that trade exactness for registers; those with values
        in tiles of 16 keys, which are added up in float16.
    """
    dtype = inputs.query.dtype
    group = case.heads // case.kv_heads
    scale = case.head_dim**-0.5
    query, key, value, dout = (x.float() for x in (inputs.query, inputs.key, inputs.value, inputs.dout))
    key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    keep, kept = _dropout(case, inputs, seed)

    seen = visible(case.q_len, case.kv_len, inputs.mask, inputs.lengths, case.is_causal, query.device)

    def finished(products: Tensor) -> Tensor:
        biased = scale * products if inputs.bias is None else scale * products + inputs.bias.float()
        return biased.masked_fill(~seen.expand_as(products), -math.inf)

    scores = finished(query @ key.mT)
    coarse = finished(_product_in_half(query, key.mT)) if half_sums else scores
    weights, log_sum = softmax(coarse)
    if half_sums:
        weights = torch.exp(scores - log_sum.masked_fill(log_sum == -math.inf, 0.0)[..., None])
    dropped = weights * keep / kept
    if half_sums:
        # weights relative to the largest: their sum is what rounds
        raised = torch.exp(coarse - coarse.amax(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).min))
        out = _product_in_half(_round(raised * keep, dtype), value, 16) / (raised.sum(dim=-1, keepdim=True) * kept).clamp_min(
            1e-9
        )
    else:
        out = _round(dropped, dtype) @ value

    dweights = dout @ value.mT * keep / kept
    products = dout * _round(out, dtype) if delta_of_out else weights * dweights
    delta = products.sum(dim=-1, keepdim=True)
    dlse = inputs.dlse.float()[..., None] if inputs.dlse is not None and lse else torch.zeros(())
    dscores = weights * (dweights - delta + dlse)
    rounded = _round(dscores, dtype)
    outputs = {
        "out": out,
        "lse": log_sum,
        "dq": scale * (rounded @ key),
        "dk": scale * (rounded.mT @ query),
        "dv": _round(dropped, dtype).mT @ dout,
    }

    exponent = torch.maximum(*(x.masked_fill(x == -math.inf, 0.0).abs() for x in (scores, log_sum[..., None].expand_as(scores))))
    once, thrice = dropped * (1.0 + exponent), dropped * (1.0 + 3.0 * exponent)
    terms = weights * (1.0 + 3.0 * exponent)
    terms = terms * (
        dout.abs() @ value.abs().mT * keep / kept + (weights * dweights).abs().sum(dim=-1, keepdim=True) + dlse.abs()
    )
    magnitude = {
        "out": once @ value.abs(),
        "lse": 1.0
        + 3.0 * (scale * (query.abs() @ key.abs().mT) + (0.0 if inputs.bias is None else inputs.bias.abs())).where(seen, 0.0),
        "dq": scale * (terms @ key.abs()),
        "dk": _of_groups(scale * (terms.mT @ query.abs()), group),
        "dv": _of_groups(thrice.mT @ dout.abs(), group),
    }
    if inputs.bias is not None:
        outputs["dbias"] = dscores.sum_to_size(inputs.bias.shape).to(inputs.bias.dtype)
        magnitude["dbias"] = terms.sum_to_size(inputs.bias.shape)
    for name in ("dk", "dv"):
        outputs[name] = _of_groups(outputs[name], group)
    for name in ("out", "dq", "dk", "dv"):
        outputs[name] = outputs[name].to(dtype)
    return outputs, {name: x.max().item() for name, x in magnitude.items()}


def _round(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).float()


def _product_in_half(a: Tensor, b: Tensor, tile: int = 0) -> Tensor:
    """`a b`, the sum rounded to float16 after every four products; with `tile`, so many are summed before they are added."""
    total, part = torch.zeros(()), torch.zeros(())
    for k in range(0, a.shape[-1], 4):
        part = _round(part + a[..., k : k + 4] @ b[..., k : k + 4, :], torch.float16)
        if tile and (k + 4) % tile == 0:
            total, part = _round(total + part, torch.float16), torch.zeros(())
    return _round(total + part, torch.float16)


def _of_groups(x: Tensor, group: int) -> Tensor:
    return x.unflatten(1, (-1, group)).sum(dim=2)


def _dropout(case: Case, inputs: Inputs, seed: int) -> tuple[Tensor | float, float]:
    if case.dropout_p == 0:
        return 1.0, 1.0
    torch.manual_seed(seed)
    # drawn as `saccade.exact.api` draws it
    key = torch.randint(0, 2**62, (1,), dtype=torch.int64, device=inputs.query.device)
    keep = dropout_keep(key, case.dropout_p, case.batch, case.heads, case.q_len, case.kv_len)
    return keep.float(), 1.0 - case.dropout_p
