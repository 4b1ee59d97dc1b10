"""The table of N:M under masks and biases on a CPU, tiny: what its calls compute, and its rows."""

from __future__ import annotations

import csv

import pytest
import torch
import torch.nn.functional as F

import saccade
from saccade.testing.timing import measure


class Tiny:
    """The interface of `nm_fused.Setting`, for two heads."""

    length, dim, sizes = 64, 16, (1, 64, 2, 16)


@pytest.fixture
def table(load, monkeypatch):
    module = load("tables.nm_masks")
    given = {"DEVICE": "cpu", "SETTINGS": [Tiny()], "ROWS": 128}
    given["in_turn"] = lambda calls, ms: {name: measure(call, "cpu", repeat_ms=ms) for name, call in calls.items()}
    for name, value in given.items():
        monkeypatch.setattr(module, name, value)
    attention = saccade.nm_sparse_attention

    def on_a_cpu(*tensors, backend, **options):
        """Plain torch in place of the kernels of both backends."""
        assert backend in ("mma_sp", "masked")
        return attention(*tensors, backend="reference", **options)

    monkeypatch.setattr(module.saccade, "nm_sparse_attention", on_a_cpu)
    return module


NAMES = ["no mask", "mask of pairs", "bias", "bias of heads", "bias of heads, trained"]


def test_its_masks(table):
    found = {given.name: given for given in table.masks(Tiny())}
    assert list(found) == NAMES
    assert found["no mask"].tensor is None
    pairs = found["mask of pairs"].tensor
    assert (pairs.dtype, tuple(pairs.shape)) == (torch.bool, (1, 1, 64, 64))
    assert 0.6 < pairs.float().mean() < 0.8
    assert [tuple(found[name].tensor.shape) for name in NAMES[2:]] == [(1, 1, 64, 64), (1, 2, 64, 64), (1, 2, 64, 64)]
    assert [given.trained for given in found.values()] == [False] * 4 + [True]
    assert found["bias of heads, trained"].tensor.requires_grad


def test_its_calls(table):
    """Ours differ from torch's by the pruning alone: with few visible keys in each group nothing is pruned."""
    leaves = [torch.randn(2, 64, 2, 16).transpose(1, 2) for _ in "qkv"]
    calls = table.calls_of(leaves, None)
    assert list(calls) == ["mma_sp 2:4", "mma_sp 1:2", "masked 2:4", "sdpa"]
    one_of_four = (torch.arange(64) % 4 == 1).expand(1, 1, 64, 64)
    for name, call in table.calls_of(leaves, one_of_four).items():
        torch.testing.assert_close(call(), F.scaled_dot_product_attention(*leaves, one_of_four), msg=name)
    assert not torch.allclose(calls["mma_sp 2:4"](), calls["sdpa"](), atol=0.01)


def test_its_rows(table, load, tmp_path, capsys):
    path = tmp_path / "nm_masks.csv"
    table.run(load("rows").Writer(path, {"gpu": "none"}), 1)
    with open(path, newline="") as handle:
        rows = list(csv.DictReader(handle))
    ours = {("mma_sp", "2:4"), ("mma_sp", "1:2"), ("masked", "2:4"), ("sdpa", "")}
    wanted = {(f"{name})", *names, way) for name in NAMES for names in ours for way in ("fwd", "fwd+bwd")}
    assert {(r["problem"].partition("bf16 ")[2], r["backend"], r["note"], r["direction"]) for r in rows} == wanted
    assert len(rows) == len(wanted)
    assert all(r["problem"].startswith("nm_sparse(B=2 H=2 Tq=64 Tk=64 D=16 ") for r in rows)
    flops = 4.0 * 2 * 2 * 64 * 64 * 16
    for row in rows:
        needed = {"fwd": 1.0, "fwd+bwd": 3.5}[row["direction"]] - (0.25 if row["backend"] == "mma_sp" else 0.0)
        assert float(row["roof_ms"]) == pytest.approx(needed * flops / 790e9, rel=1e-3)
    assert "bias of heads, trained fwd+bwd: mma_sp 2:4" in capsys.readouterr().out
    # it is read as a table
    assert load("plot").draw(path) == []
