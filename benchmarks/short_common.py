"""Functions shared by the short-sequence tables: making leaves, timing one row of ours and of every peer, bytes and roof."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from peers import peers
from rows import Row, Writer
from steps import NOT_RUN, first_line, step
from torch import Tensor
from triton.testing import do_bench

import saccade
from saccade.engine.dense import attend
from saccade.exact.args import AttentionArgs
from saccade.exact.problem import describe_attention
from saccade.exact.short import launchers
from saccade.testing.timing import Timing, measure

DEVICE = "cuda"


def stream_bandwidth() -> float:
    """Bytes a millisecond of a plain kernel that reads three tensors and writes one: the roof of memory-bound rows."""
    a, b, c, out = (torch.randn(2**29, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    return 4 * a.nbytes / do_bench(lambda: torch.addcmul(a, b, c, out=out), return_mode="median")


@dataclass(frozen=True)
class Shape:
    """One row of a short-sequence table."""

    batch: int
    heads: int
    q_len: int
    kv_len: int
    dim: int

    def __str__(self) -> str:
        return f"S={self.kv_len} D={self.dim} {self.batch * self.heads} problems"

    def leaves(self, packed: bool = False) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """(leaves that take the gradient, query/key/value as `[B, H, T, D]`, the gradient of the output)."""

        def make(*shape: int) -> Tensor:
            return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)

        dout = make(self.batch, self.q_len, self.heads, self.dim).transpose(1, 2)
        if packed:
            qkv = make(self.batch, self.q_len, 3, self.heads, self.dim).requires_grad_()
            return [qkv], list(qkv.permute(2, 0, 3, 1, 4).unbind(0)), dout
        lengths = (self.q_len, self.kv_len, self.kv_len)
        leaves = [make(self.batch, n, self.heads, self.dim).transpose(1, 2).requires_grad_() for n in lengths]
        return leaves, leaves, dout

    def minimum_bytes(self) -> tuple[int, int]:
        """Forward: q, k, v in, o and lse out. Backward: q, k, v, dout, lse in, dq, dk, dv out."""
        query = 2 * self.batch * self.heads * self.q_len * self.dim
        key = 2 * self.batch * self.heads * self.kv_len * self.dim
        lse = 4 * self.batch * self.heads * self.q_len
        return 2 * query + 2 * key + lse, 3 * query + 4 * key + lse

    def flops(self) -> tuple[float, float]:
        """Matrix operations of forward and backward."""
        forward = 4.0 * self.batch * self.heads * self.q_len * self.kv_len * self.dim
        return forward, 2.5 * forward


def time_directions(call: Callable[[], Tensor], leaves: list[Tensor], dout: Tensor, repeat_ms: int) -> dict[str, Timing]:
    """Forward without gradient, backward alone, both: end to end through autograd."""
    return {d: measure(step(call, d, leaves, dout), warmup_ms=5, repeat_ms=repeat_ms) for d in ("fwd", "bwd", "fwd+bwd")}


def log_normal_lengths(batch: int, mean: int, longest: int) -> Tensor:
    """Tokens of each sequence, on the host, from a log-normal distribution (sigma 0.5) cut at the longest: most are shorter than the mean,
    as in text."""
    source = torch.Generator().manual_seed(0)
    normal = torch.randn(batch, generator=source) * 0.5 + torch.tensor(0.9 * mean).log()
    return normal.exp().long().clamp(2, longest)


def error_ratio(args: AttentionArgs, dout: Tensor, results: tuple[Tensor, ...], names: str) -> float:
    """Error over budget, worst of the results, on three batch rows: 1 is the limit (2 x bf16 reference + a rounding; 3 x
    gradients)."""
    rows = torch.tensor([0, 1, args.query.shape[0] - 1], device=args.query.device)

    def run(dtype: torch.dtype) -> tuple[Tensor, ...]:
        query, key, value = (x[rows].detach().to(dtype).requires_grad_() for x in args[:3])
        mask, bias, lengths = (None if x is None else x if x.shape[0] == 1 else x[rows] for x in args[3:6])
        scores = args.scale * (query @ key.transpose(-1, -2)) + (0 if bias is None else bias.to(dtype))
        if dtype == torch.float64:
            out, _ = attend(query, key, value, scale=args.scale, mask=mask, bias=bias, lengths=lengths, is_causal=args.is_causal)
        else:  # the same maths in the working dtype
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device)
            seen = seen.tril() if args.is_causal else seen
            if lengths is not None:
                seen = seen & (torch.arange(scores.shape[-1], device=query.device) < lengths[:, None, None, None])
            out = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ value
        return (out, *torch.autograd.grad(out, (query, key, value), dout[rows].to(dtype)))

    exact, low = run(torch.float64), run(torch.bfloat16)
    if names == "fwd":
        exact, low, factor = exact[:1], low[:1], 2.0
    else:
        exact, low, factor = exact[1:], low[1:], 3.0
    ratios = []
    for ours, want, rough in zip(results, exact, low, strict=True):
        rounding = torch.finfo(torch.bfloat16).eps * want.abs().max() / 2
        budget = factor * (rough.double() - want).abs().max() + rounding
        ratios.append(((ours[rows].double() - want).abs().max() / budget).item())
    return max(ratios)


def measure_ours(
    writer: Writer, table: str, shape: Shape, bandwidth: float, repeat_ms: int, packed: bool, **options
) -> dict[str, Row]:
    """End-to-end rows of ours, and kernel-only rows for separate leaves."""
    leaves, qkv, dout = shape.leaves(packed)
    if packed:
        packed_dout = dout.transpose(1, 2)
        timings = time_directions(
            lambda: saccade.attention_qkvpacked(leaves[0], backend="short", **options), leaves, packed_dout, repeat_ms
        )
    else:
        timings = time_directions(lambda: saccade.attention(*qkv, backend="short", **options), leaves, dout, repeat_ms)
    mask = options.get("attn_mask")
    problem = describe_attention(
        *qkv, mask, 0.0, options.get("is_causal", False), None, False, options.get("lengths"), False, packed, True
    )
    found = {}
    roofs = dict(zip(("fwd", "bwd"), (b / bandwidth for b in shape.minimum_bytes()), strict=True))
    roofs["fwd+bwd"] = sum(roofs.values())
    for direction, timing in timings.items():
        found[direction] = writer.add(Row(table, str(problem), "short", direction, "bf16", *timing, roof_ms=roofs[direction]))
    if packed:
        return found
    detached = [x.detach() for x in qkv]
    lengths = options.get("lengths")
    bias = None if mask is None else mask.detach()
    args = AttentionArgs(
        *detached, None, bias, None if lengths is None else lengths.int(), None, 0.0, problem.is_causal, problem.scale
    )
    bias_grad = mask is not None and mask.requires_grad
    out, lse = launchers.forward(args)
    grads = launchers.backward(args, dout, None, None, lse, bias_grad=bias_grad, packed=None)[:3]
    flops = shape.flops()
    kernels = {
        "fwd": (lambda: launchers.forward(args), error_ratio(args, dout, (out,), "fwd"), flops[0]),
        "bwd": (
            lambda: launchers.backward(args, dout, None, None, lse, bias_grad=bias_grad, packed=None),
            error_ratio(args, dout, grads, "bwd"),
            flops[1],
        ),
    }
    for direction, (call, ratio, operations) in kernels.items():
        timing = measure(call, warmup_ms=5, repeat_ms=repeat_ms)
        row = Row(table, str(problem), "short", direction, "bf16", *timing, roof_ms=roofs[direction], note="kernel")
        row.error_ratio, row.tflops = ratio, operations / timing.p50 / 1e9
        found[f"{direction} kernel"] = writer.add(row)
    return found


def measure_peers(
    writer: Writer, table: str, problem: str, shape: Shape, repeat_ms: int, packed: bool, with_fa4: bool = True,
    only: dict[str, Callable[..., Tensor]] | None = None, **options,
) -> dict[str, dict[str, Timing]]:  # fmt: skip
    """End-to-end rows of every peer that runs this shape, or of these alone."""
    found = {}
    for name, call in (peers(with_fa4 and not packed) if only is None else only).items():
        leaves, qkv, dout = shape.leaves(packed)

        def run(call=call, qkv=qkv, leaves=leaves) -> Tensor:
            tensors = leaves[0].permute(2, 0, 3, 1, 4).unbind(0) if packed else qkv
            return call(*tensors, **options)

        try:
            timings = time_directions(run, leaves, dout, repeat_ms)
        except NOT_RUN as error:
            print(f"  {name} does not run this row: {first_line(error)}")
            continue
        found[name] = timings
        for direction, timing in timings.items():
            writer.add(Row(table, problem, name, direction, "bf16", *timing))
        del leaves, qkv, dout
        torch.cuda.empty_cache()
    return found


def summary(shape: Shape, packed: bool, ours: dict[str, Row], others: dict[str, dict[str, Timing]]) -> str:
    """One line: fractions of the roof, and best other over ours."""
    line = f"{'packed' if packed else 'separate':8s} Tq={shape.q_len:3d} Tk={shape.kv_len:3d} D={shape.dim:3d}:"
    for direction in ("fwd", "bwd"):
        row = ours[direction]
        line += f" {direction} {row.ms_p50:6.2f}"
        kernel = ours.get(f"{direction} kernel")
        if kernel is not None:
            line += f" (roof {float(kernel.roof_ms) / kernel.ms_p50:.2f}, err/budget {float(kernel.error_ratio):.2f})"
        if others:
            name = min(others, key=lambda n: others[n][direction].p50)
            line += f" x{others[name][direction].p50 / row.ms_p50:.2f} of {name}"
    if others:
        # against the best single peer, as in the paper: forward plus backward of the same backend
        name = min(others, key=lambda n: others[n]["fwd"].p50 + others[n]["bwd"].p50)
        total = others[name]["fwd"].p50 + others[name]["bwd"].p50
        line += f" total x{total / (ours['fwd'].ms_p50 + ours['bwd'].ms_p50):.2f}"
    return line
