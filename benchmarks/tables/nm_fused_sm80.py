"""The sm_80 form of fused N:M attention, which GPUs without sm_90a run, forced on this GPU and compared with SDPA's FLASH
backend.

The same problems, turns and clocks as `nm_fused`, from n = 2,048 on; forward alone, without autograd. FLASH is FlashAttention-2,
whose products are those of sm_80 too. `roof_ms` is at 790 TFLOP/s, as in `nm_fused`, though products of one warp do not reach
that on sm_90.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable

import torch
from peers import peers
from rows import Row, Writer
from tables.nm_fused import PATTERNS, PEAK_TFLOPS, SETTINGS, Setting, in_turn
from torch import Tensor

from saccade.hardware import arch_of
from saccade.nm_sparse.args import NMSparseArgs
from saccade.nm_sparse.fused import launchers as fused_launchers
from saccade.nm_sparse.fused.config import Sm80Config, pick_sm80
from saccade.testing.timing import Timing


def every_case() -> list[Setting]:
    """The rows of the table."""
    return [setting for setting in SETTINGS if setting.length >= 2048]


def run(writer: Writer, repeat_ms: int) -> None:
    """Each setting: both patterns and FLASH, in turn."""
    flash = peers()["sdpa_flash"]
    for setting in writer.part.cases(every_case()):
        qkv = [torch.randn(setting.sizes, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(3)]
        calls: dict[str, Callable[[], object]] = {pattern: forced(qkv, setting, pattern) for pattern in PATTERNS}
        calls["flash"] = functools.partial(flash, *qkv, is_causal=setting.is_causal)
        times = in_turn(calls, repeat_ms)
        for name, timing in times.items():
            note = f"{name}, sm_80 form, {shape_of(setting, name).warps} warps" if name in PATTERNS else ""
            _write(writer, setting, note, timing)
        gains = "  ".join(f"{p} {times[p].p50:.3f} ms x {times['flash'].p50 / times[p].p50:.2f} flash" for p in PATTERNS)
        print(f"D={setting.dim:3d} n={setting.length:5d} {'causal' if setting.is_causal else 'full  '}  {gains}", flush=True)
        del qkv, calls
        gc.collect()


def forced(qkv: list[Tensor], setting: Setting, pattern: str) -> Callable[[], Tensor]:
    """The call with the sm_80 form, whatever form the GPU would use."""
    keep, group = map(int, pattern.split(":"))
    config = shape_of(setting, pattern)
    args = NMSparseArgs(*qkv, None, None, None, None, keep, group, 0.0, setting.is_causal, setting.dim**-0.5)
    lse = torch.empty(qkv[0].shape[:3], device="cuda")
    none = torch.empty(0, dtype=torch.int32, device="cuda")

    def call() -> Tensor:
        out = torch.empty_like(qkv[0])
        fused_launchers.launch_sm80(args, config, out, lse, none)
        return out

    return call


def shape_of(setting: Setting, pattern: str) -> Sm80Config:
    """The configuration for a GPU with as much shared memory as this one."""
    return pick_sm80(setting.dim, arch_of(torch.device("cuda", 0)), int(pattern[0]), setting.is_causal)


def _write(writer: Writer, setting: Setting, note: str, timing: Timing) -> None:
    flops, needed = setting.flops, 0.75 if note else 1.0
    writer.add(
        Row(
            "nm_fused_sm80", str(setting), "mma_sp" if note else "sdpa_flash", "fwd", "bf16", *timing,
            roof_ms=needed * flops / PEAK_TFLOPS / 1e9, tflops=flops / timing.p50 / 1e9, note=note,
        )
    )  # fmt: skip
