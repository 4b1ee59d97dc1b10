"""Predicts SDPA's memory-efficient kernel on a V100-SXM2 from the instructions of its own binary, and ours beside it.

    python experiments/volta/predict_volta_peer.py [--out benchmarks/results/predictions/volta_peer_rows.csv]

The counts are those that volta_peer.py read (results/predictions/volta_peer.csv); what they cost is the model of volta_clocks.py and
predict_volta_rows.py, the same for both kernels. The sizes are those of SparkAttention's grid without dropout. If the model had
to assume something, it favours the peer: tiles that the causal edge cuts cost as much as whole ones, no maximum rises, and the work
of backward is spread evenly over the multiprocessors, whichever way torch splits the keys. Its backward keeps the float32 sums of dQ
in device memory, where each block of keys reads and writes all of them: those bytes are counted, at the memory's full speed.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from predict_volta_rows import BANDWIDTH, CLOCK, PROCESSORS, SCHEDULERS, KernelWork, bytes_moved, kernel_seconds, seconds, work_of
from volta_clocks import PEAK, PIPES, calls, clocks, counts, span
from volta_common import Setting, grid, write_table

COUNTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "predictions" / "volta_peer.csv"
REGISTERS = 65536
# all overlaps, nothing but products with their own loads does, nothing at all does
FIGURES = ("fast", "slow", "serial")
# ms of this kernel forward on a V100-SXM2, from xFormers' pull request 434: 160 heads, D = 128, no dropout
MEASURED = {4096: 38.6, 8192: 150.0}


class Kernel(NamedTuple):
    """A kernel of torch: its tile, the warps of a block and the registers of a thread."""

    direction: str
    dim: int
    rows: int
    keys: int
    warps: int
    registers: int


def read(path: Path = COUNTS) -> dict[Kernel, Counter[str]]:
    """The instructions of a tile of each kernel."""
    with open(path, newline="") as handle:
        table = list(csv.DictReader(handle))
    found: dict[Kernel, Counter[str]] = {}
    for row in table:
        dim, high, wide, warps, registers = (int(row[x]) for x in ("D", "rows", "keys", "warps", "registers"))
        kernel = Kernel(row["direction"], dim, high, wide, warps, registers)
        found.setdefault(kernel, Counter())[row["instruction"]] = int(row["count"])
    return found


def tiles(kernel: Kernel, setting: Setting) -> list[int]:
    """The tiles of each block of one head: those that any query sees."""
    n = setting.length
    if kernel.direction == "forward":
        ends = [min(n, first + kernel.rows) if setting.is_causal else n for first in range(0, n, kernel.rows)]
        return [math.ceil(end / kernel.keys) for end in ends]
    starts = [first // kernel.rows * kernel.rows if setting.is_causal else 0 for first in range(0, n, kernel.keys)]
    return [math.ceil((n - start) / kernel.rows) for start in starts]


def computing(kernel: Kernel, setting: Setting, heads: int, price: float) -> float:
    """Seconds for all heads without device memory; price: clocks of a scheduler for a tile of a warp."""
    each = tiles(kernel, setting)
    if kernel.direction == "forward":
        together = REGISTERS // (32 * kernel.warps * kernel.registers)
        return seconds(KernelWork([(x, 0) for x in each], together, kernel.warps), heads, price, price)
    return heads * sum(each) * price * kernel.warps / SCHEDULERS / CLOCK / PROCESSORS


def bytes_of(kernel: Kernel, setting: Setting, heads: int) -> float:
    """Through device memory: every tensor once; in backward the sums of dQ are read and written by each tile that touches them, but for the
    first read and the last write."""
    rows = heads * setting.length
    if kernel.direction == "forward":
        return 4 * 2 * rows * setting.dim + 4 * rows
    sums = 2 * 4 * heads * sum(tiles(kernel, setting)) * kernel.rows * setting.dim - 4 * 2 * rows * setting.dim
    return 8 * 2 * rows * setting.dim + sums + 4 * 2 * rows


def peer_seconds(kernel: Kernel, found: Counter[str], setting: Setting, heads: int) -> tuple[float, float, float]:
    """The least and the most time, and the time if nothing overlaps at all."""
    fast, slow, none = (computing(kernel, setting, heads, price) for price in (*span(found), serial(found)))
    memory = bytes_of(kernel, setting, heads) / BANDWIDTH
    return max(fast, memory), slow + memory, none + memory


def our_seconds(direction: str, setting: Setting) -> tuple[float, float, float]:
    """The same of our kernel with float32 sums."""
    call = calls(setting.dim, setting.is_causal, 0.0)[direction]
    whole, cut = serial(counts(call)), serial(counts(call, whole=False))
    batch, heads, *_ = setting.shape
    none = seconds(work_of(direction, setting), batch * heads, whole, cut) + bytes_moved(direction, setting) / BANDWIDTH
    return *kernel_seconds(direction, setting), none


def serial(found: Counter[str]) -> float:
    """Clocks of a scheduler for a tile of a warp if nothing overlaps at all, not even products with their own loads."""
    pipes = clocks(found)
    return pipes["tensor"] + pipes["shared"] + found.total() - found["HMMA"] - sum(found[name] for name in PIPES["shared"])


def row_of(kernel: Kernel, found: Counter[str], setting: Setting) -> dict[str, str]:
    """One row: the peer, ours, and how many times as fast ours is, each for `FIGURES`."""
    heads = setting.shape[0] * setting.shape[1]
    theirs, ours = peer_seconds(kernel, found, setting, heads), our_seconds(kernel.direction, setting)
    row = {
        "direction": kernel.direction, "n": str(setting.length), "D": str(setting.dim), "causal": "yes" if setting.is_causal else "no",
        "peer_memory_ms": f"{1e3 * bytes_of(kernel, setting, heads) / BANDWIDTH:.2f}",
        "volta_memory_ms": f"{1e3 * bytes_moved(kernel.direction, setting) / BANDWIDTH:.2f}",
    }  # fmt: skip
    for figure, a, b in zip(FIGURES, theirs, ours, strict=True):
        row |= {f"peer_ms_{figure}": f"{1e3 * a:.2f}", f"volta_ms_{figure}": f"{1e3 * b:.2f}", f"gain_{figure}": f"{a / b:.2f}"}
    return row


def rows(found: dict[Kernel, Counter[str]]) -> list[dict[str, str]]:
    """Both directions of the grid."""
    problems = grid(dropout_p=0.0)
    return [row_of(kernel, counted, x) for kernel, counted in found.items() for x in problems if x.dim == kernel.dim]


def line_of(kernel: Kernel, found: Counter[str]) -> str:
    """One row of the table of pipes, as predict_volta.py prints ours."""
    pipes = clocks(found)
    cells = " | ".join(f"{pipes[p]:.0f}" for p in ("tensor", "shared", "issue", "special", "float", "integer"))
    best, worst = (pipes["tensor"] / x for x in span(found))
    binds = max(pipes, key=pipes.__getitem__)
    return f"| {kernel.direction}, D = {kernel.dim} | {cells} | {binds} | {worst:.2f} to {best:.2f} | {PEAK * worst:.0f} to {PEAK * best:.0f} |"


def check(found: dict[Kernel, Counter[str]]) -> None:
    """Print the prediction beside what was measured."""
    kernel = next(x for x in found if x.direction == "forward" and x.dim == 128)
    for length, measured in MEASURED.items():
        setting = Setting(length, 128, dropout_p=0.0)
        fast, slow, none = (1e3 * x for x in peer_seconds(kernel, found[kernel], setting, 160))
        print(
            f"n = {length}, 160 heads, D = 128, in ms: {fast:.1f} to {slow:.1f}, without overlap {none:.1f}, measured {measured}"
        )


def main() -> None:
    """Print the table of pipes, the check and the rows; write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=None, help="write the rows to this CSV")
    options = parser.parse_args()
    found = read()
    print("| kernel of torch | tensor | shared | issue | special | float | integer | binds | of the tensor peak | TFLOP/s |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for kernel, instructions in found.items():
        print(line_of(kernel, instructions))
    check(found)
    table = rows(found)
    for row in table:
        print("  ".join(row.values()))
    if options.out is not None:
        write_table(options.out, table)


if __name__ == "__main__":
    main()
