"""The table of sliding windows: its masks are those of the window, and it runs with the reference on a CPU."""

from __future__ import annotations

import csv
import functools
import importlib
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import saccade

pytest.importorskip("triton")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def table(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    made = importlib.import_module("tables.windows")
    monkeypatch.setattr(made, "DEVICE", "cpu")
    monkeypatch.setattr(made, "_TOKENS", 120)
    yield made
    for name in set(sys.modules) - before:
        if str(BENCHMARKS) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_every_window_length_and_head_dim_is_there(table):
    assert len(set(table.SHAPES)) == len(table.SHAPES) == 36
    assert "window=(1023, 0) causal longest=8192" in str(table.Shape(64, 12, 12, 8192, (1023, 0)))


@pytest.mark.parametrize("window", [(3, 3), (7, 0), (9, 2)], ids=str)
def test_masks_of_the_peers(table, window):
    shape = table.Shape(16, 2, 2, 40, window)
    lengths = shape.lengths()
    offsets = F.pad(lengths.cumsum(0), (1, 0)).int()
    tokens = int(offsets[-1])
    q, k, v = torch.randn(3, tokens, 2, 16)
    expected = saccade.attention_varlen(q, k, v, offsets, offsets, 40, 40, window=window, backend="reference")
    places = torch.arange(tokens)
    seen = table.flex_seen(offsets, window)(None, None, places[:, None], places)
    rows = [x.transpose(0, 1)[None] for x in (q, k, v)]
    torch.testing.assert_close(F.scaled_dot_product_attention(*rows, seen)[0].transpose(0, 1), expected)
    padded = [torch.nn.utils.rnn.pad_sequence(x.split(lengths.tolist()), batch_first=True).transpose(1, 2) for x in (q, k, v)]
    mask = table.padded_mask(lengths, shape)[..., : padded[0].shape[2], : padded[0].shape[2]]
    out = F.scaled_dot_product_attention(*padded, mask).transpose(1, 2)
    torch.testing.assert_close(torch.cat([x[:n] for x, n in zip(out, lengths.tolist(), strict=True)]), expected)


def test_it_runs(table, monkeypatch, timed_once, tmp_path):
    from machine import machine
    from rows import Writer

    def timed(compute, leaves, dout, repeat_ms):
        def both():
            return torch.autograd.grad(compute(), leaves, dout.expand_as(compute()).contiguous())

        return {direction: timed_once(both) for direction in ("fwd", "bwd", "fwd+bwd")}

    shared = importlib.import_module("tables.short_ragged")  # has `timed`, which the table imports
    monkeypatch.setattr(shared, "time_directions", timed)
    monkeypatch.setattr(table, "stream_bandwidth", lambda: 4e9)
    monkeypatch.setattr(table, "SHAPES", [table.Shape(16, 4, 2, 40, (5, 5)), table.Shape(16, 2, 2, 40, (7, 0))])
    monkeypatch.setattr(table, "has_package", lambda name: False)
    monkeypatch.setattr(table.saccade, "attention_varlen", functools.partial(_by_the_reference, saccade.attention_varlen))
    monkeypatch.setattr(shared, "NOT_RUN", (*shared.NOT_RUN, NotImplementedError, AssertionError))
    monkeypatch.setattr(table, "compiled_flex", lambda: _refused)
    monkeypatch.setattr(table, "flex_mask", lambda offsets, window: None)
    table.run(Writer(tmp_path / "windows.csv", machine()), 1)
    rows = list(csv.DictReader((tmp_path / "windows.csv").open()))
    assert {(row["backend"], row["direction"]) for row in rows} == {
        (name, direction) for name in ("ragged", "auto", "sdpa_padded") for direction in ("fwd", "bwd", "fwd+bwd")
    }


def _by_the_reference(attend, *given, backend="auto", **options):
    return attend(*given, backend="reference", **options)


def _refused(*given, **options):
    raise NotImplementedError("not here")
