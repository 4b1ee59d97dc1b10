"""Dynamic masks over a sequence that two, four or eight GPUs share, against the same call on one of them: forward, backward and both.

    python benchmarks/run.py context_parallel --out benchmarks/results/h100x4

Backends: `one_gpu` is `saccade.dynamic_mask_attention` of the whole sequence. `two_gpus`, `four_gpus` and `eight_gpus`, as many as the machine has,
are `saccade.distributed`'s with an equal part on each. `ring` is torch's ring attention over all GPUs, dense, with the key heads expanded as it
needs, where it takes less than seconds. Times are those of the slowest rank, by the wall clock between two barriers; backends of one number of ranks
take turns, and `one_gpu` takes turns with each. Its rows are those beside the most ranks.

Notes give the efficiency, the time of one GPU in the same turns over P times that of P ranks, and the bytes that a rank receives. These are counted in
the calls themselves (torch's ring sends where the counter does not look), beside what is predicted, (P - 1) * keep rows for each key head, those of
gathering K and V, and those of a ring, which moves as many in forward, and K, V and their gradients in backward.
"""

from __future__ import annotations

import itertools
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

DEVICE, REPEATS = "cuda", 11
NAMES = {2: "two_gpus", 4: "four_gpus", 8: "eight_gpus"}


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

    def offered(self, ranks: int, direction: str) -> int:
        """The bytes that a rank receives at most, as the guide predicts them: rows of K and V with their scores, there and, as gradients, back."""
        row = 2 * self.dim * self.dtype.itemsize + 4
        return (ranks - 1) * self.keep * self.kv_heads * row * {"fwd": 1, "bwd": 1, "fwd+bwd": 2}[direction]

    def gathered(self, ranks: int) -> int:
        """The bytes that a rank receives if K and V are gathered."""
        return 2 * self.length * (ranks - 1) // ranks * self.kv_heads * self.dim * self.dtype.itemsize

    def ringed(self, ranks: int, direction: str) -> int:
        """The bytes that a rank receives in a ring: K and V, in backward their gradients too."""
        return self.gathered(ranks) * {"fwd": 1, "bwd": 2, "fwd+bwd": 3}[direction]


SETTINGS = (Setting(131072, ring=True), Setting(524288), Setting(1048576), Setting(2097152), Setting(4194304))
# what a rank measures of a backend and a direction
Measured = tuple[str, str, Timing, int]


def counts() -> list[int]:
    """The numbers of ranks that this machine can have."""
    most = torch.cuda.device_count() if DEVICE == "cuda" else 2
    found = [ranks for ranks in NAMES if ranks <= most]
    if not found:
        raise SystemExit(f"this machine has {most} GPUs; the table needs two at least")
    return found


def run(writer: Writer, repeat_ms: int) -> None:
    """Measure every setting in processes of their own."""
    for setting, ranks in itertools.product(SETTINGS, counts()):
        found = on_ranks(measure, ranks, DEVICE, setting, REPEATS)
        times = {(backend, direction): timing.p50 for backend, direction, timing, _ in found}
        for backend, direction, timing, received in found:
            if backend != NAMES[ranks] and ranks != counts()[-1]:
                continue  # measured again beside more ranks
            note = f"received {received}, predicted {setting.offered(ranks, direction)}, gathering K and V {setting.gathered(ranks)}, "
            note += f"a ring {setting.ringed(ranks, direction)} bytes a rank"
            if backend == NAMES[ranks]:
                note += f"; efficiency {times['one_gpu', direction] / timing.p50 / ranks:.3f}"
            dtype = {torch.bfloat16: "bf16", torch.float32: "fp32"}[setting.dtype]
            writer.add(Row("context_parallel", str(setting), backend, direction, dtype, *timing, note=note))
        ratio = times["one_gpu", "fwd+bwd"] / times[NAMES[ranks], "fwd+bwd"]
        print(f"{setting}: {ranks} GPUs are {ratio:.2f} times as fast as one, forward and backward", flush=True)


def measure(rank: int, device: torch.device, setting: Setting, repeats: int) -> list[Measured]:
    """Every backend and direction, on one rank."""
    ranks = dist.get_world_size()
    whole = tensors(setting, device)
    each = setting.length // ranks
    own = [x.narrow(2, rank * each, each).contiguous().requires_grad_() for x in whole]
    options = {"keep": setting.keep, "enable_gqa": True}
    steps = _directions(NAMES[ranks], lambda: saccade.distributed.dynamic_mask_attention(*own, **options), own)
    if setting.ring and ranks == counts()[-1]:
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
