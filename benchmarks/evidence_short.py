"""Figures of docs/evidence/002_short.md, short sequences."""

from __future__ import annotations

import csv

from evidence_rows import RESULTS, gains, rows, span, times

PAPER_PEERS = ("sdpa_flash", "sdpa_efficient", "sdpa_cudnn")


def short(name: str, packed: bool = False) -> list[str]:
    """Gains over the three backends of paper 002, from separate tensors or packed QKV: forward, backward, both. name: from `results/` on."""
    table = [r for r in rows(f"{name}.csv") if ("packed" in r["problem"]) is packed and r["note"] == ""]
    return [span(gains(times(table, way), "short", PAPER_PEERS).values()) for way in ("fwd", "bwd", "fwd+bwd")]


def at_64() -> list[str]:
    """Gains of the same kind at D = 64, separate tensors, 32 and 64 tokens: backward, then both directions."""
    table = [r for r in rows("h100/short_full.csv") if "packed" not in r["problem"] and r["note"] == ""]
    found = []
    for way in ("bwd", "fwd+bwd"):
        gained = gains(times(table, way), "short", PAPER_PEERS)
        found += [f"{gain:.2f}" for length in (32, 64) for p, gain in gained.items() if f"Tq={length} Tk={length} D=64 " in p]
    return found


def listing() -> list[str]:
    """The times of the paper's listing over ours in the same run, both directions together: separate tensors, packed QKV."""
    table = [r for r in rows("h100/short_full.csv") if r["note"] == ""]
    found = {
        packed: [r for r in table if ("packed" in r["problem"]) is packed and "Tq=128 Tk=128 D=256" not in r["problem"]]
        for packed in (False, True)
    }
    return [span(gains(times(part, "fwd+bwd"), "short", ["paper_002"]).values()) for part in found.values()]


def published(name: str, length: str, shapes_here: int) -> list[str]:
    """The times that paper 002 prints for its own kernel over ours: forward, backward. length: its column of lengths. shapes_here: how many of its 12
    shapes our table has."""
    with open(RESULTS.parent / "paper" / f"{name}.csv", newline="") as handle:
        theirs = [r for r in csv.DictReader(handle) if r["backend"] == "triton"]
    found = []
    for way in ("fwd", "bwd"):
        taken = times(rows(f"h100/{name}.csv"), way, lambda note: note == "")
        shapes = [(f" Tk={r[length]} D={r['head_dim']} bf16 grad", float(r[f"{way}_ms"])) for r in theirs]
        pairs = [(ms, own) for part, ms in shapes for (p, backend), own in taken.items() if backend == "short" and part in p]
        assert len(pairs) == shapes_here <= len(theirs)
        found.append(span(ms / own for ms, own in pairs))
    return found


KERNELS = {
    ("sdpa_flash", "fwd"): "flash_fwd_kernel",
    ("sdpa_flash", "bwd"): "flash_bwd_dq_dk_dv",
    ("sdpa_efficient", "fwd"): "fmha_cutlassF",
    ("sdpa_efficient", "bwd"): "fmha_cutlassB",
}


def profiled() -> list[str]:
    """Our profile over the one that paper 002 prints, of flash's and of the memory-efficient kernel, 32 to 128 tokens: forward, then
    backward, each with time, SMs used and memory used."""
    with open(RESULTS.parent / "paper" / "short_profile.csv", newline="") as handle:
        theirs = list(csv.DictReader(handle))
    ours = [r for r in rows("h200/short_profile.csv") if r["D"] == "64" and r["queries"] == r["S"]]
    found = []
    for (backend, way), kernel in KERNELS.items():
        pairs = [
            (one, other)
            for one in ours
            for other in theirs
            if kernel in one["kernel"]
            and (other["backend"], other["direction"]) == (backend, way)
            and other["seq_len"] == one["S"]
        ]
        assert len(pairs) == 3
        found.append(span(float(one["time (us)"]) / 1e3 / float(other["ms"]) for one, other in pairs))
        found += [
            span(float(one[f"{unit} (%)"]) / float(other[f"{unit} (%)"]) for one, other in pairs) for unit in ("SM", "memory")
        ]
    return found
