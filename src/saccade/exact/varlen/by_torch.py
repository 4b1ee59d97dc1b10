"""torch's own kernels as backends of `attention_varlen`: its packed flash attention on a GPU, and its dense function, length by length."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.engine.backend import Backend
from saccade.engine.calls import has_values
from saccade.engine.rule import thousands
from saccade.engine.torch_sdpa import scaled_as_torch_takes_it, torch_attention
from saccade.engine.tracing import eager
from saccade.engine.window import Window, ends_of, shown_window
from saccade.exact.bands import MOST, Band, band_of, fold, unfold
from saccade.exact.sdpa_mask import bias_for_torch
from saccade.exact.varlen import reference
from saccade.exact.varlen.args import ALIGNED_LAST, BOTTOM_RIGHT, FULL, HIDE_LATER, VarlenArgs
from saccade.exact.varlen.behind import behind
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
    if not (problem.max_q and problem.max_k):
        # the launch of its backward would have an empty grid
        lengths = f"max_seqlen_q={problem.max_q} and max_seqlen_k={problem.max_k}"
        reasons.append(f"torch's packed attention needs a sequence that is not empty, got {lengths}")
    if problem.bias is not None or problem.dropout_p > 0:
        reasons.append("torch's packed attention takes neither a bias nor dropout")
    if problem.causal not in (FULL, *ALIGNED_LAST) and not problem.same_lengths:
        reasons.append("torch's packed attention aligns the causal mask with the last key, not with the first")
    if problem.window is not None and problem.causal == FULL and not problem.same_lengths:
        reasons.append(
            f"torch's packed attention aligns a window with the last key, not with the first, got {shown_window(problem.window)}"
        )
    if problem.return_lse and problem.needs_grad:
        reasons.append("torch's packed attention has no gradient of the log-sum-exp")
    return reasons


def _attend_flash(args: VarlenArgs, problem: VarlenProblem) -> tuple[Tensor, Tensor | None]:
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    after_q, after_k = (behind(ends, *args[:3]) for ends in (args.cu_seqlens_q, args.cu_seqlens_k))
    query, scale = scaled_as_torch_takes_it(after_q.of_input(args.query), args.scale)
    key, value = after_k.of_input(args.key), after_k.of_input(args.value)
    options: Any = {"enable_gqa": problem.heads != problem.kv_heads} if _takes_grouped() else {}
    found = varlen_attn(
        query, key, value, args.cu_seqlens_q, args.cu_seqlens_k, args.max_q, args.max_k,
        return_aux=AuxRequest(lse=problem.return_lse), scale=scale,
        window_size=(args.window_left, 0 if args.causal in HIDE_LATER else args.window_right), **options,
    )  # fmt: skip
    out, lse = found if isinstance(found, tuple) else (found, None)
    if lse is not None:
        lse = lse.masked_fill(lse.isinf() | ~after_q.real(args.query)[:, 0], float("-inf"))
    return after_q.of_output(out), lse


@functools.cache
def _takes_grouped() -> bool:
    """Whether torch's function has a flag for grouped heads. Its signature takes 22 us to read."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def _why_not_grouped(problem: VarlenProblem) -> list[str]:
    reasons = []
    if problem.return_lse:
        reasons.append("torch's function does not return the log-sum-exp (return_lse=True)")
    if not problem.host_counts:
        reasons.append(
            "a call for each length needs the lengths on the host, which a compiled, captured, traced or mapped call does not have"
        )
    if problem.window is not None:
        reasons += _why_no_mask(problem, problem.window)
    return reasons


def _why_no_mask(problem: VarlenProblem, window: Window) -> list[str]:
    """The obstacles to the mask of a window."""
    numbers = band_of(problem.max_q, problem.max_k, *ends_of(window), problem.causal in HIDE_LATER).mask_numbers
    if numbers <= MOST:
        return []
    return [
        f"torch's function needs a mask for {shown_window(window)}, here of {thousands(numbers)} numbers for the longest sequence; allowed are {MOST:,}"
    ]


