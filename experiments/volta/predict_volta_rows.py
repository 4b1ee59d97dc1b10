"""Predicts each row of SparkAttention's Fig. 10 and 11 on a V100-SXM2-32GB from the clocks that volta_clocks.py counts.

Blocks are dealt to 80 multiprocessors in the order of the grid, each to the first that is free; a block takes its tiles, those
that the causal edge cuts at their own price, times what its warps cost a scheduler. Two figures: `fast`, where pipes overlap and
device memory is read meanwhile, and `slow`, where neither happens. The unfused pipeline, to which the paper compares, is
predicted too: the bytes of its passes over the scores at the memory's full speed, and its products at 90 TFLOP/s. The paper
prints no times, so the model is compared with the averages of its speed-ups; docs/notes/volta.md compares it with times in print
too.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from volta_clocks import calls, counts, span
from volta_common import Setting, grid, write_table

from saccade.exact.volta.config import OWNED_KEYS, backward_tile, forward_tile

PROCESSORS, SCHEDULERS, CLOCK = 80, 4, 1.53e9
BANDWIDTH, MATRIX, MEMORY = 900e9, 90e12, 32e9
KERNELS = ("forward", "forward, float16 sums", "backward", "backward, float16 sums")
# average speed-up over the unfused pipeline (paper 001, 4.2.1 and 4.2.2), of its own kernels; its backward has float16 sums
PAPER = {"forward": 4.44, "forward, float16 sums": 4.66, "backward": 3.44, "backward, float16 sums": 3.44}


@dataclass(frozen=True)
class KernelWork:
    """The work of one problem: (whole tiles, cut tiles) of each block in the order of the grid; blocks of a multiprocessor; warps
    of a block."""

    blocks: list[tuple[int, int]]
    together: int
    warps: int


def is_backward(kernel: str) -> bool:
    """Whether a name of `KERNELS` is one of backward."""
    return kernel.startswith("backward")


def work_of(kernel: str, setting: Setting) -> KernelWork:
    """How the kernel splits one head of one batch row."""
    n = setting.length
    if is_backward(kernel):
        tile = backward_tile(setting.dim, 70)
        # of 64 keys: queries from the first key's tile on, cut while they reach below the last key
        spans = [(first // tile.rows * tile.rows, first + OWNED_KEYS - 1) for first in range(0, n, OWNED_KEYS)]
        blocks = [
            _split(range(start if setting.is_causal else 0, n, tile.rows), lambda q, last=last: setting.is_causal and q < last)
            for start, last in spans
        ]
        return KernelWork(blocks, tile.blocks, tile.warps)
    tile = forward_tile(setting.dim, n, False, 70)
    own, blocks = 32 * tile.row_tiles, []
    for first in reversed(range(0, n, tile.rows)):
        end = min(n, first + tile.rows) if setting.is_causal else n
        # the last warp has most tiles, and cuts those that reach beyond its first query; the others wait for it
        last_warp = first + tile.rows - own
        blocks.append(_split(range(0, end, tile.keys), lambda k, q=last_warp: setting.is_causal and k + tile.keys - 1 > q))
    return KernelWork(blocks, tile.blocks, tile.warps)


def _split(tiles: range, is_cut) -> tuple[int, int]:
    cut = sum(bool(is_cut(x)) for x in tiles)
    return len(tiles) - cut, cut


def seconds(work: KernelWork, problems: int, whole: float, cut: float) -> float:
    """The time until the last block is done; clocks are those of a scheduler for a tile of a warp."""
    price = work.together * work.warps / SCHEDULERS / CLOCK
    free = [0.0] * (PROCESSORS * work.together)
    for _ in range(problems):
        for a, b in work.blocks:
            heapq.heapreplace(free, free[0] + (a * whole + b * cut) * price)
    return max(free)


def bytes_moved(kernel: str, setting: Setting) -> int:
    """Through device memory: each tensor as often as the launches of that direction read or write it, tiles read again from
    L2."""
    batch, heads, length, dim = setting.shape
    rows = batch * heads * length
    half, single = 2 * rows * dim, 4 * rows * dim
    if not is_backward(kernel):
        return 4 * half + 4 * rows
    # delta: two tensors; backward: q, k, v, dout, dk, dv, and sums cleared, read, written; dq from the sums
    return 2 * half + 6 * half + 3 * single + single + half + 4 * 4 * rows


def unfused_seconds(direction: str, setting: Setting) -> float | None:
    """The time of the unfused pipeline; None if four copies of its scores do not fit the device."""
    if 4 * setting.score_bytes > MEMORY:
        return None
    # forward: product, softmax, dropout and its byte mask, product; backward: of the product, of dropout, of softmax, two
    # products more. The causal mask is a pass of its own
    passes = (6.5 if direction == "fwd" else 9.5) + 2 * setting.is_causal
    batch, heads, length, dim = setting.shape
    # it skips nothing under a causal mask
    products = 4.0 * batch * heads * length**2 * dim * (1 if direction == "fwd" else 2)
    return passes * setting.score_bytes / BANDWIDTH + products / MATRIX


def kernel_seconds(kernel: str, setting: Setting) -> tuple[float, float]:
    """The least and the most time of one of `KERNELS`."""
    call = calls(setting.dim, setting.is_causal, setting.dropout_p)[kernel]
    (fast, slow), (fast_cut, slow_cut) = span(counts(call)), span(counts(call, whole=False))
    batch, heads, *_ = setting.shape
    work, memory = work_of(kernel, setting), bytes_moved(kernel, setting) / BANDWIDTH
    return max(seconds(work, batch * heads, fast, fast_cut), memory), seconds(work, batch * heads, slow, slow_cut) + memory


def rows() -> list[dict[str, str]]:
    """Every row of both figures."""
    found = []
    for kernel in KERNELS:
        direction = "bwd" if is_backward(kernel) else "fwd"
        for setting in grid():
            memory = bytes_moved(kernel, setting) / BANDWIDTH
            least, most = kernel_seconds(kernel, setting)
            flops = setting.flops * (2.5 if direction == "bwd" else 1.0)
            other = unfused_seconds(direction, setting)
            found.append({
                "kernel": kernel, "n": str(setting.length), "D": str(setting.dim), "causal": "yes" if setting.is_causal else "no",
                "ms_fast": f"{1e3 * least:.2f}", "ms_slow": f"{1e3 * most:.2f}", "tflops_fast": f"{flops / least / 1e12:.1f}",
                "tflops_slow": f"{flops / most / 1e12:.1f}", "memory_ms": f"{1e3 * memory:.2f}",
                "unfused_ms": "" if other is None else f"{1e3 * other:.2f}",
                "speed-up_slow": "" if other is None else f"{other / most:.2f}", "speed-up_fast": "" if other is None else f"{other / least:.2f}",
            })  # fmt: skip
    return found


def write(path: Path) -> None:
    """The rows as a CSV; the average speed-ups beside the paper's, printed."""
    found = rows()
    write_table(path, found)
    print(f"{path}\n\n| | n | " + " | ".join(f"D = {d}{c}" for d in (64, 128) for c in ("", ", causal")) + " |\n|" + "---|" * 6)
    cells: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row in found:
        cells[row["kernel"], row["n"]].append(
            f"{row['ms_fast']} to {row['ms_slow']} ms, {row['tflops_slow']} to {row['tflops_fast']}"
        )
    for (kernel, length), texts in cells.items():
        print(f"| {kernel} | {length} | " + " | ".join(texts) + " |")
    for kernel, paper in PAPER.items():
        ratios = [[float(r[x]) for r in found if r["kernel"] == kernel and r[x]] for x in ("speed-up_slow", "speed-up_fast")]
        slow, fast = (sum(x) / len(x) for x in ratios)
        print(f"{kernel} over unfused, predicted: x{slow:.2f} to x{fast:.2f} on average; the paper measured x{paper} for its own")
