"""Peak memory of forward plus backward, Volta kernels and the unfused pipeline, n = 1,024 to 16,384 with 16,384 tokens, dropout
0.1.

`note` holds MiB allocated at the peak on top of q, k, v and dout, and the bytes of one copy of the scores, of which the unfused
pipeline keeps several. Memory of one sequence is fitted as n^x. The kernels run emulated from sm_80 on; their memory is the same.
"""

from __future__ import annotations

import gc
import math
from collections import defaultdict
from collections.abc import Callable

import torch
from nm_common import peak_bytes
from rows import Row, Writer
from torch import Tensor
from volta_common import Setting, unfused

import saccade

BACKEND = "volta"
MIB = 2**20
SETTINGS = [Setting(n, dim) for dim in (64, 128) for n in (1024, 2048, 4096, 8192, 16384)]


def run(writer: Writer, repeat_ms: int) -> None:
    """Each setting; then the exponents."""
    grown: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)  # (name, D) -> n -> bytes per sequence
    for setting in SETTINGS:
        texts = []
        for name, step in steps(setting).items():
            copy = f"one copy of the scores is {setting.score_bytes / MIB:.0f} MiB"
            try:
                peak = peak_bytes(step)
            except torch.OutOfMemoryError:
                note = f"does not fit this GPU; {copy}"
            else:
                grown[name, setting.dim][setting.length] = peak / setting.shape[0]
                note = f"peak {peak / MIB:.1f} MiB; {copy}"
            writer.add(Row("volta_memory", str(setting), name, "fwd+bwd", "fp16", "", "", "", note=note))
            texts.append(f"{name} {note.partition(';')[0]}")
            gc.collect()
        print(f"{setting}: {', '.join(texts)} (one copy of the scores: {setting.score_bytes / MIB:.0f} MiB)", flush=True)
    for (name, dim), sizes in grown.items():
        note = f"bytes of a sequence grow as n^{exponent(sizes):.3f}"
        writer.add(Row("volta_memory", f"D={dim}", name, "fwd+bwd", "fp16", "", "", "", note=note))
        print(f"D={dim} {name}: {note}")


def steps(setting: Setting) -> dict[str, Callable[[], object]]:
    """Name -> forward plus backward. deterministic: dQ by a kernel of its own, not by float32 additions."""
    *leaves, dout = setting.tensors(4)
    leaves = [x.requires_grad_() for x in leaves]

    def step(attend: Callable[..., Tensor]) -> object:
        return torch.autograd.grad(attend(*leaves), leaves, dout)

    ours = lambda q, k, v: saccade.attention(q, k, v, dropout_p=setting.dropout_p, backend=BACKEND)  # noqa: E731

    def deterministic() -> object:
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)
        try:
            return step(ours)
        finally:
            torch.use_deterministic_algorithms(before)

    return {
        "volta": lambda: step(ours),
        "volta deterministic": deterministic,
        "unfused": lambda: step(lambda q, k, v: unfused(q, k, v, False, setting.dropout_p)),
    }


def exponent(sizes: dict[int, float]) -> float:
    """x of the n^x that fits best: the slope of the logarithms."""
    points = [(math.log(n), math.log(size)) for n, size in sizes.items()]
    x, y = (sum(column) / len(points) for column in zip(*points, strict=True))
    spread = sum((a - x) ** 2 for a, _ in points)
    return sum((a - x) * (b - y) for a, b in points) / spread if spread else math.nan
