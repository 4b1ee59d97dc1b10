"""Latency by stage, staged N:M against the unfused dense pipeline (Dfss, Fig. 5): 4 heads, D = 64, n = 256 to 4,096.

bf16 and fp16 with 2:4 and 1:2, float32 with 1:2 (TF32 in both pipelines). A stage is timed alone; "total" is the pipeline of three calls.
Device times from CUDA graphs; the dense product takes the scale as its alpha, so dense pays no kernel for it. `roof_ms` of a
stage is its traffic at 4.2 TB/s (what a streaming kernel reaches on an H200), all of Q, K, V and of the weights once. Rows "staged within blocks" have the blocks of BigBird that `nm_blocks` has, where they hide
anything, and the visible share of the tiles in their notes: scores multiply no hidden tile, but the format holds it.
"""

from __future__ import annotations

import functools

import torch
from nm_common import SHORT, STAGES, Call, Setting, dense_stages, device_time, staged, staged_stages, unfused
from rows import Row, Writer
from tables.nm_blocks import BIGBIRD, visible_share

BYTES_PER_MS = 4.2e9
WITHIN = "staged within blocks"
KINDS = (
    (torch.bfloat16, "2:4"), (torch.bfloat16, "1:2"), (torch.float32, "1:2"), (torch.float16, "2:4"), (torch.float16, "1:2")
)  # fmt: skip
SETTINGS = [Setting(n, 24 if n == 4096 else 48, dtype, pattern) for dtype, pattern in KINDS for n in (256, 512, 1024, 2048, 4096)]


def every_case() -> list[Setting]:
    """The rows of the table."""
    return SETTINGS


def run(writer: Writer, repeat_ms: int) -> None:
    """Each setting, both pipelines; ours within blocks too where blocks hide anything."""
    # as for float in the paper; ours multiplies in TF32 too
    torch.backends.cuda.matmul.allow_tf32 = True
    for setting in writer.part.cases(every_case()):
        query, key, value = setting.tensors()
        calls = {"unfused": {**dense_stages(query, key, value), "total": functools.partial(unfused, query, key, value)}}
        blocks = BIGBIRD.mask(setting.length).to(query.device)
        kinds = {"staged": None} if blocks.all() else {"staged": None, WITHIN: blocks}
        for name, mask in kinds.items():
            stages = staged_stages(query, key, value, setting.pattern, mask)
            calls[name] = {**stages, "total": functools.partial(staged, query, key, value, setting.pattern, mask)}
        times = _timed(writer, setting, calls, repeat_ms, visible_share(blocks))
        for name in kinds:
            gains = "  ".join(f"{stage} x{times['unfused'][stage] / times[name][stage]:.2f}" for stage in (*STAGES, "total"))
            print(f"{setting} {name}: {times['unfused']['total']:.3f} -> {times[name]['total']:.3f} ms  {gains}", flush=True)


def _timed(
    writer: Writer, setting: Setting, calls: dict[str, dict[str, Call]], repeat_ms: int, share: float
) -> dict[str, dict[str, float]]:
    """Milliseconds by pipeline and stage, written; share: of the tiles, visible within the blocks."""
    times: dict[str, dict[str, float]] = {name: {} for name in calls}
    for stage in (*STAGES, "total"):
        for name, stages in calls.items():
            timing = device_time(stages[stage], repeat_ms)
            times[name][stage] = timing.p50
            note = f"{stage}, visible {share:.4f}" if name == WITHIN else stage
            least = roof(setting, name, stage)
            writer.add(Row("nm_figure5", str(setting), name, "fwd", SHORT[setting.dtype], *timing, roof_ms=least, note=note))
    return times


def roof(setting: Setting, name: str, stage: str) -> float:
    """Milliseconds of the least traffic."""
    weights = setting.dense_bytes * (9 / 16 if name != "unfused" else 1.0)
    kept = setting.dense_bytes * (1 / 2 if name != "unfused" else 1.0)
    side = setting.batch * setting.heads * setting.length * setting.dim * setting.dtype.itemsize
    moved = {"scores": 2 * side + weights, "softmax": 2 * kept, "matmul": weights + 2 * side}
    moved["total"] = sum(moved.values())
    return moved[stage] / BYTES_PER_MS
