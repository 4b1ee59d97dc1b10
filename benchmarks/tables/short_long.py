"""Sequences of 129 to 577 tokens, bf16: a grid of S x D, and shapes of models with lengths and causal rows, against every SDPA
backend forced and FlashAttention-4.

All implementations work on the same leaves and take turns: three rounds, each time in a new random order. The roof of a
direction is the larger of two times: its bytes (backward reads the output too) at the measured bandwidth of a plain kernel, and
its products at 700 TFLOP/s. At `--repeat-ms 15` the table is meant to take at most 170 s.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from peers import SDPA, peers
from rows import Row, Writer, numbers_of
from short_common import Shape, error_ratio, log_normal_lengths, stream_bandwidth
from steps import step, those_that_run
from torch import Tensor

import saccade
from saccade.exact.args import AttentionArgs
from saccade.exact.problem import describe_attention
from saccade.testing.timing import Timing, measure_in_turns

BACKENDS = {"long": "long", "auto": "auto"}  # ours: name in the table -> `backend` of the call
NAMES = (*BACKENDS, "sdpa", *SDPA, "fa4")
DIRECTIONS = ("fwd", "bwd", "fwd+bwd")
PRODUCTS = 700e9  # operations a millisecond, about what the best kernels reach on an H200 in bf16
NUMBERS, HEADS = 2**27, 8
ROUNDS, WARM_UP_MS = 3, 10


@dataclass(frozen=True)
class Case:
    """One row of the table; `name` is that of a model, `feature` is "causal", "lengths" or nothing."""

    shape: Shape
    name: str = ""
    feature: str = ""

    def __str__(self) -> str:
        return f"S={self.shape.q_len} D={self.shape.dim} {self.name or 'plain'} {self.feature}".rstrip()


def square(batch: int, heads: int, length: int, dim: int) -> Shape:
    """Self-attention."""
    return Shape(batch, heads, length, length, dim)


PLAIN = [
    Case(square(NUMBERS // (length * dim * HEADS), HEADS, length, dim))
    for dim in (32, 64, 128)
    for length in (160, 196, 197, 256, 257, 384, 512, 577)
]
MODELS = [
    Case(square(256, 12, 197, 64), "ViT-B/16"),
    Case(square(256, 16, 257, 64), "ViT-L/14"),
    Case(square(128, 16, 577, 64), "CLIP-L/336"),
    Case(square(256, 12, 512, 64), "BERT", "lengths"),
    *(Case(square(256, 12, length, 64), "SigLIP") for length in (196, 256)),
]
CAUSAL = [Case(square(NUMBERS // (length * 64 * HEADS), HEADS, length, 64), feature="causal") for length in (256, 512)]
CASES = PLAIN + MODELS + CAUSAL


def every_case() -> list[Case]:
    """The rows of the table."""
    return CASES


def case_of(row: Mapping[str, str]) -> str:
    """The name of a row's case."""
    size, problem = numbers_of(row["problem"]), row["problem"].split()
    feature = next((x for x in ("causal", "lengths") if x in problem), "")
    return f"S={size['Tq']} D={size['D']} {row['note'] or 'plain'} {feature}".rstrip()


def run(writer: Writer, repeat_ms: int) -> None:
    """Measure forward, backward and both of every row."""
    bandwidth = stream_bandwidth()
    print(f"three reads, one write: {bandwidth / 1e9:.2f} TB/s")
    for case in writer.part.cases(every_case()):
        print(line(case, *_measure(writer, case, bandwidth, repeat_ms)), flush=True)
        torch.cuda.empty_cache()


