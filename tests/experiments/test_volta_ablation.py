"""Forward of Volta's kernels with the softmax in float16: a changed copy of the kernel, in the emulator."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import emulator
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments" / "volta"))

import ablation

pytestmark = pytest.mark.skipif(emulator.COMPILER is None, reason="needs g++")


def test_the_softmax_in_float16_is_less_exact_and_no_other_function(tmp_path):
    torch.manual_seed(0)
    inputs = [torch.randn(1, 1, 96, ablation.DIM).half() for _ in "qkv"]
    path = ablation.without_conversion(tmp_path)
    kept, dropped = (ablation.errors(ablation.forward(*inputs, p), *inputs)[0] for p in (None, path))
    assert 0 < kept < dropped < 1  # percent


def test_a_sum_in_float16_stops_to_grow(tmp_path):
    """4,096 weights of 1/16: at a sum of 128 a weight is half a step of float16, and rounded away."""
    path = ablation.without_conversion(tmp_path)
    key = torch.zeros(1, 1, 4096, ablation.DIM).half()
    query, value = key[:, :, :1], torch.ones_like(key)
    out = ablation.forward(query, key, value, path)
    assert out.float().mean().item() > 1.5
    assert ablation.forward(query, key, value).float().mean().item() == pytest.approx(1.0, abs=0.01)


def test_a_kernel_without_a_line_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(ablation.REPLACED, "no such line", "")
    with pytest.raises(ValueError, match="0 times: no such line"):
        ablation.without_conversion(tmp_path)


def test_its_rows(tmp_path):
    assert ablation.main(["--lengths", "40", "--out", str(tmp_path)]) == 0
    with (tmp_path / "volta_ablation.csv").open(newline="") as handle:
        rows = list(csv.DictReader(handle))
    assert [(r["softmax"], r["spread"]) for r in rows] == [(s, x) for x in "14" for s in ("float32", "float16")]
    assert all(float(r["relative"]) > 0 for r in rows)
