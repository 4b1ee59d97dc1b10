"""Sliding windows on packed sequences: `saccade.attention_varlen(window=...)` beside every way that others have.

Lengths are spread evenly from a fifth of the longest to the longest, some 38,000 tokens in all. The roof counts the bytes of real tokens at the
bandwidth of a plain copy; wide windows and head dims are bound by products instead. Peers: FlashAttention-4's varlen function and torch's
`varlen_attn`, both with the window, FlexAttention with a block mask of sequences and window, compiled for the shape, and torch's function on the padded
batch with a mask of window and padding. Rows with the note `captured` are replays of a CUDA graph. FlexAttention and torch's padded function have none: their
captures fail, and leave torch's generator unusable. FlexAttention is compiled for some eight seconds a shape, so at D = 64 alone.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rows import Row, Writer
from short_common import stream_bandwidth
from tables.short_ragged import both_ways
from torch import Tensor

import saccade
from saccade.hardware import has_package
from saccade.testing.timing import Timing

DEVICE = "cuda"
_TOKENS = 38_000
_MOST_MASK = 2**30  # numbers of the mask of a padded batch, beyond which it is not tried
Window = tuple[int, int]
CAPTURED = ("ragged", "auto", "varlen_attn", "fa4")
NAMES = (*CAPTURED, "sdpa_padded", "flex")


@dataclass(frozen=True)
class Shape:
    """One row of the table. A window whose right end is 0 is causal."""

    dim: int
    heads: int
    kv_heads: int
    longest: int
    window: Window

    def lengths(self) -> Tensor:
        """Tokens of each sequence, on the host."""
        source = torch.Generator().manual_seed(0)
        count = max(1, round(_TOKENS / (0.6 * self.longest)))
        return ((torch.rand(count, generator=source) * 0.8 + 0.2) * self.longest).long().clamp(1, self.longest)

    def __str__(self) -> str:
        lengths = self.lengths()
        left, right = self.window
        causal = " causal" if right == 0 else ""
        heads = f"H={self.heads}" + (f" Hkv={self.kv_heads}" if self.kv_heads != self.heads else "")
        return (
            f"attention_varlen(B={len(lengths)} {heads} D={self.dim} bf16 window=({left}, {right}){causal} "
            f"longest={self.longest} tokens={int(lengths.sum())})"
        )


WINDOWS: tuple[Window, ...] = ((64, 64), (256, 256), (1023, 0))
# ModernBERT, Mistral and EmbeddingGemma
HEADS = {64: (12, 12), 128: (32, 8), 256: (3, 1)}
SHAPES = [Shape(dim, *HEADS[dim], longest, window) for dim in HEADS for window in WINDOWS for longest in (256, 512, 2048, 8192)]


def every_case() -> list[Shape]:
    """The rows of the table."""
    return SHAPES


def run(writer: Writer, repeat_ms: int) -> None:
    """Measure forward, backward and both, end to end."""
    bandwidth = stream_bandwidth()
    for shape in writer.part.cases(every_case()):
        lengths = shape.lengths().to(DEVICE)
        offsets = F.pad(lengths.cumsum(0), (1, 0)).int()
        roofs, found = _roofs(shape, int(lengths.sum()), bandwidth), {}
        for name, call in writer.part.calls(_calls(shape, lengths, offsets)).items():
            for kind, timings in both_ways(name, call, repeat_ms, captured=name in CAPTURED).items():
                for direction, timing in timings.items():
                    row = Row("windows", str(shape), name, direction, "bf16", *timing, roof_ms=roofs[direction], note=kind)
                    writer.add(row)
                found |= {} if kind else {name: timings}
            torch.cuda.empty_cache()
        _say(shape, found, roofs)


def _say(shape: Shape, found: dict[str, dict[str, Timing]], roofs: dict[str, float]) -> None:
    totals = {name: times["fwd"].p50 + times["bwd"].p50 for name, times in found.items()}
    others = [(total, name) for name, total in totals.items() if name not in ("ragged", "auto")]
    if "ragged" not in found or not others:
        return
    ours, (best, peer) = found["ragged"], min(others)
    print(
        f"{shape}: fwd {ours['fwd'].p50:.3f} bwd {ours['bwd'].p50:.3f}, share of the roof {roofs['fwd'] / ours['fwd'].p50:.2f} "
        f"{roofs['bwd'] / ours['bwd'].p50:.2f}, total x{best / totals['ragged']:.2f} of {peer}"
        + (f", auto x{best / totals['auto']:.2f}" if "auto" in totals else ""),
        flush=True,
    )


def _roofs(shape: Shape, tokens: int, bandwidth: float) -> dict[str, float]:
    """Forward: q, k, v in, out and lse out. Backward: q, k, v, out, dout, lse in, dq, dk, dv out."""
    query, key = (2 * tokens * heads * shape.dim for heads in (shape.heads, shape.kv_heads))
    lse = 4 * tokens * shape.heads
    forward, backward = (2 * query + 2 * key + lse) / bandwidth, (4 * query + 4 * key + lse) / bandwidth
    return {"fwd": forward, "bwd": backward, "fwd+bwd": forward + backward}


Prepared = tuple[list[Tensor], Tensor, Callable[[], Tensor]]


def _calls(shape: Shape, lengths: Tensor, offsets: Tensor) -> dict[str, Callable[[], Prepared]]:
    """Name -> what makes the leaves, the gradient of the output and the call."""
    tokens, grouped = int(offsets[-1]), shape.heads != shape.kv_heads

    def made(*leading: int) -> tuple[list[Tensor], Tensor]:
        heads = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
        tensors = [torch.randn(*leading, n, shape.dim, device=DEVICE, dtype=torch.bfloat16) for n in heads]
        return [x.requires_grad_() for x in tensors[:3]], tensors[3]

    def packed(function: Callable[..., Tensor]) -> Prepared:
        leaves, dout = made(tokens)
        return leaves, dout, functools.partial(function, *leaves, offsets, offsets, shape.longest, shape.longest)

    def flex() -> Prepared:
        leaves, dout = made(tokens)
        attend, mask = compiled_flex(), flex_mask(offsets, shape.window)
        rows = [x.transpose(0, 1)[None] for x in leaves]
        return leaves, dout[None].transpose(1, 2), functools.partial(attend, *rows, block_mask=mask, enable_gqa=grouped)

    def padded() -> Prepared:
        if len(lengths) * shape.longest**2 > _MOST_MASK:
            raise ValueError(f"a mask of {len(lengths)} x {shape.longest} x {shape.longest} numbers is not tried")
        leaves, dout = made(len(lengths), shape.longest)
        rows = [x.transpose(1, 2) for x in leaves]
        call = functools.partial(F.scaled_dot_product_attention, *rows, attn_mask=padded_mask(lengths, shape), enable_gqa=grouped)
        return leaves, dout.transpose(1, 2), call

    ours = functools.partial(saccade.attention_varlen, window=shape.window, enable_gqa=grouped)
    found = {
        "ragged": functools.partial(packed, functools.partial(ours, backend="ragged")),
        "auto": functools.partial(packed, ours),
        "varlen_attn": functools.partial(packed, functools.partial(torch_windowed, shape)),
        "sdpa_padded": padded,
    }
    if shape.dim == 64:
        found["flex"] = flex
    if has_package("flash_attn"):
        found["fa4"] = functools.partial(packed, functools.partial(fa4_windowed, shape))
    return found


def torch_windowed(shape: Shape, *call: Tensor | int) -> Tensor:
    """torch's function for packed sequences, with the window."""
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.11 has no such keyword
    grouped = {"enable_gqa": True} if shape.heads != shape.kv_heads else {}
    return varlen_attn(*call, window_size=shape.window, **grouped)


