"""Dynamic mask attention on a CPU, in C++ and in plain torch, selection included, against torch's dense causal attention: float32, H = 8,
D = 64.

Ours and torch's take turns, so that a machine that slows down slows both; medians.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from rows import Row, Writer
from torch import Tensor

import saccade
from saccade.testing.timing import take_turns

OURS = ("gather_cpp", "gather_torch")
HEADS, DIM = 8, 64
SETTINGS = ((2048, 256), (4096, 256), (8192, 256), (8192, 512))  # length, keep
NAMES = (*OURS, "sdpa")
REPEATS = 7


def every_case() -> dict[str, tuple[int, int]]:
    """Problem -> length and keep."""
    return {
        f"dynamic_mask(B=1 H={HEADS} Hkv={HEADS} Tq={length} Tk={length} D={DIM} keep={keep} random fp32)": (length, keep)
        for length, keep in SETTINGS
    }


def run(writer: Writer, repeat_ms: int) -> None:
    """Forward through the public function, and backward alone."""
    settings = every_case()
    for problem in writer.part.cases(settings):
        length, keep = settings[problem]
        leaves = [torch.randn(1, HEADS, length, DIM, requires_grad=True) for _ in "qkv"]
        scores = torch.randn(1, HEADS, length, requires_grad=True)
        calls = {
            **{
                backend: lambda leaves=leaves, scores=scores, keep=keep, backend=backend: saccade.dynamic_mask_attention(
                    *leaves, scores, keep=keep, backend=backend
                )
                for backend in OURS
            },
            "sdpa": lambda leaves=leaves: F.scaled_dot_product_attention(*leaves, is_causal=True),
        }
        calls = writer.part.calls(calls)
        inputs = {**{name: [*leaves, scores] for name in OURS}, "sdpa": leaves}
        _record(writer, problem, "fwd", {name: _forward(call) for name, call in calls.items()})
        outs = {name: call() for name, call in calls.items()}
        _record(writer, problem, "bwd", {name: _backward(outs[name], inputs[name]) for name in calls})


def _forward(call: Callable[[], Tensor]) -> Callable[[], object]:
    def forward() -> None:
        with torch.no_grad():
            call()

    return forward


def _backward(out: Tensor, inputs: list[Tensor]) -> Callable[[], object]:
    dout = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)


def _record(writer: Writer, problem: str, direction: str, calls: dict[str, Callable[[], object]]) -> None:
    times = take_turns(calls, torch.device("cpu"), REPEATS)
    for name, ms in times.items():
        writer.add(Row("dynamic_mask_cpu", problem, name, direction, "fp32", ms, ms, ms, note="median of turns"))
    gains = {name: f" (x{times['sdpa'] / ms:.2f})" for name, ms in times.items() if "sdpa" in times}
    print(f"{direction}: " + ", ".join(f"{name} {ms:.0f} ms{gains.get(name, '')}" for name, ms in times.items()), flush=True)
