"""Speed-up over the unfused dense pipeline against density: top-K, a fixed pattern, N:M; measured, and by Eq. 4 to 6 (Dfss, Fig.
11).

As in the paper every rival is made as cheap as possible. Fixed: the first `s * n` keys, a smaller dense pipeline. Top-K: finding
the K is free (their places are given); the scores are dense, K of each row are gathered, softmax over these, and cuSPARSE
multiplies them with the values as one block-diagonal CSR matrix. Numbers of keys are multiples of 8, because cuBLAS multiplies
others slowly. `note` holds the density and the theoretical speed-up. bf16, 4 heads, D = 64, n = 2,048.
"""

from __future__ import annotations

import torch
from nm_common import Setting, dense_scores, device_time, staged, unfused
from rows import Row, Writer
from torch import Tensor

from saccade.nm_sparse import analysis
from saccade.testing.timing import Timing, measure

DENSITIES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.63, 0.8, 1.0)
SETTING = Setting(2048, 8)


def run(writer: Writer, repeat_ms: int) -> None:
    """Dense once, N:M once, the rivals at each density."""
    query, key, value = SETTING.tensors()
    dense = device_time(lambda: unfused(query, key, value), repeat_ms)
    writer.add(Row("nm_figure11", str(SETTING), "unfused", "fwd", "bf16", *dense, note="density 1"))
    for pattern in ("2:4", "1:2"):
        timing = device_time(lambda p=pattern: staged(query, key, value, p), repeat_ms)
        record(writer, f"staged {pattern}", 0.5, timing, dense, analysis.nm_speedup(SETTING.dim))
    for wanted in DENSITIES:
        seen = keys_at(wanted)
        density = seen / SETTING.length
        short = [x[:, :, :seen].contiguous() for x in (key, value)]
        timing = device_time(lambda s=short: unfused(query, *s), repeat_ms)
        record(writer, "fixed", density, timing, dense, analysis.fixed_speedup(density, SETTING.dim))
        # beyond this cuSPARSE takes seconds and has long lost
        if density <= 0.5:
            record_top_k(writer, query, key, value, density, dense, repeat_ms)


def keys_at(density: float) -> int:
    """The number of keys nearest to a density that is a multiple of 8."""
    return max(8, 8 * round(density * SETTING.length / 8))


def record_top_k(
    writer: Writer, query: Tensor, key: Tensor, value: Tensor, density: float, dense: Timing, repeat_ms: int
) -> None:
    """Measure one density; if cuSPARSE refuses, this is reported and not skipped in silence."""
    call = top_k(query, key, value, round(density * SETTING.length))
    try:
        call()
    except RuntimeError as error:
        print(f"top-K at {density}: {str(error).splitlines()[0][:100]}", flush=True)
        return
    # without a graph, because cuSPARSE allocates while it runs
    timing = measure(call, repeat_ms=repeat_ms)
    record(writer, "top-K", density, timing, dense, analysis.top_k_speedup(density, SETTING.dim))


def top_k(query: Tensor, key: Tensor, value: Tensor, count: int):
    """A call that attends to `count` given keys of each query."""
    heads, length = query.shape[0] * query.shape[1], query.shape[2]
    chosen = dense_scores(query, key).topk(count, dim=-1).indices.sort(-1).values
    # one matrix [heads * n, heads * n] with a block on the diagonal for each head
    columns = chosen.flatten(0, 1) + length * torch.arange(heads, device=query.device)[:, None, None]
    rows = torch.arange(0, heads * length * count + 1, count, device=query.device, dtype=torch.int32)
    columns, flat = columns.flatten().int(), value.flatten(0, 2)

    def call() -> Tensor:
        weights = torch.softmax(dense_scores(query, key).gather(-1, chosen), -1)
        matrix = torch.sparse_csr_tensor(rows, columns, weights.flatten(), (heads * length,) * 2, check_invariants=False)
        return torch.mm(matrix, flat).view(value.shape)

    return call


def record(writer: Writer, name: str, density: float, timing: Timing, dense: Timing, theory: float) -> None:
    """One row and one line."""
    note = f"density {density:g}, speed-up {dense.p50 / timing.p50:.3f}, theory {theory:.3f}"
    writer.add(Row("nm_figure11", str(SETTING), name, "fwd", "bf16", *timing, note=note))
    print(f"{name:11s} {note}", flush=True)
