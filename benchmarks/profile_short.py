"""The profile of paper 002: utilisation, shared memory, active warps and local traffic of the main kernels, ours and the peers'.

    python benchmarks/profile_short.py [--out profile.csv] [--shape 128/128/64 ...]

Runs itself under Nsight Compute (`ncu`, which must be allowed to read the counters), one launch of each kernel, and prints a
table in Markdown. A shape, queries / S / D, takes about ten seconds, D = 256 longer. Clocks are left as they are.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from machine import commit
from ncu import Launch, NcuFailed, case, markdown, profile, write

SHAPES = [
    (32, 32, 64),
    (64, 64, 64),
    (64, 64, 256),
    (128, 128, 64),
    (128, 128, 128),
    (128, 128, 256),
    (256, 256, 64),
    (512, 512, 64),
    (1, 32, 64),
    (1, 128, 64),
    (1, 128, 128),
]  # (queries, S, D)
TOKENS = 16_000 * 128  # a row of the table has at most so many, and at most 16,000 sequences of 8 heads; at D = 256 half of both
# Nsight Compute's counter -> (column, what one unit of it is in the column's)
METRICS = {
    "gpu__time_duration.sum": ("time (us)", 1e-3),
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": ("SM (%)", 1),
    "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed": ("memory (%)", 1),
    "launch__shared_mem_per_block": ("shared memory / block (KB)", 1 / 1024),
    "launch__registers_per_thread": ("registers", 1),
    "sm__warps_active.avg.pct_of_peak_sustained_active": ("active warps (%)", 1),
    "smsp__inst_executed_op_local_ld.sum": ("local loads", 1),
    "smsp__inst_executed_op_local_st.sum": ("local stores", 1),
}
# our kernels in Triton and in CUDA C++, and the main kernels of SDPA's flash, efficient and cuDNN backends (not their small helpers)
KERNELS = (
    r"regex:_fwd_|_bwd_|forward_sm90|backward_([a-z]+_)?sm90|bias_gradient_sm90|pooling_backward|flash_(fwd|bwd)_kernel|flash_bwd_dq_dk_dv|fmha_cutlass"
    r"|cudnn.*sdpa"
)


def main() -> int:
    """Parse the command line and run; returns an exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=None, help="also write the rows to this CSV")
    parser.add_argument("--shape", action="append", type=shape_of, help="queries / S / D, one of the table's; may be repeated")
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    shapes = options.shape or SHAPES
    if options.inner:
        run_each_once(shapes)
        return 0
    given = [f"--shape={'/'.join(map(str, shape))}" for shape in shapes]
    try:
        launches = profile(__file__, KERNELS, list(METRICS), given)
        complete(launches, shapes)
    except NcuFailed as error:
        print(error, file=sys.stderr)
        return 1
    rows = [row_of(launch) | {"commit": commit()} for launch in launches]
    print(markdown(rows, ["queries", "S", "D", "implementation", "kernel", *(column for column, _ in METRICS.values())]))
    if options.out is not None:
        write(rows, options.out)
    return 0


def shape_of(text: str) -> tuple[int, ...]:
    """A shape of the command line."""
    known = {"/".join(map(str, shape)): shape for shape in SHAPES}
    if text not in known:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(known)}")
    return known[text]


def run_each_once(shapes: list[tuple[int, ...]]) -> None:
    """Forward and backward of each shape and implementation, compiled before, then once inside an NVTX range."""
    import torch
    from peers import peers
    from short_common import Shape

    import saccade

    calls = {"saccade": saccade.attention, **peers(with_fa4=False)}
    for queries, length, dim in shapes:
        for name, call in calls.items():
            # a range belongs to a thread, and autograd would run backward in another one
            torch.autograd.set_multithreading_enabled(False)
            leaves, qkv, dout = Shape(sequences(length, dim), 8, queries, length, dim).leaves()
            torch.autograd.grad(call(*qkv), leaves, dout)
            with case(f"{queries}/{length}/{dim}/{name}"):
                torch.autograd.grad(call(*qkv), leaves, dout)
            del leaves, qkv, dout


def sequences(length: int, dim: int) -> int:
    """How many of a shape are computed at once."""
    return min(16_000, TOKENS // length) // (2 if dim == 256 else 1)


def complete(launches: list[Launch], shapes: list[tuple[int, ...]]) -> None:
    """Refuse a profile in which a case has less than a forward and a backward kernel: KERNELS does not know one of their names."""
    for queries, length, dim in shapes:
        own = [launch.kernel for launch in launches if launch.case == f"{queries}/{length}/{dim}/saccade"]
        if len(own) < 2:
            raise NcuFailed(f"{queries} queries, S = {length}, D = {dim}: of forward and backward only {own} were found")


def row_of(launch: Launch) -> dict[str, str]:
    """Queries, S, D, implementation, kernel and the metrics."""
    queries, length, dim, name = launch.case.split("/")
    row = {"queries": queries, "S": length, "D": dim, "implementation": name, "kernel": launch.kernel[:48]}
    return row | {column: f"{launch.counters[m] * unit:.4g}" for m, (column, unit) in METRICS.items() if m in launch.counters}


if __name__ == "__main__":
    sys.exit(main())
