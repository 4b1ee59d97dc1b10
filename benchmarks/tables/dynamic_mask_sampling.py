"""The sampling step of dynamic masks: the scores of keys from their values, alone and inside attention.

Rows "sampling" are `s = exp(A * softplus(values W^T))` alone, forward without gradient and forward with backward: by
`saccade.dynamic_mask_scores`, and by torch's operations, eager and compiled, with the product in the dtype of the values as in a model.
Rows "auto" are `saccade.dynamic_mask_attention` as a program calls it, with the same scores given ("without sampling") and computed from
the values in the timed call ("with sampling"); both take turns, as do the three ways of sampling. `dynamic_mask_length` and
`dynamic_mask_decode` have rows with it, other tables of dynamic masks do not. Dense attention has no such step; the authors' kernel and FlexAttention with the exact mask take theirs from torch, so the
row of torch is to be added to theirs.

`roof_ms` of sampling is its bytes at the 3.35 TB/s of an H100: forward reads the values, backward reads them again and writes their
gradient, and the scores and what is saved of them count too. `roof_ms` of attention is as in `dynamic_mask_length`.
"""

from __future__ import annotations

import functools
import gc
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rows import Row, Writer
from steps import step
from tables.nm_fused import in_turn
from torch import Tensor

import saccade

DEVICE = "cuda"
BANDWIDTH, PEAK_TFLOPS = 3.35e12, 790.0
FACTORS = {"fwd": 1.0, "fwd+bwd": 3.5}  # products of attention over those of its forward
WITHOUT, WITH = "without sampling", "with sampling"
Ways = dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]


@dataclass(frozen=True)
class Setting:
    """A causal call of one batch row."""

    length: int
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    keep: int = 1024

    def __str__(self) -> str:
        sizes = f"B=1 H={self.heads} Hkv={self.kv_heads} Tq={self.length} Tk={self.length} D={self.dim} keep={self.keep}"
        return f"dynamic_mask({sizes} random bf16)"


LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)
SETTINGS = [Setting(n, *shape) for n in LENGTHS for shape in ((32, 8, 128), (16, 2, 64))]


def run(writer: Writer, repeat_ms: int) -> None:
    """Attention with and without sampling at each setting, then sampling alone."""
    for setting in SETTINGS:
        _attention_rows(writer, setting, repeat_ms)
    # last, because torch.compile leaves processes running that disturb short calls
    ways = samplings()
    for setting in SETTINGS:
        _sampling_rows(writer, setting, ways, repeat_ms)


def _attention_rows(writer: Writer, setting: Setting, repeat_ms: int) -> None:
    query, key, value, weight, A = made(setting)
    scores = saccade.dynamic_mask_scores(value, weight, A).detach().requires_grad_()
    given = {WITHOUT: (scores,), WITH: (weight, A)}
    calls = {note: attention(setting, (query, key, value), *tensors) for note, tensors in given.items()}
    dout = torch.randn_like(query)
    for direction in FACTORS:
        steps = {note: step(call, direction, [query, key, value, *given[note]], dout) for note, call in calls.items()}
        flops = attention_flops(setting, direction)
        for note, timing in in_turn(steps, repeat_ms).items():
            roof, rate = flops / PEAK_TFLOPS / 1e9, flops / timing.p50 / 1e9
            writer.add(Row("dynamic_mask_sampling", str(setting), "auto", direction, "bf16", *timing, roof, rate, note=note))
            print(f"{setting} {direction} {note}: {timing.p50:.3f} ms", flush=True)
    del query, key, value, scores, given, calls, dout, steps
    gc.collect()


def _sampling_rows(writer: Writer, setting: Setting, ways: Ways, repeat_ms: int) -> None:
    *_, value, weight, A = made(setting)
    dscores = torch.randn(1, setting.kv_heads, setting.length, device=DEVICE)
    calls = {name: functools.partial(way, value, weight, A) for name, way in ways.items()}
    for direction in FACTORS:
        steps = {name: step(call, direction, [value, weight, A], dscores) for name, call in calls.items()}
        roof = 1e3 * sampling_bytes(setting, direction) / BANDWIDTH
        for name, timing in in_turn(steps, repeat_ms).items():
            writer.add(Row("dynamic_mask_sampling", str(setting), name, direction, "bf16", *timing, roof, note="sampling"))
            print(f"{setting} {direction} sampling by {name}: {1e3 * timing.p50:.1f} us", flush=True)


def made(setting: Setting) -> list[Tensor]:
    """query, key and value `[1, H, n, D]` with tokens first in memory; weight and A."""
    heads = setting.heads, setting.kv_heads, setting.kv_heads
    rows = [torch.randn(1, setting.length, h, setting.dim, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2) for h in heads]
    width = setting.kv_heads * setting.dim
    weight = (torch.randn(setting.kv_heads, width, device=DEVICE) / math.sqrt(width)).bfloat16()
    return [x.requires_grad_() for x in (*rows, weight, torch.ones(setting.kv_heads, device=DEVICE))]


def samplings() -> Ways:
    """The ways to compute scores, by the name of the backend; of values `[B, Hkv, S, D]`, weight and A."""
    return {"fused": saccade.dynamic_mask_scores, "torch": by_torch, "torch compiled": torch.compile(by_torch)}


def by_torch(value: Tensor, weight: Tensor, A: Tensor) -> Tensor:
    """As a model computes them."""
    products = F.linear(value.transpose(1, 2).flatten(2), weight)
    return (A * F.softplus(products.float())).exp().transpose(1, 2)


def attention(setting: Setting, qkv: tuple[Tensor, Tensor, Tensor], *given: Tensor) -> Callable[[], Tensor]:
    """The public function; given: its scores, or the weight and A of which they are made in the call."""

    def call() -> Tensor:
        scores = given[0] if len(given) == 1 else saccade.dynamic_mask_scores(qkv[2], *given)
        return saccade.dynamic_mask_attention(*qkv, scores, keep=setting.keep, enable_gqa=True)

    return call


def sampling_bytes(setting: Setting, direction: str) -> int:
    """The fewest bytes that a direction moves: values of 2 bytes, scores and two derivatives of them of 4."""
    values, scores = 2 * setting.kv_heads * setting.dim, 4 * setting.kv_heads
    a_token = values + scores if direction == "fwd" else values + 3 * scores + 2 * values + 3 * scores
    return setting.length * a_token


def attention_flops(setting: Setting, direction: str) -> float:
    """The products of the kept pairs."""
    n, keep = setting.length, min(setting.keep, setting.length)
    pairs = keep * (keep + 1) / 2 + (n - keep) * keep
    return FACTORS[direction] * 4.0 * setting.heads * setting.dim * pairs