def _attend_grouped(args: VarlenArgs, problem: VarlenProblem) -> tuple[Tensor, None]:
    """One call for all sequences with equal numbers of queries and of keys, with only their real tokens."""
    if not has_values(args.cu_seqlens_q):
        return reference.attend(args)[0], None  # there are no lengths, and only the shape matters
    groups = group_by_lengths(args.cu_seqlens_q.cpu(), args.cu_seqlens_k.cpu())
    out = args.query.new_zeros((args.query.shape[0], args.query.shape[1], args.value.shape[2]))
    if groups.sizes:
        by_call = not problem.needs_grad and eager(*args[:3], args.bias)
        places, outs = _outs(args, problem, groups, by_call)
        if by_call:
            for place, part in zip(places, outs, strict=True):
                out.index_copy_(0, place, part)
        else:
            out = out.index_copy(0, torch.cat(places), torch.cat(list(outs)))
    # if every sequence lacks queries or keys, nothing was computed, and backward would not reach the inputs, whose gradients are 0
    return (out if out.requires_grad or not problem.needs_grad else out + _nothing_of(args)), None


def _outs(args: VarlenArgs, problem: VarlenProblem, groups: Groups, by_call: bool) -> tuple[tuple[Tensor, ...], Iterator[Tensor]]:
    """The tokens of each call, and its out. by_call: looked up when the call comes, in memory that the next one uses again; with a gradient
    all at once, as each look-up would fill a gradient of all tokens for itself."""
    calls = list(_calls(groups, args.query.shape[1]))
    places_q = groups.tokens_q.to(args.query.device).split([q * n for q, _, n in calls])
    places_k = groups.tokens_k.to(args.query.device).split([k * n for _, k, n in calls])

    def tokens(tensor: Tensor, places: tuple[Tensor, ...]) -> Iterable[Tensor]:
        if by_call:
            return (tensor.index_select(0, place) for place in places)
        return tensor.index_select(0, torch.cat(places)).split([len(place) for place in places])

    parts = zip(tokens(args.query, places_q), tokens(args.key, places_k), tokens(args.value, places_k), calls, strict=True)
    return places_q, (_call(args, problem, *part) for part in parts)


class Groups(NamedTuple):
    """Sequences of equal lengths together, in the order of the batch within a group; none without queries or without keys.

    sizes: (queries, keys, sequences) of each group. tokens_q, tokens_k: int64, the places of their tokens one behind another.
    """

    sizes: list[tuple[int, int, int]]
    tokens_q: Tensor
    tokens_k: Tensor


def group_by_lengths(cu_q: Tensor, cu_k: Tensor) -> Groups:
    """The groups of a batch, of cu_seqlens `[B + 1]` on the host."""
    cu_q, cu_k = cu_q.long(), cu_k.long()
    q_lens, k_lens = cu_q.diff(), cu_k.diff()
    real = ((q_lens > 0) & (k_lens > 0)).nonzero().flatten()
    pairs = torch.stack((q_lens, k_lens), 1)[real]
    found, group, counts = pairs.unique(dim=0, return_inverse=True, return_counts=True)
    order = real[group.argsort(stable=True)]
    sizes = [(q, k, n) for (q, k), n in zip(found.tolist(), counts.tolist(), strict=True)]
    return Groups(sizes, _tokens(cu_q[:-1][order], q_lens[order]), _tokens(cu_k[:-1][order], k_lens[order]))


def _tokens(starts: Tensor, lengths: Tensor) -> Tensor:
    """The tokens of sequences that begin at `starts`, one behind another."""
    before = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum()), device=lengths.device) + (starts - before).repeat_interleave(lengths)


# Scores (sequences x heads x queries x keys) of one call: torch keeps them all if it has no kernel that streams them. And its CUDA kernels
# count batch and heads on grid axes of 65,535.
_MOST_SCORES, _MOST_PROBLEMS = 2**24, 2**16 - 1


