"""The time of `SentenceTransformer.encode` by steps of the host and kinds of kernels, from strings to embeddings on the host.

    python benchmarks/profile_encoder.py --out benchmarks/results/h200 [--texts 32 2048] [--dtype bfloat16 float32]

MiniLM of random weights, optimised, on sentences of 20 tokens in the mean, one call of `encode` with all of them. Prints a table in Markdown.

* Host: a step is a function, which is timed in the caller's thread without the steps inside of it. `other` is the rest of a call that is not timed.
  A timer takes some 0.5 us, so `other` may fall below 0. Rust code in threads runs beside the steps; it is no part of the sum.
* Device: the graphs of the call, one behind another, with their copies from and to the host. Kernels are summed by kind; gaps are what is left of
  the time without the profiler. On a CPU there is no such part.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from encoder_strings import Strings as Case
from machine import machine
from rows import Row, Writer
from step_clock import BESIDE, Clock, Step
from torch import Tensor

import saccade
from saccade.encoders import graphs, pipeline, served, state, strings, tokens
from saccade.engine.prepare import wait_for_known_calls

TABLE, DEVICE = "encoder_profile", "cuda" if torch.cuda.is_available() else "cpu"
ROUNDS, SECONDS = 4, 0.3  # calls as they are and calls with timers take turns, each for so long
REPLAYS = 20  # of all graphs of a call, which one profile or one pair of events holds
STEPS: list[Step] = [
    (strings.Strings, "_why_not", "checks that the call is covered"),
    (tokens.Tokens, "copy", "looking whether the tokenizer has changed"),
    (tokens.Rust, "cut", "cutting long texts"),
    (tokens.Rust, "encoded", "Rust code of the tokenizer"),
    (tokens.Rust, "arrays", "conversion of ids to arrays"),
    (pipeline, "packed", "positions and ends"),
    (pipeline, "embed", "choice of the graph, copy of pooled rows launched"),
    (state.State, "read", "reading the model's state"),
    (graphs.Inputs, "load", "packing into pinned memory, its copy launched"),
    (torch.cuda.CUDAGraph, "replay", "launch of the graph"),
    (served.Served, "run_packed", "the model, without a graph"),
    (torch.cuda.Event, "synchronize", "waiting for the device"),
    (pipeline.Results, "add", "copy back, launched"),
    (pipeline.Results, "_put", "rows in the order of the texts"),
    (pipeline.Results, "finish", "rows in the order of the texts"),
    (strings.Strings, "_embeddings", "postprocess: modules behind the pooling, `truncate_dim`, `normalize`"),
    (strings.Strings, "_finished", "postprocess: conversion of the result"),
    (strings, "_bar", "progress bar"),
]
GENERATORS = [(pipeline, "batches", "sort into batches"), (tokens, "ahead", "threads of the tokenizer: start, waiting, end")]
# the first that fits: of CUDA graphs, Memcpy and Memset are copies
KINDS = {
    "copies": r"^Mem(cpy|set)|copy_kernel",
    "fused kernels of torch.compile": r"^triton_",
    "attention": r"^(void )?(forward_|backward_|long_|ragged_|tokens_|pooling_|mask_bits|bias_(gradient|rows)|_\w*(fwd|bwd)_|"
    r"(bias|bounds|clear|count|delta|in_order|longest_first|place|survivors|weights)_kernel)|fmha|flash|sdpa",
    "pooling": r"segment_reduce",
    "matrix products": r"gemm|gemv|nvjet|cutlass|splitK|cublas",
    "other kernels": r"",
}


def of_host(call: Callable[[], object]) -> tuple[list[float], dict[str, list[float]]]:
    """(milliseconds of calls as they are, of each step in calls with timers)."""
    clock, totals, steps = Clock(), list[float](), list[dict[str, float]]()

    def once() -> float:
        began = time.perf_counter_ns()
        call()
        return (time.perf_counter_ns() - began) / 1e6

    count = max(2, int(1e3 * SECONDS / once()))
    for _ in range(ROUNDS):
        once()  # not counted: Python adapts its code to the functions that were exchanged
        totals += [once() for _ in range(count)]
        with clock.watching(STEPS, GENERATORS):
            once()
            clock.take()
            for _ in range(count):
                once()
                steps.append(clock.take())
    names = dict.fromkeys(name for found in steps for name in found)
    return totals, {name: [found.get(name, 0.0) for found in steps] for name in names}


def replays_of(call: Callable[[], object]) -> Callable[[], list[Tensor]]:
    """The device's part of a call: its copies and graphs, launched one behind another. Returns the pooled rows, by batches, which may be on their way."""
    seen: list[tuple[Any, Any, Any]] = []
    original = graphs.Forward.__call__

    def recorded(self: Any, batch: Any, stream: Any) -> Any:
        found = original(self, batch, stream)
        pinned = self.inputs.pinned[self.inputs.turn]
        given = torch.empty_like(pinned, pin_memory=pinned.is_pinned()).copy_(pinned)
        host = torch.empty(len(batch.ends) - 1, found[-1].shape[-1], pin_memory=pinned.is_pinned())
        seen.append((self, given, host))
        return found

    with patch.object(graphs.Forward, "__call__", recorded):
        call()
    if not seen:
        raise SystemExit("no graph was replayed")

    @torch.inference_mode()
    def replays() -> list[Tensor]:
        for graph, given, host in seen:
            graph.inputs.memory.copy_(given, non_blocking=True)
            graph.graph.replay()
            host.copy_(graph.outputs[-1][: len(host)].clone().float(), non_blocking=True)
        return [host for *_, host in seen]

    return replays


