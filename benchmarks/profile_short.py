"""The profile of paper 002: utilisation, shared memory, active warps and local traffic of the main kernels, ours and the peers'.

    python benchmarks/profile_short.py [--out profile.csv]

Runs itself under Nsight Compute (`ncu`, which must be allowed to read the counters), one launch of each kernel, and prints a table
in Markdown. Clocks are left as they are.
"""

from __future__ import annotations

import argparse
import csv
import io
import subprocess
import sys
from pathlib import Path

SHAPES = [(32, 64), (64, 64), (64, 256), (128, 64), (128, 128), (128, 256)]  # (S, D)
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
# our kernels, and the main kernels of SDPA's flash, efficient and cuDNN backends (not their small helpers)
KERNELS = r"regex:_fwd_|_bwd_|flash_(fwd|bwd)_kernel|flash_bwd_dq_dk_dv|fmha_cutlass|cudnn.*sdpa"


def main() -> int:
    """Parse the command line and do what it says; an exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=None, help="also write the rows to this CSV")
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inner:
        run_each_once()
        return 0
    command = ["ncu", "--csv", "--clock-control", "none", "--print-units", "base", "--nvtx", "--nvtx-include", "case/",
               "--kernel-name", KERNELS, "--metrics", ",".join(METRICS), sys.executable, __file__, "--inner"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    rows = parse(done.stdout)
    if done.returncode or not rows:
        print(done.stdout[-2000:], done.stderr[-2000:], sep="\n", file=sys.stderr)
        print("ncu failed: is it installed, and may it read the counters?", file=sys.stderr)
        return 1
    print(table(rows))
    if options.out is not None:
        with open(options.out, "w", newline="") as handle:
            writer = csv.DictWriter(handle, rows[0].keys(), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    return 0


def run_each_once() -> None:
    """Forward and backward of each shape and implementation, compiled before, then once inside an NVTX range."""
    import torch
    from peers import peers
    from short_common import Shape

    import saccade

    calls = {"saccade": saccade.attention, **peers(with_fa4=False)}
    for length, dim in SHAPES:
        for name, call in calls.items():
            # ranges belong to a thread, and autograd would run backward on another
            torch.autograd.set_multithreading_enabled(False)
            leaves, qkv, dout = Shape(8000 if dim == 256 else 16000, 8, length, length, dim).leaves()
            for turn in range(2):
                if turn == 1:
                    torch.cuda.nvtx.range_push("case")
                    torch.cuda.nvtx.range_push(f"{length}/{dim}/{name}")
                torch.autograd.grad(call(*qkv), leaves, dout)
                torch.cuda.synchronize()
            torch.cuda.nvtx.range_pop()
            torch.cuda.nvtx.range_pop()
            del leaves, qkv, dout


def parse(text: str) -> list[dict[str, str]]:
    """One row a kernel launch: S, D, implementation, kernel and the metrics."""
    lines = text[text.find('"ID"') :] if '"ID"' in text else ""
    launches: dict[str, dict[str, str]] = {}
    for record in csv.DictReader(io.StringIO(lines)):
        metric = METRICS.get(record.get("Metric Name", ""))
        if metric is None:
            continue
        ranges = " ".join(v for k, v in record.items() if k and "range" in k.lower() and v)
        case = next((part for part in ranges.replace('"', " ").replace(":", " ").split() if part.count("/") == 2), "//")
        length, dim, name = case.split("/")
        row = launches.setdefault(
            record["ID"], {"S": length, "D": dim, "implementation": name, "kernel": record["Kernel Name"][:48]}
        )
        column, unit = metric
        row[column] = f"{float(record['Metric Value'].replace(',', '')) * unit:.4g}"
    return list(launches.values())


def table(rows: list[dict[str, str]]) -> str:
    """Markdown."""
    head = ["S", "D", "implementation", "kernel", *(column for column, _ in METRICS.values())]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row.get(h, "") for h in head) + " |" for row in rows])


if __name__ == "__main__":
    sys.exit(main())
