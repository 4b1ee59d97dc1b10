"""torch's own kernels as backends of `attention_varlen`: its packed flash attention on a GPU, and its dense function, sequence by sequence."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from saccade.engine.backend import Backend
from saccade.engine.torch_sdpa import torch_attention
from saccade.exact.varlen.args import BOTTOM_RIGHT, FULL, VarlenArgs
from saccade.exact.varlen.problem import VarlenProblem

_HALF = (torch.float16, torch.bfloat16)


def _why_not_flash(problem: VarlenProblem) -> list[str]:
    reasons = []
    if problem.device_type != "cuda" or problem.arch < 80:
        device = f"sm_{problem.arch}" if problem.device_type == "cuda" else problem.device_type
        reasons.append(f"torch's packed attention needs sm_80 or later, got {device}")
    if problem.dtype not in _HALF:
        reasons.append(f"torch's packed attention takes bfloat16 and float16, got {problem.dtype}")
    if problem.head_dim % 8 or not 8 <= problem.head_dim <= 256 or problem.value_dim != problem.head_dim:
        reasons.append(
            f"torch's packed attention needs D a multiple of 8, 256 at most, and Dv = D, got {problem.head_dim} and {problem.value_dim}"
        )
    if problem.bias is not None or problem.dropout_p > 0:
        reasons.append("torch's packed attention takes neither a bias nor dropout")
    if problem.causal not in (FULL, BOTTOM_RIGHT) and not problem.same_lengths:
        reasons.append("torch's packed attention aligns the causal mask with the last key, not with the first")
    if problem.return_lse and problem.needs_grad:
        reasons.append("torch's packed attention has no gradient of the log-sum-exp")
    return reasons


def _attend_flash(args: VarlenArgs, problem: VarlenProblem) -> tuple[Tensor, Tensor | None]:
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    # torch leaves tokens behind the last sequence as memory was, in gradients too
    real_q, real_k = _real(args.query, args.cu_seqlens_q), _real(args.key, args.cu_seqlens_k)
    query, key, value = _cleared(args.query, real_q), _cleared(args.key, real_k), _cleared(args.value, real_k)
    options: Any = (
        {"enable_gqa": problem.heads != problem.kv_heads} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    )
    found = varlen_attn(
        query, key, value, args.cu_seqlens_q, args.cu_seqlens_k, args.max_q, args.max_k,
        return_aux=AuxRequest(lse=problem.return_lse), scale=args.scale,
        window_size=(-1, 0) if args.causal != FULL else (-1, -1), **options,
    )  # fmt: skip
    out, lse = found if isinstance(found, tuple) else (found, None)
    if lse is not None:
        lse = lse.masked_fill(lse.isinf() | ~real_q[:, 0], float("-inf"))
    return _cleared(out, real_q), lse


def _cleared(tokens: Tensor, real: Tensor) -> Tensor:
    """Zeros behind the last sequence. As rows of all heads, so that the last dimension is dense, which torch demands, and in gradients too."""
    return tokens.flatten(1).where(real, 0.0).view(tokens.shape)


def _real(tokens: Tensor, offsets: Tensor) -> Tensor:
    """Which tokens belong to a sequence, `[T, 1]`."""
    return (torch.arange(tokens.shape[0], device=tokens.device) < offsets[-1])[:, None]


def _why_not_each(problem: VarlenProblem) -> list[str]:
    reasons = []
    if problem.return_lse:
        reasons.append("torch's function does not return the log-sum-exp (return_lse=True)")
    if not problem.host_counts:
        reasons.append("a call for each sequence needs the lengths on the host, which a compiled or captured call does not have")
    return reasons


def _attend_each(args: VarlenArgs, problem: VarlenProblem) -> tuple[Tensor, None]:
    """Each sequence by a call of its own, of its real tokens alone."""
    starts, keys = args.cu_seqlens_q.tolist(), args.cu_seqlens_k.tolist()
    outs = []
    for first, end, first_key, end_key in zip(starts, starts[1:], keys, keys[1:], strict=False):
        if first == end:
            continue
        query = args.query[first:end].transpose(0, 1)
        key, value = args.key[first_key:end_key].transpose(0, 1), args.value[first_key:end_key].transpose(0, 1)
        if first_key == end_key:
            outs.append(args.query.new_zeros((end - first, query.shape[0], value.shape[2])))
            continue
        added, causal = _added(args, end - first, end_key - first_key)
        out = torch_attention(
            query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0), attn_mask=added, dropout_p=args.dropout_p, is_causal=causal,
            scale=args.scale, enable_gqa=problem.heads != problem.kv_heads,
        )  # fmt: skip
        outs.append(out.squeeze(0).transpose(0, 1))
    if starts[-1] < args.query.shape[0] or not outs:
        outs.append(args.query.new_zeros((args.query.shape[0] - starts[-1], args.query.shape[1], args.value.shape[2])))
    out = torch.cat(outs)
    # where every sequence lacks queries or keys nothing was computed, and backward would find no way to the inputs: their gradients are 0
    return (out if out.requires_grad or not problem.needs_grad else out + _nothing_of(args)), None


def _nothing_of(args: VarlenArgs) -> Tensor:
    """0, computed from no number of any input."""
    given = (args.query, args.key, args.value, *(() if args.bias is None else (args.bias,)))
    return torch.stack([x.reshape(-1)[:0].sum().to(args.query.dtype) for x in given]).sum()


def _added(args: VarlenArgs, q_len: int, k_len: int) -> tuple[Tensor | None, bool]:
    """(attn_mask, is_causal) of a sequence."""
    bias = None if args.bias is None else args.bias[:, :q_len, :k_len].to(args.query.dtype)
    if args.causal == FULL:
        return bias, False
    if bias is None and (args.causal != BOTTOM_RIGHT or q_len == k_len):
        return None, True
    seen = torch.ones(q_len, k_len, dtype=torch.bool, device=args.query.device)
    seen = seen.tril(k_len - q_len if args.causal == BOTTOM_RIGHT else 0)
    if bias is None and args.query.device.type == "cpu":
        return seen, False
    # -inf, as torch's cuDNN kernels take the least finite number for a boolean mask, and the mean of the values where nothing is seen
    bias = torch.zeros_like(seen, dtype=args.query.dtype) if bias is None else bias
    return bias.masked_fill(~seen, float("-inf")), False


FLASH = Backend(
    name="flash",
    own_dropout=True,
    operation="attention_varlen",
    summary="torch.nn.attention.varlen.varlen_attn, sm_80 and later",
    why_not=_why_not_flash,
    prefers=lambda problem: True,
    attend=_attend_flash,
)
SDPA = Backend(
    name="sdpa",
    own_dropout=True,
    operation="attention_varlen",
    summary="torch.nn.functional.scaled_dot_product_attention, a call for each sequence; reads the lengths on the host",
    why_not=_why_not_each,
    prefers=lambda problem: problem.device_type == "cpu",
    attend=_attend_each,
)
