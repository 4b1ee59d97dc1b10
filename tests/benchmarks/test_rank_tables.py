"""The tables with several processes run with gloo ranks on a CPU, tiny."""

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

    def table(name, ranks):
        module = importlib.import_module(f"tables.{name}")
        # spawned processes would import torch for most of the time
        monkeypatch.setattr(importlib.import_module("rank_common").multiprocessing, "get_context", lambda way: processes)
        monkeypatch.setattr(module, "DEVICE", "cpu")
        monkeypatch.setattr(module, "REPEATS", 2)
        monkeypatch.setattr(module, "RANKS", ranks)
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


@pytest.mark.parametrize("ranks", [2, 5])
def test_context_parallel(load, monkeypatch, tmp_path, capsys, ranks):
    """On five GPUs one, two and four of them are measured."""
    table = load("context_parallel", ranks)
    setting = table.Setting(512, keep=16, heads=4, dim=16, dtype=torch.float32)
    monkeypatch.setattr(table, "SETTINGS", (table.Setting(256, keep=16, heads=4, dim=16, dtype=torch.float32), setting))
    rows = [r for r in rows_of(table, tmp_path / "context_parallel.csv") if "Tq=512" in r["problem"]]
    counts = [count for count in (1, 2, 4) if count <= ranks]
    assert [(r["backend"], r["direction"]) for r in rows] == [(f"gpus_{p}", d) for p in counts for d in ("fwd", "bwd", "fwd+bwd")]
    assert all(float(r["ms_p50"]) > 0 for r in rows)
    received = {(r["backend"], r["direction"]): int(r["note"].split()[1].strip(",")) for r in rows}
    offers = 16 * 2 * (2 * 16 * 4 + 4)  # keys of another rank, key heads, bytes of K, V and score
    for count in counts:
        others = count - 1
        # and 16 numbers that say what a rank calls
        assert received[f"gpus_{count}", "fwd"] == others * (offers + 16 * 8)
        # the first rank receives gradients of all others
        assert received[f"gpus_{count}", "bwd"] == others * offers
        assert received[f"gpus_{count}", "fwd+bwd"] == others * (2 * offers + 16 * 8)
        assert setting.offered(count, "fwd") == setting.offered(count, "bwd") == others * offers
        assert setting.gathered(count) == 2 * 512 * others // count * 2 * 16 * 4
    took = {(r["backend"], r["direction"]): float(r["ms_p50"]) for r in rows}
    efficiency = {(r["backend"], r["direction"]): float(r["note"].split()[-1]) for r in rows}
    for backend, direction in took:
        expected = took["gpus_1", direction] / (int(backend[5:]) * took[backend, direction])
        assert efficiency[backend, direction] == pytest.approx(expected, rel=5e-3, abs=6e-4)
    assert "one GPU with 256 tokens takes" in capsys.readouterr().out


def test_a_sequence_that_does_not_fit_is_left_out_with_a_sentence(load, monkeypatch, capsys):
    table = load("context_parallel", 4)
    setting = table.Setting(4194304)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(60e9), int(80e9)))
    monkeypatch.setattr(torch, "tensor", lambda number, device: torch.full((), number))
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, op: None)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    assert table._fitting(setting, [1, 2, 4], torch.device("cuda", 0)) == [2, 4]
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert "on 1 GPUs takes about 64 GB of each, which has 60 GB free: it is left out" in out


def test_tensor_parallel(load, monkeypatch, tmp_path):
    table = load("tensor_parallel", 3)
    monkeypatch.setattr(table, "SETTINGS", (table.Setting(2, 8, 4, 8, padded=True, dtype=torch.float32),))
    rows = rows_of(table, tmp_path / "tensor_parallel.csv")
    assert [(r["problem"], r["backend"], r["direction"]) for r in rows] == [
        (f"tensor_parallel(P={p} B=2 H=4 S=8 D=8 lengths)", b, d)
        for p in (1, 2)
        for b in table.BACKENDS
        for d in ("fwd", "fwd+bwd")
    ]
    assert all(float(r["ms_p50"]) > 0 for r in rows)


def _one_fails(rank, device):
    if rank == 1:
        raise ValueError("on purpose")
    dist.barrier()  # rank 1 never comes


def test_a_rank_that_fails_ends_the_others(load):
    load("context_parallel", 2)
    common = importlib.import_module("rank_common")
    with pytest.raises(RuntimeError, match=r"ranks \[1\] failed"):
        common.on_ranks(_one_fails, 2, "cpu")


def test_without_a_gpu_it_says_so(load, tmp_path):
    with pytest.raises(RuntimeError, match="torch sees no GPU"):
        rows_of(load("context_parallel", 0), tmp_path / "none.csv")
