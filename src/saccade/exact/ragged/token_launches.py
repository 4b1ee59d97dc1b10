"""Launches of the kernels of `tokens.py`: which calls they take, and the bounds of a batch, found once for a tensor of cu_seqlens."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.engine.calls import values_known
from saccade.engine.window import has_window
from saccade.exact.long.choice import window_of
from saccade.exact.ragged import tokens_sm90
from saccade.exact.ragged.call import RaggedCall
from saccade.exact.ragged.config import MOST_EAGER, TILES, TOKENS_MAX_DIM, token_config
from saccade.exact.ragged.launches import Gradients
from saccade.exact.ragged.token_dropout import survivors_kernel
from saccade.exact.ragged.tokens import backward_tokens_kernel, bounds_kernel, forward_tokens_kernel
from saccade.exact.varlen.args import FULL, HIDE_LATER, UPPER_LEFT, VarlenArgs
from saccade.launch.cache import LaunchCache
from saccade.launch.triton import launch_any, pow2
from saccade.native.described import FIXED, HALVINGS, LONGEST_K, QUERIES, SEQUENCES
from saccade.native.recording import is_recorded, scratch, varying
from saccade.nvrtc.capture import capture_id, in_compilers_graph

# Numbers (tokens x heads x D, D a power of two) up to which token tiles are one launch each way. Times in a CUDA graph on an H100, in us, forward and
# backward together, buckets of lengths in brackets: 64 sequences 20 (52), 256 sequences 57 (80), 1,024 sequences 194 (184). They had 12 heads of
# D = 64, a mean of 20 tokens and the best shapes.
MOST_NUMBERS = 2**23
# The same in backward if sequences may have more than 128 tokens, whose keys a tile takes twice. Times of backward alone on an H200, 12 heads, in us, at
# D = 32 and D = 64, those of the lists in brackets:
#     8 sequences of mean 180, longest 512     27 (35), 34 (44)
#     32 such sequences                        88 (52), 112 (99)
#     8 sequences of 512                       76 (40), 98 (54)
MOST_LONG_BACKWARD = 3 * 2**19
_BLOCK = 128  # tokens of a program of `bounds_kernel`
_DRAWN = 32  # rows of a program of `survivors_kernel`
_MAX_KNOWN = 16


def takes(call: RaggedCall, direction: str) -> bool:
    """Whether token tiles compute a direction of a call: packed self-attention without a bias. Outside of CUDA graphs and without a window it is as `RaggedCall.eager_tokens`
    says."""
    args = call.args
    if has_window(args):
        return True
    if call.dense or args.cu_seqlens_q is not args.cu_seqlens_k or args.bias is not None or call.block_d > TOKENS_MAX_DIM:
        return False
    numbers = call.total_q * call.heads * call.block_d
    if not capture_id(args.query.device):
        return call.eager_tokens and numbers <= MOST_EAGER
    if call.total_q != call.total_k:
        return False
    by_lists = direction == "backward" and max(args.max_q, args.max_k) > TILES[-1] and _has_chunks(call)
    return numbers <= (MOST_LONG_BACKWARD if by_lists else MOST_NUMBERS) or tokens_sm90.prefers(call, direction)


def _has_chunks(call: RaggedCall) -> bool:
    """Whether lists have the kernels of sm_90 for longer sequences, with which backward was timed."""
    return call.arch == 90 and call.size == 2


# (id of cu_seqlens, capture) -> (the tensor, its version, bounds)
_KNOWN = LaunchCache()
_KNOWN.limit = _MAX_KNOWN


def bounds_of(cu: Tensor, total: int) -> Tensor:
    """int32 `[3, total]`: of each token the first row of its sequence, the row behind its last, and its number. Found once for a tensor and a
    capture, since the layers of a model hand over one tensor. Not remembered for tensors of inference mode, which do not count their changes, and in the memory of a graph of torch's compiler."""
    key = (id(cu), capture_id(cu.device), total)
    if is_recorded() or cu.is_inference() or not (key[1] or values_known(cu)) or in_compilers_graph(cu.device):
        return _find(cu, total)
    seen = _KNOWN.get(key)
    if seen is not None and seen[0]() is cu and seen[1] == cu._version:
        return seen[2]
    return _KNOWN.remember(key, (weakref.ref(cu, lambda _: _KNOWN.pop(key, None)), cu._version, _find(cu, total)))[2]


# of the numbers of a launch; a window and the words of a row are those of its kind
_SLOTS = {
    "total": QUERIES, "sequences": SEQUENCES, "steps": HALVINGS, "longest": LONGEST_K, "words": FIXED, "left": FIXED, "right": FIXED
}  # fmt: skip


