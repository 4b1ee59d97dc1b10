"""The error budget of `saccade.exact.testing.check` for N:M sparse attention.

Pruning jumps if two scores are nearly equal, so a backend is judged in two steps, neither with a tolerance picked by hand:
- its selection must be complete (every group keeps N visible keys, or all; one that is never pruned keeps all), and optimal up to the error of the scores: no key
  that was left out may exceed a kept one of its group by more than the rounding bounds of both scores. Exact ties are tested
  separately, on integers;
- its outputs and gradients must meet the budget of dense attention under the selection that it made.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from saccade.nm_sparse import op
from saccade.nm_sparse import reference as nm_sparse
from saccade.nm_sparse.api import nm_sparse_attention
from saccade.nm_sparse.args import NMSparseArgs
from saccade.nm_sparse.backends import BACKENDS
from saccade.nm_sparse.problem import BLOCK, parse_pattern
from saccade.nm_sparse.testing.cases import NMSparseCase
from saccade.nm_sparse.testing.inputs import block_mask_of, make_nm_sparse
from saccade.testing.baseline import (
    Outputs,
    baseline_of,
    differentiate,
    joined_outputs,
    oracle_of,
)
from saccade.testing.cases import Case
from saccade.testing.inputs import Inputs, joined
from saccade.testing.judge import Result, judge_calls
from saccade.testing.roundings import IN_PIECES
from saccade.testing.textbook import bias_of_rows, of_calls

Runner = Callable[[Inputs], tuple[Tensor, Tensor | None]]


def check_nm_sparse(
    case: NMSparseCase,
    dtype: torch.dtype,
    device: torch.device | str,
    backend: str,
    seed: int = 0,
    lse: bool = True,
    inputs: Inputs | None = None,
    run: Runner | None = None,
) -> list[Result]:
    """Compare one backend, forward and backward, with float64 on one case. Results are the selection, out, lse, dq, dk, dv and dbias.
    inputs: the data of the case, by default that of `make_nm_sparse`. run: a function to run in place of the public one."""
    inputs = make_nm_sparse(case, dtype, device, seed) if inputs is None else inputs
    return check_calls(case, [inputs], run or public_call(case, backend, lse), backend, [seed], lse)[0]


def check_calls(
    case: NMSparseCase, inputs: Sequence[Inputs], run: Runner, backend: str, seeds: Sequence[int], lse: bool = True
) -> list[list[Result]]:
    """The same for several calls of one case, each with data and a seed of its own, judged together: the results of each."""
    whole, data = joined(case, inputs)
    actual = [differentiate(run, inputs[0], seeds[0], lse)]  # first of all, since the backend may decline
    # before other calls: a graph that was captured with the first one's tensors writes to them
    kept = torch.cat([selection_of(case, x, backend) for x in inputs])
    actual += [differentiate(run, x, seed, lse) for x, seed in zip(inputs[1:], seeds[1:], strict=True)]
    return _judged(whole, data, joined_outputs(actual), kept, seeds, lse)


def _judged(
    case: NMSparseCase, inputs: Inputs, actual: Outputs, kept: Tensor, seeds: Sequence[int], lse: bool
) -> list[list[Result]]:
    """Judge outputs of calls that selected `kept`, bool `[B, H, Tq, Tk]`."""
    dense = Case(
        case.name, case.batch, case.heads, case.kv_heads, case.q_len, case.kv_len, case.head_dim, dropout_p=case.dropout_p,
        bias=case.bias, calls=case.calls,
    )  # fmt: skip
    under = dataclasses.replace(inputs, mask=kept, lengths=None)
    oracle = oracle_of(dense, under, seeds, lse)
    baseline = baseline_of(dense, _cleared(under), seeds, lse, IN_PIECES)
    judged = judge_calls(actual, oracle, baseline, inputs.query.dtype, case.calls)
    selections = judge_selections(case, inputs, kept)
    return [[selection, *results] for selection, results in zip(selections, judged, strict=True)]


def judge_selection(case: NMSparseCase, inputs: Inputs, kept: Tensor) -> Result:
    """Whether a selection is complete and optimal up to the error of the scores; error is the largest excess, budget its
    bound."""
    return judge_selections(case, inputs, kept)[0]


def judge_selections(case: NMSparseCase, inputs: Inputs, kept: Tensor) -> list[Result]:
    """`judge_selection` for each of the calls in `case`."""
    keep, group = parse_pattern(case.pattern)
    exact, bound = _scores(case, inputs.to(torch.float64)), _score_bound(case, inputs)
    seen = (exact > -math.inf) | exact.isnan()
    groups = [
        torch.nn.functional.pad(x, (0, -case.kv_len % group)).unflatten(-1, (-1, group)) for x in (exact, bound, seen, kept)
    ]
    exact, bound, seen, kept = groups
    wanted = torch.where(_keeps_all(case, group, kept.device), seen.sum(-1), seen.sum(-1).clamp(max=keep))
    # the largest possible value of the left-out scores against the smallest possible value of the kept ones
    left_out, worst_kept = seen & ~kept, kept
    over = (exact - bound).masked_fill(~left_out, -math.inf).amax(-1)
    under = (exact + bound).masked_fill(~worst_kept, math.inf).amin(-1)
    excess = (over - under).nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf)
    wrong = {
        "an invisible key is kept": kept & ~seen,
        "a group keeps too few or too many": kept.sum(-1) != wanted,
        "a key left out beats a kept one": excess > 0,
    }
    refuted = torch.stack([of_calls(case, x).any(1) for x in wrong.values()], dim=1).tolist()
    return [
        _of_selection(case, call, [reason for reason, yes in zip(wrong, found, strict=True) if yes], wrong)
        for call, found in enumerate(refuted)
    ]


def _of_selection(case: NMSparseCase, call: int, reasons: list[str], wrong: dict[str, Tensor]) -> Result:
    if not reasons:
        return Result("selection", 0.0, 0.0, 0.0, 0.0, True)
    first = wrong[reasons[0]].unflatten(0, (case.calls, -1))[call].nonzero()[0].tolist()
    return Result("selection", math.inf, 0.0, math.inf, math.inf, False, tuple(first), reasons[0])


def _keeps_all(case: NMSparseCase, group: int, device: torch.device) -> Tensor:
    """The groups that a query never prunes, bool `[Tq, groups]`: written from the sentence that defines them, key by key."""
    groups = -(-case.kv_len // group)
    keeps = [[False] * groups for _ in range(case.q_len)]
    for query in range(case.q_len):
        recent = range(max(0, query - case.dense_recent + 1), query + 1) if case.dense_recent else ()
        for key in (*range(case.dense_first), *recent):
            if key // group < groups:  # the last group may be short: it counts as full
                keeps[query][key // group] = True
    return torch.tensor(keeps, dtype=torch.bool, device=device).reshape(case.q_len, groups)


def public_call(case: NMSparseCase, backend: str, lse: bool, scale: float | None = None) -> Runner:
    """A run of the public function."""
    # made once: it comes from the CPU, and a capture forbids copies from pageable memory
    blocks_on = functools.cache(functools.partial(block_mask_of, case))

    def run(x: Inputs) -> tuple[Tensor, Tensor | None]:
        result = nm_sparse_attention(
            x.query, x.key, x.value, x.attn_mask, case.dropout_p, case.is_causal, scale, case.heads != case.kv_heads,
            pattern=case.pattern, block_mask=blocks_on(x.query.device), lengths=x.lengths, dense_first=case.dense_first,
            dense_recent=case.dense_recent, return_lse=lse, backend=backend,
        )  # fmt: skip
        return result if isinstance(result, tuple) else (result, None)

    return run


def selection_of(case: NMSparseCase, inputs: Inputs, backend: str, scale: float | None = None) -> Tensor:
    """The selection that a backend's forward stores for backward, as bool `[B, H, Tq, Tk]`."""
    keep, group = parse_pattern(case.pattern)
    scale = case.head_dim**-0.5 if scale is None else scale
    if next(b for b in BACKENDS if b.name == backend).launchers is None:
        return nm_sparse.select(_scores(case, inputs, scale), keep, group, case.dense_first, case.dense_recent)
    seed = torch.zeros(1, dtype=torch.int64, device=inputs.query.device) if case.dropout_p else None
    args = NMSparseArgs(
        inputs.query.detach(), inputs.key.detach(), inputs.value.detach(), visible_of(inputs), inputs.bias,
        block_mask_of(case, inputs.query.device), seed, keep, group, case.dropout_p, case.is_causal, scale,
        case.dense_first, case.dense_recent,
    )  # fmt: skip
    *_, bits = op.forward(args, True, backend)
    return nm_sparse.unpack_selection(bits, group, case.kv_len)


