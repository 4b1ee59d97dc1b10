"""`auto` against the measurements: where it chooses `short`, the committed table must not show that as slower than torch."""

from __future__ import annotations

import csv
import statistics
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# of torch's speed; rows repeat within about 5 %
NOISE = 0.95


@pytest.fixture(scope="module")
def table():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        from tables import short_auto
    finally:
        sys.path.remove(str(BENCHMARKS))
    return short_auto


@pytest.fixture(scope="module")
def times():
    with open(BENCHMARKS / "results" / "h200" / "short_auto.csv", newline="") as handle:
        return {(r["problem"], r["note"], r["direction"], r["backend"]): float(r["ms_p50"]) for r in csv.DictReader(handle)}


@pytest.fixture(scope="module")
def ratios(times):
    return {key: times[*key[:3], "sdpa"] / time for key, time in times.items() if key[3] != "sdpa"}


def measured(table, ratios):
    """(case, its problem and note, direction, the problem in that direction) of what the committed table has: cases may be newer."""
    for case in table.CASES:
        row = str(table.described(case, True)), case.note
        for direction in ("fwd", "fwd+bwd"):
            if (*row, direction, "auto") in ratios:
                yield case, row, direction, table.described(case, direction != "fwd")


def test_auto_takes_short_only_where_it_was_not_slower(table, ratios):
    slower, taken = [], 0
    for case, row, direction, problem in measured(table, ratios):
        if table.SHORT.prefers(problem):
            taken += 1
            if ratios[*row, direction, "short"] < NOISE:
                slower.append(f"{ratios[*row, direction, 'short']:.2f} {direction} {row[0]} {case.feature}")
    assert not slower, "\n".join(slower)
    assert taken > 40


# one query on grouped heads, 0.73 to 1.00: the way from C++ takes 2 us of a call of 19, and more on a slow host
KNOWN = ("Hkv=2 Tq=1 Tk=50", "Hkv=2 Tq=1 Tk=128")


def test_what_is_left_to_torch_costs_what_torch_does(table, times, ratios):
    """torch's function takes 2 us more of host time when called from C++ than when called directly, which shows in calls of 20 to
    40 us."""
    sdpa = {key[:3]: time for key, time in times.items() if key[3] == "sdpa"}
    slower, seen = [], 0
    for case, row, direction, problem in measured(table, ratios):
        if not table.SHORT.prefers(problem) and not any(known in row[0] for known in KNOWN):
            seen += 1
            least = NOISE if sdpa[*row, direction] >= 0.3 else 0.9
            if ratios[*row, direction, "auto"] < least:
                slower.append(f"{ratios[*row, direction, 'auto']:.2f} {direction} {row[0]} {case.feature}")
    assert not slower, "\n".join(slower)
    assert seen >= 12


def test_most_rows_gain(ratios):
    found = [ratio for (*_, backend), ratio in ratios.items() if backend == "auto"]
    assert len(found) > 150
    assert statistics.geometric_mean(found) > 1.7


def test_every_case_is_one_that_short_runs_and_has_a_row_of_its_own(table):
    """A named backend raises where it cannot run, which would end the table. A few plain cases stand in two of its lists."""
    problems = {case: table.described(case, True) for case in table.CASES}
    assert not [(case, reasons) for case, problem in problems.items() if (reasons := table.SHORT.why_not(problem))]
    assert len({(str(problem), case.note) for case, problem in problems.items()}) == len(problems)


@pytest.mark.parametrize(
    "feature", ["2-D mask", "equal rows, expanded", "equal rows, copied", "added mask", "batch bias", "full mask"]
)
def test_masks_are_of_the_form_they_are_named_after(table, feature):
    added = table._added_to_scores(table.Case(3, 2, 20, 20, 16, torch.float32, feature), "cpu")
    assert added is not None
    assert added.shape == {"2-D mask": (20, 20), "added mask": (3, 1, 1, 20), "batch bias": (3, 2, 20, 20)}.get(
        feature, (3, 1, 20, 20)
    )
    assert (added.dtype == torch.bool) is (feature not in ("added mask", "batch bias"))
    same_rows = bool((added == added[..., :1, :]).all())
    assert same_rows is (feature in ("equal rows, expanded", "equal rows, copied", "added mask"))
    assert (added.stride(-2) == 0) is (feature == "equal rows, expanded")
    assert added.requires_grad is (feature == "batch bias")


@pytest.mark.parametrize(
    "feature", ["2-D mask", "equal rows, expanded", "added mask", "batch bias", "dropout", "grouped", "lengths"]
)
def test_both_sides_of_a_row_compute_the_same(table, feature):
    qkv, ours, theirs, extra = table._calls(table.Case(3, 4, 20, 20, 16, torch.float32, feature), "cpu")
    assert [x.requires_grad for x in (*qkv, *extra)] == [True] * (4 if feature == "batch bias" else 3)
    out = ours(backend="auto")
    if feature == "dropout":
        assert ours.keywords["dropout_p"] == theirs.keywords["dropout_p"] == 0.1
    else:
        torch.testing.assert_close(out, theirs())
