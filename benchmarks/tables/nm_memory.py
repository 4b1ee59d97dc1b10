"""Memory of attention weights and peak memory, staged N:M, unfused dense and fused (Dfss, Fig. 16 for the attention alone).

`note` holds the numbers: MiB of one matrix of weights (values and metadata), its share of the dense one, and MiB that the whole
call allocates at its peak.
"""

from __future__ import annotations

import torch
from nm_common import SHORT, Setting, peak_bytes, staged, unfused
from rows import Row, Writer

import saccade
from saccade.testing.timing import measure

MIB = 2**20
SETTINGS = [
    Setting(n, 24 if n == 4096 else 48, dtype, pattern)
    for dtype, pattern in ((torch.bfloat16, "2:4"), (torch.float32, "1:2"))
    for n in (256, 512, 1024, 2048, 4096)
] + [Setting(1000, 48), Setting(1000, 48, torch.float32, "1:2")]


def every_case() -> list[Setting]:
    """The rows of the table."""
    return SETTINGS


def run(writer: Writer, repeat_ms: int) -> None:
    """Each setting; times are end to end, host included."""
    torch.backends.cuda.matmul.allow_tf32 = True
    for setting in writer.part.cases(every_case()):
        query, key, value = setting.tensors()
        weights = saccade.nm_sparse.scores(query, key, pattern=setting.pattern, backend="mma_sp").nbytes
        calls = {
            "unfused": (lambda q=query, k=key, v=value: unfused(q, k, v), setting.dense_bytes),
            "staged": (lambda q=query, k=key, v=value, s=setting: staged(q, k, v, s.pattern), weights),
            "in place": (lambda q=query, k=key, v=value, s=setting: in_place(q, k, v, s.pattern), weights),
            "nm_sparse_attention": (
                lambda q=query, k=key, v=value, s=setting: saccade.nm_sparse_attention(q, k, v, pattern=s.pattern), 0
            ),
        }  # fmt: skip
        peaks = {}
        for name, (call, matrix) in calls.items():
            peaks[name] = peak_bytes(call)
            note = f"weights {matrix / MIB:.1f} MiB ({matrix / setting.dense_bytes:.4f}), peak {peaks[name] / MIB:.1f} MiB"
            writer.add(
                Row("nm_memory", str(setting), name, "fwd", SHORT[setting.dtype], *measure(call, repeat_ms=repeat_ms), note=note)
            )
        shares = "  ".join(f"{name} {peaks[name] / peaks['unfused']:.3f}" for name in calls)
        print(f"{setting}: weights {weights / setting.dense_bytes:.4f} of dense, peak of dense's: {shares}", flush=True)


def in_place(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pattern: str) -> torch.Tensor:
    """The staged pipeline with one matrix of weights instead of two."""
    return saccade.nm_sparse.scores(query, key, pattern=pattern, backend="mma_sp").softmax_().matmul(value)
