"""Launch configurations of the short kernels: an explicit one, else the measured table, else a heuristic."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass

from saccade.env import print_config
from saccade.hardware import SMALL_SHARED


@dataclass(frozen=True)
class Config:
    """The launch configuration of one kernel.

    heads: adjacent heads that one program computes.
    q_blocks: blocks that the queries are split into inside a program.
    chunk: width of the head-dim chunks, 0 for the whole head dim at once.
    stages: loads in flight; 1 loads nothing ahead.
    programs_per_sm: persistent programs on each multiprocessor; 0 for one program per problem.
    prefetch: how many problems ahead, in multiples of the number of multiprocessors, each program prefetches into L2; 0 for none.
        (A streaming forward prefetches its own values.)
    max_registers: a cap on the registers of each thread; 0 for none.
    matrix: for a single query, use the matrix kernels with 15 idle query rows instead of the pooling kernels.
    tma: move tiles with the tensor memory accelerator (sm_90 and later), which needs no registers for addresses but some host
        time for descriptors.
    sm90: a form of the CUDA C++ kernels of `sm90.py`, used instead of Triton's; `programs_per_sm` then bounds the registers of a
        thread. "forward"; "backward", where the four tiles of a problem fit; "backward_streamed", where V and dO pass through in
        chunks; "backward_turns", where V and K share their memory; "pooling_backward", for one query.
    persistent: for the sm90 forms, `programs_per_sm` programs on each multiprocessor compute one problem after another.
    """

    warps: int
    heads: int = 1
    q_blocks: int = 1
    chunk: int = 0
    stages: int = 1
    programs_per_sm: int = 0
    prefetch: int = 0
    max_registers: int = 0
    matrix: bool = False
    tma: bool = False
    sm90: str = ""
    persistent: bool = False


def tile_size(extent: int) -> int:
    """The power of two, at least 16 (a matrix instruction's inner length), that holds `extent`."""
    size = 16
    while size < extent:  # compared and not computed, since an extent may be a symbol of a compiled graph
        size *= 2
    return size


def kernel_name(form: str) -> str:
    """The CUDA C++ kernel of a form ("forward", "backward", "backward_streamed", "backward_turns" or "pooling_backward"), and its file."""
    return form if form == "pooling_backward" else f"{form}_sm90"


# (direction, tile rows, tile head dim) -> Config for bf16 and fp16 on sm_90.
# Measured on one H200 by tools/tuner, 16,000 x 8 problems (8,000 x 8 at D = 256):
# benchmarks/results/h200/short_tune.csv
LARGE: dict[tuple[str, int, int], Config] = {
    ("fwd", 32, 32): Config(2, heads=2),  # 0.25 ms, 0.96 of the streaming roof
    ("fwd", 32, 64): Config(4, heads=4),  # 0.48 ms, 0.99
    ("fwd", 32, 128): Config(2),  # 0.95 ms, 1.00
    ("fwd", 32, 256): Config(4, chunk=128, stages=4),  # 0.94 ms, 1.00
    ("fwd", 64, 32): Config(4),  # 0.52 ms, 0.92
    ("fwd", 64, 64): Config(4, max_registers=128),  # 0.96 ms, 0.99
    ("fwd", 64, 128): Config(4, max_registers=168),  # 1.88 ms, 1.00
    ("fwd", 64, 256): Config(4, chunk=128, stages=3),  # 1.88 ms, 1.00
    ("fwd", 128, 32): Config(4, stages=3, programs_per_sm=2, tma=True),  # 1.09 to 1.15 ms, 0.83 to 0.88
    ("fwd", 128, 256): Config(4, chunk=64, stages=3),  # 3.79 ms, 0.99
    ("bwd", 32, 32): Config(2, stages=3, programs_per_sm=4, tma=True),  # 0.48 ms, 0.87
    ("bwd", 32, 64): Config(1, q_blocks=2, stages=3),  # 0.90 ms, 0.92
    ("bwd", 32, 128): Config(2, q_blocks=2, stages=3),  # 1.78 ms, 0.93
    ("bwd", 32, 256): Config(2, prefetch=2),  # 1.78 ms, 0.93
    ("bwd", 64, 32): Config(4),  # 0.97 ms, 0.86
    ("bwd", 64, 64): Config(4, max_registers=128),  # 1.78 ms, 0.93
    ("bwd", 64, 128): Config(4, prefetch=1),  # 3.60 ms, 0.92
    ("pool_fwd", 32, 32): Config(2, heads=2),  # 0.14 ms, 0.89
    ("pool_fwd", 32, 64): Config(2, heads=2, matrix=True),  # 0.26 ms, 0.95
    ("pool_fwd", 32, 128): Config(1, matrix=True),  # 0.50 ms, 0.97
    ("pool_fwd", 32, 256): Config(4, chunk=128, stages=3, matrix=True),  # 0.50 ms, 0.97
    ("pool_fwd", 64, 32): Config(4, heads=4, matrix=True),  # 0.25 ms, 0.95
    ("pool_fwd", 64, 64): Config(4, heads=4, matrix=True),  # 0.49 ms, 0.98
    ("pool_fwd", 64, 128): Config(2, matrix=True),  # 0.96 ms, 1.00
    ("pool_fwd", 64, 256): Config(2, chunk=128, stages=2, matrix=True),  # 0.96 ms, 1.00
    ("pool_fwd", 128, 32): Config(4, heads=4, matrix=True),  # 0.48 ms, 0.99
    ("pool_fwd", 128, 64): Config(2, matrix=True),  # 0.95 ms, 1.00
    ("pool_fwd", 128, 128): Config(4, matrix=True),  # 1.87 ms, 1.01
    ("pool_fwd", 128, 256): Config(4, chunk=128, stages=3, matrix=True),  # 1.86 ms, 1.02
    ("pool_bwd", 32, 32): Config(2, heads=4),  # 0.27 ms, 0.91
    ("pool_bwd", 32, 64): Config(4, heads=4, prefetch=1, matrix=True),  # 0.55 ms, 0.88
    ("pool_bwd", 32, 128): Config(2, stages=3, programs_per_sm=2, matrix=True, tma=True),  # 1.10 ms, 0.88
    ("pool_bwd", 32, 256): Config(2, chunk=128, stages=2, matrix=True),  # 1.21 ms, 0.80
    ("pool_bwd", 64, 32): Config(4, heads=2),  # 0.52 ms, 0.91
    ("pool_bwd", 64, 64): Config(4, heads=2),  # 1.14 ms, 0.84
    ("pool_bwd", 64, 128): Config(4),  # 2.33 ms, 0.82
    ("pool_bwd", 64, 256): Config(2, chunk=128, stages=2, matrix=True),  # 2.45 ms, 0.78
    ("pool_bwd", 128, 32): Config(8, heads=2),  # 1.03 ms, 0.92
    ("pool_bwd", 128, 64): Config(8, heads=2),  # 2.09 ms, 0.91
    ("pool_bwd", 128, 128): Config(4, chunk=64, stages=2, matrix=True, tma=True),  # 4.94 ms, 0.77
    ("pool_bwd", 128, 256): Config(4, chunk=64, stages=4, matrix=True, tma=True),  # 4.96 ms, 0.77
}

# The same for few problems, where descriptors and persistent programs do not pay. Also for calls with a mask, bias, lengths,
# dropout or grouped heads: these need registers and shared memory that the configurations above have already used.
ROBUST: dict[tuple[str, int, int], Config] = {
    ("fwd", 32, 32): Config(2, heads=2),
    ("fwd", 32, 64): Config(2, heads=2),
    ("fwd", 32, 128): Config(2),
    ("fwd", 32, 256): Config(4, chunk=128, stages=2),
    ("fwd", 64, 32): Config(4),
    ("fwd", 64, 64): Config(4),
    ("fwd", 64, 128): Config(4),
    ("fwd", 64, 256): Config(4, chunk=128, stages=2),
    ("fwd", 128, 32): Config(4, q_blocks=2),
    ("fwd", 128, 64): Config(8),
    ("fwd", 128, 128): Config(8, chunk=64, stages=3),
    ("fwd", 128, 256): Config(8, chunk=64, stages=3),
    ("bwd", 32, 32): Config(1, q_blocks=2, stages=3),
    ("bwd", 32, 64): Config(1, q_blocks=2, stages=3),
    ("bwd", 32, 128): Config(2, q_blocks=2, stages=3),
    ("bwd", 32, 256): Config(4, chunk=64, stages=2),
    ("bwd", 64, 32): Config(4),
    ("bwd", 64, 64): Config(4),
    ("bwd", 64, 128): Config(4, chunk=64, stages=2),
    ("bwd", 64, 256): Config(4, chunk=64, stages=3),
    ("bwd", 128, 32): Config(4, q_blocks=2),
    ("bwd", 128, 64): Config(8),
    ("bwd", 128, 128): Config(8, chunk=64, stages=2),
    ("bwd", 128, 256): Config(8, chunk=64, stages=2),
}
# for sm_90, without mask, bias, lengths, dropout or grouped heads, and where tensor maps are possible; used from choice.SM90_ELEMENTS
# elements in a tensor's tiles
SM90: dict[tuple[str, int, int], Config] = {
    ("fwd", 128, 64): Config(4, programs_per_sm=4, sm90="forward"),  # 1.93 ms, 0.99 of the streaming roof
    ("fwd", 128, 128): Config(8, programs_per_sm=2, sm90="forward"),  # 3.78 ms, 1.00
    ("bwd", 64, 128): Config(4, programs_per_sm=2, sm90="backward"),  # 3.46 ms, 0.96
    ("bwd", 64, 256): Config(8, programs_per_sm=2, sm90="backward_turns"),  # 3.52 ms, 0.94
    ("bwd", 128, 32): Config(8, programs_per_sm=2, sm90="backward", persistent=True),  # 2.44 ms, 0.68
    ("bwd", 128, 64): Config(8, programs_per_sm=2, sm90="backward"),  # 3.75 ms, 0.89
    ("bwd", 128, 128): Config(8, programs_per_sm=1, sm90="backward", persistent=True),  # 7.39 ms, 0.90
    ("bwd", 128, 256): Config(8, programs_per_sm=1, sm90="backward_streamed", persistent=True),  # 7.84 ms, 0.85
    ("pool_bwd", 32, 64): Config(1, sm90="pooling_backward"),  # 0.55 ms, 0.88
    ("pool_bwd", 32, 128): Config(1, sm90="pooling_backward"),  # 1.03 ms, 0.94
    ("pool_bwd", 32, 256): Config(2, sm90="pooling_backward"),  # 1.05 ms, 0.92
    ("pool_bwd", 64, 64): Config(1, sm90="pooling_backward"),  # 1.07 ms, 0.89
    ("pool_bwd", 64, 128): Config(2, sm90="pooling_backward"),  # 2.02 ms, 0.94
    ("pool_bwd", 64, 256): Config(2, sm90="pooling_backward"),  # 2.10 ms, 0.91
    ("pool_bwd", 128, 128): Config(2, sm90="pooling_backward"),  # 4.07 ms, 0.93
    ("pool_bwd", 128, 256): Config(4, sm90="pooling_backward"),  # 4.16 ms, 0.91
}

# a bias that the batch shares (Swin windows): persistent programs hold it on chip, and `stages` counts the problems read ahead
SHARED_BIAS: dict[tuple[str, int, int], Config] = {
    ("fwd", 32, 32): Config(2, stages=3, programs_per_sm=8),
    ("fwd", 32, 64): Config(2, stages=3, programs_per_sm=8),
    ("fwd", 64, 32): Config(4, stages=3, programs_per_sm=4),
    ("fwd", 64, 64): Config(4, stages=2, programs_per_sm=4),
    ("bwd", 32, 32): Config(2, stages=3),
    ("bwd", 32, 64): Config(2, stages=2),
    ("bwd", 64, 32): Config(4, stages=3),
    ("bwd", 64, 64): Config(4, stages=2),
}

# a boolean mask, or a bias of one row for all queries: split into query blocks, S = 128 at D = 32 takes 5,500 instructions instead of 900 and
# spills. Under a mask eight warps take 0.19 ms for 12,288 problems where four took 1.07; with a bias 0.15 ms for
# 8,192 on an H100, where four took 0.68 on an H200
UNSPLIT: dict[tuple[str, int, int], Config] = {
    ("fwd", 128, 32): Config(8),
    ("bwd", 128, 32): Config(8),
}


# A bias with a row for each query, which batch rows do not share. The best of 24 shapes for 8,192 problems of 49 tokens on an H100: one warp with 16
# queries at a time takes 0.17 ms, and four warps with 64 queries take 0.23.
OWN_BIAS: dict[tuple[str, int, int], Config] = {("fwd", 64, 32): Config(1, q_blocks=4)}


def heuristic(direction: str, rows: int, dim: int, element_size: int, arch: int = 90) -> Config:
    """A configuration that fits every device: the warps grow with the tile, and the head dim is streamed once tiles are large."""
    area = rows * dim * element_size // 2
    if direction.startswith("pool"):
        chunk = dim if area <= 8192 else max(16, 8192 // rows * 2 // element_size)
        return Config(warps=2 if area <= 4096 else 4 if area <= 8192 else 8, chunk=0 if chunk >= dim else chunk)
    warps = 1 if rows * rows <= 1024 and dim <= 32 else 2 if rows <= 32 else 4 if rows <= 64 else 8
    whole_bytes = (3 if direction == "fwd" else 4) * rows * dim * element_size + rows * rows * element_size
    budget = (48 if arch in SMALL_SHARED else 80) * 1024
    if whole_bytes <= budget or dim <= 16:
        return Config(warps)
    chunk = 64 if arch not in SMALL_SHARED and element_size == 2 else 32 if element_size == 2 else 16
    return Config(max(warps, 4), chunk=min(chunk, dim // 2), stages=2)


@functools.lru_cache(maxsize=4096)
def pick(
    direction: str,
    rows: int,
    dim: int,
    element_size: int,
    arch: int,
    plain: bool = True,
    sm90: bool = False,
    shared_bias: bool = False,
    unsplit: bool = False,
    own_bias: bool = False,
) -> Config:
    """The configuration of a kernel: from the measured tables if they cover the call, else from the heuristic.

    Args:
        direction: "fwd", "bwd", "pool_fwd" or "pool_bwd". rows, dim: tile sizes (powers of two).
        plain: at least `choice.LARGE_PROBLEMS` problems without mask, bias, lengths, dropout or grouped heads, the conditions of the
            measurement.
        sm90: the kernels of `sm90.py` can run the call.
        shared_bias: a bias that the batch shares. unsplit: a boolean mask, or a bias of one row for all queries. own_bias: a
            bias with a row for each query, of its own for each batch row.
    """
    key = (direction, rows, dim)
    chosen = SM90.get(key) if sm90 else SHARED_BIAS.get(key) if shared_bias and arch >= 80 and element_size == 2 else None
    if chosen is None and arch >= 90 and arch not in SMALL_SHARED and element_size == 2:
        featured = UNSPLIT.get(key) if unsplit else OWN_BIAS.get(key) if own_bias else None
        chosen = (LARGE.get(key) if plain else None) or featured or ROBUST.get(key)
    if chosen is None:
        chosen = heuristic(direction, rows, dim, element_size, arch)
    if print_config():
        print(f"saccade: short {direction} rows={rows} dim={dim} sm_{arch}: {chosen}", file=sys.stderr)
    return chosen
