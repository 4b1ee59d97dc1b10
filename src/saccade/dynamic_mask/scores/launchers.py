"""Launches the kernels of `dynamic_mask_scores`."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.dynamic_mask.scores.kernels import scores_gradient_kernel, scores_kernel
from saccade.launch.triton import launch, launch_any, pow2

# tokens of a tile of forward: many for streaming, few if there are too few tokens to occupy all multiprocessors
_LARGE, _SMALL, _FEW_TOKENS = 64, 16, 8192
# tokens up to which a launch is remembered for their number: decoding repeats it, and C++ can replay it
_REPEATED = 16
# of a tile of backward: with 64 tokens its two products spill registers
_BACKWARD = 32
# bytes of a tile's row, and tiles that are loaded ahead; the products need at least 16 numbers a side
_ROW_BYTES, _STAGES, _NARROWEST = 256, 3, 16
# programs of a backward, whatever the GPU, so that sums are the same on each
_PROGRAMS = 1024


def forward(values: Tensor, weight: Tensor, A: Tensor, bias: Tensor | None, form: str, save: bool) -> tuple[Tensor, Tensor]:
    """scores, float32 `[B, Hkv, S]`, and their derivatives by z and by A, `[2, B, Hkv, S]`, empty unless they are to be saved."""
    (rows,) = _rows(values)
    batch, tokens, heads = rows.shape[0], rows.shape[1], weight.shape[0]
    scores = torch.empty((batch, heads, tokens), dtype=torch.float32, device=values.device)
    derivatives = scores.new_empty((2, *scores.shape) if save else 0)
    if not scores.numel():
        return scores, derivatives
    block = _LARGE if batch * tokens >= _FEW_TOKENS else _SMALL
    tiles = -(-tokens // block)
    numbers = (
        *rows.stride()[:3], heads, *rows.shape[2:], form == "exp", bias is not None, save, block, *_tile(rows, heads), _STAGES,
    )  # fmt: skip
    tensors = values, weight.contiguous(), A.contiguous(), A if bias is None else bias.contiguous(), scores, derivatives
    if tokens <= _REPEATED:
        launch(scores_kernel, batch * tiles, tensors, (tokens, tiles, *numbers), num_warps=block // 16)
    else:
        launch_any(scores_kernel, batch * tiles, tensors, (tokens, tiles), numbers, num_warps=block // 16)
    return scores, derivatives


def backward(dscores: Tensor, derivatives: Tensor, values: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dvalues, dweight, dA, dbias); dA and dbias are float32 and share memory."""
    dvalues = torch.empty_like(values)
    rows, gradient = _rows(values, dvalues)
    (batch, tokens, groups, width), heads = rows.shape, weight.shape[0]
    if not values.numel() or not heads:
        nothing = torch.zeros((2, heads), dtype=torch.float32, device=values.device)
        return dvalues.zero_(), torch.zeros_like(weight), nothing[0], nothing[1]
    block_e, block_h = _tile(rows, heads)
    tiles, chunks = -(-tokens // _BACKWARD), groups * -(-width // block_e)
    own = max(1, -(-batch * tiles * chunks // _PROGRAMS))
    parts = -(-batch * tiles // own)
    dweight = torch.empty((parts, heads, groups * width), dtype=torch.float32, device=values.device)
    sums = torch.empty((parts, 2, heads), dtype=torch.float32, device=values.device)
    tensors = dscores.contiguous(), derivatives, values, weight.contiguous(), dvalues, dweight, sums
    numbers = (*rows.stride()[:3], *gradient.stride()[:3], heads, groups, width, _BACKWARD, block_e, block_h, _STAGES)
    launch_any(scores_gradient_kernel, parts * chunks, tensors, (tokens, tiles, batch * tiles, own), numbers, num_warps=4)
    of_heads = sums.sum(0)
    return dvalues, dweight.sum(0).to(weight.dtype), of_heads[0], of_heads[1]


def _rows(*values: Tensor) -> list[Tensor]:
    """`[B, S, groups, width]` of values `[B, S, E]` or `[B, Hkv, S, D]`; one group if in each of them all heads of a token lie side by side."""
    if values[0].dim() == 3:
        return [x.unsqueeze(2) for x in values]
    heads = [x.transpose(1, 2) for x in values]
    beside = all(x.stride(2) == x.shape[3] or x.shape[2] == 1 for x in heads)
    return [x.flatten(2).unsqueeze(2) for x in heads] if beside else heads


def _tile(rows: Tensor, heads: int) -> tuple[int, int]:
    """(BLOCK_E, BLOCK_H) of values `[B, S, groups, width]`."""
    widest = _ROW_BYTES // rows.element_size()
    return max(_NARROWEST, min(widest, pow2(rows.shape[3]))), max(_NARROWEST, pow2(heads))