class TokenLaunch(NamedTuple):
    """A launch of `programs` for each `tile` tokens. varying: by the names that the kernel gives them."""

    kernel: Any
    tile: int
    programs: int
    tensors: tuple[Tensor, ...]
    varying: dict[str, int]
    numbers: tuple
    warps: int

    def run(self, total: int) -> None:
        programs = -(-total // self.tile) * self.programs
        numbers = varying(tuple(self.varying.values()), map(_SLOTS.__getitem__, self.varying))
        follows = self.programs, 0, self.tile
        launch_any(self.kernel, programs, self.tensors, numbers, self.numbers, follows, num_warps=self.warps)


def _find(cu: Tensor, total: int) -> Tensor:
    bounds, sequences = scratch((3, total), torch.int32, cu.device, total), cu.shape[0] - 1
    numbers = {"total": total, "sequences": sequences, "steps": sequences.bit_length()}
    TokenLaunch(bounds_kernel, _BLOCK, 1, (cu, bounds), numbers, (_BLOCK,), 4).run(total)
    return bounds


def _heads(*tensors: Tensor) -> tuple[int, ...]:
    return tuple([x.stride(1) for x in tensors])


def _rows(*tensors: Tensor) -> tuple[int, ...]:
    return tuple([x.stride(0) for x in tensors])


def _varying(call: RaggedCall, words: int) -> dict[str, int]:
    left, right = _window(call)
    steps = call.sequences.bit_length()
    return {"total": call.total_q, "sequences": call.sequences, "steps": steps, "words": words, "left": left, "right": right}


def _window(call: RaggedCall) -> tuple[int, int]:
    """(left, right); 0 without a window, when no kernel reads them."""
    args = call.args
    return window_of((args.window_left, args.window_right), args.causal) or (0, 0)


def _causal(args: VarlenArgs) -> bool:
    """Whether no query sees a later key. Queries and keys are the same tokens, so that any alignment is one."""
    return args.causal in HIDE_LATER or args.window_right == 0


def _alignment(args: VarlenArgs) -> int:
    # a window needs no other kernel for its alignment; kernels without a window are unchanged
    if not has_window(args):
        return args.causal
    return UPPER_LEFT if _causal(args) else FULL


def words_of(call: RaggedCall) -> int:
    """Words of a row of `survivors_kernel`, 0 without dropout: the same for all lengths of a kind that C++ replays."""
    args = call.args
    if args.seed is None:
        return 0
    longest = max(args.max_q, args.max_k)  # C++ distinguishes kinds by both together
    words = -(-(pow2(longest) if longest <= TILES[-1] or has_window(args) else args.max_k) // 32)
    # with a window those from the word that the first key in the window of a row lies in
    return min(words, sum(_window(call)) // 32 + 2) if has_window(args) else words


def _survivors(call: RaggedCall, bounds: Tensor) -> Tensor:
    """The weights that survive dropout, a bit each, int32 `[H, T, words]`; without dropout a tensor that no kernel reads. Drawn again in backward, so that no layer
    keeps them."""
    args, (left, _), words = call.args, _window(call), words_of(call)
    if args.seed is None:
        return bounds
    bits = scratch((call.heads, call.total_q, words), torch.int32, bounds.device, call.total_q)
    numbers = {"total": call.total_q, "longest": args.max_k, "words": words, "left": left}
    constants = (args.dropout_p, call.heads, _DRAWN, has_window(args))
    TokenLaunch(survivors_kernel, _DRAWN, call.heads, (args.seed, bounds, bits), numbers, constants, 4).run(call.total_q)
    return bits


def _drawn(call: RaggedCall) -> Tensor | None:
    return None if call.args.seed is None else _survivors(call, bounds_of(call.args.cu_seqlens_q, call.total_q))


def forward(call: RaggedCall, out: Tensor, lse: Tensor) -> None:
    """out and lse of all tokens."""
    if tokens_sm90.takes(call, "forward", out) and tokens_sm90.forward(call, _drawn(call), words_of(call), out, lse):
        return
    args, shape = call.args, token_config("fwd", call.size, call.arch, call.block_d)
    query, key, value = args[:3]
    bounds = bounds_of(args.cu_seqlens_q, call.total_q)
    tensors = (query, key, value, _survivors(call, bounds), bounds, out, lse)
    numbers = (
        _heads(query, key, value, out), call.head_dim, args.scale, args.dropout_p, _rows(query, key, value, out), call.heads, call.group,
        shape.tile, shape.step, call.block_d, _alignment(args), has_window(args), args.seed is not None, call.masks_dims, shape.stages,
        call.precision,
    )  # fmt: skip
    varied = _varying(call, words_of(call))
    TokenLaunch(forward_tokens_kernel, shape.tile, call.heads, tensors, varied, numbers, shape.warps).run(call.total_q)


def backward(call: RaggedCall, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, gradients: Gradients) -> None:
    """Every gradient of all tokens."""
    by_cuda = tokens_sm90.takes(call, "backward", dout, out, *gradients)
    if by_cuda and tokens_sm90.backward(call, _drawn(call), words_of(call), dout, dlse, out, lse, gradients):
        return
    args, shape = call.args, token_config("bwd", call.size, call.arch, call.block_d)
    query, key, value = args[:3]
    strided = (query, key, value, dout, out, *gradients)
    bounds = bounds_of(args.cu_seqlens_q, call.total_q)
    bits = _survivors(call, bounds)
    tensors = (query, key, value, bits, bounds, dout, out, lse, lse if dlse is None else dlse, *gradients)
    owners = call.heads // call.group
    numbers = (
        _heads(*strided), call.head_dim, args.scale, args.dropout_p, _rows(*strided), owners, call.group, shape.tile, shape.step,
        call.block_d, _alignment(args), has_window(args), args.seed is not None, dlse is not None, call.masks_dims, call.precision,
    )  # fmt: skip
    varied = _varying(call, words_of(call))
    TokenLaunch(backward_tokens_kernel, shape.tile, owners, tensors, varied, numbers, shape.warps).run(call.total_q)
