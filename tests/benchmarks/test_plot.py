"""Plots of every table show ours beside the peers."""

from __future__ import annotations

import csv
import re
import shutil
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import plot  # noqa: E402
import plot_fused  # noqa: E402


@pytest.mark.parametrize("table", ["nm_fused", "nm_fused_sm80"])
def test_fused_tables_show_both_patterns_beside_flash(table, tmp_path, monkeypatch):
    path = Path(shutil.copy(BENCHMARKS / "results" / "h200" / f"{table}.csv", tmp_path))
    panels = []
    lines = plot_fused._lines
    monkeypatch.setattr(plot_fused, "_lines", lambda rows: panels.append(lines(rows)) or panels[-1])
    (drawn,) = plot.draw(path)
    assert drawn.stat().st_size > 10_000
    with open(path, newline="") as handle:
        lengths = {int(re.search(r"Tk=(\d+)", row["problem"])[1]) for row in csv.DictReader(handle)}
    assert len(panels) == 4
    for panel in panels:
        for name in ("mma_sp 1:2", "mma_sp 2:4", "sdpa_flash"):
            assert [n for n, _ in panel[name]] == sorted(lengths)
