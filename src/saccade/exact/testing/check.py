"""The error budget: no tolerance is picked by hand; each is measured by an honest run of the same mathematics.

    error(backend, float64) <= factor * error(baseline, float64) + one rounding

- float64: the reference on the same numbers promoted to float64.
- baseline: the textbook formula with the roundings that a kernel cannot avoid. Products of the working dtype are summed in
  float32. Weights are rounded to the working dtype before `P V` and `P^T dO`, score gradients before `dS K` and `dS^T Q`, and
  each result once at the end. Scores, dP and lse, which only a careless kernel rounds, are not rounded here. In float32 it is
  the plain formula in float32.
- factor: 2 for out and lse, 3 for gradients. An error is the largest of the tensor. The baseline's counts as no smaller than its
  roundings make likely (`saccade.testing.likely`): if there are few numbers, their errors may be small by chance.
- one rounding: half a unit in the last place of the largest result, and one of float32 in the largest sum of absolute terms. The
  second is for a gradient that cancels to zero: it still carries the rounding of what cancelled. A weight carries the absolute
  roundings of its exponent as relative ones. Forward has two: that of the score, and that of a maximum that rises from tile to
  tile. Backward has three, because it recomputes the weight from the score, the stored lse and their difference. A weight also
  carries the roundings of the operations that make it. In forward these are both exponentials, the reciprocal of the sum of
  weights and the product with it. In backward they are two of the exponential, whose fast form is not rounded correctly. lse
  itself is rounded three times on its way through base 2, and its sum of weights once. All of this is float32, so it shows in
  float32 alone.

The root mean square of the error must also stay below 0.005 of that of the result, or below twice the baseline's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from saccade.exact.api import attention, attention_qkvpacked
from saccade.testing.baseline import Outputs, Runner, baseline_of, differentiate, joined_outputs, oracle_of
from saccade.testing.cases import Case
from saccade.testing.inputs import Inputs, joined, make
from saccade.testing.judge import BEYOND, Result, judge_all, judge_calls
from saccade.testing.roundings import UNAVOIDABLE, Roundings

# backends whose backward has whole rows, and sums delta from P dP; all others, and what "auto" may take, compute it from the rounded out, if not for
# every shape. Without that rounding in its baseline `ragged` reached 1.06 of its budget in 1 of 32 random problems (float16, with dropout),
# with it 0.6. And those whose forward sums in float16: see `Roundings`
_WHOLE_ROWS, _HALF_SUMS = ("short", "reference"), ("volta_fp16",)
# And those that round the weights before dS. When the baseline did not do so, a soak of bfloat16 reached 1.11 of the budget. It had two keys, one of
# them with most of the weight.
_ROUNDED_WEIGHTS = ("short", "auto")
# and those that round the gradients of scores before they add them up to that of a bias: torch's, which "auto" may take
_ROUNDED_TERMS = ("sdpa", "auto")
# error of the lse that torch's function may have on a CPU in 16 bits, beside its budget: its exponential is a coarse one there, and errors of 6e-5
# were seen
_COARSE_LSE = 1e-4


def check_attention(
    case: Case,
    dtype: torch.dtype,
    device: torch.device | str,
    backend: str,
    seed: int = 0,
    lse: bool = True,
    run: Runner | None = None,
    inputs: Inputs | None = None,
) -> list[Result]:
    """Compare one backend, forward and backward, with float64 on one case.

    Args:
        lse: request the log-sum-exp; False for a backend that has none (a case with `lse_grad` then skips that gradient).
        run: a differentiable function to run instead of the public one, `Inputs -> (out, lse)`.
        inputs: the data of the case, by default that of `make`.
    """
    inputs = make(case, dtype, device, seed) if inputs is None else inputs
    return check_calls(case, [inputs], run or public_call(case, backend, lse), backend, [seed], lse)[0]


def check_calls(
    case: Case, inputs: Sequence[Inputs], run: Runner, backend: str, seeds: Sequence[int], lse: bool = True
) -> list[list[Result]]:
    """The same for several calls of one case, each with data and a seed of its own, judged together: the results of each."""
    whole, data = joined(case, inputs)  # before the calls: a graph that was captured with the first one's tensors writes to them
    actual = joined_outputs([differentiate(run, x, seed, lse) for x, seed in zip(inputs, seeds, strict=True)])
    oracle = oracle_of(whole, data, seeds, lse)
    baseline = baseline_of(whole, data, seeds, lse, roundings_of(backend))
    results = judge_calls(actual, oracle, baseline, data.query.dtype, whole.calls)
    coarse = backend == "sdpa" and data.query.device.type == "cpu" and data.query.dtype != torch.float32
    return [[_with_coarse_lse(r) for r in call] for call in results] if coarse else results


def _with_coarse_lse(result: Result) -> Result:
    """The result with a budget for the exponential of torch's function, if only that makes it miss its budget."""
    if result.name != "lse" or result.ok or result.reason != BEYOND or result.error > _COARSE_LSE:
        return result
    return replace(result, budget=_COARSE_LSE, ratio=result.error / _COARSE_LSE, ok=True, reason="")


def compare(
    case: Case, inputs: Inputs, actual: Outputs, seed: int = 0, lse: bool = True, roundings: Roundings = UNAVOIDABLE
) -> list[Result]:
    """Judge outputs of a run on `inputs`, all or some; roundings: those of its kernels besides the unavoidable ones."""
    baseline = baseline_of(case, inputs, seed, lse, roundings)
    return judge_all(actual, oracle_of(case, inputs, seed, lse), baseline.only(actual), inputs.query.dtype)


def roundings_of(backend: str) -> Roundings:
    """The roundings of a backend, and of "auto", which may take any."""
    return Roundings(backend not in _WHOLE_ROWS, backend in _HALF_SUMS, backend in _ROUNDED_WEIGHTS, backend in _ROUNDED_TERMS)


def public_call(case: Case, backend: str, lse: bool) -> Runner:
    """The public function on a case; out is always returned as `[B, H, Tq, D]`."""

    def run(x: Inputs) -> tuple[Tensor, Tensor | None]:
        if x.qkv is not None:
            result = attention_qkvpacked(
                x.qkv,
                x.attn_mask,
                case.dropout_p,
                case.is_causal,
                lengths=x.lengths,
                window=case.window,
                return_lse=lse,
                backend=backend,
            )
        else:
            query, key, value = (t.unflatten(0, (-1, case.windows)) if case.windows else t for t in (x.query, x.key, x.value))
            result = attention(
                query, key, value, x.attn_mask, case.dropout_p, case.is_causal, None, case.heads != case.kv_heads,
                lengths=x.lengths, window=case.window, return_lse=lse, backend=backend,
            )  # fmt: skip
        out, log_sum = result if isinstance(result, tuple) else (result, None)
        if case.windows:
            out, log_sum = out.flatten(0, 1), None if log_sum is None else log_sum.flatten(0, 1)
        return (out.transpose(1, 2) if x.qkv is not None else out), log_sum

    return run
