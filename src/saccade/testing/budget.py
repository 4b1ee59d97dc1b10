"""The error budget: no tolerance is picked by hand, each is measured against an honest run of the same mathematics.

    error(backend, float64) <= factor * error(baseline, float64) + one rounding

- float64: the reference on the same numbers promoted to float64.
- baseline: the textbook formula with the roundings that a kernel cannot avoid. Products of the working dtype are summed in
  float32, but the weights are rounded to the working dtype before `P V` and `P^T dO`, the score gradients before `dS K` and
  `dS^T Q`, and each result once at the end. Nothing that only a careless kernel rounds (scores, dP, lse) is rounded here. In
  float32 it is the plain float32 formula.
- factor: 2 for out and lse, 3 for gradients. Errors are the largest of the tensor.
- one rounding: half a unit in the last place of the largest result, and one of float32 in the largest sum of absolute terms
  (a gradient that cancels to zero still carries the rounding of what cancelled). A weight carries the absolute roundings of its
  exponent as relative ones: one of the score in forward; three in backward, which computes the weight again from the score, the
  stored lse and their difference. lse itself is rounded three times on its way through base 2, and its
  sum of weights once. All of this is float32, so it shows in float32 alone.

The root mean square of the error must also stay below 0.005 of that of the result, or below twice the baseline's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.functional import attention, attention_qkvpacked
from saccade.reference.dense import visible
from saccade.reference.philox import dropout_keep
from saccade.reference.softmax import softmax
from saccade.testing.inputs import Inputs, make
from saccade.testing.shapes import Case

FACTOR, GRADIENT_FACTOR, RMS_LIMIT = 2.0, 3.0, 0.005
_FLOAT32_ROUNDING = 2.0**-24
# backends whose backward takes delta from the rounded out, and whose forward sums in float16: see `baseline_of`
_IN_PIECES, _HALF_SUMS = ("volta", "volta_fp16"), ("volta_fp16",)


@dataclass(frozen=True)
class Result:
    """How far one tensor is from float64. ratio: error over budget. rms: relative root mean square. worst: its index."""

    name: str
    error: float
    budget: float
    ratio: float
    rms: float
    ok: bool
    worst: tuple[int, ...] = ()
    reason: str = ""

    def __str__(self) -> str:
        verdict = "ok" if self.ok else f"FAILED ({self.reason})"
        return (
            f"{self.name:>5}: error {self.error:.3e}, budget {self.budget:.3e}, ratio {self.ratio:.2f}, rms {self.rms:.2e}, "
            f"worst at {self.worst}: {verdict}"
        )


Outputs = dict[str, Tensor]
Runner = Callable[[Inputs], tuple[Tensor, Tensor | None]]


def check_attention(
    case: Case,
    dtype: torch.dtype,
    device: torch.device | str,
    backend: str,
    seed: int = 0,
    lse: bool = True,
    run: Runner | None = None,
) -> list[Result]:
    """Compare one backend, forward and backward, with float64 on one case.

    Args:
        lse: ask for the log-sum-exp; False for a backend that has none (a case with `lse_grad` then skips that gradient).
        run: what to run in place of the public function, `Inputs -> (out, lse)`, differentiable.
    """
    inputs = make(case, dtype, device, seed)
    actual = differentiate(run or public_call(case, backend, lse), inputs, seed, lse)
    return compare(case, inputs, actual, seed, lse, delta_of_out=backend in _IN_PIECES, half_sums=backend in _HALF_SUMS)


def compare(
    case: Case,
    inputs: Inputs,
    actual: Outputs,
    seed: int = 0,
    lse: bool = True,
    delta_of_out: bool = False,
    half_sums: bool = False,
) -> list[Result]:
    """Judge the outputs of a run of `inputs`; delta_of_out, half_sums: what its baseline shall share with it."""
    oracle = differentiate(public_call(case, "reference", True), inputs.to(torch.float64), seed, lse)
    baseline, magnitude = baseline_of(case, inputs, seed, lse, delta_of_out, half_sums)
    dtype = inputs.query.dtype
    return [judge(name, x, oracle[name], baseline[name], magnitude[name], dtype) for name, x in actual.items()]


def report(case: Case, results: list[Result]) -> str:
    """Readable lines, one a tensor."""
    return "\n".join([case.name, *(f"  {r}" for r in results)])


def public_call(case: Case, backend: str, lse: bool) -> Runner:
    """The public function on a case; out always comes as `[B, H, Tq, D]`."""

    def run(x: Inputs) -> tuple[Tensor, Tensor | None]:
        if x.qkv is not None:
            result = attention_qkvpacked(
                x.qkv, x.attn_mask, case.dropout_p, case.is_causal, lengths=x.lengths, return_lse=lse, backend=backend
            )
        else:
            result = attention(
                x.query, x.key, x.value, x.attn_mask, case.dropout_p, case.is_causal, None, case.heads != case.kv_heads,
                lengths=x.lengths, return_lse=lse, backend=backend,
            )  # fmt: skip
        out, log_sum = result if isinstance(result, tuple) else (result, None)
        return (out.transpose(1, 2) if x.qkv is not None else out), log_sum

    return run


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
    # drawn as `saccade.functional` draws it
    key = torch.randint(0, 2**62, (1,), dtype=torch.int64, device=inputs.query.device)
    keep = dropout_keep(key, case.dropout_p, case.batch, case.heads, case.q_len, case.kv_len)
    return keep.float(), 1.0 - case.dropout_p


def judge(name: str, actual: Tensor, oracle: Tensor, baseline: Tensor, magnitude: float, dtype: torch.dtype) -> Result:
    """Hold one tensor against its budget. magnitude: the largest sum of absolute terms behind one of its numbers."""
    if actual.shape != oracle.shape:
        return Result(
            name, math.inf, 0.0, math.inf, math.inf, False, reason=f"shape {list(actual.shape)}, expected {list(oracle.shape)}"
        )
    actual, baseline = actual.double(), baseline.double()
    infinite = oracle.isinf()  # lse of a query that sees no key: equal or wrong, there is no distance
    differing = actual.isinf() != infinite
    differing |= infinite & (actual != oracle)
    if differing.any():
        return Result(name, math.inf, 0.0, math.inf, math.inf, False, _index(differing), "infinities differ")
    error, own = ((x - oracle).masked_fill(infinite, 0.0).abs() for x in (actual, baseline))
    oracle = oracle.masked_fill(infinite, 0.0)
    working = 2.0**-24 if name == "lse" or dtype == torch.float32 else torch.finfo(dtype).eps / 2
    floor = working * _max(oracle) + _FLOAT32_ROUNDING * magnitude
    budget = (GRADIENT_FACTOR if name.startswith("d") else FACTOR) * _max(own) + floor
    largest = math.inf if error.isnan().any() else _max(error)
    size = max(_rms(oracle), floor / RMS_LIMIT)  # a result that cancels to nothing has no relative error
    rms = _rms(error) / size if size else 0.0
    limit = max(RMS_LIMIT, 2 * _rms(own) / size if size else 0.0)
    reason = "" if largest <= budget else "largest error over budget"
    if not reason and not rms <= limit:
        reason = f"rms over {limit:.2e}"
    ratio = largest / budget if budget else (0.0 if largest == 0 else math.inf)
    return Result(name, largest, budget, ratio, rms, not reason, _index(error.nan_to_num(math.inf)), reason)


def _max(x: Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


def _rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item() if x.numel() else 0.0


def _index(error: Tensor) -> tuple[int, ...]:
    if error.numel() == 0:
        return ()
    return tuple(int(i) for i in torch.unravel_index(error.double().argmax(), error.shape))
