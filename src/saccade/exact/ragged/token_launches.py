"""Launches of the kernels of `tokens.py`: which calls they take, and the bounds of a batch, found once for a tensor of cu_seqlens."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.engine.calls import values_known
from saccade.exact.ragged.call import Call
from saccade.exact.ragged.launches import Gradients
from saccade.exact.ragged.token_dropout import survivors_kernel
from saccade.exact.ragged.tokens import backward_tokens_kernel, bounds_kernel, forward_tokens_kernel
from saccade.launch.cache import LaunchCache
from saccade.launch.triton import launch_any
from saccade.nvrtc.capture import capture_id

# Numbers (tokens x heads x D, D a power of two) up to which token tiles are one launch each way. In a CUDA graph on an H100, us forward + backward,
# buckets of lengths in brackets, 12 heads, mean 20 tokens, the best shapes: D = 64, 64 sequences 20 (52), 256 sequences 57 (80), 1,024 sequences 194 (184).
MOST_NUMBERS = 2**23
_MAX_DIM = 64
_BLOCK = 128  # tokens of a program of `bounds_kernel`
_DRAWN = 32  # rows of a program of `survivors_kernel`
_MAX_KNOWN = 16


class TokenConfig(NamedTuple):
    """tile: tokens of a program. step: tokens beside them at a time."""

    tile: int
    step: int
    warps: int
    stages: int = 1


def config_of(direction: str, element_size: int, arch: int) -> TokenConfig:
    """Of five forward and six backward shapes one that was fastest or near it at most sizes on an H100, at D = 32 and 64. float32, which has no matrix unit, takes small tiles.

    Backward takes 64 rows where that was measured and on sm_100. Elsewhere they spill, with grouped heads and dropout 1,624 bytes a thread on sm_80
    and 1,720 on sm_120.
    """
    if element_size == 4:
        return TokenConfig(32, 32, 4)
    if direction == "fwd":
        return TokenConfig(64, 64, 4, 3)
    return TokenConfig(64 if arch in (90, 100) else 32, 32, 4)


def takes(call: Call) -> bool:
    """Whether token tiles compute a call: packed self-attention without a bias, while a CUDA graph is captured. Eager calls stay with the launches
    that C++ repeats."""
    args = call.args
    if call.dense or args.cu_seqlens_q is not args.cu_seqlens_k or args.bias is not None or call.block_d > _MAX_DIM:
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


def _varying(call: Call, words: int) -> tuple[int, ...]:
    return call.total_q, call.sequences, call.sequences.bit_length(), words


def _survivors(call: Call, bounds: Tensor) -> tuple[Tensor, int]:
    """(which weights survive dropout, a bit each, int32 `[H, T, words]`; words of a row). Drawn again in backward, which costs less than keeping them."""
    args = call.args
    if args.seed is None:
        return bounds, 0
    words = -(-args.max_k // 32)
    bits = torch.empty((call.heads, call.total_q, words), dtype=torch.int32, device=bounds.device)
    programs = -(-call.total_q // _DRAWN) * call.heads
    numbers = (args.dropout_p, call.heads, _DRAWN)
    launch_any(survivors_kernel, programs, (args.seed, bounds, bits), (call.total_q, args.max_k, words), numbers, num_warps=4)
    return bits, words


def forward(call: Call, out: Tensor, lse: Tensor) -> None:
    """out and lse of all tokens."""
    args, config = call.args, config_of("fwd", call.size, call.arch)
    query, key, value = args[:3]
    bounds = bounds_of(args.cu_seqlens_q, call.total_q)
    bits, words = _survivors(call, bounds)
    tensors = (query, key, value, bits, bounds, out, lse)
    numbers = (
        _heads(query, key, value, out), call.head_dim, args.scale, args.dropout_p, _rows(query, key, value, out), call.heads, call.group,
        config.tile, config.step, call.block_d, args.causal, args.seed is not None, call.masks_dims, config.stages, call.precision,
    )  # fmt: skip
    programs = -(-call.total_q // config.tile) * call.heads
    launch_any(forward_tokens_kernel, programs, tensors, _varying(call, words), numbers, num_warps=config.warps)


def backward(call: Call, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, gradients: Gradients) -> None:
    """Every gradient of all tokens."""
    args, config = call.args, config_of("bwd", call.size, call.arch)
    query, key, value = args[:3]
    bounds = bounds_of(args.cu_seqlens_q, call.total_q)
    bits, words = _survivors(call, bounds)
    strided = (query, key, value, dout, out, *gradients)
    tensors = (query, key, value, bits, bounds, dout, out, lse, lse if dlse is None else dlse, *gradients)
    owners = call.heads // call.group
    numbers = (
        _heads(*strided), call.head_dim, args.scale, args.dropout_p, _rows(*strided), owners, call.group, config.tile, config.step,
        call.block_d, args.causal, args.seed is not None, dlse is not None, call.masks_dims, call.precision,
    )  # fmt: skip
    programs = -(-call.total_q // config.tile) * owners
    launch_any(backward_tokens_kernel, programs, tensors, _varying(call, words), numbers, num_warps=config.warps)