def _measure(
    writer: Writer, case: Case, bandwidth: float, repeat_ms: int
) -> tuple[dict[str, dict[str, Timing]], dict[str, float]]:
    """Write the rows of a case: (direction -> implementation -> time, direction -> roof)."""
    leaves, _, dout = case.shape.leaves()
    lengths = None
    if case.feature == "lengths":
        lengths = log_normal_lengths(case.shape.batch, case.shape.kv_len // 2, case.shape.kv_len).to(dout.device)
    calls = those_that_run(writer.part.calls(_calls(case, leaves, lengths)), leaves, dout)
    keys = case.shape.batch * case.shape.kv_len if lengths is None else int(lengths.sum())
    roofs, operations = _roofs(case, keys, bandwidth), _operations(case, keys)
    ratios = {name: _error_ratios(case, call, leaves, dout, lengths) for name, call in calls.items() if name in BACKENDS}
    for name, ratio in ratios.items():
        if max(ratio.values()) > 1:
            print(f"  {name} is beyond its budget: {ratio}")
    problem = str(describe_attention(*leaves, None, 0.0, case.feature == "causal", None, False, lengths, False, False, True))
    found = {}
    for direction in DIRECTIONS:
        steps = {name: step(call, direction, leaves, dout) for name, call in calls.items()}
        found[direction] = measure_in_turns(steps, ROUNDS, leaves[0].device, WARM_UP_MS, repeat_ms)
        del steps
        for name, timing in found[direction].items():
            row = Row("short_long", problem, name, direction, "bf16", *timing, roof_ms=roofs[direction], note=case.name)
            row.tflops, row.error_ratio = operations[direction] / timing.p50 / 1e9, ratios.get(name, {}).get(direction, "")
            writer.add(row)
    return found, roofs


def _calls(case: Case, leaves: list[Tensor], lengths: Tensor | None) -> dict[str, Callable[[], Tensor]]:
    """Ours and the peers, which are given lengths as a key-padding mask."""
    ours, theirs = {}, {}
    if case.feature == "causal":
        ours = theirs = {"is_causal": True}
    if lengths is not None:
        ours = {"lengths": lengths}
        theirs = {"attn_mask": (torch.arange(case.shape.kv_len, device=lengths.device) < lengths[:, None])[:, None, None, :]}
    found = {name: functools.partial(saccade.attention, *leaves, backend=asked, **ours) for name, asked in BACKENDS.items()}
    others = {
        "sdpa": F.scaled_dot_product_attention,
        **peers(with_fa4=lengths is None),
    }  # torch's own choice, and each backend forced
    return {**found, **{name: functools.partial(call, *leaves, **theirs) for name, call in others.items()}}


def _roofs(case: Case, keys: int, bandwidth: float) -> dict[str, float]:
    """Milliseconds of the larger of bytes and products; `keys` is the number of real ones in the batch."""
    shape = case.shape
    queries = shape.batch * shape.q_len
    query, key = (2 * shape.heads * shape.dim * tokens for tokens in (queries, keys))
    gradient = 2 * shape.heads * shape.dim * shape.batch * shape.kv_len  # of K or V, padding included
    lse = 4 * shape.heads * queries
    # forward: q, k, v in, out and lse out; backward: q, k, v, out, dout, lse in, dq, dk, dv out
    moved = {"fwd": 2 * query + 2 * key + lse, "bwd": 4 * query + 2 * key + 2 * gradient + lse}
    operations = _operations(case, keys)
    roofs = {direction: max(moved[direction] / bandwidth, operations[direction] / PRODUCTS) for direction in moved}
    return {**roofs, "fwd+bwd": sum(roofs.values())}


def _operations(case: Case, keys: int) -> dict[str, float]:
    """Matrix operations: 4 Tq Tk D a problem in forward, 10 in backward; a causal mask hides half."""
    shape = case.shape
    forward = 4.0 * shape.heads * shape.q_len * keys * shape.dim / (2 if case.feature == "causal" else 1)
    return {"fwd": forward, "bwd": 2.5 * forward, "fwd+bwd": 3.5 * forward}


def _error_ratios(
    case: Case, call: Callable[[], Tensor], leaves: list[Tensor], dout: Tensor, lengths: Tensor | None
) -> dict[str, float]:
    """Error over budget of the output and of the gradients."""
    lengths = None if lengths is None else lengths.int()
    causal, scale = case.feature == "causal", case.shape.dim**-0.5
    args = AttentionArgs(*(x.detach() for x in leaves), None, None, lengths, None, 0.0, causal, scale)
    out = call()
    grads = torch.autograd.grad(out, leaves, dout)
    return {"fwd": error_ratio(args, dout, (out.detach(),), "fwd"), "bwd": error_ratio(args, dout, grads, "bwd")}


def line(case: Case, found: dict[str, dict[str, Timing]], roofs: dict[str, float]) -> str:
    """Times of ours, shares of the roof, and gains over the best single peer: the one whose forward plus backward is least."""
    ours = [name for name in BACKENDS if name in found["fwd"]]
    others = [name for name in found["fwd"] if name not in BACKENDS]
    said = f"{case}:"
    for name in ours:
        times = {direction: found[direction][name].p50 for direction in DIRECTIONS}
        said += f" {name}"
        if name == ours[0]:
            said += " " + " ".join(f"{d} {ms:.3f}" for d, ms in times.items())
            said += ", share of the roof " + " ".join(f"{roofs[d] / ms:.2f}" for d, ms in times.items()) + ","
        for what, direction in (("total", "fwd+bwd"), ("fwd", "fwd")) if others else ():
            best = min(others, key=lambda other, d=direction: found[d][other].p50)
            said += f" {what} x{found[direction][best].p50 / times[direction]:.2f} of {best}"
        said += ";"
    return said.rstrip(",;")
