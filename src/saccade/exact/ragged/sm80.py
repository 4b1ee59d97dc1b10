"""CUDA C++ for the backward of buckets of 64 and 128 tokens (`cuda/`): products of 16 rows at a time, so that a tile costs what its sequence
needs.

Triton multiplies whole tiles, by warpgroups on sm_90: a sequence of 70 tokens costs 128 x 128 pairs there, and 80 x 80 here. The forward in this form
was slower than Triton's (docs/notes/ragged.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from saccade.exact.varlen.args import VarlenArgs
from saccade.hardware import SMALL_SHARED, arch_of, multiprocessors
from saccade.launch.cache import LaunchCache
from saccade.launch.cuda import HEADERS
from saccade.launch.disabled import FAILURES, disable, failure_of
from saccade.native.described import KEYS, LONGEST_K, LONGEST_Q, QUERIES
from saccade.native.recording import varying
from saccade.nvrtc import Bound, Options, Source, load, obstacles

SOURCE = Source(Path(__file__).parent / "cuda" / "backward.cu", (HEADERS,))
_STRIDED = ("query", "key", "value", "dout", "out", "dquery", "dkey", "dvalue")


@dataclass(frozen=True)
class Sm80Config:
    """stages: sequences in shared memory at a time. programs: thread blocks for each multiprocessor."""

    stages: int
    programs: int


# (tile, head dim): the best of one and two stages and 1 to 8 programs on one H200, bfloat16, lengths of the upper half of each bucket. Times in ms, of
# Triton's kernel in brackets: 64 tokens 0.36 (0.42) at D = 64, 0.40 (0.45) at 128, but 0.43 (0.40) at 32; 128 tokens 0.56 (1.07), 0.49 (0.65), 0.55 (0.80)
CONFIGS = {
    (64, 64): Sm80Config(2, 3),
    (64, 128): Sm80Config(1, 2),
    (128, 32): Sm80Config(2, 2),
    (128, 64): Sm80Config(2, 2),
    (128, 128): Sm80Config(1, 2),
}


def shared_bytes(tile: int, head_dim: int, stages: int) -> int:
    """Dynamic shared memory of a block; the source checks it."""
    return stages * 8 * tile * head_dim + 2 * tile * tile + 8 * tile


def options(tile: int, args: VarlenArgs, has_dlse: bool, stages: int) -> Options:
    """How the kernel is compiled for a call."""
    head_dim = args.query.shape[2]
    return Options.of({
        "HEAD_DIM": head_dim, "ROWS": tile, "WARPS": tile // 16, "STAGES": stages, "CAUSAL": args.causal,
        "BF16": args.query.dtype == torch.bfloat16, "SHARED_BYTES": shared_bytes(tile, head_dim, stages), "HAS_DLSE": has_dlse,
    })  # fmt: skip


def takes(tile: int, args: VarlenArgs, *others: Tensor) -> bool:
    """Whether this kernel takes the bucket of a call. others: dout, out and the gradients."""
    query, key = args.query, args.key
    if query.device.type != "cuda" or arch_of(query.device) < 80 or query.element_size() != 2:
        return False
    config = CONFIGS.get((tile, query.shape[2]))
    if config is None or query.shape[1] != key.shape[1] or args.bias is not None or args.seed is not None:
        return False
    if arch_of(query.device) in SMALL_SHARED and shared_bytes(tile, query.shape[2], config.stages) > 99 * 1024:
        return False
    if obstacles(arch_of(query.device)) or failure_of(_named(tile, args)) is not None:
        return False
    return all(_on_16_bytes(x) for x in (*args[:3], *others))


def _on_16_bytes(tensor: Tensor) -> bool:
    return tensor.data_ptr() % 16 == 0 and not (tensor.stride(0) | tensor.stride(1)) % 8


def _named(tile: int, args: VarlenArgs) -> tuple[Any, ...]:
    """The key under which a failure to compile is remembered."""
    return "attention_varlen", "ragged_backward", tile, args.query.shape[2], args.query.dtype, args.causal


_LAUNCHES = LaunchCache()


def _launch(tile: int, args: VarlenArgs, tensors: tuple[Tensor, ...], has_dlse: bool, config: Sm80Config | None) -> Bound:
    """The launch of a call; its numbers of tokens and sequences are free."""
    query = args.query
    config = config or CONFIGS[tile, query.shape[2]]
    strides = {
        f"{n}_{dim}": s
        for n, x in zip(_STRIDED, tensors, strict=True)
        for dim, s in zip(("row", "head"), x.stride(), strict=False)
    }
    key = (tile, tuple(strides.values()), query.shape[1:], query.dtype, query.device, args.causal, args.scale, has_dlse, config)
    found = _LAUNCHES.get(key)
    if found is None:
        kernel = load(SOURCE, "ragged_backward", options(tile, args, has_dlse, config.stages), query.device)
        shape = (config.programs * multiprocessors(query.device), 2 * tile, shared_bytes(tile, query.shape[2], config.stages))
        found = _LAUNCHES.remember(key, kernel.configure(*shape).bind({**strides, "heads": query.shape[1], "scale": args.scale}))
    return found


def backward(
    args: VarlenArgs, tile: int, members: Tensor, count: Tensor, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor,
    gradients: tuple[Tensor, Tensor, Tensor], config: Sm80Config | None = None,
) -> bool:  # fmt: skip
    """Run the bucket; False if the kernel does not compile here, so that Triton's takes its place."""
    query, key, value = args.query, args.key, args.value
    try:
        launch = _launch(tile, args, (query, key, value, dout, out, *gradients), dlse is not None, config)
    except FAILURES as error:
        disable(_named(tile, args), "the Triton kernel of this bucket", error)
        return False
    tensors = (
        query, key, value, args.cu_seqlens_q, args.cu_seqlens_k, members, count, dout, out, lse, lse if dlse is None else dlse, *gradients,
    )  # fmt: skip
    # the last four pointers are numbers that change from call to call; the other numbers are bound to the launch
    numbers = (query.shape[0], key.shape[0], args.max_q, args.max_k)
    launch(*[x.data_ptr() for x in tensors], *varying(numbers, (QUERIES, KEYS, LONGEST_Q, LONGEST_K)))
    return True
