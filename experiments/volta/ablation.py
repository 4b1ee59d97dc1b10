"""The worth of the conversion to float32 before the softmax: forward with float16 sums, with it and without (paper 001, section 3.3).

    python experiments/volta/ablation.py [--out benchmarks/results/cpu] [--lengths 512 1024 2048]        # a CPU with g++, minutes

The paper reports an average absolute error of 0.1 without the conversion; it names neither inputs nor sizes. The kernel is `volta_forward` with
HALF_SUMS in the emulator of the tests. Without the conversion, a copy of its source rounds to float16 after each operation of the online softmax: shift,
exponent, weight, sum of weights, and the factor by which sums shrink. `volta_ablation.csv` has a row for each length, softmax and standard deviation of the scores, errors
in percent as in `tables/volta_accuracy.py`: relative, mean |x - ref| / mean |ref|, and absolute, mean |x - ref|.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from saccade.exact.args import AttentionArgs
from saccade.exact.volta import launchers
from saccade.nvrtc import Source

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests")]

import emulator  # noqa: E402
from machine import machine  # noqa: E402

ARCH, DIM = 70, 64
SPREADS = (1, 4)  # standard deviation of the scores
INCLUDED = '#include "visible.cuh"\n'
ROUNDED = "__device__ __forceinline__ float rounded(float x) { return floats_of(pack(x, x)).x; }\n"
# what the kernel has once -> the same in float16
REPLACED = {
    INCLUDED: INCLUDED + ROUNDED,
    "most[r] * rest + HEADROOM;": "rounded(most[r] * rest + HEADROOM);",
    "shrunk[r] = exp2_fast(fmaf(state.most[t][r], rest, HEADROOM - shift[r]));":
        "shrunk[r] = rounded(exp2_fast(rounded(fmaf(state.most[t][r], rest, HEADROOM - shift[r]))));",
    "state.total[t][r] *= shrunk[r];": "state.total[t][r] = rounded(state.total[t][r] * shrunk[r]);",
    "score = exp2_fast(fmaf(score, rest, -shift[row_index(i)]));":
        "score = rounded(exp2_fast(rounded(fmaf(rounded(score * rest), 1.0f, -shift[row_index(i)]))));",
    "state.total[t][row_index(i)] += score;": "state.total[t][row_index(i)] = rounded(state.total[t][row_index(i)] + score);",
    "1.0f / (total * survival);": "rounded(1.0f / rounded(total * survival));",
}  # fmt: skip


def without_conversion(folder: Path) -> Path:
    """A copy of the kernel's folder in which the softmax is in float16; its forward.cu.

    Raises:
        ValueError: the kernel has a line not once.
    """
    copy = Path(shutil.copytree(launchers._CUDA, folder / "cuda"))
    path = copy / "forward.cu"
    text = path.read_text(encoding="utf-8")
    for before, after in REPLACED.items():
        if text.count(before) != 1:
            raise ValueError(f"{path.name} has {text.count(before)} times: {before}")
        text = text.replace(before, after)
    path.write_text(text, encoding="utf-8")
    return path


def forward(query: Tensor, key: Tensor, value: Tensor, path: Path | None = None) -> Tensor:
    """The output by the kernel, or by the one in a file, emulated."""
    source = launchers._source("volta_forward")

    def launch(make: Callable[..., object], tensors: tuple[Tensor | None, ...], *options: object) -> None:
        call = make(*tensors, *options, ARCH)
        emulator.run(call._replace(source=Source(path, source.headers) if path else source))  # type: ignore[attr-defined]

    before, launchers._run = launchers._run, launch
    try:
        return launchers.forward(
            AttentionArgs(query, key, value, None, None, None, None, 0.0, False, query.shape[3] ** -0.5), True
        )[0]
    finally:
        launchers._run = before


def errors(found: Tensor, query: Tensor, key: Tensor, value: Tensor) -> tuple[float, float]:
    """(relative, absolute) against float64, in percent."""
    q, k, v = (x.double() for x in (query, key, value))
    exact = torch.softmax(q @ k.mT * q.shape[3] ** -0.5, -1) @ v
    absolute = 100 * (found.double() - exact).abs().mean().item()
    return absolute / exact.abs().mean().item(), absolute


def measure(lengths: list[int]) -> list[dict[str, object]]:
    """A row for each length, spread of the scores and softmax."""
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        paths = {"float32": None, "float16": without_conversion(Path(folder))}
        for length in lengths:
            torch.manual_seed(length)
            query, key, value = torch.randn(3, 1, 1, length, DIM)
            for spread, (name, path) in itertools.product(SPREADS, paths.items()):
                inputs = [x.half() for x in (spread * query, key, value)]
                relative, absolute = errors(forward(*inputs, path), *inputs)
                row = {"softmax": name, "length": length, "spread": spread, "dim": DIM}
                row |= {"relative": f"{relative:.4f}", "absolute": f"{absolute:.5f}"}
                print("  ".join(f"{column} {x}" for column, x in row.items()), flush=True)
                rows.append({**row, **machine()})
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "cpu")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048])
    given = parser.parse_args(arguments)
    if emulator.COMPILER is None:
        parser.error("g++ is missing, which compiles the emulated kernel")
    rows = measure(given.lengths)
    given.out.mkdir(parents=True, exist_ok=True)
    with (given.out / "volta_ablation.csv").open("w", newline="") as handle:
        writer = csv.DictWriter(handle, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(given.out / "volta_ablation.csv")
    return 0


if __name__ == "__main__":
    sys.exit(main())
