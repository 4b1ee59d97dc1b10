"""Launches of the kernels of `tokens.py`: which calls they take, and the bounds of a batch, found once for a tensor of cu_seqlens."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.engine.calls import values_known
from saccade.engine.window import NO_LIMIT
from saccade.exact.args import AttentionArgs
from saccade.exact.ragged.call import RaggedCall
from saccade.exact.ragged.config import MOST_EAGER, TILES, TOKENS_MAX_DIM, token_config
from saccade.exact.ragged.launches import Gradients
from saccade.exact.ragged.token_dropout import survivors_kernel
from saccade.exact.ragged.tokens import backward_tokens_kernel, bounds_kernel, forward_tokens_kernel
from saccade.exact.varlen.args import FULL, HIDE_LATER, UPPER_LEFT, VarlenArgs
from saccade.launch.cache import LaunchCache
from saccade.launch.triton import launch_any, pow2
from saccade.nvrtc.capture import capture_id

# Numbers (tokens x heads x D, D a power of two) up to which token tiles are one launch each way. In a CUDA graph on an H100, us forward + backward,
# buckets of lengths in brackets, 12 heads, mean 20 tokens, the best shapes: D = 64, 64 sequences 20 (52), 256 sequences 57 (80), 1,024 sequences 194 (184).
MOST_NUMBERS = 2**23
_BLOCK = 128  # tokens of a program of `bounds_kernel`
_DRAWN = 32  # rows of a program of `survivors_kernel`
_MAX_KNOWN = 16


def takes(call: RaggedCall) -> bool:
    """Whether token tiles compute a call: packed self-attention without a bias. Outside of CUDA graphs and without a window it is as `RaggedCall.eager_tokens`
    says."""
    args = call.args
    if has_window(args):
        return True
    if call.dense or args.cu_seqlens_q is not args.cu_seqlens_k or args.bias is not None or call.block_d > TOKENS_MAX_DIM:
        return False
    numbers = call.total_q * call.heads * call.block_d
    if not capture_id(args.query.device):
        return call.eager_tokens and numbers <= MOST_EAGER
    return call.total_q == call.total_k and numbers <= MOST_NUMBERS


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
        launch_any(self.kernel, programs, self.tensors, tuple(self.varying.values()), self.numbers, num_warps=self.warps)


def _find(cu: Tensor, total: int) -> Tensor:
    bounds = torch.empty((3, total), dtype=torch.int32, device=cu.device)
    find_bounds(cu, total, bounds).run(total)
    return bounds


def find_bounds(cu: Tensor, total: int, bounds: Tensor) -> TokenLaunch:
    """The launch that fills `bounds`."""
    sequences = cu.shape[0] - 1
    varying = {"total": total, "sequences": sequences, "steps": sequences.bit_length()}
    return TokenLaunch(bounds_kernel, _BLOCK, 1, (cu, bounds), varying, (_BLOCK,), 4)


def _heads(*tensors: Tensor) -> tuple[int, ...]:
    return tuple([x.stride(1) for x in tensors])


def _rows(*tensors: Tensor) -> tuple[int, ...]:
    return tuple([x.stride(0) for x in tensors])


def has_window(args: VarlenArgs | AttentionArgs) -> bool:
    """Whether a call has a window, which no other kernel of the family knows."""
    return (args.window_left, args.window_right) != (NO_LIMIT, NO_LIMIT)


def _varying(call: RaggedCall, words: int) -> dict[str, int]:
    left, right = _window(call)
    steps = call.sequences.bit_length()
    return {"total": call.total_q, "sequences": call.sequences, "steps": steps, "words": words, "left": left, "right": right}


def _window(call: RaggedCall) -> tuple[int, int]:
    """(left, right), at most all tokens; 0 without a window, when nobody reads them."""
    args = call.args
    if not has_window(args):
        return 0, 0
    left, right = (call.total_q if end == NO_LIMIT else min(end, call.total_q) for end in (args.window_left, args.window_right))
    return left, 0 if _causal(args) else right


def _causal(args: VarlenArgs) -> bool:
    """Whether no query sees a later key. Queries and keys are the same tokens, so that any alignment is one."""
    return args.causal in HIDE_LATER or args.window_right == 0


def _alignment(args: VarlenArgs) -> int:
    # a window needs no other kernel for its alignment; what has none is compiled as ever
    if not has_window(args):
        return args.causal
    return UPPER_LEFT if _causal(args) else FULL


def words_of(call: RaggedCall) -> int:
    """Words of a row of `survivors_kernel`, 0 without dropout: the same for all lengths of a kind that C++ replays."""
    args = call.args
    if args.seed is None:
        return 0
    words = -(-(pow2(args.max_k) if args.max_k <= TILES[-1] else args.max_k) // 32)
    # with a window those from the word that the first key in the window of a row lies in
    return min(words, sum(_window(call)) // 32 + 2) if has_window(args) else words


def draw(call: RaggedCall, bounds: Tensor, bits: Tensor) -> TokenLaunch:
    """The launch that finds which weights survive dropout, a bit each: `bits` int32 `[H, T, words]`."""
    args, (left, _) = call.args, _window(call)
    assert args.seed is not None
    varying = {"total": call.total_q, "longest": args.max_k, "words": words_of(call), "left": left}
    numbers = (args.dropout_p, call.heads, _DRAWN, has_window(args))
    return TokenLaunch(survivors_kernel, _DRAWN, call.heads, (args.seed, bounds, bits), varying, numbers, 4)


def _survivors(call: RaggedCall, bounds: Tensor) -> Tensor:
    """Drawn again in backward, so that no layer keeps them; what nobody reads without dropout."""
    if call.args.seed is None:
        return bounds
    bits = torch.empty((call.heads, call.total_q, words_of(call)), dtype=torch.int32, device=bounds.device)
    draw(call, bounds, bits).run(call.total_q)
    return bits


def forward(call: RaggedCall, out: Tensor, lse: Tensor) -> None:
    """out and lse of all tokens."""
    bounds = bounds_of(call.args.cu_seqlens_q, call.total_q)
    forward_launch(call, bounds, _survivors(call, bounds), out, lse).run(call.total_q)


def forward_launch(call: RaggedCall, bounds: Tensor, bits: Tensor, out: Tensor, lse: Tensor) -> TokenLaunch:
    """bits: of `draw`, or any tensor."""
    args, config = call.args, token_config("fwd", call.size, call.arch, call.block_d)
    query, key, value = args[:3]
    tensors = (query, key, value, bits, bounds, out, lse)
    numbers = (
        _heads(query, key, value, out), call.head_dim, args.scale, args.dropout_p, _rows(query, key, value, out), call.heads, call.group,
        config.tile, config.step, call.block_d, _alignment(args), has_window(args), args.seed is not None, call.masks_dims, config.stages,
        call.precision,
    )  # fmt: skip
    return TokenLaunch(
        forward_tokens_kernel, config.tile, call.heads, tensors, _varying(call, words_of(call)), numbers, config.warps
    )


def backward(call: RaggedCall, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, gradients: Gradients) -> None:
    """Every gradient of all tokens."""
    bounds = bounds_of(call.args.cu_seqlens_q, call.total_q)
    backward_launch(call, bounds, _survivors(call, bounds), dout, dlse, out, lse, gradients).run(call.total_q)


def backward_launch(
    call: RaggedCall, bounds: Tensor, bits: Tensor, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, gradients: Gradients,
) -> TokenLaunch:  # fmt: skip
    """bits: of `draw`, or any tensor."""
    args, config = call.args, token_config("bwd", call.size, call.arch, call.block_d)
    query, key, value = args[:3]
    strided = (query, key, value, dout, out, *gradients)
    tensors = (query, key, value, bits, bounds, dout, out, lse, lse if dlse is None else dlse, *gradients)
    owners = call.heads // call.group
    numbers = (
        _heads(*strided), call.head_dim, args.scale, args.dropout_p, _rows(*strided), owners, call.group, config.tile, config.step,
        call.block_d, _alignment(args), has_window(args), args.seed is not None, dlse is not None, call.masks_dims, call.precision,
    )  # fmt: skip
    return TokenLaunch(
        backward_tokens_kernel, config.tile, owners, tensors, _varying(call, words_of(call)), numbers, config.warps
    )
