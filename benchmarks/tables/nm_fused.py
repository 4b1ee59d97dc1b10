"""Fused N:M attention against the best dense kernels: forward, forward plus backward and peak memory, by length, head dim and
pattern.

The setting of paper 001 and of most attention papers: 32,768 rows of hidden 2,048, bf16, views of `[B, T, H, D]`. Forward rows
with note "kernel" run without autograd; the others go through the public function with leaves that require gradients. Peers:
SDPA's FLASH and cuDNN backends forced, FlashAttention-4 where it is installed. Calls of one setting take turns in a new random
order, so that neither clocks nor neighbouring calls favour any. `tflops` counts the dense products for every row, pruned or not;
`roof_ms` is that of the products that a row needs (dense Q K^T, P V at the doubled rate) at 790 TFLOP/s, measured as the peak of
a large dense bf16 product. Forward plus backward has rows with note "unordered" too: the same call under
`saccade.nm_sparse.unordered_gradients()`.
"""

from __future__ import annotations

import gc
import random
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
TURNS = 9
PATTERNS = ("2:4", "1:2")
UNORDERED = "unordered"  # gradients whose sums have no order, as those of the dense peers have none


@dataclass(frozen=True)
class Setting:
    """32,768 rows of hidden 2,048."""

    length: int
    dim: int
    is_causal: bool

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """B, T, H, D."""
        return 32768 // self.length, self.length, 2048 // self.dim, self.dim

    @property
    def flops(self) -> float:
        """The matrix operations of dense attention, forward."""
        batch, length, heads, dim = self.sizes
        return 4.0 * batch * heads * length * length * dim * (0.5 if self.is_causal else 1.0)

    def __str__(self) -> str:
        batch, length, heads, dim = self.sizes
        return f"nm_sparse(B={batch} H={heads} Tq={length} Tk={length} D={dim} bf16{' causal' if self.is_causal else ''})"


SETTINGS = [Setting(n, d, causal) for d in (128, 64) for causal in (False, True) for n in (1024, 2048, 4096, 8192, 16384)]


def every_case() -> list[Setting]:
    """The rows of the table."""
    return SETTINGS


def run(writer: Writer, repeat_ms: int) -> None:
    """Each setting: forward and forward plus backward of ours and of the peers, in turn."""
    for setting in writer.part.cases(every_case()):
        shape = setting.sizes
        leaves = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for _ in range(3)]
        dout = torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        calls = _calls(setting, leaves)
        forward = in_turn({name: _without_gradient(call) for name, call in calls.items()}, repeat_ms)
        steps = {name: _with_backward(call, leaves, dout) for name, call in calls.items()}
        steps |= {f"mma_sp {pattern} {UNORDERED}": _in_no_order(steps[f"mma_sp {pattern}"]) for pattern in PATTERNS}
        both = in_turn(steps, repeat_ms)
        for name, timing in forward.items():
            _write(writer, setting, name, "fwd", timing, "kernel")
        for name, timing in both.items():
            _write(writer, setting, name, "fwd+bwd", timing, f"peak {_peak(steps[name]):.2f} GiB")
        print(_line(setting, forward, both), flush=True)
        del leaves, dout, calls
        gc.collect()


def _calls(setting: Setting, leaves: list[Tensor]) -> dict[str, Callable[[], Tensor]]:
    """Ours by pattern and the peers that run."""
    found: dict[str, Callable[[], Tensor]] = {}
    for pattern in PATTERNS:
        found[f"mma_sp {pattern}"] = lambda pattern=pattern: saccade.nm_sparse_attention(
            *leaves, is_causal=setting.is_causal, pattern=pattern, backend="mma_sp"
        )
    for name, peer in peers().items():
        # slower than the others on this GPU at every length
        if name == "sdpa_efficient":
            continue
        call = lambda peer=peer: peer(*leaves, is_causal=setting.is_causal)  # noqa: E731
        try:
            call()
        except Exception as error:  # noqa: BLE001 - a peer that refuses is left out, with its reason
            print(f"  {name} does not run {setting}: {str(error).splitlines()[0][:90]}")
            continue
        found[name] = call
    return found


def _without_gradient(call: Callable[[], Tensor]) -> Callable[[], object]:
    def run() -> object:
        with torch.no_grad():
            return call()

    return run


def _with_backward(call: Callable[[], Tensor], leaves: list[Tensor], dout: Tensor) -> Callable[[], object]:
    return lambda: torch.autograd.grad(call(), leaves, dout)


def _in_no_order(step: Callable[[], object]) -> Callable[[], object]:
    def run() -> object:
        with saccade.nm_sparse.unordered_gradients():
            return step()

    return run


def in_turn(calls: dict[str, Callable[[], object]], repeat_ms: int) -> dict[str, Timing]:
    """Milliseconds of each call, by device events; every turn runs each of them for a share of `repeat_ms`."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    counts = {name: max(1, round(repeat_ms / TURNS / _once(call, 1))) for name, call in calls.items()}
    order = list(calls)
    for turn in range(TURNS + 1):
        # in a new random order, because after FlashAttention-4 a call takes 2 to 4 % longer
        random.shuffle(order)
        for name in order:
            elapsed = _once(calls[name], counts[name])
            if turn:
                times[name].append(elapsed)
    found = {}
    for name, values in times.items():
        spread = statistics.quantiles(values, n=5, method="inclusive")
        found[name] = Timing(statistics.median(values), spread[0], spread[-1])
    return found


def _once(call: Callable[[], object], count: int) -> float:
    # keeps the queue from being empty, so that the host time of the first launch is not measured
    call()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / count


def _peak(call: Callable[[], object]) -> float:
    """GiB at the peak, in addition to what was allocated before the call."""
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def _write(writer: Writer, setting: Setting, name: str, direction: str, timing: Timing, note: str) -> None:
    factor = 1.0 if direction == "fwd" else 3.5
    # a pruned forward needs three quarters of the products at the doubled rate; backward is dense
    needed = factor - 0.25 if name.startswith("mma_sp") else factor
    flops = setting.flops
    writer.add(
        Row(
            "nm_fused", str(setting), name.split()[0], direction, "bf16", *timing, roof_ms=needed * flops / PEAK_TFLOPS / 1e9,
            tflops=factor * flops / timing.p50 / 1e9, note=", ".join(filter(None, (name.partition(" ")[2], note))),
        )
    )  # fmt: skip


def _line(setting: Setting, forward: dict[str, Timing], both: dict[str, Timing]) -> str:
    """Ours, and how often faster than each peer."""
    words = [f"D={setting.dim:3d} n={setting.length:5d} {'causal' if setting.is_causal else 'full  '}"]
    for direction, times in (("fwd", forward), ("fwd+bwd", both)):
        for pattern in PATTERNS:
            ours = times[f"mma_sp {pattern}"].p50
            ratios = [
                f"{t.p50 / ours:.2f} {name.removeprefix('sdpa_')}" for name, t in times.items() if not name.startswith("mma_sp")
            ]
            words.append(f"{direction} {pattern} {ours:.3f} ms x " + " ".join(ratios))
    return "  ".join(words)
