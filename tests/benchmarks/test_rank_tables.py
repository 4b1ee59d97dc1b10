"""The tables with several processes run with two gloo ranks on a CPU, tiny."""

from __future__ import annotations

import csv
import importlib
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_pool import forking

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")


@pytest.fixture
def load(monkeypatch):
    """Name -> module, on the CPU."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before, processes = set(sys.modules), forking()

    def table(name):
        module = importlib.import_module(f"tables.{name}")
        # spawned processes would import torch for most of the time
        monkeypatch.setattr(importlib.import_module("rank_common").multiprocessing, "get_context", lambda way: processes)
        monkeypatch.setattr(module, "DEVICE", "cpu")
        monkeypatch.setattr(module, "REPEATS", 2)
        return module

    yield table
    for name in set(sys.modules) - before:
        if str(BENCHMARKS) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def rows_of(table, path):
    """The rows that a table writes."""
    rows = importlib.import_module("rows")
    table.run(rows.Writer(path, {"gpu": "none"}), 1)
    with open(path, newline="") as handle:
        return list(csv.DictReader(handle))


def test_context_parallel(load, monkeypatch, tmp_path):
    table = load("context_parallel")
    setting = table.Setting(512, keep=16, heads=4, dim=16, dtype=torch.float32)
    monkeypatch.setattr(table, "SETTINGS", (setting,))
    rows = rows_of(table, tmp_path / "context_parallel.csv")
    assert {(r["backend"], r["direction"]) for r in rows} == {
        (b, d) for b in ("one_gpu", "two_gpus") for d in ("fwd", "bwd", "fwd+bwd")
    }
    assert all(float(r["ms_p50"]) > 0 for r in rows)
    received = {(r["backend"], r["direction"]): int(r["note"].split()[1].strip(",")) for r in rows}
    assert received["one_gpu", "fwd+bwd"] == 0
    offers = 16 * 2 * (2 * 16 * 4 + 4)  # keys of another rank, key heads, bytes of K, V and score
    # and 16 numbers that say what a rank calls
    assert received["two_gpus", "fwd"] == offers + 16 * 8
    # of two ranks the first receives gradients
    assert received["two_gpus", "bwd"] == offers == setting.offered(2, "bwd")
    assert all("efficiency" in r["note"] for r in rows if r["backend"] == "two_gpus")
    assert setting.gathered(2) == 2 * 256 * 2 * 16 * 4


def test_tensor_parallel(load, monkeypatch, tmp_path):
    table = load("tensor_parallel")
    monkeypatch.setattr(table, "SETTINGS", (table.Setting(2, 8, 4, 8, padded=True, dtype=torch.float32),))
    rows = rows_of(table, tmp_path / "tensor_parallel.csv")
    assert {(r["backend"], r["direction"]) for r in rows} == {(b, d) for b in table.BACKENDS for d in ("fwd", "fwd+bwd")}
    assert all(float(r["ms_p50"]) > 0 for r in rows)
