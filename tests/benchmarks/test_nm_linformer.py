"""The table of N:M over Linformer's projected keys: its projections, its errors and what it counts, and the table itself on a CPU."""

from __future__ import annotations

import csv
import importlib
import re
import sys
from pathlib import Path

import pytest
import torch

from saccade.testing.timing import measure

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


class Tiny:
    """The interface of `nm_fused.Setting`, for two batch rows of three heads."""

    length, dim, sizes, flops = 256, 16, (2, 256, 3, 16), 4.0 * 2 * 3 * 256**2 * 16

    def __str__(self):
        return "nm_sparse(B=2 H=3 Tq=256 Tk=256 D=16 bf16)"


@pytest.fixture
def table(monkeypatch):
    """The table on the CPU, tiny."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    module = importlib.import_module("tables.nm_linformer")
    monkeypatch.setattr(module, "DEVICE", "cpu")
    monkeypatch.setattr(module, "SETTINGS", [Tiny()])
    monkeypatch.setattr(module, "RANKS", (32, 64))
    monkeypatch.setattr(module, "WIDTH", 17)  # about twice as many tokens as a mean takes, as at n = 16,384 with 256 means
    monkeypatch.setattr(
        module, "in_turn", lambda calls, ms: {name: measure(call, "cpu", repeat_ms=ms) for name, call in calls.items()}
    )
    yield module
    for name in set(sys.modules) - before:
        if str(BENCHMARKS) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_the_matrix_of_a_projection_pools(table):
    approximations = importlib.import_module("approximations")
    matrix = table.means(16, 64)
    assert matrix.shape == (16, 64)
    x = torch.randn(2, 64, 3, 8).transpose(1, 2)
    torch.testing.assert_close(table.projected(x, matrix.float()), approximations.pooled(x, 16))
    # any other matrix, too
    other = torch.randn(16, 64)
    torch.testing.assert_close(table.projected(x, other), other @ x)


def test_tokens_resemble_their_neighbours(table):
    torch.manual_seed(0)
    query, key, value, dout = table.tokens(Tiny())
    assert query.shape == key.shape == value.shape == dout.shape == (2, 3, 256, 16)
    assert all(x.is_leaf and x.requires_grad and x.dtype == torch.bfloat16 for x in (query, key, value))

    def alike(x, y):
        return torch.nn.functional.cosine_similarity(x.float(), y.float(), dim=-1).mean().item()

    assert alike(query[:, :, :-1], key[:, :, 1:]) > 0.5
    assert abs(alike(query[:, :, :64], key[:, :, -64:])) < 0.2
    assert abs(alike(dout[:, :, :-1], dout[:, :, 1:])) < 0.1


def test_attention_to_projected_keys_is_linformer(table):
    approximations = importlib.import_module("approximations")
    query, key, value, _ = (x.detach().float() for x in table.tokens(Tiny()))
    expected = approximations.linformer(32)(query * 16**-0.5, key, value)
    dense = torch.nn.functional.scaled_dot_product_attention
    torch.testing.assert_close(table.attend(dense, query, key, value, table.means(32, 256).float()), expected)


def test_the_table_on_a_cpu(table, tmp_path):
    torch.manual_seed(0)
    rows = importlib.import_module("rows")
    path = tmp_path / "nm_linformer.csv"
    table.run(rows.Writer(path, dict.fromkeys(("gpu", "torch", "date"), "x")), 1)
    with open(path, newline="") as handle:
        found = {(r["backend"], r["direction"]): r for r in csv.DictReader(handle)}
    names = {"sdpa_flash"} | {
        f"linformer {name}" for rank in (32, 64) for name in (f"sdpa_flash {rank}", f"saccade {rank} 2:4", f"saccade {rank} 1:2")
    }
    assert set(found) == {(name, way) for name in names for way in ("fwd", "fwd+bwd")}
    assert all(float(r["ms_p50"]) > 0 and float(r["tflops"]) > 0 for r in found.values())
    assert found["sdpa_flash", "fwd"]["note"] == "dense"
    for rank in (32, 64):
        alone = found[f"linformer sdpa_flash {rank}", "fwd"]["note"]
        [lost] = map(float, re.fullmatch(rf"rank {rank}, error ([\d.]+) of dense", alone).groups())
        assert 0.05 < lost < 1
        pruning = set()
        for pattern in ("2:4", "1:2"):
            note = found[f"linformer saccade {rank} {pattern}", "fwd"]["note"]
            text = rf"rank {rank}, error ([\d.]+) of dense, ([\d.]+) of Linformer alone"
            of_dense, of_linformer = map(float, re.fullmatch(text, note).groups())
            assert lost < of_dense < 1
            assert 0.02 < of_linformer < 1
            pruning.add(of_linformer)
        assert len(pruning) == 2
    # its CSV is read as a table, and no plot of it is drawn
    assert importlib.import_module("plot").draw(path) == []


def test_errors_are_of_what_is_timed(table):
    """A call that computes Linformer itself has its error; one that computes dense attention has none."""
    torch.manual_seed(0)
    *leaves, dout = table.tokens(Tiny())
    contenders = table._contenders(leaves, dout)
    exact = table.Contender(contenders["sdpa_flash"].call, leaves, 32)
    pooled = table.Contender(contenders["linformer sdpa_flash 32"].call, leaves, 32)
    of_dense, of_pooled = (
        [float(x) for x in re.findall(r"[\d.]+(?= of)", table._note("saccade", found, leaves))] for found in (exact, pooled)
    )
    assert of_dense[0] < 0.01 < 0.05 < of_dense[1]
    assert of_pooled[1] < 0.02 < 0.05 < of_pooled[0]


def test_backward_reaches_the_projection(table):
    *leaves, dout = table.tokens(Tiny())
    for name, found in table._contenders(leaves, dout).items():
        gradients = torch.autograd.grad(found.call(), found.leaves, dout)
        assert len(gradients) == (4 if found.rank else 3)
        assert all(g.abs().sum() > 0 for g in gradients), name
        if found.rank:
            assert gradients[3].shape == (found.rank, 256)
            assert str(found.rank) in name.split()


def test_operations_are_those_of_the_products(table):
    batch, length, heads, dim = Tiny.sizes
    product = 2.0 * batch * heads * length * 32 * dim  # E K, E V, Q K^T or P V
    assert table._flops(Tiny(), 32, "fwd", False) == (4 * product, 4 * product)
    assert table._flops(Tiny(), 32, "fwd", True) == (4 * product, 3.5 * product)
    assert table._flops(Tiny(), 32, "fwd+bwd", False)[0] == 6 * product + 7 * product
    assert table._flops(Tiny(), 0, "fwd", False) == (Tiny.flops, Tiny.flops)
