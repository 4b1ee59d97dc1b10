"""The error budget of `attention_varlen`: that of `attention` for the same batch padded, where padding is hidden by a mask.

The oracle and the baseline are the dense ones (`saccade.exact.testing.check` has the rule), so the packed code never judges itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from saccade.errors import UnsupportedProblem
from saccade.exact.testing.varlen_cases import VarlenCase
from saccade.exact.varlen.api import attend
from saccade.exact.varlen.args import ALIGNED_LAST, HIDE_LATER
from saccade.testing.baseline import Outputs, baseline_of, joined_outputs, oracle_of
from saccade.testing.cases import Case
from saccade.testing.dropout import seed_generators
from saccade.testing.inputs import Inputs, joined
from saccade.testing.judge import Result, judge_calls
from saccade.testing.roundings import IN_PIECES, UNAVOIDABLE

Arrange = Callable[[Tensor], Tensor]
# (call, the tensors that it is given, offsets that it reads) -> what is called in its place
Graphed = Callable[[Callable[..., tuple[Tensor, ...]], Sequence[Tensor], Sequence[Tensor]], Callable[..., tuple[Tensor, ...]]]


def check_varlen(
    case: VarlenCase,
    dtype: torch.dtype,
    device: torch.device | str,
    backend: str,
    seed: int = 0,
    lse: bool = True,
    arrange: Arrange | None = None,
) -> list[Result]:
    """Compare one backend, forward and backward, with float64 on one case. lse: ask for the log-sum-exp. arrange: lays the packed tensors and their
    incoming gradient out otherwise."""
    longest = max(case.q_lengths), max(case.keys)
    return check_calls([case], [padded(case, dtype, device, seed, longest)], backend, [seed], lse, lambda: arrange)[0] or []


def check_calls(
    cases: Sequence[VarlenCase],
    problems: Sequence[tuple[Case, Inputs]],
    backend: str,
    seeds: Sequence[int],
    lse: bool,
    arrange: Callable[[], Arrange | None],
    graphed: Graphed | None = None,
) -> list[list[Result] | None]:
    """The same for several calls that differ in lengths, data and seeds, judged together: the results of each, None if the backend declines it and
    takes another.

    problems: of each case by `padded`, all to the same longest lengths, which the function is given as the longest; arrange: makes the arrangement of
    each call; graphed: as in `run_packed`.
    """
    calls = list(zip(cases, problems, seeds, strict=True))
    outputs: dict[int, Outputs] = {}
    for i, (case, (_, data), seed) in enumerate(calls):
        try:
            outputs[i] = run_packed(case, data, backend, seed, lse, arrange(), graphed)
        except UnsupportedProblem:
            if i == len(cases) - 1 and not outputs:
                raise
    whole, data = joined(problems[0][0], [problems[i][1] for i in outputs])
    chosen = [seeds[i] for i in outputs]
    actual = joined_outputs(list(outputs.values()))
    oracle = oracle_of(whole, data, chosen, lse)
    baseline = baseline_of(whole, data, chosen, lse, UNAVOIDABLE if backend == "reference" else IN_PIECES)
    results = judge_calls(actual, oracle, baseline, data.query.dtype, len(outputs))
    judged = dict(zip(outputs, results, strict=True))
    return [judged.get(i) for i in range(len(cases))]


def padded(
    case: VarlenCase,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int,
    longest: tuple[int, int],
    source: torch.Generator | None = None,
) -> tuple[Case, Inputs]:
    """The same problem as a dense one of `longest` queries and keys: its mask hides the padding, whose incoming gradients are 0."""
    batch, (q_len, k_len) = len(case.q_lengths), longest
    dense = Case(
        case.name, batch, case.heads, case.kv_heads, q_len, k_len, case.head_dim, dropout_p=case.dropout_p, lse_grad=case.lse_grad
    )
    source = (source or torch.Generator()).manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source, device=source.device)

    def normal(heads: int, time: int) -> Tensor:
        return drawn(batch, heads, time, case.head_dim).to(dtype).to(device)

    query, key, value, dout = (
        normal(h, t) for h, t in ((case.heads, q_len), (case.kv_heads, k_len), (case.kv_heads, k_len), (case.heads, q_len))
    )
    bias = drawn(1, case.heads, q_len, k_len).to(dtype).to(device) if case.bias else None
    dlse = drawn(batch, case.heads, q_len).to(device) if case.lse_grad else None
    real_q, mask = _real(case.q_lengths, q_len, device), _visible(case, q_len, k_len, device)
    dout = dout.where(real_q[:, None, :, None], 0.0)
    dlse = None if dlse is None else dlse.where(mask.any(-1), 0.0)
    return dense, Inputs(query, key, value, mask, bias, None, dout, dlse)


def _real(lengths: tuple[int, ...], longest: int, device: torch.device | str) -> Tensor:
    return torch.arange(longest, device=device) < torch.tensor(lengths, device=device)[:, None]


def _visible(case: VarlenCase, q_len: int, k_len: int, device: torch.device | str) -> Tensor:
    mask = _real(case.q_lengths, q_len, device)[:, None, :, None] & _real(case.keys, k_len, device)[:, None, None, :]
    i, j = torch.arange(q_len, device=device)[:, None], torch.arange(k_len, device=device)
    reach = torch.tensor(case.keys, device=device) - torch.tensor(case.q_lengths, device=device)
    ahead = j - i - (reach[:, None, None, None] if case.causal in ALIGNED_LAST else 0)
    mask = mask & (ahead <= 0) if case.causal in HIDE_LATER else mask
    left, right = case.window or (None, None)
    mask = mask if left is None else mask & (ahead >= -left)
    return mask if right is None else mask & (ahead <= right)


def run_packed(
    case: VarlenCase,
    inputs: Inputs,
    backend: str,
    seed: int = 0,
    lse: bool = True,
    arrange: Arrange | None = None,
    graphed: Graphed | None = None,
) -> Outputs:
    """The public function on a case; its results padded with zeros (lse with -inf). graphed: captures the call, a function of the tensors that take
    a gradient, given those and the offsets."""
    device, (max_q, max_k) = inputs.query.device, (inputs.query.shape[2], inputs.key.shape[2])
    rows_q, rows_k = _rows(case.q_lengths, max_q, device), _rows(case.keys, max_k, device)

    def packed(tensor: Tensor, rows: Tensor) -> Tensor:
        real = tensor.transpose(1, 2).flatten(0, 1)[rows]
        return torch.cat((real, real.new_full((case.tail, *real.shape[1:]), float("nan"))))

    tensors = [packed(inputs.query, rows_q), packed(inputs.key, rows_k), packed(inputs.value, rows_k)]
    leaves = [torch.stack(tensors, 1)] if case.packed else tensors
    leaves = [(arrange(x) if arrange else x).detach().requires_grad_() for x in leaves]
    bias = None if inputs.bias is None else inputs.bias[0].detach().requires_grad_()
    offsets = [torch.tensor((0, *accumulate(n)), dtype=torch.int32, device=device) for n in (case.q_lengths, case.keys)]
    if case.k_lengths is None:
        offsets[1] = offsets[0]
    seed_generators(seed, inputs.query.device)
    wanted = leaves if bias is None else [*leaves, bias]

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        query, key, value = tensors[0].unbind(1) if case.packed else tensors[:3]
        found = attend(
            (
                query, key, value, offsets[0], offsets[1], max_q, max_k, case.dropout_p, case.causal, None, case.heads != case.kv_heads,
                None if bias is None else tensors[-1], case.window, lse, backend,
            ),
            tensors[0] if case.packed else None,
        )  # fmt: skip
        return found if isinstance(found, tuple) else (found,)

    out, *rest = (call if graphed is None else graphed(call, wanted, offsets))(*wanted)
    log_sum = rest[0] if rest else None
    dout = packed(inputs.dout, rows_q).nan_to_num(0.0)
    sources, incoming = [out], [arrange(dout) if arrange else dout]
    if log_sum is not None and inputs.dlse is not None:
        sources.append(log_sum)
        incoming.append(_tokens_of(inputs.dlse, rows_q, case.tail).to(log_sum.dtype))
    gradients = list(torch.autograd.grad(sources, wanted, incoming))
    if case.packed:
        gradients[:1] = gradients[0].unbind(1)
    return _dense(case, (out.detach(), log_sum, *gradients), (rows_q, max_q), (rows_k, max_k))


def _rows(lengths: tuple[int, ...], longest: int, device: torch.device) -> Tensor:
    """The places of the tokens of packed sequences in padded ones, `[T]`. Made on the CPU, because finding them on a GPU would wait for it."""
    return torch.tensor([row * longest + t for row, n in enumerate(lengths) for t in range(n)], dtype=torch.int64).to(device)


def _tokens_of(rows: Tensor, real: Tensor, tail: int) -> Tensor:
    """`[H, T]` of `[B, H, longest]`, with zeros for the tail."""
    packed = rows.transpose(1, 2).flatten(0, 1)[real].t()
    return torch.cat((packed, packed.new_zeros((packed.shape[0], tail))), 1)


def _dense(case: VarlenCase, found: tuple, queries: tuple[Tensor, int], keys: tuple[Tensor, int]) -> Outputs:
    out, log_sum, dq, dk, dv, *dbias = found
    named = {"out": (out, queries), "dq": (dq, queries), "dk": (dk, keys), "dv": (dv, keys)}
    behind = {name: x[len(rows) :] for name, (x, (rows, _)) in named.items() if len(x) > len(rows)}
    if behind:
        wrong = torch.stack([x.any() for x in behind.values()]).tolist()
        names = [name for name, yes in zip(behind, wrong, strict=True) if yes]
        assert not names, f"{', '.join(names)}: not 0 behind the last sequence"

    def spread(tokens: Tensor, rows: Tensor, longest: int, elsewhere: float = 0.0) -> Tensor:
        full = tokens.new_full((len(case.q_lengths) * longest, *tokens.shape[1:]), elsewhere)
        return full.index_copy(0, rows, tokens[: len(rows)]).unflatten(0, (len(case.q_lengths), longest)).transpose(1, 2)

    outputs = {"out": spread(out, *queries)}
    if log_sum is not None:
        outputs["lse"] = spread(log_sum.detach().t(), *queries, float("-inf"))
    outputs.update({name: spread(x, *where) for name, (x, where) in named.items() if name != "out"})
    if dbias:
        outputs["dbias"] = dbias[0].unsqueeze(0)
    return outputs
