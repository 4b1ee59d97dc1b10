"""Host time of a call on a tiny problem, beside torch's own function: what a launch-bound user pays."""

import statistics
import time

import torch
import torch.nn.functional as F
from rows import Row, Writer

import saccade

CALLS = 300


def host_us(call) -> list[float]:
    """Host microseconds a call, the device drained only outside the clock; nine repeats."""
    for _ in range(50):
        call()
    times = []
    for _ in range(9):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append(1e6 * (time.perf_counter() - start) / CALLS)
    return sorted(times)


def run(writer: Writer, repeat_ms: int) -> None:
    """Forward alone and forward plus backward, [2, 4, 32, 64] and one query."""
    for q_len in (32, 1):
        query = torch.randn(2, q_len, 4, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        key, value = (
            torch.randn(2, 32, 4, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for _ in "kv"
        )
        qkv = (query, key, value)
        dout = torch.randn_like(query)
        results = {}
        for name, function in (("short", saccade.attention), ("sdpa", F.scaled_dot_product_attention)):

            def forward(function=function, qkv=qkv) -> None:
                with torch.no_grad():
                    function(*qkv)

            def both(function=function, qkv=qkv, dout=dout) -> None:
                torch.autograd.grad(function(*qkv), qkv, dout)

            for direction, call in (("fwd", forward), ("fwd+bwd", both)):
                times = host_us(call)
                results[name, direction] = statistics.median(times)
                problem = f"attention(B=2 H=4 Tq={q_len} Tk=32 D=64 bf16 sm_90)"
                milliseconds = (results[name, direction] / 1e3, times[1] / 1e3, times[-2] / 1e3)
                writer.add(Row("short_overhead", problem, name, direction, "bf16", *milliseconds, note="host"))
        for direction in ("fwd", "fwd+bwd"):
            ours, torchs = results["short", direction], results["sdpa", direction]
            print(f"Tq={q_len:2d} {direction:7s}: ours {ours:5.1f} us, torch {torchs:5.1f} us, x{ours / torchs:.2f} of torch's")