def _calls(groups: Groups, heads: int) -> Iterator[tuple[int, int, int]]:
    """(queries, keys, sequences) of each call."""
    for q_len, k_len, count in groups.sizes:
        most = max(1, min(_MOST_SCORES // (q_len * k_len), _MOST_PROBLEMS) // max(1, heads))
        for first in range(0, count, most):
            yield q_len, k_len, min(most, count - first)


def _call(
    args: VarlenArgs, problem: VarlenProblem, query: Tensor, key: Tensor, value: Tensor, sizes: tuple[int, int, int]
) -> Tensor:
    """out `[tokens, H, Dv]` of sequences of equal lengths."""
    query, key, value = (x.unflatten(0, (sizes[2], -1)).transpose(1, 2) for x in (query, key, value))
    band = None if problem.window is None else _band(args, *sizes[:2])
    if band is None:
        added, causal = _added(args, query.shape[2], key.shape[2])
    else:
        query, key, value, seen = fold(query, key, value, band, None)
        added, causal = _as_added(seen, query.dtype), False
    query, scale = scaled_as_torch_takes_it(query, args.scale)
    out = torch_attention(
        query, key, value, attn_mask=added, dropout_p=args.dropout_p, is_causal=causal, scale=scale,
        enable_gqa=problem.heads != problem.kv_heads,
    )  # fmt: skip
    out = out if band is None else unfold(out, band, sizes[2], False)
    return out.transpose(1, 2).flatten(0, 1)


def _band(args: VarlenArgs, q_len: int, k_len: int) -> Band:
    shift = k_len - q_len if args.causal in ALIGNED_LAST else 0
    return band_of(q_len, k_len, args.window_left, args.window_right, args.causal in HIDE_LATER, shift)


def _nothing_of(args: VarlenArgs) -> Tensor:
    """0, computed from empty slices of the inputs."""
    given = (args.query, args.key, args.value, *(() if args.bias is None else (args.bias,)))
    return torch.stack([x.reshape(-1)[:0].sum().to(args.query.dtype) for x in given]).sum()


def _added(args: VarlenArgs, q_len: int, k_len: int) -> tuple[Tensor | None, bool]:
    """(attn_mask, is_causal) of sequences of these lengths."""
    bias = None if args.bias is None else bias_for_torch(args.bias[:, :q_len, :k_len], args.query.dtype, args.query.device.type)
    if args.causal == FULL:
        return bias, False
    if bias is None and (args.causal != BOTTOM_RIGHT or q_len == k_len):
        return None, True
    seen = torch.ones(q_len, k_len, dtype=torch.bool, device=args.query.device)
    seen = seen.tril(k_len - q_len if args.causal == BOTTOM_RIGHT else 0)
    return _as_added(seen, args.query.dtype) if bias is None else bias.masked_fill(~seen, float("-inf")), False


def _as_added(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask as torch's function takes it. On a GPU it becomes a bias of -inf. For a boolean mask torch's cuDNN kernels add the least finite
    number, and give the mean of the values to a query that sees nothing."""
    if seen.device.type == "cpu":
        return seen
    return torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, float("-inf"))


FLASH = Backend(
    is_torch=True,
    name="flash",
    own_dropout=True,
    operation="attention_varlen",
    summary="torch.nn.attention.varlen.varlen_attn, sm_80 and later",
    why_not=_why_not_flash,
    prefers=lambda problem: True,
    attend=_attend_flash,
)
SDPA = Backend(
    is_torch=True,
    name="sdpa",
    own_dropout=True,
    operation="attention_varlen",
    summary="torch.nn.functional.scaled_dot_product_attention, a call for each length; reads the lengths on the host",
    why_not=_why_not_grouped,
    prefers=lambda problem: problem.device_type == "cpu",
    attend=_attend_grouped,
)
