"""Outside the paper's grid: Swin windows (bias per head with gradient), MiniLM (lengths), ViT, causal; peers with the same mask. TabICL attends over
the columns of each row of a table, so its batches go up to millions. Flash, cuDNN and FlashAttention-4 may refuse more than 65,535 sequences, so three of
its cases have fewer. 128 inducing points of TabPFN read the rows of a column, and are read by them. Windows of Qwen2.5-VL hold 64 patches."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from rows import Writer, numbers_of
from short_common import DEVICE, Shape, measure_ours, measure_peers, stream_bandwidth, summary
from torch import Tensor

SIZES = ("B", "H", "Tq", "Tk", "D")
Options = dict[str, Tensor | bool]


@dataclass(frozen=True)
class Case:
    """One row of the table. feature: "bias", "lengths", "causal" or nothing."""

    model: str
    shape: Shape
    feature: str = ""

    def __str__(self) -> str:
        shape = self.shape
        sizes = shape.batch, shape.heads, shape.q_len, shape.kv_len, shape.dim
        return " ".join((self.model, *(f"{name}={size}" for name, size in zip(SIZES, sizes, strict=True))))


CASES = [
    *(Case("Swin", Shape(8192, heads, 49, 49, 32), "bias") for heads in (4, 16)),
    Case("MiniLM", Shape(4096, 12, 128, 128, 32), "lengths"),
    *(Case("ViT", Shape(4096, 12, tokens, tokens, 64)) for tokens in (65, 128)),
    Case("causal", Shape(16000, 8, 128, 128, 64), "causal"),
    Case("Qwen2.5-VL", Shape(4096, 16, 64, 64, 80)),
    # FlashAttention's backward overflows above batch * heads * 128 * 32 = 2^31, which is 65,536 sequences of 8 heads
    *(Case("TabICL", Shape(65_000, 8, tokens, tokens, 16)) for tokens in (12, 40, 104)),
    *(Case("TabPFN", Shape(8000, 8, *lengths, 16)) for lengths in ((128, 104), (104, 128))),
    *(Case("TabICL", Shape(batch, 8, n, n, 16)) for batch, n in ((100_000, 104), (1_000_000, 12), (2_000_000, 12))),
]  # fmt: skip


def every_case() -> list[Case]:
    """The rows of the table. The largest are last: a peer that overflows there ends the run."""
    return CASES


def case_of(row: Mapping[str, str]) -> str:
    """The name of a row's case; no two cases are of the same sizes."""
    found = numbers_of(row["problem"])
    sizes = " ".join(f"{name}={found[name]}" for name in SIZES)
    return next((str(case) for case in every_case() if str(case).endswith(f" {sizes}")), row["problem"])


def run(writer: Writer, repeat_ms: int) -> None:
    """Measure each model's row."""
    bandwidth = stream_bandwidth()
    print(f"three reads, one write: {bandwidth / 1e9:.2f} TB/s")
    for case in writer.part.cases(every_case()):
        _row(writer, case, bandwidth, repeat_ms, *options(case))


def options(case: Case) -> tuple[Options, Options]:
    """(for ours, for the peers): arguments besides the tensors."""
    shape = case.shape
    if case.feature == "bias":
        bias = torch.randn(1, shape.heads, shape.q_len, shape.kv_len, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        return {"attn_mask": bias}, {"attn_mask": bias}
    if case.feature == "lengths":
        lengths = torch.randint(16, shape.kv_len + 1, (shape.batch,), device=DEVICE)
        mask = (torch.arange(shape.kv_len, device=DEVICE) < lengths[:, None])[:, None, None, :]
        return {"lengths": lengths}, {"attn_mask": mask}
    causal: Options = {"is_causal": True} if case.feature == "causal" else {}
    return causal, causal


def _row(writer: Writer, case: Case, bandwidth: float, repeat_ms: int, ours: Options, theirs: Options) -> None:
    found = measure_ours(writer, "short_models", case.shape, bandwidth, repeat_ms, False, **ours)
    torch.cuda.empty_cache()
    fa4 = set(theirs) <= {"is_causal"}
    others = measure_peers(writer, "short_models", found["fwd"].problem, case.shape, repeat_ms, False, with_fa4=fa4, **theirs)
    print(f"{case.model:10s}", summary(case.shape, False, found, others), flush=True)