def of_device(replays: Callable[[], object]) -> dict[str, tuple[float, str]]:
    """Kind -> (milliseconds of its kernels, its three longest ones)."""
    from torch.profiler import ProfilerActivity, profile

    replays()
    torch.cuda.synchronize()
    walls = []
    for _ in range(5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(REPLAYS):
            replays()
        end.record()
        end.synchronize()
        walls.append(begin.elapsed_time(end) / REPLAYS)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        for _ in range(REPLAYS):
            replays()
        torch.cuda.synchronize()
    kernels = {x.key: x.self_device_time_total / 1e3 / REPLAYS for x in seen.key_averages() if x.self_device_time_total > 0}
    found = by_kind(kernels)
    wall = statistics.median(walls)
    return found | {"gaps between kernels": (wall - sum(kernels.values()), ""), "total": (wall, "")}


def kind_of_kernel(name: str) -> str:
    """The kind of a kernel."""
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, name))


def by_kind(kernels: dict[str, float]) -> dict[str, tuple[float, str]]:
    """Kind -> (the sum, the names of the three longest) of kernels and their times."""
    found: dict[str, list[str]] = defaultdict(list)
    for name in sorted(kernels, key=lambda x: -kernels[x]):
        found[kind_of_kernel(name)].append(name)
    return {x: (sum(kernels[y] for y in found[x]), " ".join(y[:60] for y in found[x][:3])) for x in KINDS if x in found}


def measure(writer: Writer, case: Case, model: Any, handle: Any) -> None:
    """Write the rows of a case."""
    texts = case.texts()
    problem = f"{case.architecture.name} encode from strings texts={case.count} {case.dtype}"
    has_graphs = DEVICE == "cuda"

    def call() -> object:
        return model.encode(texts)

    def add(direction: str, step: str, times: list[float], total: float, note: str = "") -> None:
        p20, p50, p80 = (statistics.quantiles(times, n=10)[i] for i in (1, 4, 7)) if len(times) > 1 else (times[0],) * 3
        share = f"share {p50 / total:.4f}" if step != BESIDE else "no part of the sum"
        writer.add(Row(TABLE, problem, step, direction, case.dtype, p50, p20, p80, note=f"{share}{note}"))

    call(), call()
    said = handle.explain()
    if "from strings: stock" in said or (has_graphs and "captured:" not in said):
        raise SystemExit(f"{problem}: the call is not computed as it is to be measured:\n{said}")
    totals, steps = of_host(call)
    total = statistics.median(totals)
    for step, times in steps.items():
        add("host", step, times, total)
    rest = total - sum(statistics.median(x) for step, x in steps.items() if step != BESIDE)
    add("host", "other", [rest], total)
    add("host", "total", totals, total)
    found = of_device(replays_of(call)) if has_graphs else {}
    for kind, (taken, names) in found.items():
        add("device", kind, [taken], found["total"][0], f"; {names}" * bool(names))


def markdown(rows: list[Row]) -> str:
    """Microseconds and shares, a column for each problem and dtype."""
    columns = dict.fromkeys((row.problem, row.dtype) for row in rows)
    cells = {(row.direction, row.backend, row.problem, row.dtype): row for row in rows}
    order = sorted(dict.fromkeys(x[:2] for x in cells), key=lambda x: (x[0] != "host", x[1] == "total"))
    lines = ["| | step, us | " + " | ".join(f"{x.rpartition('=')[2].split()[0]} texts, {y}" for x, y in columns) + " |"]
    lines.append("|---" * (2 + len(columns)) + "|")
    for direction, step in order:
        found = [cells.get((direction, step, *x)) for x in columns]
        shown = ["" if x is None else f"{1e3 * float(x.ms_p50):,.1f}{_share(x.note)}" for x in found]
        lines.append(f"| {direction} | {step} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def _share(note: str) -> str:
    found = re.match(r"share (-?[\d.]+)", note)
    return f" ({100 * float(found[1]):.1f} %)" if found else ""


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and run; returns an exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help=f"the folder of {TABLE}.csv, whose other rows stay")
    parser.add_argument("--texts", type=int, nargs="+", default=[32, 2048])
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"], choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--commit", default=None, help="what rows name as their commit, where the history is missing")
    options = parser.parse_args(arguments)
    writer = Writer(options.out / f"{TABLE}.csv", machine() | ({"commit": options.commit} if options.commit else {}))
    wait_for_known_calls(DEVICE)
    for dtype in options.dtype:
        model = Case(1, dtype).model(DEVICE)
        with saccade.optimize(model) as handle:
            for count in options.texts:
                measure(writer, Case(count, dtype), model, handle)
            print(handle.explain(), flush=True)
    print(markdown(writer.rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
