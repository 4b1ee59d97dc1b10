"""Searches the configurations of the short family on this GPU, prints rows for `exact/short/config.py` and writes every timing.

    python -m tools.tuner OUT.csv [--only fwd:128:64,bwd:128:64] [--rep 20]

Each candidate is checked against a float64 run on a slice of the batch before it is timed; a wrong one is reported, not ranked.
"""

from __future__ import annotations

import argparse
import csv
import functools
import multiprocessing
import sys
import time

import torch

from benchmarks.machine import machine
from saccade.engine.dense import attend
from saccade.exact.args import AttentionArgs
from saccade.exact.short.config import Config
from saccade.exact.short.launchers import backward, forward
from tools.tuner.candidates import candidates

Group = tuple[str, int, int]  # direction, rows, head dim
Job = tuple[str, int, int, Config]
HEADS = 8
TILES = [(rows, dim) for rows in (32, 64, 128) for dim in (32, 64, 128, 256)]


def inputs(direction: str, rows: int, dim: int, batch: int, device: str = "cuda"):
    """Random args and dout in the paper's layout, [B, S, H, D] viewed as [B, H, S, D]."""
    q_len = 1 if direction.startswith("pool") else rows

    def make(length):
        return torch.randn(batch, length, HEADS, dim, device=device, dtype=torch.bfloat16).transpose(1, 2)

    query, key, value, dout = make(q_len), make(rows), make(rows), make(q_len)
    args = AttentionArgs(query, key, value, None, None, None, None, 0.0, False, dim**-0.5)
    return args, dout


def launch(direction: str, args: AttentionArgs, dout, lse, config: Config):
    """Run one direction under a forced configuration."""
    if direction.endswith("fwd"):
        return forward(args, config)
    return backward(args, dout, None, None, lse, bias_grad=False, packed=None, config=config)[:3]


def warm(job):
    """Compile one candidate into Triton's disk cache (in a worker process)."""
    direction, rows, dim, config = job
    try:
        args, dout = inputs(direction, rows, dim, 512)
        lse = torch.zeros(args.query.shape[:3], device="cuda")
        launch(direction, args, dout, lse, config)
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001  a candidate that does not fit the device is reported
        return f"{type(error).__name__}: {str(error)[:100]}"
    return None


def read_configs(path: str) -> dict[tuple[str, int, int], list[Config]]:
    """The configurations listed in a CSV with columns direction, rows, dim, config."""
    found: dict[tuple[str, int, int], list[Config]] = {}
    with open(path, newline="") as handle:
        for row in csv.DictReader(handle):
            config = eval(row["config"], {"__builtins__": {}, "Config": Config})
            choices = found.setdefault((row["direction"], int(row["rows"]), int(row["dim"])), [])
            if config not in choices:
                choices.append(config)
    return found


