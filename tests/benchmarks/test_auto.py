"""`auto` against what was measured: where it takes `short`, the committed table must not show it slower than torch."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NOISE = 0.95  # of torch's speed; rows repeat within about 5 %


@pytest.fixture(scope="module")
def table():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        from tables import short_auto
    finally:
        sys.path.remove(str(BENCHMARKS))
    return short_auto


@pytest.fixture(scope="module")
def ratios():
    with open(BENCHMARKS / "results" / "h200" / "short_auto.csv", newline="") as handle:
        times = {(r["problem"], r["direction"], r["backend"]): float(r["ms_p50"]) for r in csv.DictReader(handle)}
    return {key: times[*key[:2], "sdpa"] / time for key, time in times.items() if key[2] != "sdpa"}


def test_auto_takes_short_only_where_it_was_not_slower(table, ratios):
    slower, taken = [], 0
    for case in table.CASES:
        measured_as = str(table.described(case, True))
        for direction in ("fwd", "fwd+bwd"):
            problem = table.described(case, direction != "fwd")
            if table.SHORT.prefers(problem):
                taken += 1
                if ratios[measured_as, direction, "short"] < NOISE:
                    slower.append(f"{ratios[measured_as, direction, 'short']:.2f} {direction} {measured_as} {case.feature}")
    assert not slower, "\n".join(slower)
    assert taken > 40


# rows that the rule leaves to torch and that are still slower than torch's function: what zeroes the rows of queries without a visible key
# reads the mask and the result once more (docs/notes/short.md)
KNOWN = ("mask[1024x1x128x128]",)


def test_what_is_left_to_torch_costs_what_torch_does(table, ratios):
    """Where a call is long enough that the host's share, some 20 us more than torch's, is within the noise."""
    with open(BENCHMARKS / "results" / "h200" / "short_auto.csv", newline="") as handle:
        sdpa = {(r["problem"], r["direction"]): float(r["ms_p50"]) for r in csv.DictReader(handle) if r["backend"] == "sdpa"}
    slower, seen = [], 0
    for case in table.CASES:
        measured_as = str(table.described(case, True))
        for direction in ("fwd", "fwd+bwd"):
            left = not table.SHORT.prefers(table.described(case, direction != "fwd"))
            by_short = (
                abs(ratios[measured_as, direction, "auto"] / ratios[measured_as, direction, "short"] - 1) < 0.05
            )  # as the rule was
            known = by_short or any(known in measured_as for known in KNOWN)
            if left and sdpa[measured_as, direction] >= 0.5 and not known:
                seen += 1
                if ratios[measured_as, direction, "auto"] < NOISE:
                    slower.append(f"{ratios[measured_as, direction, 'auto']:.2f} {direction} {measured_as}")
    assert not slower, "\n".join(slower)
    assert seen > 2


def test_the_table_of_the_cpu_compares_equals(tmp_path, monkeypatch, capsys):
    """Both sides of every row compute the same, and the rows are written: public calls beside torch's function."""
    import torch

    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from rows import Writer, machine
    from tables import auto_cpu

    small = [
        case._replace(batch=2, heads=4, q_len=min(case.q_len, 9), kv_len=min(case.kv_len, 9), kv_heads=case.kv_heads and 2)
        for case in auto_cpu.CASES
    ]
    cases = list(dict.fromkeys(small))
    for case in cases:
        _, ours, theirs, _ = auto_cpu.calls(case)
        torch.testing.assert_close(ours(), theirs())
    monkeypatch.setattr(auto_cpu, "CASES", cases[:2])
    monkeypatch.setattr(auto_cpu, "LEAST_SECONDS", 0.0)
    auto_cpu.run(Writer(tmp_path / "auto_cpu.csv", machine()), 0)
    with open(tmp_path / "auto_cpu.csv", newline="") as handle:
        rows = list(csv.DictReader(handle))
    assert [row["backend"] for row in rows] == ["auto", "sdpa"] * 4
    assert all(float(row["ms_p50"]) > 0 for row in rows)
