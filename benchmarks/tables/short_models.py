"""Outside the paper's grid: Swin windows (bias per head with gradient), MiniLM (lengths), ViT, causal; peers with the same mask. TabICL attends over
the columns of each row of a table, so its batches go up to a million, and over 128 inducing points. Windows of Qwen2.5-VL hold 64 patches."""

import torch
from rows import Writer
from short_common import Shape, measure_ours, measure_peers, stream_bandwidth, summary


def run(writer: Writer, repeat_ms: int) -> None:
    """Measure each model's row."""
    bandwidth = stream_bandwidth()
    print(f"three reads, one write: {bandwidth / 1e9:.2f} TB/s")
    for heads in (4, 16):
        shape = Shape(8192, heads, 49, 49, 32)
        bias = torch.randn(1, heads, 49, 49, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        _row(writer, "Swin", shape, bandwidth, repeat_ms, {"attn_mask": bias}, {"attn_mask": bias})
    shape = Shape(4096, 12, 128, 128, 32)
    lengths = torch.randint(16, 129, (shape.batch,), device="cuda")
    mask = (torch.arange(128, device="cuda") < lengths[:, None])[:, None, None, :]
    _row(writer, "MiniLM", shape, bandwidth, repeat_ms, {"lengths": lengths}, {"attn_mask": mask})
    for tokens in (65, 128):
        _row(writer, "ViT", Shape(4096, 12, tokens, tokens, 64), bandwidth, repeat_ms, {}, {})
    # TabICL: 8 heads of 16
    for batch, tokens in ((1_000_000, 12), (100_000, 104), (8192, 128)):
        _row(writer, "TabICL", Shape(batch, 8, tokens, tokens, 16), bandwidth, repeat_ms, {}, {})
    _row(writer, "Qwen2.5-VL", Shape(4096, 16, 64, 64, 80), bandwidth, repeat_ms, {}, {})
    causal = {"is_causal": True}
    _row(writer, "causal", Shape(16000, 8, 128, 128, 64), bandwidth, repeat_ms, causal, causal)


def _row(writer: Writer, name: str, shape: Shape, bandwidth: float, repeat_ms: int, ours: dict, theirs: dict) -> None:
    found = measure_ours(writer, "short_models", shape, bandwidth, repeat_ms, False, **ours)
    fa4 = set(theirs) <= {"is_causal"}
    others = measure_peers(writer, "short_models", found["fwd"].problem, shape, repeat_ms, False, with_fa4=fa4, **theirs)
    print(f"{name:10s}", summary(shape, False, found, others), flush=True)
