"""N:M attention under masks and biases: `mma_sp` against `masked`, which computes them with dense products, and torch's dense function.

Each setting has rows without a mask, with one of queries and keys that hides three of ten pairs at random, the same for all heads
(so that no tile can be skipped), with a bias that all heads share, with one for each head, and with the gradient of that one. All
take the public function on leaves that require gradients, in turns as in `nm_fused`. Torch's function is called without a backend
forced; beside a mask or bias it takes its memory-efficient kernel, or cuDNN's.

`roof_ms` has the products of `nm_fused` at the rate of `nm_fused`; bytes of masks and biases are not in it.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from rows import Row, Writer, numbers_of
from steps import step, those_that_run
from tables.nm_fused import PATTERNS, PEAK_TFLOPS, Setting, in_turn
from torch import Tensor

import saccade

DEVICE = "cuda"
SETTINGS = [Setting(n, d, False) for d in (128, 64) for n in (2048, 8192)]
ROWS = 16_384  # of a bias for each head, [H, n, n], beside them
HIDDEN = 0.3


class Given(NamedTuple):
    """The tensor that a call is given with q, k and v. trained: its gradient is computed too."""

    name: str
    tensor: Tensor | None
    trained: bool = False


def every_case() -> list[Setting]:
    """The rows of the table."""
    return SETTINGS


def case_of(row: Mapping[str, str]) -> str:
    """The name of a row's case, which has all masks."""
    size = numbers_of(row["problem"])
    return str(Setting(size["Tq"], size["D"], False))


def run(writer: Writer, repeat_ms: int) -> None:
    """Each setting and mask, forward and forward plus backward, all implementations in turn."""
    for setting in writer.part.cases(every_case()):
        made = [torch.randn(sizes_of(setting), device=DEVICE, dtype=torch.bfloat16).transpose(1, 2) for _ in range(4)]
        leaves, dout = [x.requires_grad_() for x in made[:3]], made[3]
        for given in masks(setting):
            learned = [*leaves, given.tensor] if given.trained and given.tensor is not None else leaves
            calls = those_that_run(calls_of(leaves, given.tensor), learned, dout)
            for direction in ("fwd", "fwd+bwd"):
                times = in_turn({name: step(call, direction, learned, dout) for name, call in calls.items()}, repeat_ms)
                for name, timing in times.items():
                    writer.add(_row(setting, given, name, direction, *timing))
                ours = times["mma_sp 2:4"].p50
                others = "  ".join(f"{n} {t.p50:.3f} ({t.p50 / ours:.2f})" for n, t in times.items() if n != "mma_sp 2:4")
                print(
                    f"D={setting.dim} n={setting.length} {given.name} {direction}: mma_sp 2:4 {ours:.3f} ms  {others}", flush=True
                )
            del given, learned, calls
        del made, leaves, dout
        gc.collect()


def sizes_of(setting: Setting) -> tuple[int, int, int, int]:
    """B, T, H, D."""
    _, length, heads, dim = setting.sizes
    return ROWS // length, length, heads, dim


def masks(setting: Setting) -> Iterator[Given]:
    """Made one after another: a bias for each head is up to 4 GiB."""
    _, n, heads, _ = sizes_of(setting)
    yield Given("no mask", None)
    yield Given("mask of pairs", torch.rand(1, 1, n, n, device=DEVICE) >= HIDDEN)
    yield Given("bias", torch.randn(1, 1, n, n, device=DEVICE, dtype=torch.bfloat16))
    bias = torch.randn(1, heads, n, n, device=DEVICE, dtype=torch.bfloat16)
    yield Given("bias of heads", bias)
    yield Given("bias of heads, trained", bias.requires_grad_(), True)


def calls_of(leaves: list[Tensor], mask: Tensor | None) -> dict[str, Callable[[], Tensor]]:
    """Name, ours with its pattern -> a call."""
    found: dict[str, Callable[[], Tensor]] = {
        f"{backend} {pattern}": functools.partial(
            saccade.nm_sparse_attention, *leaves, attn_mask=mask, pattern=pattern, backend=backend
        )
        for backend in ("mma_sp", "masked")
        for pattern in PATTERNS
        if (backend, pattern) != ("masked", "1:2")  # its time does not depend on the pattern
    }
    return {**found, "sdpa": functools.partial(F.scaled_dot_product_attention, *leaves, attn_mask=mask)}


def _row(setting: Setting, given: Given, name: str, direction: str, p50: float, p20: float, p80: float) -> Row:
    batch, length, heads, dim = sizes_of(setting)
    backend, _, pattern = name.partition(" ")
    factor = 1.0 if direction == "fwd" else 3.5
    flops = 4.0 * batch * heads * length * length * dim
    needed = factor - 0.25 * (backend == "mma_sp")  # a pruned forward needs three quarters of the products
    problem = f"nm_sparse(B={batch} H={heads} Tq={length} Tk={length} D={dim} bf16 {given.name})"
    return Row(
        "nm_masks", problem, backend, direction, "bf16", p50, p20, p80, roof_ms=needed * flops / PEAK_TFLOPS / 1e9,
        tflops=factor * flops / p50 / 1e9, note=pattern,
    )  # fmt: skip
