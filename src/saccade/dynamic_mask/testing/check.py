"""The error budget of `saccade.exact.testing.check` for dynamic mask attention: dense attention under the mask of `ranking`.

Every run selects the same keys: scores are ranked in float32 by one total order, and promoting float32 to float64 does not change
it. So the oracle and the baseline use the same mask, and near-ties make no difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from saccade.dynamic_mask.api import dynamic_mask_attention
from saccade.dynamic_mask.reference import attend
from saccade.dynamic_mask.testing.cases import DynamicMaskCase
from saccade.dynamic_mask.testing.inputs import DynamicMaskInputs, joined, make_dynamic_mask
from saccade.dynamic_mask.testing.ranking import kept_by_counting
from saccade.testing.baseline import Baseline, Outputs, baseline_of, joined_outputs
from saccade.testing.cases import Case
from saccade.testing.inputs import Inputs
from saccade.testing.judge import Result, judge_all, judge_calls
from saccade.testing.roundings import IN_PIECES

Runner = Callable[[DynamicMaskInputs], tuple[Tensor, Tensor | None]]


def check_dynamic_mask(
    case: DynamicMaskCase,
    dtype: torch.dtype,
    device: torch.device | str,
    backend: str,
    seed: int = 0,
    lse: bool = True,
    inputs: DynamicMaskInputs | None = None,
    run: Runner | None = None,
) -> list[Result]:
    """Compare one backend, forward and backward, with float64 on one case; results are out, lse, dq, dk, dv and dscores.

    lse: request the log-sum-exp; False leaves out it and its gradient. inputs: the data of the case, by default that of `make_dynamic_mask`.
    run: a function to run instead of the public one.
    """
    inputs = make_dynamic_mask(case, dtype, device, seed) if inputs is None else inputs
    return check_calls(case, [inputs], run or public_call(case, backend, lse), lse)[0]


def check_calls(case: DynamicMaskCase, inputs: Sequence[DynamicMaskInputs], run: Runner, lse: bool = True) -> list[list[Result]]:
    """The same for several calls of one case, each with data of its own, judged together: the results of each."""
    whole, data = joined(case, inputs)  # before the calls: a graph that was captured with the first one's tensors writes to them
    actual = joined_outputs([differentiate(run, x, lse) for x in inputs])
    oracle, baseline = _oracle_and_baseline(whole, data, lse)
    return judge_calls(actual, oracle, baseline, data.query.dtype, whole.calls)


def compare_dynamic_mask(case: DynamicMaskCase, inputs: DynamicMaskInputs, actual: Outputs, lse: bool = True) -> list[Result]:
    """Judge outputs of a run of `inputs`, all or some."""
    oracle, baseline = _oracle_and_baseline(case, inputs, lse)
    return judge_all(actual, oracle, baseline.only(actual), inputs.query.dtype)


def _oracle_and_baseline(case: DynamicMaskCase, inputs: DynamicMaskInputs, lse: bool) -> tuple[Outputs, Baseline]:
    rule = (case.keep, case.q_len, case.is_causal, inputs.lengths, inputs.document_ids, case.sinks, case.window)
    mask = kept_by_counting(inputs.key_scores, *rule)
    return differentiate(_under(mask, case), inputs.to(torch.float64), lse), _baseline(case, inputs, mask, lse)


def public_call(case: DynamicMaskCase, backend: str, lse: bool) -> Runner:
    """A run of the public function."""

    def run(x: DynamicMaskInputs) -> tuple[Tensor, Tensor | None]:
        result = dynamic_mask_attention(
            x.query, x.key, x.value, x.key_scores, keep=case.keep, is_causal=case.is_causal, lengths=x.lengths,
            document_ids=x.document_ids, sinks=case.sinks, window=case.window, add_scores=case.add_scores, enable_gqa=case.heads != case.kv_heads,
            return_lse=lse, backend=backend,
        )  # fmt: skip
        return result if isinstance(result, tuple) else (result, None)

    return run


def differentiate(run: Runner, inputs: DynamicMaskInputs, lse: bool) -> Outputs:
    """out, lse, dq, dk, dv and dscores of a run (no dscores if scores only rank)."""
    leaves = inputs.leaves()
    out, log_sum = run(leaves)
    outputs: Outputs = {"out": out.detach()}
    sources, gradients = [out], [inputs.dout]
    if log_sum is not None and lse:
        outputs["lse"] = log_sum.detach()
        if inputs.dlse is not None:
            sources.append(log_sum)
            gradients.append(inputs.dlse.to(log_sum.dtype))
    tensors = (leaves.query, leaves.key, leaves.value, leaves.key_scores)
    found = torch.autograd.grad(sources, tensors, gradients, allow_unused=True)
    outputs |= {name: x for name, x in zip(("dq", "dk", "dv", "dscores"), found, strict=True) if x is not None}
    return outputs


def _under(mask: Tensor, case: DynamicMaskCase) -> Runner:
    def run(x: DynamicMaskInputs) -> tuple[Tensor, Tensor]:
        return attend(x.query, x.key, x.value, x.key_scores, mask, scale=case.head_dim**-0.5, add_scores=case.add_scores)

    return run


def _baseline(case: DynamicMaskCase, inputs: DynamicMaskInputs, mask: Tensor, lse: bool) -> Baseline:
    """The baseline of dense attention with the kept keys as mask and the scores as bias. The gradients of the scores are summed over the heads of a group."""
    group = case.heads // case.kv_heads
    dense = Case(case.name, case.batch, case.heads, case.kv_heads, case.q_len, case.kv_len, case.head_dim, calls=case.calls)
    scores = inputs.key_scores.float().repeat_interleave(group, dim=1)[:, :, None]
    bias = scores.unflatten(0, (case.calls, case.batch // case.calls)) if case.add_scores else None
    masked = mask.repeat_interleave(group, dim=1)
    data = Inputs(inputs.query, inputs.key, inputs.value, masked, bias, None, inputs.dout, inputs.dlse)
    found = baseline_of(dense, data, 0, lse, IN_PIECES)
    if bias is not None:
        of_heads = found.outputs.pop("dbias")[..., 0, :].unflatten(-2, (-1, group)).sum(-2)
        found.outputs["dscores"] = of_heads.flatten(-4, -3).to(inputs.key_scores.dtype)
        found.magnitude["dscores"] = group * found.magnitude.pop("dbias")
        found.likely["dscores"] = group**0.5 * found.likely.pop("dbias")
    return found
