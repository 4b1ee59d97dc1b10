"""Dynamic masks over a sequence that two GPUs share, against the same call on one of them: forward, backward and both.

    python benchmarks/run.py context_parallel --out benchmarks/results/h200x2

Backends: `one_gpu` is `saccade.dynamic_mask_attention` of the whole sequence, `two_gpus` is `saccade.distributed`'s with half of it
on each, `ring` torch's ring attention over the same two GPUs, dense, with the key heads expanded as it needs, where it takes less
than seconds. Times are those of the slower rank, by the wall clock between two barriers; the backends take turns. Notes give the
bytes that a rank receives, counted in the calls themselves (torch's ring sends where the counter does not look), beside those of
gathering K and V and of a ring, which moves as many in forward, and K, V and their gradients in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from rank_common import in_turns, on_ranks
from rows import Row, Writer
from torch import Tensor

import saccade
import saccade.distributed
from saccade.testing.timing import Timing
from saccade.testing.traffic import Traffic

DEVICE, RANKS, REPEATS = "cuda", 2, 11


@dataclass(frozen=True)
class Setting:
    """A sequence of `length` tokens over all ranks. ring: whether the dense ring runs, too."""

    length: int
    keep: int = 1024
    heads: int = 8
    kv_heads: int = 2
    dim: int = 128
    ring: bool = False
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        sizes = f"B=1 H={self.heads} Hkv={self.kv_heads} Tq={self.length} Tk={self.length} D={self.dim} keep={self.keep}"
        return f"context_parallel({sizes} random)"

    def gathered(self, ranks: int) -> int:
        """The bytes that a rank receives if K and V are gathered."""
        return 2 * self.length * (ranks - 1) // ranks * self.kv_heads * self.dim * self.dtype.itemsize

    def ringed(self, ranks: int, direction: str) -> int:
        """The bytes that a rank receives in a ring: K and V, in backward their gradients too."""
        return self.gathered(ranks) * {"fwd": 1, "bwd": 2, "fwd+bwd": 3}[direction]


SETTINGS = (Setting(131072, ring=True), Setting(524288), Setting(1048576), Setting(2097152))
# what a rank measures of a backend and a direction
Measured = tuple[str, str, Timing, int]


def run(writer: Writer, repeat_ms: int) -> None:
    """Measure every setting in processes of their own."""
    for setting in SETTINGS:
        times = {}
        for backend, direction, timing, received in on_ranks(measure, RANKS, DEVICE, setting, REPEATS):
            times[backend, direction] = timing.p50
            note = f"received {received}, gathering K and V {setting.gathered(RANKS)}, a ring {setting.ringed(RANKS, direction)} bytes a rank"
            dtype = {torch.bfloat16: "bf16", torch.float32: "fp32"}[setting.dtype]
            writer.add(Row("context_parallel", str(setting), backend, direction, dtype, *timing, note=note))
        ratio = times["one_gpu", "fwd+bwd"] / times["two_gpus", "fwd+bwd"]
        print(f"{setting}: {RANKS} GPUs are {ratio:.2f} times as fast as one, forward and backward", flush=True)


def measure(rank: int, device: torch.device, setting: Setting, repeats: int) -> list[Measured]:
    """Every backend and direction, on one rank."""
    ranks = dist.get_world_size()
    whole = tensors(setting, device)
    each = setting.length // ranks
    own = [x.narrow(2, rank * each, each).contiguous().requires_grad_() for x in whole]
    options = {"keep": setting.keep, "enable_gqa": True}
    steps = _directions("two_gpus", lambda: saccade.distributed.dynamic_mask_attention(*own, **options), own)
    if setting.ring:
        steps |= _ring(setting, whole)
    leaves = [x.requires_grad_() for x in whole] if rank == 0 else []
    call = (lambda: saccade.dynamic_mask_attention(*leaves, **options)) if rank == 0 else None
    steps |= _directions("one_gpu", call, leaves)
    times = in_turns({name: step for name, (step, _) in steps.items()}, device, repeats)
    return [(*name, times[name], received) for name, (_, received) in steps.items()]


def tensors(setting: Setting, device: torch.device) -> list[Tensor]:
    """query, key, value and key_scores of the whole sequence, the same on every rank."""
    made = torch.Generator(device).manual_seed(0)
    shapes = ((1, heads, setting.length, setting.dim) for heads in (setting.heads, setting.kv_heads, setting.kv_heads))
    rows = [torch.randn(shape, device=device, dtype=setting.dtype, generator=made) for shape in shapes]
    return [*rows, torch.randn(1, setting.kv_heads, setting.length, device=device, generator=made)]


# (backend, direction) -> the step, None on a rank that waits, and the bytes that it receives
Steps = dict[tuple[str, str], tuple[Callable[[], object] | None, int]]


def _ring(setting: Setting, whole: list[Tensor]) -> Steps:
    group = setting.heads // setting.kv_heads
    expanded = [whole[0], *(x.repeat_interleave(group, 1) for x in whole[1:3])]
    own = [saccade.distributed.head_tail(x.detach(), 2).requires_grad_() for x in expanded]
    return _directions("ring", lambda: saccade.distributed.attention(*own), own)


def _directions(backend: str, call: Callable[[], Tensor] | None, leaves: list[Tensor]) -> Steps:
    """Forward, backward and both. call: None on a rank that waits while another measures alone."""
    if call is None:
        return {(backend, direction): (None, 0) for direction in ("fwd", "bwd", "fwd+bwd")}
    with Traffic() as forward:
        out = call()
    dout = torch.randn_like(out)
    with Traffic() as backward:
        torch.autograd.grad(out, leaves, dout, retain_graph=True)

    def without_gradient() -> None:
        with torch.no_grad():
            call()

    return {
        (backend, "fwd"): (without_gradient, forward.received),
        (backend, "bwd"): (lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True), backward.received),
        (backend, "fwd+bwd"): (lambda: torch.autograd.grad(call(), leaves, dout), forward.received + backward.received),
    }
