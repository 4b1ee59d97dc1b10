"""A bias that many rows share, and its gradient: `saccade.attention` with `key_mask` beside every way that others have.

The rows of structure models (N rows of N tokens with a bias of the pairs, with and without a mask of keys for each row), T5's relative bias, and large
windows: one bias for all (Swin V2, Video Swin), and one for each window (SwinUNETR). All gradients are asked for, that of the bias too. The roof counts
bytes alone, the bias once for all rows. Peers: torch's function, which is given the bias of every row where there is a mask, as its users build it,
within the time; FlexAttention with the bias as score_mod, compiled for the shape, its compile time in the note; cuEquivariance and cuDNN's own gradient
of a bias (`cudnn_bias.py`, without masks), where they are installed.
Rows with the note `captured` are replays of a CUDA graph, without the host's time.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from cudnn_bias import MULTIPLE, cudnn_bias
from rows import Row, Writer
from short_common import stream_bandwidth
from steps import step
from tables.short_ragged import both_ways
from torch import Tensor

import saccade
from saccade.exact.problem import describe_attention
from saccade.hardware import has_package
from saccade.testing.timing import Timing

DEVICE = "cuda"
_MOST_BIAS = 2**33  # numbers of the bias of every row, beyond which torch's function is not tried
_OURS = ("long", "shared_bias", "ragged", "auto")
NAMES = (*_OURS, "sdpa", "flex", "cuequivariance", "cudnn_bias")


@dataclass(frozen=True)
class Shape:
    """One row of the table. windows: W, of a bias for each window; 0 for one that all rows share. masked: whether each row has a mask of keys."""

    model: str
    batch: int
    heads: int
    tokens: int
    dim: int
    windows: int = 0
    masked: bool = False

    @property
    def bias_shape(self) -> tuple[int, int, int, int]:
        """`[W or 1, H, N, N]`."""
        return max(1, self.windows), self.heads, self.tokens, self.tokens

    def leaves(self) -> list[Tensor]:
        """query, key, value, as views of `[B, N, H, D]`, and the bias."""
        made = [torch.randn(self.batch, self.tokens, self.heads, self.dim, device=DEVICE, dtype=torch.bfloat16) for _ in range(3)]
        bias = torch.randn(self.bias_shape, device=DEVICE, dtype=torch.bfloat16)
        return [x.requires_grad_() for x in (*(x.transpose(1, 2) for x in made), bias)]

    def mask(self, device: str | None = None) -> Tensor | None:
        """bool `[B, N]`: a fifth of the keys of each row is hidden."""
        if not self.masked:
            return None
        source = torch.Generator().manual_seed(0)
        return (torch.rand(self.batch, self.tokens, generator=source) < 0.8).to(device or DEVICE)

    def __str__(self) -> str:
        return _described(self)


@functools.cache
def _described(shape: Shape) -> str:
    """The description of the call, as `explain` gives it; where no GPU is, that on an H100."""
    device = DEVICE if torch.cuda.is_available() or DEVICE == "cpu" else "meta"
    made = torch.empty(shape.batch, shape.heads, shape.tokens, shape.dim, device=device, dtype=torch.bfloat16)
    bias = torch.empty(shape.bias_shape, device=device, dtype=torch.bfloat16, requires_grad=True)
    query = made.unflatten(0, (-1, shape.windows)) if shape.windows else made
    options = (0.0, False, None, False, None, False, False, True, None, shape.mask(device))
    problem = describe_attention(query, query, query, bias, *options)
    return str(replace(problem, device_type="cuda", arch=90) if device == "meta" else problem)


SHAPES = [
    *(Shape("triangle", n, 4, n, 32, masked=masked) for n in (128, 256, 384, 512, 768, 1024) for masked in (False, True)),
    *(Shape("T5", 32, 12, 512, 64, masked=masked) for masked in (False, True)),
    Shape("Swin V2", 256, 4, 392, 32),
    Shape("SwinUNETR", 256, 3, 343, 16, windows=64),
]


def every_case() -> list[Shape]:
    """The rows of the table."""
    return SHAPES


def run(writer: Writer, repeat_ms: int) -> None:
    """Measure forward, backward and both, end to end."""
    bandwidth = stream_bandwidth()
    for shape in writer.part.cases(every_case()):
        roofs, found = _roofs(shape, bandwidth), {}
        for name, call in writer.part.calls(calls_of(shape)).items():
            notes = [shape.model]
            prepare = functools.partial(_made, shape, name, call, notes)
            for kind, timings in both_ways(name, prepare, repeat_ms).items():
                note = ", ".join([*notes, *filter(None, [kind])])
                for direction, timing in timings.items():
                    writer.add(
                        Row("shared_bias", str(shape), name, direction, "bf16", *timing, roof_ms=roofs[direction], note=note)
                    )
                found.setdefault(kind, {})[name] = timings
            torch.cuda.empty_cache()
        for kind, of_kind in found.items():
            _say(f"{shape.model} {shape}{kind and ' ' + kind}", of_kind, roofs)


Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def _made(
    shape: Shape, name: str, make: Callable[[], Attend], notes: list[str]
) -> tuple[list[Tensor], Tensor, Callable[[], Tensor]]:
    """The leaves, the gradient of the output and the call. A peer that compiles does so here, and leaves a note of it."""
    leaves, attend = shape.leaves(), make()
    dout = torch.randn_like(leaves[0])
    compute = functools.partial(attend, *leaves)
    if name == "flex":
        start = time.perf_counter()
        step(compute, "fwd", leaves, dout)()
        step(compute, "fwd+bwd", leaves, dout)()
        torch.cuda.synchronize()
        notes.append(f"compiled in {time.perf_counter() - start:.0f} s")
    return leaves, dout, compute


def _say(what: str, found: dict[str, dict[str, Timing]], roofs: dict[str, float]) -> None:
    others = {name: times for name, times in found.items() if name not in _OURS}
    if "shared_bias" not in found or not others:
        return
    ours, parts = found["shared_bias"], []
    for direction in ("fwd", "fwd+bwd"):
        best = min(others, key=lambda name, d=direction: others[name][d].p50)
        gains = [
            f"{name} x{others[best][direction].p50 / found[name][direction].p50:.2f}"
            for name in ("shared_bias", "long", "auto")
            if name in found
        ]
        parts.append(f"{direction} {ours[direction].p50:.3f} (roof {roofs[direction]:.3f}), {', '.join(gains)} of {best}")
    print(f"{what}: {', '.join(parts)}", flush=True)


def _roofs(shape: Shape, bandwidth: float) -> dict[str, float]:
    """Forward: q, k, v and the bias in, out and lse out. Backward: q, k, v, out, dout, lse and the bias in, dq, dk, dv and dbias out."""
    tensor = 2 * shape.batch * shape.heads * shape.tokens * shape.dim
    lse, bias = 4 * shape.batch * shape.heads * shape.tokens, 2 * torch.Size(shape.bias_shape).numel()
    forward, backward = (4 * tensor + lse + bias) / bandwidth, (8 * tensor + lse + 2 * bias) / bandwidth
    return {"fwd": forward, "bwd": backward, "fwd+bwd": forward + backward}


def calls_of(shape: Shape) -> dict[str, Callable[[], Attend]]:
    """Name -> what makes the function `(query, key, value, bias) -> out`."""
    mask = shape.mask()
    found: dict[str, Callable[[], Attend]] = {name: functools.partial(ours, shape, mask, name) for name in _OURS}
    found |= {"sdpa": functools.partial(by_torch, shape, mask), "flex": functools.partial(flex, shape, mask)}
    if not shape.windows and any(map(has_package, ("cuequivariance_torch", "cuequivariance_ops_torch"))):
        found["cuequivariance"] = functools.partial(cuequivariance, mask)
    if mask is None and not shape.windows and shape.tokens % MULTIPLE == 0 and has_package("cudnn"):
        found["cudnn_bias"] = lambda: cudnn_bias
    return found


def ours(shape: Shape, mask: Tensor | None, backend: str) -> Attend:
    """`saccade.attention`; a bias for each window as its users call it, `[images, W, H, N, D]`."""

    def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        if not shape.windows:
            return saccade.attention(query, key, value, bias, key_mask=mask, backend=backend)
        query, key, value = (x.unflatten(0, (-1, shape.windows)) for x in (query, key, value))
        return saccade.attention(query, key, value, bias, backend=backend).flatten(0, 1)

    return attend


def by_torch(shape: Shape, mask: Tensor | None) -> Attend:
    """torch's function, under one tensor of bias and mask."""
    if shape.batch * shape.heads * shape.tokens**2 > _MOST_BIAS:
        raise ValueError(f"a bias of {shape.batch} x {shape.heads} x {shape.tokens} x {shape.tokens} numbers is not tried")
    hidden = None if mask is None else torch.zeros_like(mask, dtype=torch.bfloat16).masked_fill(~mask, float("-inf"))

    def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        if shape.windows:
            bias = bias.repeat(shape.batch // shape.windows, 1, 1, 1)
        elif hidden is not None:
            bias = bias + hidden[:, None, None]
        return F.scaled_dot_product_attention(query, key, value, bias)

    return attend


def score_mod(shape: Shape, mask: Tensor | None, bias: Tensor) -> Callable[..., Tensor]:
    """The bias, and the mask of keys, as FlexAttention adds them to a score."""
    windows = max(1, shape.windows)

    def added(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        score = score + bias[b % windows, h, query, key]
        return score if mask is None else torch.where(mask[b, key], score, float("-inf"))

    return added


def flex(shape: Shape, mask: Tensor | None) -> Attend:
    """FlexAttention compiled for one shape."""
    from torch.nn.attention.flex_attention import flex_attention

    # shapes that were compiled before would count towards the limit of recompilations
    torch.compiler.reset()
    # or a backward that is timed alone, whose graph is kept, is refused
    torch._functorch.config.donated_buffer = False
    compiled = torch.compile(flex_attention, dynamic=False)
    made = functools.cache(functools.partial(score_mod, shape, mask))  # another function at each call might be compiled anew

    def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        return compiled(query, key, value, score_mod=made(bias))

    return attend


def cuequivariance(mask: Tensor | None) -> Attend:
    """NVIDIA's triangle attention, with the bias in float32, as its page says it is cast."""
    try:
        from cuequivariance_torch import triangle_attention
    except ImportError:
        from cuequivariance_ops_torch import triangle_attention
    seen = None if mask is None else mask[None, :, None, None]

    def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        return triangle_attention(query[None], key[None], value[None], bias[None].float(), seen)[0]

    return attend
