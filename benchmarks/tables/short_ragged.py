"""Ragged batches: `saccade.attention_varlen` on packed tokens, against every way that torch and FlashAttention-4 have.

Lengths are drawn from a log-normal distribution (sigma 0.5), cut at the longest: most sequences are shorter than the mean, as in text. The roof counts the
bytes of real tokens alone, at the bandwidth of a plain copy. Peers: torch's `varlen_attn`, FlashAttention-4's varlen function, and torch's dense
function on the padded batch with a key-padding mask (what a program does that does not pack). Rows with the note `captured` are replays of a CUDA
graph: calls of small batches are host time otherwise.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from peers import fa4_packed, torch_packed
from rows import Row, Writer
from short_common import log_normal_lengths, stream_bandwidth, time_directions
from steps import NOT_RUN, capture, first_line, step
from torch import Tensor

import saccade
from saccade.exact.ragged import launchers
from saccade.exact.varlen.args import VarlenArgs
from saccade.hardware import has_package
from saccade.testing.timing import Timing, measure

HEADS = 12
NAMES = ("ragged", "auto", "varlen_attn", "sdpa_padded", "fa4")
_MOST_PADDED = 2**33  # numbers of a padded tensor, beyond which it is not tried


@dataclass(frozen=True)
class Shape:
    """One row of the table."""

    dim: int
    longest: int
    mean: int
    batch: int
    heads: int = HEADS

    def lengths(self) -> Tensor:
        """Tokens of each sequence, on the host."""
        return log_normal_lengths(self.batch, self.mean, self.longest)

    def __str__(self) -> str:
        lengths = self.lengths()
        tokens = int(lengths.sum())
        return f"attention_varlen(B={self.batch} H={self.heads} D={self.dim} bf16 longest={self.longest} mean={tokens / self.batch:.0f} tokens={tokens})"


SHAPES = [
    *(Shape(dim, 128, 20, batch) for batch in (64, 256, 1024) for dim in (32, 64)),
    *(Shape(dim, 64, 12, 16384) for dim in (32, 64, 128)),
    *(Shape(dim, 128, 40, 4096) for dim in (32, 64, 128)),
    *(Shape(dim, 128, 89, 4096) for dim in (32, 64, 128)),
    *(Shape(dim, 417, 122, 1024) for dim in (32, 64, 128)),
    *(Shape(dim, 512, 256, 1024) for dim in (32, 64, 128)),
    Shape(32, 64, 12, 1_000_000),
    # fewer heads: the tensors of a call and its gradients are 8 times 5 GB
    Shape(32, 64, 20, 1_000_000, heads=4),
]


def every_case() -> list[Shape]:
    """The rows of the table."""
    return SHAPES


def run(writer: Writer, repeat_ms: int) -> None:
    """Measure forward, backward and both, end to end and by the kernels alone."""
    bandwidth = stream_bandwidth()
    for shape in writer.part.cases(every_case()):
        lengths = shape.lengths().to("cuda")
        offsets = F.pad(lengths.cumsum(0), (1, 0)).int()
        roofs = _roofs(shape, int(lengths.sum()), bandwidth)
        found, ours = dict[str, float](), dict[str, Timing]()
        for name, call in writer.part.calls(_calls(shape, lengths, offsets)).items():
            for kind, timings in both_ways(name, call, repeat_ms).items():
                for direction, timing in timings.items():
                    row = Row("short_ragged", str(shape), name, direction, "bf16", *timing, roof_ms=roofs[direction], note=kind)
                    writer.add(row)
                if not kind:
                    found[name] = timings["fwd"].p50 + timings["bwd"].p50
                    ours = timings if name == "ragged" else ours
            torch.cuda.empty_cache()
        if not writer.part.has("ragged"):
            continue
        _kernels(writer, shape, offsets, roofs, repeat_ms)
        if "ragged" not in found:
            continue
        others = [(total, name) for name, total in found.items() if name not in ("ragged", "auto")]
        gain = "no peer ran it"
        if others:
            gain = f"total x{min(others)[0] / found['ragged']:.2f} of {min(others)[1]}"
            gain += f", auto x{min(others)[0] / found['auto']:.2f}" if "auto" in found else ""
        print(
            f"{shape}: fwd {ours['fwd'].p50:.3f} bwd {ours['bwd'].p50:.3f}, share of the roof {roofs['fwd'] / ours['fwd'].p50:.2f} "
            f"{roofs['bwd'] / ours['bwd'].p50:.2f}, {gain}",
            flush=True,
        )


def both_ways(name: str, call: Callable[[], "Prepared"], repeat_ms: int, captured: bool = True) -> dict[str, dict[str, Timing]]:
    """Times of forward, backward and both, by the note of their rows: "" of the call as it is, "captured" without backward alone. A call that does not run is
    left out. Tensors are gone afterwards, those of a failed call too: in the rows of a million sequences they are half the memory of a GPU."""
    found: dict[str, dict[str, Timing]] = {}
    try:
        leaves, dout, compute = call()
        found[""] = time_directions(compute, leaves, dout, repeat_ms)
        if not captured:
            return found
        replays = {way: capture(step(compute, way, leaves, dout)) for way in ("fwd", "fwd+bwd")}
        found["captured"] = {way: measure(replay, warmup_ms=5, repeat_ms=repeat_ms) for way, replay in replays.items()}
    except NOT_RUN as error:
        print(f"  {name} {'is not captured' if found else 'does not run this row'}: {first_line(error)}")
    return found


def _roofs(shape: Shape, tokens: int, bandwidth: float) -> dict[str, float]:
    """Forward: q, k, v in, out and lse out. Backward: q, k, v, dout, lse in, dq, dk, dv out."""
    tensor, lse = 2 * tokens * shape.heads * shape.dim, 4 * tokens * shape.heads
    forward, backward = (4 * tensor + lse) / bandwidth, (7 * tensor + lse) / bandwidth
    return {"fwd": forward, "bwd": backward, "fwd+bwd": forward + backward}


def _packed(shape: Shape, tokens: int) -> tuple[list[Tensor], Tensor]:
    made = [torch.randn(tokens, shape.heads, shape.dim, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    return [x.requires_grad_() for x in made[:3]], made[3]


def _kernels(writer: Writer, shape: Shape, offsets: Tensor, roofs: dict[str, float], repeat_ms: int) -> None:
    """Our launches without autograd."""
    (query, key, value), dout = _packed(shape, int(offsets[-1]))
    args = VarlenArgs(
        query.detach(), key.detach(), value.detach(), offsets, offsets, None, None, shape.longest, shape.longest, 0.0, 0,
        shape.dim**-0.5,
    )  # fmt: skip
    out, lse = launchers.forward(args)
    backward = functools.partial(launchers.backward, args, dout, None, out, lse, bias_grad=False)
    for direction, call in (("fwd", functools.partial(launchers.forward, args)), ("bwd", backward)):
        timing = measure(call, warmup_ms=5, repeat_ms=repeat_ms)
        writer.add(Row("short_ragged", str(shape), "ragged", direction, "bf16", *timing, roof_ms=roofs[direction], note="kernel"))


Prepared = tuple[list[Tensor], Tensor, Callable[[], Tensor]]


def _calls(shape: Shape, lengths: Tensor, offsets: Tensor) -> dict[str, Callable[[], Prepared]]:
    """Name -> what makes the leaves, the gradient of the output and the call."""

    def packed(function: Callable[..., Tensor]) -> Prepared:
        leaves, dout = _packed(shape, int(offsets[-1]))
        return leaves, dout, functools.partial(function, *leaves, offsets, offsets, shape.longest, shape.longest)

    def padded() -> Prepared:
        size = (shape.batch, shape.longest, shape.heads, shape.dim)
        if shape.batch * shape.longest * shape.heads * shape.dim > _MOST_PADDED:
            raise ValueError(f"padded tensors of shape {size} are not tried")
        made = [torch.randn(size, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(4)]
        leaves = [x.requires_grad_() for x in made[:3]]
        mask = (torch.arange(shape.longest, device="cuda") < lengths[:, None])[:, None, None, :]
        return leaves, made[3], functools.partial(F.scaled_dot_product_attention, *leaves, attn_mask=mask)

    found = {
        "ragged": functools.partial(packed, functools.partial(saccade.attention_varlen, backend="ragged")),
        "auto": functools.partial(packed, saccade.attention_varlen),
        "varlen_attn": functools.partial(packed, torch_packed),
        "sdpa_padded": padded,
    }
    if has_package("flash_attn"):
        found["fa4"] = functools.partial(packed, fa4_packed)
    return found
