"""Compares the bytes that each Volta kernel moves through device memory with the minimum: every operand read once, every result
written once.

    python benchmarks/profile_volta.py [--out profile.csv]

Runs itself under Nsight Compute (`ncu`, which must be allowed to read the counters), one launch of each kernel from cold caches.
The
emulation of the matrix instruction does not change the counted traffic of the tiling, but the L2 cache of a GPU does: an H200 has
50 MB, a V100 6 MB.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ncu import Launch, NcuFailed, case, markdown, profile, write

SHAPES = [(n, dim, causal) for n in (1024, 4096) for dim in (64, 128) for causal in (False, True)]
HIDDEN, TOKENS = 2048, 16384
READ, WRITTEN, CACHE, TIME = "dram__bytes_read.sum", "dram__bytes_write.sum", "lts__t_bytes.sum", "gpu__time_duration.sum"
# tensors of 2 and of 4 bytes a number `[B, H, n, D]`, and of 4 bytes a row `[B, H, n]`, that a kernel reads and writes at least.
# backward adds to float32 sums that were cleared just before: they are read and written
FEWEST = {
    "volta_forward": ((3, 0, 0), (1, 0, 1)),
    "volta_delta": ((2, 0, 1), (0, 0, 2)),
    "volta_backward atomic": ((4, 1, 2), (2, 1, 0)),
    "volta_backward deterministic": ((4, 0, 2), (2, 0, 0)),
    "volta_query_gradient": ((4, 0, 2), (1, 0, 0)),
}
HEAD = [
    "kernel",
    "n",
    "D",
    "causal",
    "read (MB)",
    "written (MB)",
    "fewest read",
    "fewest written",
    "ratio",
    "L2 (MB)",
    "time (us)",
]


def main() -> int:
    """Parse the command line and run; returns an exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=None, help="also write the rows to this CSV")
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inner:
        run_each_once()
        return 0
    try:
        launches = profile(__file__, "regex:volta_", [READ, WRITTEN, CACHE, TIME])
    except NcuFailed as error:
        print(error, file=sys.stderr)
        return 1
    rows = [row_of(launch) for launch in launches]
    print(markdown(rows, HEAD))
    if options.out is not None:
        write(rows, options.out)
    return 0


def run_each_once() -> None:
    """Forward and both ways of backward of each shape, compiled before, then once inside a range."""
    import torch

    import saccade

    # a range belongs to a thread, and autograd would run backward in another one
    torch.autograd.set_multithreading_enabled(False)
    for length, dim, causal in SHAPES:
        shape = (TOKENS // length, length, HIDDEN // dim, dim)
        *leaves, dout = (torch.randn(shape, device="cuda").half().transpose(1, 2) for _ in range(4))
        leaves = [x.requires_grad_() for x in leaves]
        attend = lambda x=leaves, c=causal: saccade.attention(*x, is_causal=c, backend="volta")  # noqa: E731
        torch.autograd.grad(attend(), leaves, dout)
        with case(f"{length}/{dim}/{int(causal)}/atomic"):
            torch.autograd.grad(attend(), leaves, dout)
        out = attend()
        torch.use_deterministic_algorithms(True)
        torch.autograd.grad(out, leaves, dout, retain_graph=True)
        with case(f"{length}/{dim}/{int(causal)}/deterministic"):
            torch.autograd.grad(out, leaves, dout)
        torch.use_deterministic_algorithms(False)


def row_of(launch: Launch) -> dict[str, str]:
    """One line of the table, in MB."""
    length, dim, causal, way = launch.case.split("/")
    kernel = launch.kernel.split("(")[0]
    name = f"{kernel} {way}" if kernel == "volta_backward" else kernel
    rows = TOKENS * (HIDDEN // int(dim))
    fewest = [(2 * halves + 4 * floats) * rows * int(dim) + 4 * of_rows * rows for halves, floats, of_rows in FEWEST[name]]
    read, written, cache = (launch.counters[x] / 1e6 for x in (READ, WRITTEN, CACHE))
    ratio = (read + written) / (sum(fewest) / 1e6)
    values = [name, length, dim, "yes" if causal == "1" else "no", f"{read:.1f}", f"{written:.1f}", *(f"{x / 1e6:.1f}" for x in fewest),
              f"{ratio:.3f}", f"{cache:.0f}", f"{launch.counters[TIME] / 1e3:.1f}"]  # fmt: skip
    return dict(zip(HEAD, values, strict=True))


if __name__ == "__main__":
    sys.exit(main())
