"""A transformer block whose heads several GPUs share (tensor parallelism), with torch's attention and with ours.

    python benchmarks/run.py tensor_parallel --out benchmarks/results/h200x2

It runs on each number of GPUs of 1, 2, 4 and 8 that the machine has, `P` in the name of a problem.

The block is torch's own recipe: `ColwiseParallel` before attention and in the feed-forward, `RowwiseParallel` after them, so that
two all-reduces run in forward and two in backward, whichever attention there is. Backends: `sdpa` is torch's function on each
rank's heads, under a mask of the lengths where the batch is padded; `saccade` ours on the same; `saccade_dtensor` ours on the
DTensors themselves. Times are those of the slowest rank, by the wall clock between two barriers; the backends take turns.
Efficiency, in the notes, is the time of one GPU over P times that of P.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rank_common import counts_of, in_turns, on_ranks
from rows import Row, Writer
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import saccade
from saccade.testing.timing import Timing

DEVICE, RANKS, REPEATS = "cuda", torch.cuda.device_count(), 21
BACKENDS = ("sdpa", "saccade", "saccade_dtensor")


@dataclass(frozen=True)
class Setting:
    """padded: whether sequences have lengths, 40 to 100 % of `tokens`."""

    batch: int
    tokens: int
    heads: int = 16
    dim: int = 64
    padded: bool = False
    dtype: torch.dtype = torch.bfloat16

    def problem(self, ranks: int) -> str:
        """The name of the block on so many GPUs."""
        words = f"P={ranks} B={self.batch} H={self.heads} S={self.tokens} D={self.dim}{' lengths' if self.padded else ''}"
        return f"tensor_parallel({words})"


SETTINGS = tuple(Setting(64 * 1024 // tokens, tokens, padded=padded) for tokens in (64, 128, 512) for padded in (False, True))


class Block(nn.Module):
    """A pre-norm encoder block."""

    def __init__(self, width: int, dim: int, backend: str) -> None:
        super().__init__()
        self.dim, self.backend = dim, backend
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, lengths: Tensor | None, mask: Tensor | None) -> Tensor:
        hidden = self.norm1(x)
        query, key, value = (f(hidden).unflatten(-1, (-1, self.dim)).transpose(1, 2) for f in (self.query, self.key, self.value))
        if self.backend == "sdpa":
            attended = F.scaled_dot_product_attention(query, key, value, mask)
        else:
            attended = saccade.attention(query, key, value, lengths=lengths)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


# a backend, a direction and its times
Measured = tuple[str, str, Timing]


def run(writer: Writer, repeat_ms: int) -> None:
    """Measure every setting on each number of ranks, which are processes of their own."""
    alone: dict[tuple[Setting, str, str], float] = {}
    for ranks in counts_of(RANKS):
        print(f"{len(SETTINGS)} blocks on {ranks} GPUs", flush=True)
        for setting, found in zip(SETTINGS, on_ranks(measure_all, ranks, DEVICE, SETTINGS, REPEATS), strict=True):
            times = {}
            for backend, direction, timing in found:
                times[backend, direction] = timing.p50
                one = alone.setdefault((setting, backend, direction), timing.p50)  # the first count is one
                note = f"{ranks} GPUs; efficiency {one / (ranks * timing.p50):.3f}"
                dtype = {torch.bfloat16: "bf16", torch.float32: "fp32"}[setting.dtype]
                writer.add(Row("tensor_parallel", setting.problem(ranks), backend, direction, dtype, *timing, note=note))
            gains = ", ".join(f"{b} {times['sdpa', 'fwd+bwd'] / times[b, 'fwd+bwd']:.2f}" for b in BACKENDS[1:])
            print(f"{setting.problem(ranks)}: the whole block, forward and backward, against sdpa: {gains}", flush=True)


def measure_all(rank: int, device: torch.device, settings: tuple[Setting, ...], repeats: int) -> list[list[Measured]]:
    """Every setting, on one rank: starting processes takes longer than a setting."""
    return [measure(rank, device, setting, repeats) for setting in settings]


def measure(rank: int, device: torch.device, setting: Setting, repeats: int) -> list[Measured]:
    """Every backend and direction, on one rank."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    width = setting.heads * setting.dim
    made = torch.Generator(device).manual_seed(0)
    x = torch.randn(setting.batch, setting.tokens, width, device=device, dtype=setting.dtype, generator=made).requires_grad_()
    lengths = mask = None
    if setting.padded:
        lengths = torch.randint(2 * setting.tokens // 5, setting.tokens + 1, (setting.batch,), device=device, generator=made)
        mask = (torch.arange(setting.tokens, device=device) < lengths[:, None])[:, None, None]
    steps: dict[tuple[str, str], Callable[[], object] | None] = {}
    for backend in BACKENDS:
        torch.manual_seed(0)
        block = Block(width, setting.dim, backend).to(device, setting.dtype)
        local = backend != "saccade_dtensor"
        plan = {name: ColwiseParallel(use_local_output=local) for name in ("query", "key", "value")}
        plan |= {"up": ColwiseParallel(), "out": RowwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh, plan)
        given = lengths if local or lengths is None else distribute_tensor(lengths, mesh, [Replicate()])
        steps |= _directions(backend, block, (x, given, mask))
    return [(*name, timing) for name, timing in in_turns(steps, device, repeats).items()]


def _directions(backend: str, block: Block, inputs: tuple) -> dict[tuple[str, str], Callable[[], object] | None]:
    def forward() -> Tensor:
        return block(*inputs)

    def without_gradient() -> None:
        with torch.no_grad():
            forward()

    leaves = [inputs[0], *block.parameters()]
    dout = torch.randn_like(inputs[0])
    return {
        (backend, "fwd"): without_gradient,
        (backend, "fwd+bwd"): lambda: torch.autograd.grad(forward(), leaves, dout),
    }
