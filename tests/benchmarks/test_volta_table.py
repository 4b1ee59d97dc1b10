"""The Volta table runs, by the reference on a CPU, and says that its times are no speeds."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def table(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(BENCHMARKS / "tables"))
    import volta

    yield volta
    for name in ("volta", "peers", "rows"):
        sys.modules.pop(name, None)


def test_a_table_on_a_cpu(table, monkeypatch, tmp_path, capsys):
    from rows import Writer

    monkeypatch.setattr(table, "DEVICE", "cpu")
    monkeypatch.setattr(table, "BACKEND", "reference")
    monkeypatch.setattr(table, "TOKENS", 32)
    monkeypatch.setattr(table, "HIDDEN", 128)
    monkeypatch.setattr(table, "SETTINGS", [table.Setting(16, 64, False), table.Setting(32, 64, True)])
    table.run(Writer(tmp_path / "volta.csv", {}), 1)
    with open(tmp_path / "volta.csv", newline="") as handle:
        rows = list(csv.DictReader(handle))
    ours = [r for r in rows if r["backend"] == "volta"]
    assert [r["direction"] for r in ours] == ["fwd", "bwd"] * 2
    assert {r["note"] for r in ours} == {"emulated: not a speed"}
    assert {r["note"] for r in rows if r["backend"] == "unfused"} == {""}
    assert "B=2 H=2 Tq=16 Tk=16 D=64" in ours[0]["problem"]
    printed = capsys.readouterr().out
    assert "the paper on a V100: x4.44 (up to x9.17)" in printed
    assert "emulated: not a speed" in printed


def test_the_grid_is_the_papers(table):
    assert len(table.SETTINGS) == 24
    assert {s.shape[0] * s.length for s in table.SETTINGS} == {16384}
    assert {s.shape[1] * s.dim for s in table.SETTINGS} == {2048}


def test_the_unfused_pipeline_is_attention(table, monkeypatch):
    monkeypatch.setattr(table, "DROPOUT", 0.0)
    query, key, value = torch.randn(3, 1, 2, 9, 8)
    for causal in (False, True):
        expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
        torch.testing.assert_close(table.unfused(query, key, value, causal), expected)