def visible_of(inputs: Inputs) -> Tensor | None:
    """The boolean mask of a call with its lengths."""
    if inputs.lengths is None:
        return inputs.mask
    real = (torch.arange(inputs.key.shape[2], device=inputs.key.device) < inputs.lengths[:, None])[:, None, None]
    return real if inputs.mask is None else inputs.mask & real


def _scores(case: NMSparseCase, inputs: Inputs, scale: float | None = None) -> Tensor:
    return nm_sparse.visible_scores(
        inputs.query, inputs.key, scale=case.head_dim**-0.5 if scale is None else scale, mask=visible_of(inputs),
        bias=None if inputs.bias is None else bias_of_rows(case, inputs.bias), block_mask=block_mask_of(case, inputs.query.device),
        block=BLOCK, is_causal=case.is_causal,
    )  # fmt: skip


def _score_bound(case: NMSparseCase, inputs: Inputs) -> Tensor:
    """How far a float32 score may be from the true one: (D + 3) roundings of the sum of its absolute terms."""
    group = case.heads // case.kv_heads
    key = inputs.key.double().abs().nan_to_num().repeat_interleave(group, dim=1)
    terms = case.head_dim**-0.5 * (inputs.query.double().abs() @ key.mT)
    if inputs.bias is not None:
        terms = terms + bias_of_rows(case, inputs.bias).double().abs()
    return (case.head_dim + 3) * 2.0**-24 * terms


def _cleared(inputs: Inputs) -> Inputs:
    """The inputs with zeros at keys that no query keeps and that hold NaN, because the baseline multiplies them by weights of
    0."""
    return dataclasses.replace(inputs, key=inputs.key.nan_to_num(), value=inputs.value.nan_to_num())
