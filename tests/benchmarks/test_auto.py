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
            if table.saccade.backends.SHORT.prefers(problem):
                taken += 1
                if ratios[measured_as, direction, "short"] < NOISE:
                    slower.append(f"{ratios[measured_as, direction, 'short']:.2f} {direction} {measured_as} {case.feature}")
    assert not slower, "\n".join(slower)
    assert taken > 40


def test_the_public_function_is_as_fast_as_torchs(ratios):
    """Where a call is long enough that the host's share, some 20 us more than torch's, is within the noise."""
    with open(BENCHMARKS / "results" / "h200" / "short_auto.csv", newline="") as handle:
        long = {
            (r["problem"], r["direction"]) for r in csv.DictReader(handle) if r["backend"] == "sdpa" and float(r["ms_p50"]) >= 0.5
        }
    slower = [f"{ratio:.2f} {key}" for key, ratio in ratios.items() if key[2] == "auto" and key[:2] in long and ratio < NOISE]
    assert not slower, "\n".join(slower)
    assert len(long) > 40


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