def fa4_windowed(shape: Shape, q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor, ends_k: Tensor, max_q: int, max_k: int) -> Tensor:
    """FlashAttention-4 on packed sequences, with the window."""
    from flash_attn.cute.interface import flash_attn_varlen_func

    out = flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=ends_q, cu_seqlens_k=ends_k, max_seqlen_q=max_q, max_seqlen_k=max_k, causal=shape.window[1] == 0,
        window_size=shape.window,
    )  # fmt: skip
    return out[0] if isinstance(out, tuple) else out


def compiled_flex() -> Callable[..., Tensor]:
    """FlexAttention compiled for one shape."""
    from torch.nn.attention.flex_attention import flex_attention

    # shapes that were compiled before would count towards the limit of recompilations
    torch.compiler.reset()
    return torch.compile(flex_attention, dynamic=False)


def flex_seen(offsets: Tensor, window: Window) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The function with which FlexAttention asks whether two tokens of the packed row see each other."""
    sequence = torch.repeat_interleave(torch.arange(len(offsets) - 1, device=offsets.device), offsets.diff().long())
    left, right = window

    def seen(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (sequence[query] == sequence[key]) & (key >= query - left) & (key <= query + right)

    return seen


def flex_mask(offsets: Tensor, window: Window):
    """The block mask of the packed row."""
    from torch.nn.attention.flex_attention import create_block_mask

    tokens = int(offsets[-1])
    # compiled, or it would form a mask of all pairs
    return create_block_mask(flex_seen(offsets, window), None, None, tokens, tokens, device=str(offsets.device), _compile=True)


def padded_mask(lengths: Tensor, shape: Shape) -> Tensor:
    """bool `[B, 1, longest, longest]`: the window and the real keys."""
    places = torch.arange(shape.longest, device=lengths.device)
    ahead = places - places[:, None]
    within = (ahead >= -shape.window[0]) & (ahead <= shape.window[1])
    return within & (places < lengths[:, None, None, None])
