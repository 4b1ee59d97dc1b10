"""SparkAttention's grid (paper 001, Fig. 10, 11 and 12): hidden size 2,048, D = 64 and 128, n = 512 to 16,384 with 16,384 tokens,
dropout 0.1.

This is for owners of a V100, T4 or RTX 20. Forward by `backend="volta"` and `"volta_fp16"` (the paper's FP32-ACC and FP16-ACC)
and their backwards; the unfused float16 pipeline (the paper's PyTorch_FP16: product, softmax, dropout, product);
SDPA's memory-efficient kernel, which the paper left out and which is what torch runs there. Then one encoder layer, forward (Fig.
12). TFLOP/s count 4 B H n^2 D forward and 2.5 times that backward, half if causal, as the paper does. The paper prints no figures
but averages, which are printed below ours. On any other GPU the compiler emulates the instruction: rows are noted "emulated: not
a speed".
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable

import torch
import volta_common
import volta_encoder
from peers import peers
from rows import Row, Writer
from torch import Tensor
from volta_common import Setting, emulated, grid, unfused

import saccade
from saccade.testing.timing import Timing, measure

BACKENDS = {"volta": "volta", "volta_fp16": "volta_fp16"}  # column -> backend of `attention`
# average and largest speed-up over the unfused pipeline on a V100 (paper 001, 4.2.1 and 4.2.2)
# its backward has float16 sums; ours with float32 sums stands beside it too
PAPER = {
    ("volta", "fwd"): (4.44, 9.17),
    ("volta_fp16", "fwd"): (4.66, 8.56),
    ("volta", "bwd"): (3.44, 7.91),
    ("volta_fp16", "bwd"): (3.44, 7.91),
}
SETTINGS = grid()


def run(writer: Writer, repeat_ms: int) -> None:
    """Each setting, all backends; the average speed-ups beside the paper's; then the encoder layer."""
    note = emulated()
    gains: dict[tuple[str, str], list[float]] = {key: [] for key in PAPER}
    for setting in SETTINGS:
        found: dict[str, dict[str, float]] = {}
        for name, call in backends(setting).items():
            try:
                found[name] = _record(writer, setting, name, call, repeat_ms, note if name in BACKENDS else "")
            except (RuntimeError, saccade.SaccadeError) as error:  # out of memory, or a peer that refuses
                print(f"  {name} does not run {setting}: {str(error).splitlines()[0][:90]}")
            gc.collect()
        print(_line(setting, found), note, flush=True)
        for (name, direction), ratios in gains.items():
            if {name, "unfused"} <= found.keys():
                ratios.append(found["unfused"][direction] / found[name][direction])
    for (name, direction), ratios in gains.items():
        average, most = PAPER[name, direction]
        ours = f"x{sum(ratios) / len(ratios):.2f} (up to x{max(ratios):.2f})" if ratios else "none"
        print(f"{name} {direction} over unfused: {ours} {note}; the paper on a V100: x{average} (up to x{most})")
    volta_encoder.run(writer, repeat_ms, BACKENDS["volta"])


def backends(setting: Setting) -> dict[str, Callable[..., Tensor]]:
    """Name -> call on query, key, value."""
    efficient = peers(with_fa4=False)["sdpa_efficient"]
    ours = {
        name: functools.partial(saccade.attention, dropout_p=setting.dropout_p, is_causal=setting.is_causal, backend=backend)
        for name, backend in BACKENDS.items()
    }
    return {
        **ours,
        "unfused": functools.partial(unfused, is_causal=setting.is_causal, dropout_p=setting.dropout_p),
        "sdpa_efficient": functools.partial(efficient, dropout_p=setting.dropout_p, is_causal=setting.is_causal),
    }


def _record(
    writer: Writer, setting: Setting, name: str, call: Callable[..., Tensor], repeat_ms: int, note: str
) -> dict[str, float]:
    """Milliseconds by direction."""
    device = volta_common.DEVICE
    *leaves, dout = setting.tensors(4)
    leaves = [x.requires_grad_() for x in leaves]
    with torch.no_grad():
        timings: dict[str, Timing] = {"fwd": measure(lambda: call(*leaves), device, repeat_ms=repeat_ms)}
    out = call(*leaves)
    backward = lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)  # noqa: E731
    timings["bwd"] = measure(backward, device, repeat_ms=repeat_ms)
    for direction, timing in timings.items():
        tflops = setting.flops * (2.5 if direction == "bwd" else 1.0) / timing.p50 / 1e9
        writer.add(Row("volta", str(setting), name, direction, "fp16", *timing, tflops=tflops, note=note))
    return {direction: timing.p50 for direction, timing in timings.items()}


def _line(setting: Setting, found: dict[str, dict[str, float]]) -> str:
    times = "  ".join(f"{name} {' + '.join(f'{ms:.3f}' for ms in t.values())} ms" for name, t in found.items())
    return f"{setting}: {times}"
