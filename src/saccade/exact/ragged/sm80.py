"""CUDA C++ for buckets of 64 and 128 tokens (`cuda/`): products of 16 rows at a time, so that a tile costs what its sequence needs.

Triton multiplies whole tiles, by warpgroups on sm_90: a sequence of 70 tokens costs 128 x 128 pairs there, and 80 x 80 here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from saccade.exact.varlen.args import VarlenArgs
from saccade.hardware import arch_of, multiprocessors
from saccade.launch.aside import FAILURES, failure_of, set_aside
from saccade.launch.cache import LaunchCache
from saccade.launch.constants import LOG2E
from saccade.launch.cuda import HEADERS
from saccade.nvrtc import Bound, Options, Source, load, obstacles

_FOLDER = Path(__file__).parent / "cuda"
SOURCES = {name: Source(_FOLDER / f"{name}.cu", (HEADERS,)) for name in ("forward", "backward")}
HEAD_DIMS = (32, 64, 128)
TILES = (64, 128)
_STRIDES = {"forward": 8, "backward": 16}
_KINDS = {
    # seven inputs, out and lse; in backward dout, out, lse, dlse and three gradients; the totals come as numbers in the place of pointers,
    # because they change from call to call
    "forward": (*["pointer"] * 11, *["int64"] * 8, *["int32"] * 3, "float32"),
    "backward": (*["pointer"] * 16, *["int64"] * 16, *["int32"] * 3, "float32"),
}


@dataclass(frozen=True)
class Sm80Config:
    """stages: sequences in shared memory at a time. programs: thread blocks for each multiprocessor."""

    stages: int
    programs: int


def shared_bytes(direction: str, tile: int, head_dim: int, stages: int) -> int:
    """Dynamic shared memory of a block; the sources check it."""
    rows = tile * head_dim * 2
    return stages * 3 * rows if direction == "forward" else stages * 4 * rows + 2 * tile * tile + 8 * tile


def pick(direction: str, tile: int, head_dim: int) -> Sm80Config:
    """What was measured best on one H200."""
    stages = 1 if shared_bytes(direction, tile, head_dim, 2) > 100 * 1024 else 2
    return Sm80Config(stages, 4)


def options(direction: str, tile: int, args: VarlenArgs, has_dlse: bool, stages: int) -> Options:
    """How a kernel is compiled for a call."""
    head_dim = args.query.shape[2]
    own = {"HAS_DLSE": has_dlse} if direction == "backward" else {}
    return Options.of({
        "HEAD_DIM": head_dim, "ROWS": tile, "WARPS": tile // 16, "STAGES": stages, "CAUSAL": args.causal,
        "BF16": args.query.dtype == torch.bfloat16, "SHARED_BYTES": shared_bytes(direction, tile, head_dim, stages), **own,
    })  # fmt: skip


def takes(direction: str, tile: int, args: VarlenArgs, *others: Tensor) -> bool:
    """Whether these kernels take the bucket of a call. others: dout, out and the gradients."""
    query, key = args.query, args.key
    if query.device.type != "cuda" or arch_of(query.device) < 80 or query.element_size() != 2 or tile not in TILES:
        return False
    if query.shape[2] not in HEAD_DIMS or query.shape[1] != key.shape[1] or not args.scale > 0:
        return False
    if args.bias is not None or args.seed is not None or obstacles(arch_of(query.device)):
        return False
    if shared_bytes(direction, tile, query.shape[2], 1) > 96 * 1024 and arch_of(query.device) in (86, 89, 120, 121):
        return False
    return all(_on_16_bytes(x) for x in (*args[:3], *others)) and failure_of(_named(direction, tile, args)) is None


def _on_16_bytes(tensor: Tensor) -> bool:
    return tensor.data_ptr() % 16 == 0 and not (tensor.stride(0) | tensor.stride(1)) % 8


def _named(direction: str, tile: int, args: VarlenArgs) -> tuple[Any, ...]:
    return "attention_varlen", f"ragged_{direction}", tile, args.query.shape[2], args.query.dtype, args.causal


_LAUNCHES = LaunchCache()


def _launch(
    direction: str, tile: int, args: VarlenArgs, tensors: tuple[Tensor, ...], has_dlse: bool, config: Sm80Config | None
) -> Bound:
    query = args.query
    config = config or pick(direction, tile, query.shape[2])
    strides = tuple([stride for tensor in tensors for stride in tensor.stride()[:2]])
    key = (
        direction, tile, strides, args.max_q, args.max_k, query.shape[1:], query.dtype, query.device, args.causal, args.scale, has_dlse, config,
    )  # fmt: skip
    found = _LAUNCHES.get(key)
    if found is None:
        compiled = options(direction, tile, args, has_dlse, config.stages)
        kernel = load(SOURCES[direction], f"ragged_{direction}", _KINDS[direction], compiled, query.device)
        shape = (
            config.programs * multiprocessors(query.device),
            2 * tile,
            shared_bytes(direction, tile, query.shape[2], config.stages),
        )
        scale = args.scale * LOG2E if direction == "forward" else args.scale
        bound = kernel.configure(*shape).bind(*strides, args.max_q, args.max_k, query.shape[1], scale)
        found = _LAUNCHES.remember(key, bound)
    return found


def forward(
    args: VarlenArgs, tile: int, members: Tensor, count: Tensor, out: Tensor, lse: Tensor, config: Sm80Config | None = None
) -> bool:
    """Run the bucket; False where the kernel does not compile here, so that Triton's takes its place."""
    query, key, value = args.query, args.key, args.value
    try:
        launch = _launch("forward", tile, args, (query, key, value, out), False, config)
    except FAILURES as error:
        set_aside(_named("forward", tile, args), "the Triton kernel of this bucket", error)
        return False
    read = (query, key, value, args.cu_seqlens_q, args.cu_seqlens_k, members, count, out, lse)
    launch(*[x.data_ptr() for x in read], query.shape[0], key.shape[0])
    return True


def backward(
    args: VarlenArgs, tile: int, members: Tensor, count: Tensor, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor,
    gradients: tuple[Tensor, Tensor, Tensor], config: Sm80Config | None = None,
) -> bool:  # fmt: skip
    """Run the bucket; False as `forward`."""
    query, key, value = args.query, args.key, args.value
    try:
        launch = _launch("backward", tile, args, (query, key, value, dout, out, *gradients), dlse is not None, config)
    except FAILURES as error:
        set_aside(_named("backward", tile, args), "the Triton kernel of this bucket", error)
        return False
    tensors = (
        query, key, value, args.cu_seqlens_q, args.cu_seqlens_k, members, count, dout, out, lse, lse if dlse is None else dlse, *gradients,
    )  # fmt: skip
    launch(*[x.data_ptr() for x in tensors], query.shape[0], key.shape[0])
    return True
