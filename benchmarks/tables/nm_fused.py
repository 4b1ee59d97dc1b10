"""Fused N:M attention against the best dense kernels: forward, and forward with backward, bf16, n = 1,024 to 16,384.

Hidden size 2,048 (16 heads of 128, 32 of 64), batch 32,768 / n, causal and not. `mma_sp` by name, patterns "2:4" and "1:2". Peers: SDPA's
FLASH and cuDNN backends and FlashAttention-4, dense. All of a setting take turns, so that a GPU that grows hot slows all alike. Times are
of the public functions on the device. `tflops` counts what dense attention computes, `roof_ms` is a third of the way from there: sparse
products run at twice the dense rate, so that QK^T dense and PV sparse take 0.75 of dense attention at 790 TFLOP/s.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from peers import peers
from rows import Row, Writer
from torch import Tensor

import saccade
from saccade.testing.timing import Timing

PEAK_TFLOPS = 790.0
TOKENS, HIDDEN = 32768, 2048
ROUNDS = 9
PATTERNS = ("2:4", "1:2")


@dataclass(frozen=True)
class Setting:
    """One shape; `backward`: with a gradient."""

    length: int
    dim: int
    causal: bool
    backward: bool = False

    @property
    def flops(self) -> float:
        """What dense attention computes."""
        forward = 4.0 * TOKENS * self.length * HIDDEN * (0.5 if self.causal else 1.0)
        return 3.5 * forward if self.backward else forward

    def __str__(self) -> str:
        sizes = f"B={TOKENS // self.length} H={HIDDEN // self.dim} T={self.length} D={self.dim}"
        return f"nm_sparse({sizes}{' causal' if self.causal else ''} bf16)"


LENGTHS = (1024, 2048, 4096, 8192, 16384)
SETTINGS = [Setting(n, d, c) for d in (128, 64) for c in (False, True) for n in LENGTHS] + [
    Setting(n, d, c, True) for d in (128, 64) for c in (False, True) for n in (2048, 8192)
]


def run(writer: Writer, repeat_ms: int) -> None:
    """Each setting, all kernels in turns."""
    rivals = {name: peer for name, peer in peers().items() if name != "sdpa_efficient"}
    for setting in SETTINGS:
        calls = _calls(setting, rivals)
        times = _take_turns(calls, repeat_ms)
        for name, timing in times.items():
            ours = name in PATTERNS
            note = "forward and backward" if setting.backward else ""
            roof = setting.flops * (0.75 if ours and not setting.backward else 1.0) / PEAK_TFLOPS / 1e9
            backend = f"mma_sp {name}" if ours else name
            direction = "fwd_bwd" if setting.backward else "fwd"
            row = Row("nm_fused", str(setting), backend, direction, "bf16", *timing, roof_ms=roof,
                      tflops=setting.flops / timing.p50 / 1e9, note=note)  # fmt: skip
            writer.add(row)
        print(_line(setting, times), flush=True)
        del calls
        gc.collect()


def _calls(setting: Setting, rivals: dict[str, Callable[..., Tensor]]) -> dict[str, Callable[[], object]]:
    """name -> call; a peer that refuses is left out, with its reason."""
    shape = (TOKENS // setting.length, setting.length, HIDDEN // setting.dim, setting.dim)
    qkv = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(3)]
    dout = torch.randn_like(qkv[0])
    for x in qkv:
        x.requires_grad_(setting.backward)

    def both(attend: Callable[[], Tensor]) -> Callable[[], object]:
        return (lambda: torch.autograd.grad(attend(), qkv, dout)) if setting.backward else attend

    calls: dict[str, Callable[[], object]] = {}
    for name, peer in rivals.items():
        call = both(lambda peer=peer: peer(*qkv, is_causal=setting.causal))
        try:
            call()
            torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001
            print(f"  {name} does not run {setting}: {str(error).splitlines()[0][:90]}")
            continue
        calls[name] = call
    for pattern in PATTERNS:
        calls[pattern] = both(
            lambda pattern=pattern: saccade.nm_sparse_attention(*qkv, is_causal=setting.causal, pattern=pattern, backend="mma_sp")
        )
    return calls


def _take_turns(calls: dict[str, Callable[[], object]], repeat_ms: int) -> dict[str, Timing]:
    """ROUNDS turns of each, together about `repeat_ms` of each; milliseconds a call."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    repeats = {name: max(1, round(repeat_ms / ROUNDS / _run(call, 1))) for name, call in calls.items() if _run(call, 2)}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            times[name].append(_run(call, repeats[name]))
    quantiles = {name: (statistics.median(t), sorted(t)[ROUNDS // 5], sorted(t)[-1 - ROUNDS // 5]) for name, t in times.items()}
    return {name: Timing(*three) for name, three in quantiles.items()}


def _run(call: Callable[[], object], repeats: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def _line(setting: Setting, times: dict[str, Timing]) -> str:
    words = [
        f"D={setting.dim:3d} n={setting.length:6d} {'causal' if setting.causal else 'full':6s} {'fwd+bwd' if setting.backward else 'fwd':7s}"
    ]
    for pattern in PATTERNS:
        ms = times[pattern].p50
        gains = " ".join(f"x{t.p50 / ms:.2f} {name.removeprefix('sdpa_')}" for name, t in times.items() if name not in PATTERNS)
        words.append(f"{pattern} {ms:7.3f} ms {setting.flops / ms / 1e9:4.0f} TFLOP/s {gains}")
    return "  ".join(words)
