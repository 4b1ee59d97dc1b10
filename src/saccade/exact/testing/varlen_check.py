"""The error budget of `attention_varlen`: that of `attention` for the same batch padded, where padding is hidden by a mask.

The oracle and the baseline are the dense ones (`saccade.exact.testing.check` tells the rule), so nothing of the packed code judges itself.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor

from saccade.exact.args import AttentionArgs
from saccade.exact.reference import attend as dense_reference
from saccade.exact.testing.varlen_cases import VarlenCase
from saccade.exact.varlen.api import attend
from saccade.exact.varlen.args import BOTTOM_RIGHT
from saccade.testing.baseline import Outputs, baseline_of, differentiate, seed_generators
from saccade.testing.cases import Case
from saccade.testing.inputs import Inputs
from saccade.testing.judge import Result, judge_all

Arrange = Callable[[Tensor], Tensor]


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
    dense, inputs = padded(case, dtype, device, seed)
    actual = run_packed(case, inputs, backend, seed, lse, arrange)
    oracle = differentiate(lambda x: _reference(dense, x), inputs.to(torch.float64), seed, lse)
    baseline, magnitude = baseline_of(dense, inputs, seed, lse, delta_of_out=backend != "reference")
    return judge_all(actual, oracle, baseline, magnitude, dtype)


def padded(case: VarlenCase, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> tuple[Case, Inputs]:
    """The same problem as a dense one: its mask hides the padding, whose incoming gradients are 0."""
    batch, q_len, k_len = len(case.q_lengths), max(case.q_lengths), max(case.keys)
    dense = Case(
        case.name, batch, case.heads, case.kv_heads, q_len, k_len, case.head_dim, dropout_p=case.dropout_p, lse_grad=case.lse_grad
    )
    source = torch.Generator().manual_seed(seed)

    def normal(heads: int, time: int) -> Tensor:
        return torch.randn(batch, heads, time, case.head_dim, generator=source).to(dtype).to(device)

    query, key, value, dout = (
        normal(h, t) for h, t in ((case.heads, q_len), (case.kv_heads, k_len), (case.kv_heads, k_len), (case.heads, q_len))
    )
    bias = torch.randn(1, case.heads, q_len, k_len, generator=source).to(dtype).to(device) if case.bias else None
    dlse = torch.randn(batch, case.heads, q_len, generator=source).to(device) if case.lse_grad else None
    real_q, mask = _real(case.q_lengths, q_len, device), _visible(case, q_len, k_len, device)
    dout = dout.where(real_q[:, None, :, None], 0.0)
    dlse = None if dlse is None else dlse.where(mask.any(-1), 0.0)
    return dense, Inputs(query, key, value, mask, bias, None, dout, dlse)


def _real(lengths: tuple[int, ...], longest: int, device: torch.device | str) -> Tensor:
    return torch.arange(longest, device=device) < torch.tensor(lengths, device=device)[:, None]


def _visible(case: VarlenCase, q_len: int, k_len: int, device: torch.device | str) -> Tensor:
    mask = _real(case.q_lengths, q_len, device)[:, None, :, None] & _real(case.keys, k_len, device)[:, None, None, :]
    if case.causal:
        i, j = torch.arange(q_len, device=device)[:, None], torch.arange(k_len, device=device)
        reach = torch.tensor(case.keys, device=device) - torch.tensor(case.q_lengths, device=device)
        mask = mask & (j <= i + (reach[:, None, None, None] if case.causal == BOTTOM_RIGHT else 0))
    return mask


def _reference(case: Case, x: Inputs) -> tuple[Tensor, Tensor]:
    seed = torch.randint(0, 2**62, (1,), dtype=torch.int64, device=x.query.device) if case.dropout_p else None
    return dense_reference(
        AttentionArgs(x.query, x.key, x.value, x.mask, x.bias, None, seed, case.dropout_p, False, case.head_dim**-0.5)
    )


def run_packed(
    case: VarlenCase, inputs: Inputs, backend: str, seed: int = 0, lse: bool = True, arrange: Arrange | None = None
) -> Outputs:
    """The public function on a case; its results padded with zeros (lse with -inf)."""
    device = inputs.query.device
    rows_q, rows_k = _real(case.q_lengths, inputs.query.shape[2], device), _real(case.keys, inputs.key.shape[2], device)

    def packed(tensor: Tensor, rows: Tensor) -> Tensor:
        real = tensor.transpose(1, 2)[rows]
        return torch.cat((real, real.new_full((case.tail, *real.shape[1:]), float("nan"))))

    tensors = [packed(inputs.query, rows_q), packed(inputs.key, rows_k), packed(inputs.value, rows_k)]
    leaves = [torch.stack(tensors, 1)] if case.packed else tensors
    leaves = [(arrange(x) if arrange else x).detach().requires_grad_() for x in leaves]
    bias = None if inputs.bias is None else inputs.bias[0].detach().requires_grad_()
    offsets = [torch.tensor((0, *accumulate(n)), dtype=torch.int32, device=device) for n in (case.q_lengths, case.keys)]
    if case.k_lengths is None:
        offsets[1] = offsets[0]
    seed_generators(seed, inputs.query.device)
    query, key, value = leaves[0].unbind(1) if case.packed else leaves
    found = attend(
        query, key, value, offsets[0], offsets[1], max(case.q_lengths), max(case.keys), case.dropout_p, case.causal,
        None, case.heads != case.kv_heads, bias, lse, backend, leaves[0] if case.packed else None,
    )  # fmt: skip
    out, log_sum = found if isinstance(found, tuple) else (found, None)
    dout = packed(inputs.dout, rows_q).nan_to_num(0.0)
    sources, incoming = [out], [arrange(dout) if arrange else dout]
    if log_sum is not None and inputs.dlse is not None:
        sources.append(log_sum)
        incoming.append(_tokens_of(inputs.dlse, rows_q, case.tail).to(log_sum.dtype))
    wanted = leaves if bias is None else [*leaves, bias]
    gradients = list(torch.autograd.grad(sources, wanted, incoming))
    if case.packed:
        gradients[:1] = gradients[0].unbind(1)
    return _dense(case, (out.detach(), log_sum, *gradients), rows_q, rows_k)


def _tokens_of(rows: Tensor, real: Tensor, tail: int) -> Tensor:
    """`[H, T]` of `[B, H, longest]`, with zeros for the tail."""
    packed = rows.transpose(1, 2)[real].t()
    return torch.cat((packed, packed.new_zeros((packed.shape[0], tail))), 1)


def _dense(case: VarlenCase, found: tuple, rows_q: Tensor, rows_k: Tensor) -> Outputs:
    out, log_sum, dq, dk, dv, *dbias = found
    tokens_q, tokens_k = sum(case.q_lengths), sum(case.keys)
    for name, tensor, real in (("out", out, tokens_q), ("dq", dq, tokens_q), ("dk", dk, tokens_k), ("dv", dv, tokens_k)):
        assert not tensor[real:].any(), f"{name} is not 0 behind the last sequence"

    def spread(tokens: Tensor, rows: Tensor) -> Tensor:
        full = tokens.new_zeros((*rows.shape, *tokens.shape[1:]))
        full[rows] = tokens[: int(rows.sum())]
        return full.transpose(1, 2)

    outputs = {"out": spread(out, rows_q)}
    if log_sum is not None:
        full = log_sum.new_full((*rows_q.shape, log_sum.shape[0]), float("-inf"))
        full[rows_q] = log_sum.detach().t()[:tokens_q]
        outputs["lse"] = full.transpose(1, 2)
    outputs.update(dq=spread(dq, rows_q), dk=spread(dk, rows_k), dv=spread(dv, rows_k))
    if dbias:
        outputs["dbias"] = dbias[0].unsqueeze(0)
    return outputs
