"""Approximations beside each other: 2:4 and 1:2 pruning in bf16, FP8 by cuDNN, INT8 scores by SageAttention, with their errors; forward.

The settings of `nm_fused`: 32,768 rows of hidden 2,048, views of `[B, T, H, D]`. `error` in the notes is |O' - O| / |O| against dense attention in float32 on
the first batch entry, for normally distributed numbers: a case without structure, in which a pruned weight is as large as its neighbours.
"kernel" takes numbers of 8 bits as they are, and "with quantisation" makes them in the call; pruning always starts from bf16. `roof_ms` is that of the dense
products at 790 TFLOP/s in bf16. Calls of one setting take turns in a new random order.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
import torch.nn.functional as F
from fp8 import eight_bits
from rows import Row, Writer
from tables.nm_fused import PATTERNS, PEAK_TFLOPS, Setting, in_turn
from torch import Tensor

import saccade

SETTINGS = [Setting(n, d, causal) for d in (64, 128) for causal in (False, True) for n in (2048, 8192)]
Call = tuple[Callable[[], Tensor], Tensor | float]


def every_case() -> list[Setting]:
    """The rows of the table."""
    return SETTINGS


def run(writer: Writer, repeat_ms: int) -> None:
    """Forward of each setting, all implementations in turn."""
    for setting in writer.part.cases(every_case()):
        torch.manual_seed(0)
        tensors = [torch.randn(setting.sizes, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(3)]
        with torch.no_grad():
            calls = _calls(setting, tensors)
            errors = {name: _error(setting, tensors, *call) for name, call in calls.items()}
            times = in_turn({name: call for name, (call, _) in calls.items()}, repeat_ms)
        flops = setting.flops
        for (name, note), timing in times.items():
            said = ", ".join(filter(None, (note, f"error {errors[name, note]:.4f}")))
            writer.add(
                Row(
                    "nm_fp8",
                    str(setting),
                    name,
                    "fwd",
                    "bf16",
                    *timing,
                    roof_ms=flops / PEAK_TFLOPS / 1e9,
                    tflops=flops / timing.p50 / 1e9,
                    note=said,
                )
            )
        told = "  ".join(f"{name} {note} {t.p50:.3f} ms ({errors[name, note]:.3f})" for (name, note), t in times.items())
        print(f"{setting}: {told}", flush=True)
        del tensors, calls
        gc.collect()
        torch.cuda.empty_cache()


def _calls(setting: Setting, tensors: list[Tensor]) -> dict[tuple[str, str], Call]:
    """(implementation, note) -> the call and the factor of its result."""
    causal = setting.is_causal
    found: dict[tuple[str, str], Call] = {}
    for pattern in PATTERNS:
        found["mma_sp", pattern] = (
            lambda pattern=pattern: saccade.nm_sparse_attention(*tensors, is_causal=causal, pattern=pattern, backend="mma_sp"),
            1.0,
        )

    def dense() -> Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(*tensors, is_causal=causal)

    found["sdpa_cudnn", ""] = dense, 1.0
    for name, make in eight_bits().items():
        try:
            made = make(*tensors, causal)
            for call, _ in made.values():
                call()
        except Exception as error:  # noqa: BLE001 - a peer that refuses is left out, with its reason
            print(f"  {name} does not run {setting}: {str(error).splitlines()[0][:140]}")
            continue
        found |= {(name, note): call for note, call in made.items()}
    return found


def _error(setting: Setting, tensors: list[Tensor], call: Callable[[], Tensor], factor: Tensor | float) -> float:
    """|O' - O| / |O| of the first batch entry, a head at a time: the scores of one are 8,192 squared at most."""
    made = (call()[0].float() * factor).view(tensors[0].shape[1:])
    wrong, whole = 0.0, 0.0
    for head in range(0, made.shape[0], 4):
        query, key, value = (x[0, head : head + 1].float()[None] for x in tensors)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            exact = F.scaled_dot_product_attention(query, key, value, is_causal=setting.is_causal)[0]
        wrong += (made[head : head + 1] - exact).square().sum().item()
        whole += exact.square().sum().item()
    return (wrong / whole) ** 0.5
