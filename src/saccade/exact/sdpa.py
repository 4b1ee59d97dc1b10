"""torch's `scaled_dot_product_attention`, for calls that no kernel of ours supports or runs faster.

Under a mask its meaning is torch's. Two guarantees that torch does not give are added here, each at the least cost. With `lengths`, padded keys may
hold garbage, NaN too. A query that sees no key gets output 0 and zero gradient, as torch's CPU kernels give by themselves. On CUDA, layouts that
torch's fused kernels refuse, or read at misaligned addresses (seen with torch 2.11), are copied first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from saccade.engine.arguments import is_normal_scale
from saccade.engine.backend import Backend
from saccade.engine.first_order import applied
from saccade.engine.layout import repeat_heads
from saccade.engine.problem import Problem
from saccade.engine.rule import Rule, taken
from saccade.engine.torch_sdpa import scaled_as_torch_takes_it, torch_attention
from saccade.engine.tracing import eager
from saccade.engine.tracked import Tracked
from saccade.exact.args import AttentionArgs, repeated
from saccade.exact.lse import WithLse, with_lse
from saccade.exact.sdpa_mask import bias_for_torch, mask_for_torch
from saccade.exact.sdpa_window import attend_with_window, why_not_with_window

_LARGEST = 1e15  # keys and values below it, times queries of any use, stay finite scores in float32
_ROW_WORK = 2**19  # of heads, keys, head dim and queries: a row of about 50 us on one core, four times what its own call costs
_ROW = 2**16  # numbers of a batch row from which each row's padding is checked separately, not the complete tensor
_HALF = (torch.bfloat16, torch.float16)
_CPU_LSE_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_MOST_ROWS = 2**16 - 1  # batch rows that some of torch's fused CUDA kernels count on a grid axis (torch 2.11)


def _why_not(problem: Problem) -> list[str]:
    if problem.window is not None:
        return why_not_with_window(problem, _why_not)
    reasons = _why_no_lse(problem) if problem.return_lse else []
    return reasons + _why_not_so_many_rows(problem) if problem.device_type == "cuda" else reasons


def _why_not_so_many_rows(problem: Problem) -> list[str]:
    """The obstacle of calls at which torch's fused CUDA kernels fail: more than `_MOST_ROWS` batch rows, however many heads these have. Tensors of
    another rank, or of float64, go to torch's math path, which has no such limit."""
    drops = problem.dropout_p > 0
    # a mask folds the heads of a group into queries of one head (`_without_repeating`), and K and V are repeated under any other
    one_query = problem.q_len == 1 and problem.heads != problem.kv_heads and problem.dtype in _HALF and not _has_mask(problem)
    if not (drops or one_query) or problem.rank != 4 or problem.dtype == torch.float64 or problem.batch <= _MOST_ROWS:
        return []
    reasons = []
    if drops:
        reasons.append(f"torch's function takes dropout for at most {_MOST_ROWS:,} batch rows on a GPU, got {problem.batch}")
    if one_query:
        reasons.append(
            f"torch's function takes one query with grouped heads in 16 bits for at most {_MOST_ROWS:,} batch rows on a GPU, got "
            f"{problem.batch} rows, {problem.heads} heads and {problem.kv_heads} key heads"
        )
    return reasons


def _has_mask(problem: Problem) -> bool:
    return problem.mask is not None or problem.lengths


def _why_no_lse(problem: Problem) -> list[str]:
    if problem.device_type != "cpu":
        return ["torch's function does not return the log-sum-exp (return_lse=True)"]
    reasons = []
    if problem.dropout_p > 0:
        reasons.append(f"torch's CPU kernel returns the log-sum-exp without dropout, got dropout_p = {problem.dropout_p:g}")
    if problem.rank != 4 or problem.head_dim != problem.value_dim or problem.head_dim == 0:
        reasons.append(
            "torch's CPU kernel returns the log-sum-exp of tensors of rank 4 with values as wide as keys, got rank "
            f"{problem.rank}, D = {problem.head_dim} and Dv = {problem.value_dim}"
        )
    if problem.dtype not in _CPU_LSE_DTYPES:
        reasons.append(f"torch's CPU kernel returns the log-sum-exp of float32, float64 and 16 bits, got {problem.dtype}")
    return reasons


class _Call(NamedTuple):
    """The call of torch's function: `added` is its attn_mask, boolean or floating."""

    query: Tensor
    key: Tensor
    value: Tensor
    added: Tensor | None
    is_causal: bool
    grouped: bool


