"""Dynamic masks over a sequence that several GPUs share, against the same call on one of them: forward, backward and both.

    python benchmarks/run.py context_parallel --out benchmarks/results/h200x2

Backends: `gpus_P` is `saccade.distributed.dynamic_mask_attention` with 1 / P of the sequence on each of P GPUs, for each P of 1, 2, 4
and 8 that the machine has; `ring` is torch's ring attention over the most of them, dense, with the key heads expanded as it needs,
where it takes less than seconds. Times are those of the slowest rank, by the wall clock between two barriers; the backends take turns.
A row is left out, with a printed sentence, where a GPU has too little memory for it.

Notes give the bytes that rank 0 receives, counted in the calls themselves (torch's ring sends where the counter does not look), beside
the prediction, (P - 1) * keep rows, and beside those of gathering K and V and of a ring, which moves as many in forward, and K, V and
their gradients in backward. Efficiency is the time of one GPU over P times that of P.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from rank_common import counts_of, first_ranks, in_turns_made, on_ranks
from rows import Row, Writer
from torch import Tensor

import saccade
import saccade.distributed
from saccade.testing.timing import Timing
from saccade.testing.traffic import Traffic

DEVICE, RANKS, REPEATS = "cuda", torch.cuda.device_count(), 11
DIRECTIONS = ("fwd", "bwd", "fwd+bwd")
# of what a call is known to hold: selection, lists and what the allocator cannot use
_SLACK = 1.15


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
        """The bytes of the offers that rank 0 receives, or of their gradients: rows of K and V with a float32 score."""
        row = 2 * self.dim * self.dtype.itemsize + 4
        rows = (ranks - 1) * min(self.keep, self.length // ranks) * self.kv_heads
        return rows * row * {"fwd": 1, "bwd": 1, "fwd+bwd": 2}[direction]

    def gathered(self, ranks: int) -> int:
        """The bytes that a rank receives if K and V are gathered."""
        return 2 * self.length * (ranks - 1) // ranks * self.kv_heads * self.dim * self.dtype.itemsize

    def ringed(self, ranks: int, direction: str) -> int:
        """The bytes that a rank receives in a ring: K and V, in backward their gradients too."""
        return self.gathered(ranks) * {"fwd": 1, "bwd": 2, "fwd+bwd": 3}[direction]

    def held(self, ranks: int) -> int:
        """About the bytes that a rank holds at once: the whole sequence, its own stretch of it and what forward and backward keep."""
        query, keys = (heads * self.length * self.dim * self.dtype.itemsize for heads in (self.heads, 2 * self.kv_heads))
        whole = query + keys if ranks > 1 else 0
        # query, out and their gradients; keys, those with offers in front, their gradients, and the float32 sums of these
        return int(_SLACK * (whole + (4 * query + 5 * keys) // ranks))


SETTINGS = (Setting(131072, ring=True), *map(Setting, (524288, 1048576, 2097152, 4194304)))


@dataclass(frozen=True)
class Measured:
    """A backend and direction on `ranks` ranks; received: bytes of rank 0."""

    backend: str
    direction: str
    ranks: int
    timing: Timing
    received: int


def run(writer: Writer, repeat_ms: int) -> None:
    """Measure every setting in processes of their own."""
    counts = counts_of(RANKS)
    together: dict[tuple[int, int], float] = {}
    for setting in SETTINGS:
        repeats = REPEATS if setting.length <= 2**20 else (REPEATS + 3) // 2
        print(f"{setting} on {counts} ranks", flush=True)
        found = on_ranks(measure, max(counts), DEVICE, setting, counts, repeats)
        alone = {m.direction: m.timing.p50 for m in found if m.ranks == 1}
        for m in found:
            writer.add(_row(setting, m, alone.get(m.direction)))
            if m.backend != "ring" and m.direction == "fwd+bwd":
                together[m.ranks, setting.length] = m.timing.p50
    _print_gains(together)


def _row(setting: Setting, m: Measured, alone: float | None) -> Row:
    notes = [f"received {m.received}"]
    if m.backend != "ring":
        notes.append(f"predicted {setting.offered(m.ranks, m.direction)}")
    notes += [f"gathering K and V {setting.gathered(m.ranks)}", f"a ring {setting.ringed(m.ranks, m.direction)} bytes a rank"]
    note = ", ".join(notes)
    if alone is not None and m.backend != "ring":
        note += f"; efficiency {alone / (m.ranks * m.timing.p50):.3f}"
    dtype = {torch.bfloat16: "bf16", torch.float32: "fp32"}[setting.dtype]
    return Row("context_parallel", str(setting), m.backend, m.direction, dtype, *m.timing, note=note)


def _print_gains(together: dict[tuple[int, int], float]) -> None:
    """Forward and backward against one GPU: with the same sequence, and with the same share of a longer one."""
    for (ranks, length), took in together.items():
        alone, part = together.get((1, length)), together.get((1, length // ranks))
        same = f"efficiency {alone / (ranks * took):.3f}" if alone else "one GPU was not measured"
        share = f"; one GPU with {length // ranks:,} tokens takes {part / took:.3f} of the time" if part else ""
        print(f"{length:,} tokens, {ranks} GPUs: {took:.2f} ms, {same}{share}", flush=True)


def measure(rank: int, device: torch.device, setting: Setting, counts: list[int], repeats: int) -> list[Measured]:
    """Every backend and direction, on one rank; each of `counts` is a group of the first ranks."""
    counts = _fitting(setting, counts, device)
    groups = {ranks: first_ranks(ranks) for ranks in counts}
    whole = tensors(setting, device)
    makers: dict[str, Callable[[], Call] | None] = {
        f"gpus_{ranks}": (lambda ranks=ranks: _stretch(setting, whole, rank, ranks, groups[ranks])) if rank < ranks else None
        for ranks in counts
    }
    sizes = dict(zip(makers, counts, strict=True))
    if setting.ring and dist.get_world_size() > 1:
        makers["ring"] = lambda: _ring(setting, whole)
        sizes["ring"] = dist.get_world_size()
    received = {name: _received(maker()) if maker else dict.fromkeys(DIRECTIONS, 0) for name, maker in makers.items()}
    steps = {name: (lambda maker=maker: _steps(maker())) if maker else None for name, maker in makers.items()}
    times = in_turns_made(steps, DIRECTIONS, device, repeats)
    return [Measured(*name, sizes[name[0]], timing, received[name[0]][name[1]]) for name, timing in times.items()]


def _fitting(setting: Setting, counts: list[int], device: torch.device) -> list[int]:
    """The counts for which every GPU has the memory; the same on all ranks."""
    if device.type != "cuda":
        return counts
    least = torch.tensor(torch.cuda.mem_get_info(device)[0], device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    free = int(least.item())
    fitting = [ranks for ranks in counts if setting.held(ranks) <= free]
    for ranks in counts:
        if ranks not in fitting and dist.get_rank() == 0:
            print(
                f"{setting} on {ranks} GPUs takes about {setting.held(ranks) / 1e9:.0f} GB of each, which has {free / 1e9:.0f} GB free: "
                "it is left out",
                flush=True,
            )
    return fitting


def tensors(setting: Setting, device: torch.device) -> list[Tensor]:
    """query, key, value and key_scores of the whole sequence, the same on every rank."""
    made = torch.Generator(device).manual_seed(0)
    shapes = ((1, heads, setting.length, setting.dim) for heads in (setting.heads, setting.kv_heads, setting.kv_heads))
    rows = [torch.randn(shape, device=device, dtype=setting.dtype, generator=made) for shape in shapes]
    return [*rows, torch.randn(1, setting.kv_heads, setting.length, device=device, generator=made)]


# a call, and the tensors whose gradients backward makes
Call = tuple[Callable[[], Tensor], list[Tensor]]


def _stretch(setting: Setting, whole: list[Tensor], rank: int, ranks: int, group: object) -> Call:
    each = setting.length // ranks
    own = [x.narrow(2, rank * each, each).contiguous().detach().requires_grad_() for x in whole]
    options = {"keep": setting.keep, "enable_gqa": True, "group": group}
    return lambda: saccade.distributed.dynamic_mask_attention(*own, **options), own


def _ring(setting: Setting, whole: list[Tensor]) -> Call:
    group = setting.heads // setting.kv_heads
    expanded = [whole[0], *(x.repeat_interleave(group, 1) for x in whole[1:3])]
    own = [saccade.distributed.head_tail(x, 2).requires_grad_() for x in expanded]
    return lambda: saccade.distributed.attention(*own), own


def _received(made: Call) -> dict[str, int]:
    """The bytes that this rank receives in each direction."""
    call, leaves = made
    with Traffic() as forward:
        out = call()
    with Traffic() as backward:
        torch.autograd.grad(out, leaves, torch.randn_like(out))
    return {"fwd": forward.received, "bwd": backward.received, "fwd+bwd": forward.received + backward.received}


def _steps(made: Call) -> dict[str, Callable[[], object]]:
    """The steps of one turn, in order: forward leaves nothing, backward takes the graph with it, as four million tokens fill a GPU."""
    call, leaves = made
    kept = [call()]
    dout = torch.randn_like(kept[0])
    torch.autograd.grad(kept[0], leaves, dout, retain_graph=True)  # so that the allocator has its blocks, and clocks are alike

    def without_gradient() -> None:
        with torch.no_grad():
            call()

    steps = (
        without_gradient,
        lambda: torch.autograd.grad(kept.pop(), leaves, dout),
        lambda: torch.autograd.grad(call(), leaves, dout),
    )
    return dict(zip(DIRECTIONS, steps, strict=True))
