"""Latency by stage, staged N:M against the unfused dense pipeline (Dfss, Fig. 5): 4 heads, D = 64, n = 256 to 4,096.

bf16 and fp16 with 2:4 and 1:2, float32 with 1:2 (TF32 in both pipelines). A stage is timed alone; "total" is the pipeline of three calls.
Device times from CUDA graphs; the dense product takes the scale as its alpha, so dense pays no kernel for it. `roof_ms` of a
stage is its traffic at 4.2 TB/s (what a streaming kernel reaches on an H200), all of Q, K, V and of the weights once.
"""

from __future__ import annotations

import torch
from nm_common import SHORT, STAGES, Setting, dense_stages, device_time, staged, staged_stages, unfused
from rows import Row, Writer

BYTES_PER_MS = 4.2e9
KINDS = (
    (torch.bfloat16, "2:4"), (torch.bfloat16, "1:2"), (torch.float32, "1:2"), (torch.float16, "2:4"), (torch.float16, "1:2")
)  # fmt: skip
SETTINGS = [Setting(n, 24 if n == 4096 else 48, dtype, pattern) for dtype, pattern in KINDS for n in (256, 512, 1024, 2048, 4096)]


def run(writer: Writer, repeat_ms: int) -> None:
    """Each setting, both pipelines."""
    # as for float in the paper; ours multiplies in TF32 too
    torch.backends.cuda.matmul.allow_tf32 = True
    for setting in SETTINGS:
        query, key, value = setting.tensors()
        ours, dense = staged_stages(query, key, value, setting.pattern), dense_stages(query, key, value)
        ours["total"] = lambda q=query, k=key, v=value, s=setting: staged(q, k, v, s.pattern)
        dense["total"] = lambda q=query, k=key, v=value: unfused(q, k, v)
        times = {"staged": {}, "unfused": {}}
        for stage in (*STAGES, "total"):
            for name, calls in (("unfused", dense), ("staged", ours)):
                timing = device_time(calls[stage], repeat_ms)
                times[name][stage] = timing.p50
                writer.add(
                    Row(
                        "nm_figure5",
                        str(setting),
                        name,
                        "fwd",
                        SHORT[setting.dtype],
                        *timing,
                        roof_ms=roof(setting, name, stage),
                        note=stage,
                    )
                )
        gains = "  ".join(f"{stage} x{times['unfused'][stage] / times['staged'][stage]:.2f}" for stage in (*STAGES, "total"))
        print(f"{setting}: {times['unfused']['total']:.3f} -> {times['staged']['total']:.3f} ms  {gains}", flush=True)


def roof(setting: Setting, name: str, stage: str) -> float:
    """Milliseconds of the least traffic."""
    weights = setting.dense_bytes * (9 / 16 if name == "staged" else 1.0)
    kept = setting.dense_bytes * (1 / 2 if name == "staged" else 1.0)
    side = setting.batch * setting.heads * setting.length * setting.dim * setting.dtype.itemsize
    moved = {"scores": 2 * side + weights, "softmax": 2 * kept, "matmul": weights + 2 * side}
    moved["total"] = sum(moved.values())
    return moved[stage] / BYTES_PER_MS