def _attend(args: AttentionArgs, problem: Problem) -> tuple[Tensor, Tensor | None]:
    if problem.window is not None:
        return attend_with_window(args, problem, _attend)
    key, value, mask, is_causal = args.key, args.value, args.mask, args.is_causal
    if mask is not None:
        mask = _of_rank(mask, problem.rank)
    if args.lengths is not None:
        real = _known_lengths(args, problem)
        if real is not None and min(real) < max(real) and _rows_are_worth_it(problem) and not problem.key_mask:
            added = (
                mask
                if args.bias is None
                else bias_for_torch(_of_rank(args.bias, problem.rank), args.query.dtype, problem.device_type)
            )
            return _row_by_row(args, real, added, problem), None
        key, value, mask, is_causal = _within_lengths(args, args.lengths, real, mask)
    bias = None
    if args.bias is not None:
        bias = _of_rank(args.bias, problem.rank)
        if problem.windows:  # of tensors of rank 5 torch's fused kernels take none, and its math path would form every score
            bias = repeated(bias, problem.batch)
        bias = bias_for_torch(bias, args.query.dtype, problem.device_type)
        bias = bias if args.lengths is None else bias[..., : key.shape[-2]]
        if mask is not None:
            bias = bias.masked_fill(~mask, float("-inf"))
    if mask is not None and bias is None and problem.device_type == "cuda":
        bias = mask_for_torch(mask, args.query.dtype)
    # a branch: with symbolic sizes the comparison is not a bool, which torch's function needs
    grouped = True if problem.heads != problem.kv_heads else False  # noqa: SIM210
    call = _Call(args.query, key, value, mask if bias is None else bias, is_causal, grouped)
    if problem.return_lse:
        return _with_lse(call, args, problem)
    if call.grouped:
        call = _without_repeating(call, problem)
    if problem.device_type == "cuda" and problem.rank == 4:
        call = _aligned_call(call)
    out = _run(call, args, problem)
    if call.query.shape[:-1] != args.query.shape[:-1]:
        out = out.reshape(*args.query.shape[:-1], out.shape[-1])
    return out, None


def _run(call: _Call, args: AttentionArgs, problem: Problem) -> Tensor:
    empty = 0 in (*call.query.shape[:-1], call.key.shape[-2])
    on_gpu = problem.device_type == "cuda"
    if on_gpu and _trains_nothing_but(call.added, call[:3]):
        call = call._replace(query=Tracked.apply(call.query, call.added))
    query, scale = scaled_as_torch_takes_it(call.query, args.scale)
    # cuDNN fails on tensors without elements
    with sdpa_kernel(SDPBackend.MATH) if empty and on_gpu else contextlib.nullcontext():
        out = torch_attention(
            query,
            call.key,
            call.value,
            attn_mask=call.added,
            dropout_p=args.dropout_p,
            is_causal=call.is_causal,
            scale=scale,
            enable_gqa=call.grouped,
        )
    if empty and call.added is not None and call.added.requires_grad:
        # a sum of no elements gives zeros; torch's function would leave the bias without a gradient
        out = out + call.added[..., :0].sum().to(out.dtype)
    if on_gpu and out.requires_grad and not torch.compiler.is_compiling():
        # torch's backward reads a misaligned gradient without a check: "misaligned address"
        out.register_hook(_like(out.stride()) if "Cudnn" in type(out.grad_fn).__name__ else _aligned)
    return out


