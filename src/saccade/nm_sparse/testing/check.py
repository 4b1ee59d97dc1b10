"""The error budget of `saccade.exact.testing.check` for N:M sparse attention.

Pruning jumps where two scores are nearly equal, so a backend is judged in two steps, neither with a tolerance picked by hand:
- its selection must be complete (every group keeps N visible keys, or all; one that is never pruned keeps all), and optimal up to the error of the scores: no key
  that was left out may exceed a kept one of its group by more than the rounding bounds of both scores. Exact ties are tested
  separately, on integers;
- its outputs and gradients must meet the budget of dense attention under the selection that it made.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from saccade.engine.philox import dropout_keep
from saccade.nm_sparse import op
from saccade.nm_sparse import reference as nm_sparse
from saccade.nm_sparse.api import nm_sparse_attention
from saccade.nm_sparse.args import NMSparseArgs
from saccade.nm_sparse.backends import BACKENDS
from saccade.nm_sparse.problem import BLOCK, parse_pattern
from saccade.nm_sparse.testing.cases import NMSparseCase
from saccade.nm_sparse.testing.inputs import block_mask_of, make_nm_sparse
from saccade.testing.baseline import Outputs, baseline_of, differentiate, spread_of_bias
from saccade.testing.cases import Case
from saccade.testing.inputs import Inputs
from saccade.testing.judge import Result, judge_all

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
    """Compare one backend, forward and backward, with float64 on one case; results are the selection, out, lse, dq, dk, dv,
    dbias. inputs: the data of the case, by default that of `make_nm_sparse`. run: a function to run instead of the public one."""
    inputs = make_nm_sparse(case, dtype, device, seed) if inputs is None else inputs
    actual = differentiate(run or public_call(case, backend, lse), inputs, seed, lse)
    return compare_nm_sparse(case, inputs, actual, selection_of(case, inputs, backend), seed, lse)


def compare_nm_sparse(
    case: NMSparseCase, inputs: Inputs, actual: Outputs, kept: Tensor, seed: int = 0, lse: bool = True
) -> list[Result]:
    """Judge the outputs of a run of `inputs` that selected `kept`, bool `[B, H, Tq, Tk]`."""
    oracle = differentiate(under_selection(case, kept), inputs.to(torch.float64), seed, lse)
    cleared = _cleared(inputs, kept)
    dense = Case(
        case.name, case.batch, case.heads, case.kv_heads, case.q_len, case.kv_len, case.head_dim, dropout_p=case.dropout_p,
        bias=case.bias,
    )  # fmt: skip
    given = Inputs(cleared.query, cleared.key, cleared.value, kept, cleared.bias, None, cleared.dout, cleared.dlse)
    baseline, magnitude = baseline_of(dense, given, seed, lse, delta_of_out=True)
    dtype = inputs.query.dtype
    spread = {"dbias": spread_of_bias(dense, given, seed, lse, delta_of_out=True)}
    judged = judge_all(actual, oracle, baseline, magnitude, dtype, spread)
    return [judge_selection(case, inputs, kept), *judged]


def judge_selection(case: NMSparseCase, inputs: Inputs, kept: Tensor) -> Result:
    """Whether a selection is complete and optimal up to the error of the scores; error is the largest excess, budget its
    bound."""
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
    for reason, refuted in zip(wrong, torch.stack([x.any() for x in wrong.values()]).tolist(), strict=True):
        if refuted:
            return _refuted(reason, wrong[reason])
    return Result("selection", 0.0, 0.0, 0.0, 0.0, True)


def _keeps_all(case: NMSparseCase, group: int, device: torch.device) -> Tensor:
    """Which groups a query never prunes, bool `[Tq, groups]`: written from the sentence that defines them, key by key."""
    groups = -(-case.kv_len // group)
    keeps = [[False] * groups for _ in range(case.q_len)]
    for query in range(case.q_len):
        recent = range(max(0, query - case.dense_recent + 1), query + 1) if case.dense_recent else ()
        for key in (*range(case.dense_first), *recent):
            if key // group < groups:  # the last group may be short: it counts with the places that no key has
                keeps[query][key // group] = True
    return torch.tensor(keeps, dtype=torch.bool, device=device).reshape(case.q_len, groups)


def _refuted(reason: str, where: Tensor) -> Result:
    return Result("selection", math.inf, 0.0, math.inf, math.inf, False, tuple(where.nonzero()[0].tolist()), reason)


def public_call(case: NMSparseCase, backend: str, lse: bool, scale: float | None = None) -> Runner:
    """A run of the public function."""
    # made once: it comes from the CPU, which a call that is captured may not copy from
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
        bias=inputs.bias, block_mask=block_mask_of(case, inputs.query.device), block=BLOCK, is_causal=case.is_causal,
    )  # fmt: skip


def _score_bound(case: NMSparseCase, inputs: Inputs) -> Tensor:
    """How far a float32 score may be from the true one: (D + 3) roundings of the sum of its absolute terms."""
    group = case.heads // case.kv_heads
    key = inputs.key.double().abs().nan_to_num().repeat_interleave(group, dim=1)
    terms = case.head_dim**-0.5 * (inputs.query.double().abs() @ key.mT)
    if inputs.bias is not None:
        terms = terms + inputs.bias.double().abs()
    return (case.head_dim + 3) * 2.0**-24 * terms


def under_selection(case: NMSparseCase, kept: Tensor) -> Runner:
    """The reference with a given selection."""

    def run(x: Inputs) -> tuple[Tensor, Tensor]:
        seed = _drawn(case, x.query.device)
        survivors = None
        if seed is not None:
            survivors = dropout_keep(seed, case.dropout_p, case.batch, case.heads, case.q_len, case.kv_len)
        return nm_sparse.attend(
            x.query, x.key, x.value, kept, scale=case.head_dim**-0.5, bias=x.bias, survivors=survivors, dropout_p=case.dropout_p
        )

    return run


def _drawn(case: NMSparseCase, device: torch.device) -> Tensor | None:
    # drawn as in `calls.draw_seed`, from the generator that `differentiate` has just seeded
    return torch.randint(0, 2**62, (1,), dtype=torch.int64, device=device) if case.dropout_p else None


def _cleared(inputs: Inputs, kept: Tensor) -> Inputs:
    """The inputs with zeros at keys that no query keeps and that hold NaN, because the baseline multiplies them by weights of
    0."""
    return dataclasses.replace(inputs, key=inputs.key.nan_to_num(), value=inputs.value.nan_to_num())
