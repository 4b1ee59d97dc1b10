"""Launches of the kernels of `tokens.py`: which calls they take, and the bounds of a batch, found once for a tensor of cu_seqlens."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from saccade.engine.calls import values_known
from saccade.engine.window import NO_LIMIT
from saccade.exact.args import AttentionArgs
from saccade.exact.ragged.call import Call
from saccade.exact.ragged.config import TOKENS_MAX_DIM, token_config
from saccade.exact.ragged.launches import Gradients
from saccade.exact.ragged.tokens import backward_tokens_kernel, bounds_kernel, forward_tokens_kernel
from saccade.exact.varlen.args import FULL, HIDE_LATER, UPPER_LEFT, VarlenArgs
from saccade.launch.cache import LaunchCache
from saccade.launch.triton import launch_any
from saccade.nvrtc.capture import capture_id

# Numbers (tokens x heads x D, D a power of two) up to which token tiles are one launch each way. In a CUDA graph on an H100, us forward + backward,
# buckets of lengths in brackets, 12 heads, mean 20 tokens, the best shapes: D = 64, 64 sequences 20 (52), 256 sequences 57 (80), 1,024 sequences 194 (184).
MOST_NUMBERS = 2**23
_BLOCK = 128  # tokens of a program of `bounds_kernel`
_MAX_KNOWN = 16


def takes(call: Call) -> bool:
    """Whether token tiles compute a call: packed self-attention without a bias, while a CUDA graph is captured or with a window. Other eager calls
    stay with the launches that C++ repeats."""
    args = call.args
    if has_window(args):
        return True
    if call.dense or args.cu_seqlens_q is not args.cu_seqlens_k or args.bias is not None or call.block_d > TOKENS_MAX_DIM:
        return False
    if call.total_q != call.total_k or call.total_q * call.heads * call.block_d > MOST_NUMBERS:
        return False
    return capture_id(args.query.device) != 0


# (id of cu_seqlens, capture) -> (the tensor, its version, bounds)
_KNOWN = LaunchCache()
_KNOWN.limit = _MAX_KNOWN


def bounds_of(cu: Tensor, total: int) -> Tensor:
    """int32 `[3, total]`: of each token the first row of its sequence, the row behind its last, and its number. Found once for a tensor and a
    capture, since the layers of a model hand over one tensor."""
    key = (id(cu), capture_id(cu.device), total)
    if not key[1] and (not values_known(cu) or cu.is_inference()):
        return _find(cu, total)
    version = 0 if cu.is_inference() else cu._version
    seen = _KNOWN.get(key)
    if seen is not None and seen[0]() is cu and seen[1] == version:
        return seen[2]
    return _KNOWN.remember(key, (weakref.ref(cu, lambda _: _KNOWN.pop(key, None)), version, _find(cu, total)))[2]


def _find(cu: Tensor, total: int) -> Tensor:
    sequences = cu.shape[0] - 1
    bounds = torch.empty((3, total), dtype=torch.int32, device=cu.device)
    numbers = (total, sequences, sequences.bit_length())
    launch_any(bounds_kernel, -(-total // _BLOCK), (cu, bounds), numbers, (_BLOCK,), num_warps=4)
    return bounds


def _heads(*tensors: Tensor) -> tuple[int, ...]:
    return tuple([x.stride(1) for x in tensors])


def _rows(*tensors: Tensor) -> tuple[int, ...]:
    return tuple([x.stride(0) for x in tensors])


def has_window(args: VarlenArgs | AttentionArgs) -> bool:
    """Whether a call has a window, which no other kernel of the family knows."""
    return (args.window_left, args.window_right) != (NO_LIMIT, NO_LIMIT)


def _varying(call: Call) -> tuple[int, ...]:
    args = call.args
    left, right = (call.total_q if end == NO_LIMIT else min(end, call.total_q) for end in (args.window_left, args.window_right))
    return call.total_q, call.sequences, call.sequences.bit_length(), args.max_k, left, 0 if _causal(args) else right


def _causal(args: VarlenArgs) -> bool:
    """Whether no query sees a later key. Queries and keys are the same tokens, so that any alignment is one."""
    return args.causal in HIDE_LATER or args.window_right == 0


def _alignment(args: VarlenArgs) -> int:
    # a window needs no other kernel for its alignment; what has none is compiled as ever
    if not has_window(args):
        return args.causal
    return UPPER_LEFT if _causal(args) else FULL


def forward(call: Call, out: Tensor, lse: Tensor) -> None:
    """out and lse of all tokens."""
    args, config = call.args, token_config("fwd", call.size, call.arch, call.block_d)
    query, key, value = args[:3]
    seed = query if args.seed is None else args.seed
    tensors = (query, key, value, seed, bounds_of(args.cu_seqlens_q, call.total_q), out, lse)
    numbers = (
        _heads(query, key, value, out), call.head_dim, args.scale, args.dropout_p, _rows(query, key, value, out), call.heads, call.group,
        config.tile, config.step, call.block_d, _alignment(args), has_window(args), args.seed is not None, call.masks_dims, config.stages,
        call.precision,
    )  # fmt: skip
    programs = -(-call.total_q // config.tile) * call.heads
    launch_any(forward_tokens_kernel, programs, tensors, _varying(call), numbers, num_warps=config.warps)


def backward(call: Call, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, gradients: Gradients) -> None:
    """Every gradient of all tokens."""
    args, config = call.args, token_config("bwd", call.size, call.arch, call.block_d)
    query, key, value = args[:3]
    seed = query if args.seed is None else args.seed
    strided = (query, key, value, dout, out, *gradients)
    tensors = (
        query, key, value, seed, bounds_of(args.cu_seqlens_q, call.total_q), dout, out, lse, lse if dlse is None else dlse, *gradients
    )  # fmt: skip
    owners = call.heads // call.group
    numbers = (
        _heads(*strided), call.head_dim, args.scale, args.dropout_p, _rows(*strided), owners, call.group, config.tile, config.step,
        call.block_d, _alignment(args), has_window(args), args.seed is not None, dlse is not None, call.masks_dims, call.precision,
    )  # fmt: skip
    programs = -(-call.total_q // config.tile) * owners
    launch_any(backward_tokens_kernel, programs, tensors, _varying(call), numbers, num_warps=config.warps)
