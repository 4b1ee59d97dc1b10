"""Predicts which resource limits the Volta kernels on a V100, from their machine instructions and without a GPU. Prints a table.

    python experiments/volta/predict_volta.py [--out benchmarks/results/predictions/volta.csv]

With `--out`, also every row of the paper's Fig. 10 and 11: see predict_volta_rows.py. volta_clocks.py says what is counted.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from predict_volta_rows import write
from volta_clocks import PEAK, calls, clocks, counts, span

from saccade.launch.cuda import CudaLaunch


def line_of(name: str, call: CudaLaunch) -> str:
    """One row of the table."""
    found = counts(call)
    pipes = clocks(found)
    cells = " | ".join(f"{pipes[p]:.0f}" for p in ("tensor", "shared", "issue", "special", "float", "integer"))
    best, worst = (pipes["tensor"] / x for x in span(found))
    return f"| {name} | {cells} | {max(pipes, key=pipes.__getitem__)} | {worst:.2f} to {best:.2f} | {PEAK * worst:.0f} to {PEAK * best:.0f} |"


def main() -> None:
    """Print the table; write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=None, help="write each row of Fig. 10 and 11 to this CSV")
    options = parser.parse_args()
    print("| kernel | tensor | shared | issue | special | float | integer | binds | of the tensor peak | TFLOP/s |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for dim in (64, 128):
        for dropout_p in (0.0, 0.1):
            for name, call in calls(dim, False, dropout_p).items():
                print(line_of(f"{name}, D = {dim}" + (", dropout" if dropout_p else ""), call))
    if options.out is not None:
        write(options.out)


if __name__ == "__main__":
    main()