def _like(strides: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    """A hook that gives a gradient the strides of the output.

    torch 2.11 keeps the plans of cuDNN's backward without the strides of the incoming gradient in their key. If the layout differs from that of the
    plan's first call, the gradient is read at wrong addresses, and dq, dk and dv are garbage.
    """

    def laid_out(gradient: Tensor) -> Tensor:
        if gradient.stride() == strides and _aligned(gradient) is gradient:
            return gradient
        made = torch.empty_strided(gradient.shape, strides, dtype=gradient.dtype, device=gradient.device)
        return made.copy_(gradient)

    return laid_out


def _trains_nothing_but(added: Tensor | None, tensors: tuple[Tensor, ...]) -> bool:
    """Whether only the bias needs a gradient: torch 2.11 then keeps no log-sum-exp on a GPU, and fails in backward ("LSE is not
    correctly aligned")."""
    return added is not None and added.requires_grad and not any(x.requires_grad for x in tensors)


def _of_rank(mask: Tensor, rank: int) -> Tensor:
    """The mask with at least two dims, as torch requires, and with four if the call has four: torch's fused kernels take 2 or 4."""
    wanted = 4 if rank == 4 and mask.dim() == 3 else 2
    return mask if mask.dim() >= wanted else mask.view((1,) * (wanted - mask.dim()) + mask.shape)


# --- lengths


def _known_lengths(args: AttentionArgs, problem: Problem) -> list[int] | None:
    """The lengths as numbers, if they can be read without waiting for a device."""
    lengths = args.lengths
    if lengths is None or problem.device_type != "cpu" or not eager(args.query, args.key, args.value, lengths, args.mask):
        return None
    return lengths.tolist() or None


def _rows_are_worth_it(problem: Problem) -> bool:
    """Whether a call for each batch row's real keys beats one call under a mask. It does with rows of about 50 us and tasks for every thread."""
    work = problem.heads * problem.kv_len * problem.head_dim * (8 + problem.q_len)
    tasks = problem.heads * -(-problem.q_len // 32)
    return work >= _ROW_WORK and tasks >= torch.get_num_threads() and not problem.return_lse and problem.dropout_p == 0


def _row_by_row(args: AttentionArgs, real: list[int], mask: Tensor | None, problem: Problem) -> Tensor:
    """Each batch row with its real keys: the padding is neither read nor multiplied. `mask` may be a bias."""
    # split and narrow, not indexed: the gradient of an index is a tensor of the whole batch, once for each row, and each takes 4 us more
    rows = zip(args.query.split(1), args.key.split(1), args.value.split(1), strict=True)
    grouped = problem.heads != problem.kv_heads
    outs = []
    for row, ((query, key, value), length) in enumerate(zip(rows, real, strict=True)):
        added = None
        if mask is not None:
            added = mask if mask.dim() < 4 or mask.shape[0] == 1 else mask[row : row + 1]
            added = added if added.shape[-1] == 1 else added[..., :length]
        if length < problem.kv_len:
            key, value = key.narrow(2, 0, length), value.narrow(2, 0, length)
        call = _Call(query, key, value, added, args.is_causal, grouped)
        if grouped:
            call = _without_repeating(call, problem)
        out = _run(call, args, problem)
        if call.query is not query:
            out = out.reshape(*query.shape[:-1], out.shape[-1])
        outs.append(out.transpose(1, 2))
    return torch.cat(outs).transpose(1, 2)  # a view of [B, T, H, D], as torch's CPU kernel gives


def _within_lengths(
    args: AttentionArgs, lengths: Tensor, real: list[int] | None, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, bool]:
    """key, value, mask and is_causal with the padding invisible, whatever it holds."""
    key, value = args.key, args.value
    if real is not None:
        longest = max(real)
        if longest < key.shape[2]:
            # keys that are padding in every row are cut off: a view
            key, value = key[:, :, :longest], value[:, :, :longest]
            mask = mask if mask is None or mask.shape[-1] == 1 else mask[..., :longest]
        if min(real) == longest:
            return key, value, mask, args.is_causal
        must_clear = not (_harmless(key, real) and _harmless(value, real))
    else:
        # On a GPU the ragged kernels take calls with only lengths, without a copy. Calls that get here have a mask, a bias, float32 or D > 128.
        # Both are copied, read and written once: 4 * B * Hkv * Tk * D numbers, as many as attention itself moves at Tq = Tk and H = Hkv.
        # No exact method costs less. torch's fused kernels with a mask add -inf to the score: NaN + -inf is NaN for K, as is 0 * NaN for V.
        # Checking the values first would read half as much, but wait for the device. Without the wait, the copy would be launched in any case. The
        # caller's tensors must not be changed in place.
        must_clear = True
    valid = torch.arange(key.shape[2], device=key.device) < lengths.unsqueeze(1)  # [B, Tk]
    if must_clear:
        # a weight of 0 times a NaN is NaN, so such padding must be cleared, not only masked
        key, value = (x.where(valid[:, None, :, None], 0.0) for x in (key, value))
    mask = valid[:, None, None, :] if mask is None else mask & valid[:, None, None, :]
    if not args.is_causal:
        return key, value, mask, False
    causal = torch.ones(args.query.shape[2], key.shape[2], dtype=torch.bool, device=key.device).tril()
    return key, value, mask & causal, False


def _harmless(tensor: Tensor, real: list[int]) -> bool:
    """Whether the padding of `[B, H, T, D]` beyond `real` tokens is finite and of ordinary size, so that a weight of 0 hides it."""
    tensor, time = tensor.detach(), tensor.shape[2]
    if tensor.numel() == 0:
        return True
    # checking the complete tensor takes one operation; checking only the padding takes one for each row, which is faster if rows are large
    whole = tensor.numel() < len(real) * _ROW
    parts = [tensor] if whole else [row[:, length:] for row, length in zip(tensor, real, strict=True) if length < time]
    for part in parts:
        low, high = torch.aminmax(part)
        if not (low.item() > -_LARGEST and high.item() < _LARGEST):  # false for NaN
            return False
    return True


# --- grouped heads


def _without_repeating(call: _Call, problem: Problem) -> _Call:
    """The call with as few copies of K and V as torch allows."""
    query, added, group = call.query, call.added, problem.heads // problem.kv_heads
    single = query.shape[-2] == 1
    shared = added is None or added.dim() < 3 or added.shape[-3] == 1
    same_for_queries = added is not None and added.shape[-2] == 1
    on_gpu = problem.device_type == "cuda"
    if problem.rank == 4 and not call.is_causal and shared and (same_for_queries if on_gpu else single):
        # The queries of a group become the queries of one head: exact, and twice as fast for one token on a CPU. On a GPU torch takes plain
        # grouped heads unchanged. That is three times as fast for one query: 0.022 for 0.073 ms (1,024 x 8 heads, 50 keys, H200).
        folded = query.reshape(query.shape[0], problem.kv_heads, group * query.shape[2], query.shape[3])
        return call._replace(query=folded, grouped=False)
    if on_gpu and added is not None:
        # under any other mask torch's fused CUDA kernels refuse grouped heads, and its math path would form every score
        key, value = (repeat_heads(x, group, x.dim() - 3) for x in (call.key, call.value))
        return call._replace(key=key, value=value, grouped=False)
    return call


# --- the log-sum-exp


def _with_lse(call: _Call, args: AttentionArgs, problem: Problem) -> tuple[Tensor, Tensor]:
    added = call.added
    if added is not None and added.dim() < 4:
        added = added.view((1,) * (4 - added.dim()) + added.shape)
    query, scale = scaled_as_torch_takes_it(call.query, args.scale)
    asked = (query, call.key, call.value, added, call.is_causal, scale)
    return applied(WithLse, problem, "sdpa", *asked) if problem.needs_grad else with_lse(*asked)


# --- addresses


def _aligned_call(call: _Call) -> _Call:
    query, key, value = (_aligned(x) for x in call[:3])
    added = call.added
    if added is not None and added.dim() > 0 and (added.shape[-1] != key.shape[-2] or added.stride(-1) != 1):
        # a mask broadcast over the keys: "last dimension must be contiguous", or a misaligned address
        added = added.expand(*added.shape[:-1], key.shape[-2]).contiguous()
    return call._replace(query=query, key=key, value=value, added=added)


def _takes_as_it_is(args: AttentionArgs) -> bool:
    """Whether torch gets the tensors of a call as they were given."""
    tensors, added = args[:3], args.mask if args.bias is None else args.bias
    if (
        not is_normal_scale(args.scale)
        or any(0 in tensor.shape for tensor in tensors)
        or not all(_aligned(tensor) is tensor for tensor in tensors)
    ):
        return False
    if added is None:
        return True
    if _trains_nothing_but(added, tensors):
        return False
    fits = added.dim() in (2, 4) and added.shape[-1] == args.key.shape[2] and added.stride(-1) == 1
    return fits and (args.bias is None or added.dtype == args.query.dtype)


def _aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a dense copy if it, or a row, head or batch row of it, does not start on 16 bytes."""
    width = tensor.element_size()
    strides = [stride for stride, extent in zip(tensor.stride()[:-1], tensor.shape, strict=False) if extent > 1]
    # compiled code copies misaligned inputs by itself, and torch 2.11 does not trace the offset
    offset = 0 if torch.compiler.is_compiling() else tensor.storage_offset()
    if tensor.stride(-1) == 1 and offset * width % 16 == 0 and not any(stride * width % 16 for stride in strides):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _rule(problem: Problem) -> Rule:
    if problem.window is not None and problem.device_type == "cuda":
        return Rule("with a window it copies keys and reads a mask; not measured beside kernels that know windows")
    return taken(None, "no kernel that can run was measured faster")


SDPA = Backend(
    is_torch=True,
    name="sdpa",
    own_dropout=True,
    takes_as_it_is=_takes_as_it_is,
    operation="attention",
    summary="torch.nn.functional.scaled_dot_product_attention",
    why_not=_why_not,
    prefers=lambda problem: not _rule(problem).against,
    rule=_rule,
    attend=_attend,
)