def stream_bandwidth() -> float:
    """TB/s of a plain kernel that reads three tensors and writes one."""
    from triton.testing import do_bench

    a, b, c, out = (torch.randn(2**29, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    return 4 * a.nbytes / do_bench(lambda: torch.addcmul(a, b, c, out=out), return_mode="median") / 1e9


def expected(direction: str, args: AttentionArgs, dout):
    """float64 results on the first and last batch rows."""
    pick = torch.tensor([0, 1, args.query.shape[0] - 1], device="cuda")
    query, key, value = (x[pick].double().requires_grad_() for x in args[:3])
    out, lse = attend(query, key, value, scale=args.scale)
    grads = torch.autograd.grad(out, (query, key, value), dout[pick].double())
    return pick, (out.detach(), lse.detach()) if direction.endswith("fwd") else grads


def error_of(results, pick, wanted) -> float:
    """Largest relative error of the results."""
    return max(((r[pick].double() - w).norm() / w.norm()).item() for r, w in zip(results, wanted, strict=True))


def chosen_groups(options) -> dict[Group, list[Config]]:
    """The configurations to measure, for each direction, number of rows and head dim."""
    if options.again:
        return read_configs(options.again)
    wanted = [tuple(x.split(":")) for x in options.only.split(",") if x]
    groups = [
        (direction, rows, dim)
        for direction in ("fwd", "bwd", "pool_fwd", "pool_bwd")
        for rows, dim in TILES
        if not wanted or (direction, str(rows), str(dim)) in wanted
    ]
    return {group: [c for c in candidates(*group) if c.tma or not options.tma] for group in groups}


def compile_in_parallel(jobs: list[Job], workers: int) -> dict[Job, str | None]:
    """Compile every candidate; for each the reason why it does not fit, or None."""
    started = time.time()
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        failures = dict(zip(jobs, pool.map(warm, jobs, chunksize=4), strict=True))
    unfit = sum(f is not None for f in failures.values())
    print(f"{len(jobs)} candidates compiled in {time.time() - started:.0f} s, {unfit} do not fit")
    return failures


def roof_of(direction: str, args: AttentionArgs, lse, bandwidth: float) -> float:
    """Milliseconds in which the memory could move what a call reads and writes."""
    q, kv = args.query.nbytes, args.key.nbytes
    moved = 2 * q + 2 * kv if direction.endswith("fwd") else 3 * q + 4 * kv
    return (moved + lse.nbytes) / bandwidth / 1e9


def measure(group: Group, configs: list[Config], failures: dict[Job, str | None], bandwidth: float, rep: int, writer) -> None:
    """Check and time the configurations of one group; write every row and print the best three."""
    from triton.testing import do_bench

    direction, rows, dim = group
    args, dout = inputs(direction, rows, dim, 8000 if dim == 256 else 16000)
    _, lse = forward(args)
    pick, want = expected(direction, args, dout)
    roof = roof_of(direction, args, lse, bandwidth)
    timed: list[tuple[float, float, Config]] = []
    for config in configs:
        failure = failures[(*group, config)]
        if failure is not None:
            writer.writerow([*group, config, "", f"{roof:.4f}", "", failure, *machine().values()])
            continue
        error = error_of(launch(direction, args, dout, lse, config), pick, want)
        if not error < 1e-2:
            print(f"WRONG {direction} {rows} {dim} {config}: error {error:.1e}")
            continue
        run = functools.partial(launch, direction, args, dout, lse, config)
        ms = do_bench(run, warmup=1, rep=2, return_mode="median")
        # only what comes near the best is worth a careful measurement
        if not timed or ms < 1.15 * min(row[0] for row in timed):
            ms = do_bench(run, warmup=4, rep=rep, return_mode="median")
        writer.writerow([*group, config, f"{ms:.4f}", f"{roof:.4f}", f"{roof / ms:.3f}", f"{error:.1e}", *machine().values()])
        timed.append((ms, error, config))
    timed.sort(key=lambda row: row[0])
    for ms, error, config in timed[:3]:
        changed = ", ".join(f"{k}={v}" for k, v in vars(config).items() if v != Config.__dataclass_fields__[k].default)
        print(f'("{direction}", {rows}, {dim}): Config({changed}),  # {ms:.3f} ms, {roof / ms:.2f} of roof, error {error:.0e}')


def main() -> None:
    """Parse the arguments, compile in parallel, then check and time group by group."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--only", default="")
    parser.add_argument("--rep", type=int, default=20)
    parser.add_argument("--tma", action="store_true", help="only configurations with TMA")
    parser.add_argument("--again", default="", help="measure the configurations of this CSV, not the whole candidate list")
    parser.add_argument("--workers", type=int, default=14)
    options = parser.parse_args()
    groups = chosen_groups(options)
    failures = compile_in_parallel([(*group, c) for group, configs in groups.items() for c in configs], options.workers)
    bandwidth = stream_bandwidth()
    print(f"three reads, one write: {bandwidth:.2f} TB/s")
    with open(options.out, "w", newline="") as handle:
        writer = csv.writer(handle)
        writer.writerow([*["direction", "rows", "dim", "config", "ms", "roof_ms", "fraction", "error"], *machine()])
        for group, configs in groups.items():
            torch.cuda.empty_cache()
            measure(group, configs, failures, bandwidth, options.rep, writer)
            sys.stdout.flush()
            handle.flush()


if __name__ == "__main__":
    main()
