"""Host time of a call on a tiny problem, against torch's own function in the same process: the cost for launch-bound users.

Every operation, both layouts, separate and packed inputs, `auto` and a backend by name; forward without and with a graph, and
forward plus backward by `.backward()` and by `torch.autograd.grad`. `python` is a call without the C++ path. All take turns.
"""

import functools
import math
import random
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from rows import Row, Writer

import saccade
from saccade import native
from saccade.testing.timing import Timing

CALLS, ROUNDS = 200, 11
BATCH, HEADS, DIM = 2, 4, 64
NAMES = ("auto", "short", "python", "sdpa")
DIRECTIONS = ("fwd", "fwd with a graph", "fwd+backward()", "fwd+grad()")


Made = tuple[list[torch.Tensor], dict[str, Callable[[], torch.Tensor]]]


def every_case() -> dict[str, Callable[[], Made]]:
    """Problem -> what makes its leaves and calls: [2, 4, 32, 64] and one query, then the sparse operations."""
    found: dict[str, Callable[[], Made]] = {
        f"attention(B={BATCH} H={HEADS} Tq={q_len} Tk=32 D={DIM} bf16 {layout})": functools.partial(calls_of, q_len, layout)
        for q_len, layouts in ((32, ("bhtd", "bthd", "packed")), (1, ("bhtd", "bthd")))
        for layout in layouts
    }
    return found | {
        f"dynamic_mask_attention(B={BATCH} H={HEADS} T=64 D={DIM} keep=16 bf16)": dynamic_mask,
        f"nm_sparse_attention(B={BATCH} H={HEADS} T=64 D={DIM} 2:4 bf16)": nm_sparse,
    }


def run(writer: Writer, repeat_ms: int) -> None:
    """Every problem."""
    cases = every_case()
    for problem in writer.part.cases(cases):
        measure(writer, problem, *cases[problem]())


def calls_of(q_len: int, layout: str) -> Made:
    """The leaves of a row, and each call on them."""

    def make(length: int) -> torch.Tensor:
        shape = (BATCH, HEADS, length, DIM) if layout == "bhtd" else (BATCH, length, HEADS, DIM)
        x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        return (x if layout == "bhtd" else x.transpose(1, 2)).requires_grad_()

    if layout == "packed":
        qkv = torch.randn(BATCH, 32, 3, HEADS, DIM, device="cuda", dtype=torch.bfloat16).requires_grad_()
        ours = functools.partial(saccade.attention_qkvpacked, qkv)

        def theirs() -> torch.Tensor:
            return F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4).unbind(0))

        leaves = [qkv]
    else:
        leaves = [make(q_len), make(32), make(32)]
        ours, theirs = functools.partial(saccade.attention, *leaves), functools.partial(F.scaled_dot_product_attention, *leaves)
    return leaves, {
        "auto": ours,
        "short": functools.partial(ours, backend="short"),
        "python": through_python(ours),
        "sdpa": theirs,
    }


def through_python(call: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """The call by the backend "short", with the C++ path disabled."""

    def run() -> torch.Tensor:
        kept, native.calls = native.calls, None
        starts, native._starts = native._starts, 1
        try:
            return call(backend="short")  # type: ignore[call-arg]
        finally:
            native.calls, native._starts = kept, starts

    return run


def _sparse() -> tuple[list[torch.Tensor], Callable[[], torch.Tensor]]:
    """The leaves of a sparse operation, and torch's function on them."""
    leaves = [torch.randn(BATCH, HEADS, 64, DIM, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    return leaves, functools.partial(F.scaled_dot_product_attention, *leaves, is_causal=True)


def dynamic_mask() -> Made:
    """16 keys of 64."""
    leaves, theirs = _sparse()
    scores = torch.randn(BATCH, HEADS, 64, device="cuda").requires_grad_()
    return leaves, {"auto": functools.partial(saccade.dynamic_mask_attention, *leaves, scores, keep=16), "sdpa": theirs}


def nm_sparse() -> Made:
    """2:4."""
    leaves, theirs = _sparse()
    return leaves, {"auto": functools.partial(saccade.nm_sparse_attention, *leaves, is_causal=True), "sdpa": theirs}


def measure(writer: Writer, problem: str, leaves: list[torch.Tensor], calls: dict[str, Callable]) -> None:
    """Every direction of one row."""
    calls = writer.part.calls(calls)
    with torch.no_grad():
        douts = {name: torch.randn_like(call()) for name, call in calls.items()}
    for direction in DIRECTIONS:
        timed = {name: step_of(call, direction, leaves, douts[name]) for name, call in calls.items()}
        found = host_times(timed)
        for name, timing in found.items():
            writer.add(Row("short_overhead", problem, name, direction, "bf16", *(1e-3 * t for t in timing), note="host"))
        theirs = found["sdpa"].p50 if "sdpa" in found else math.nan
        said = ", ".join(f"{name} {timing.p50:6.1f} us (x{timing.p50 / theirs:.2f})" for name, timing in found.items())
        print(f"{problem} {direction:16s}: {said}", flush=True)


def step_of(call: Callable, direction: str, leaves: list[torch.Tensor], dout: torch.Tensor) -> Callable[[], None]:
    """One step of a direction."""

    def forward() -> None:
        with torch.no_grad():
            call()

    def backward() -> None:
        out = call()
        out.backward(dout)
        for leaf in leaves:
            leaf.grad = None

    def grad() -> None:
        out = call()
        torch.autograd.grad(out, leaves, dout)

    return {"fwd": forward, "fwd with a graph": call, "fwd+backward()": backward, "fwd+grad()": grad}[direction]


def host_times(calls: dict[str, Callable[[], object]]) -> dict[str, Timing]:
    """Host microseconds per call, with the device synchronised only outside the measured time; in turns, in a new random
    order."""
    for call in calls.values():
        for _ in range(30):
            call()
    found: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    for _ in range(ROUNDS):
        random.shuffle(order)
        for name in order:
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                calls[name]()
            found[name].append(1e6 * (time.perf_counter() - start) / CALLS)
    return {name: Timing(statistics.median(times), min(times), max(times)) for name, times in found.items()}
