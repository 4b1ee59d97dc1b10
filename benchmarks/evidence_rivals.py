"""Figures of docs/evidence/003_dfss.md about other transformers."""

from __future__ import annotations

import re

from evidence_rows import gains, rows, span, times

RIVALS = ("performer", "linformer", "nystromformer", "window")


def length_of(problem: str) -> int:
    """The tokens in a description."""
    return int(re.findall(r"\bT=(\d+)", problem)[0])


def rivals() -> list[str]:
    """Gains over unfused attention. Attention alone in bf16: each rival at up to 1,024 tokens and from 2,048 on. Encoders: N:M and each
    rival, in bf16 and in float32. Last what pruning gains over Nystromformer: alone and in encoders, both patterns in bf16, 1:2 in
    float32."""
    table = rows("h200/nm_rivals.csv")
    found = {kind: times([r for r in table if r["problem"].startswith(kind)], "fwd") for kind in ("attention", "encoder")}
    texts = []
    for rival in RIVALS:
        alone = {p: gain for p, gain in gains(found["attention"], rival, ["unfused"]).items() if "bf16" in p}
        texts.append(span(gain for p, gain in alone.items() if length_of(p) <= 1024))
        texts.append(span(gain for p, gain in alone.items() if length_of(p) >= 2048))
    for dtype, ours in (("bf16", ("staged 2:4", "fused 2:4")), ("fp32", ("staged 1:2", "fused 1:2"))):
        inside = {name: gains(found["encoder"], name, ["unfused"]) for name in (*ours, *RIVALS)}
        texts += [span(gain for p, gain in of.items() if dtype in p) for of in inside.values()]
    for of in found.values():
        pruned = [gains(of, f"nystromformer {pattern}", ["nystromformer"]) for pattern in ("2:4", "1:2")]
        texts += [span(gain for by in pruned for p, gain in by.items() if dtype in p) for dtype in ("bf16", "fp32")]
    return texts


def beside_sdpa() -> list[str]:
    """Gains over torch's SDPA in bf16: staged 2:4, fused 2:4 and fused 1:2, of attention alone and then of encoders."""
    table = [r for r in rows("h200/nm_rivals.csv") if "bf16" in r["problem"]]
    found = [times([r for r in table if r["problem"].startswith(kind)], "fwd") for kind in ("attention", "encoder")]
    return [span(gains(of, ours, ["sdpa"]).values()) for of in found for ours in ("staged 2:4", "fused 2:4", "fused 1:2")]


def rival_memory() -> list[str]:
    """The peak memory of unfused attention over that of others, bf16, attention alone: staged 2:4, fused 2:4 and each rival."""
    table = [r for r in rows("h200/nm_rivals.csv") if r["problem"].startswith("attention") and "bf16" in r["problem"]]
    peaks = {(r["problem"], r["backend"]): float(re.findall(r"peak ([\d.]+) MiB", r["note"])[0]) for r in table if r["ms_p50"]}
    return [span(gains(peaks, other, ["unfused"]).values()) for other in ("staged 2:4", "fused 2:4", *RIVALS)]
