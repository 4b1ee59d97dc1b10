"""The prediction counts the intended loop: exactly the products of one tile of one warp."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

from saccade.exact.volta import launchers
from saccade.exact.volta.config import OWNED_KEYS, backward_tile, forward_tile
from saccade.exact.volta.launchers import Features
from saccade.nvrtc import obstacles

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def clocks(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS.parent / "experiments" / "volta"))
    yield importlib.import_module("volta_clocks")
    for name in ("volta_clocks", "predict_volta_rows", "predict_volta_encoder", "volta_common"):
        sys.modules.pop(name, None)


@pytest.fixture
def rows(clocks):
    return importlib.import_module("predict_volta_rows")


@pytest.mark.parametrize("dim", [64, 128])
def test_the_products_of_a_tile(clocks, dim):
    pytest.importorskip("triton")
    if obstacles(70):
        pytest.skip(obstacles(70)[0])
    x, rows = torch.empty(1, 1, 4096, dim, dtype=torch.float16), torch.empty(1, 1, 4096)
    operands, features = (x, x, x, None, None, None), Features(False, 0.0, 0.125)
    tile = forward_tile(dim, 4096, False, 70)
    found = clocks.counts(launchers.forward_call(*operands, x, rows, features, 70))
    # a product of a warp has 32 rows, 8 columns and depth 4, and takes four instructions
    assert found["HMMA"] == 4 * 2 * tile.row_tiles * (tile.keys // 8) * (dim // 4)
    assert clocks.clocks(found)["tensor"] == 2 * found["HMMA"]
    tile = forward_tile(dim, 4096, False, 70)
    found = clocks.counts(launchers.forward_call(*operands, x, rows, features._replace(half_sums=True), 70))
    # in two with float16 sums
    assert found["HMMA.F16"] == 2 * 2 * tile.row_tiles * (tile.keys // 8) * (dim // 4)
    assert clocks.clocks(found)["tensor"] == 4 * found["HMMA.F16"]
    tile = backward_tile(dim, 70)
    call = launchers.backward_call(*operands, x, rows, rows, rows, torch.empty(1, 1, 4096, dim), x, x, features, 70)
    assert clocks.counts(call)["HMMA"] == 4 * 5 * (tile.rows // 32) * (OWNED_KEYS // 8) * (dim // 4) // tile.warps
    options = (x, rows, rows, rows, torch.empty(1, 1, 4096, dim), x, x, features._replace(half_sums=True), 70)
    found = clocks.counts(launchers.backward_call(*operands, *options))
    assert found["HMMA.F16"] == 2 * 5 * (tile.rows // 32) * (OWNED_KEYS // 8) * (dim // 4) // tile.warps
    assert found["HMMA"] == 0


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("length", [512, 4096])
def test_the_tiles_of_a_problem(rows, dim, length):
    """Counted a second time, element by element: a tile counts if its block has any visible score in it or before it."""
    visible = torch.ones(length, length, dtype=torch.bool).tril()
    for kernel in rows.KERNELS:
        full = rows.work_of(kernel, rows.Setting(length, dim, False))
        work = rows.work_of(kernel, rows.Setting(length, dim, True))
        tile = backward_tile(dim, 70) if rows.is_backward(kernel) else forward_tile(dim, length, False, 70)
        high, wide = (tile.rows, OWNED_KEYS) if rows.is_backward(kernel) else (tile.rows, tile.keys)
        tiles = visible.unfold(0, high, high).unfold(1, wide, wide).flatten(2)
        assert {cut for _, cut in full.blocks} == {0}
        assert sum(a for a, _ in full.blocks) == tiles[..., 0].numel()
        assert sum(a + b for a, b in work.blocks) == tiles.any(-1).sum()
        cut = tiles.any(-1) & ~tiles.all(-1)
        if rows.is_backward(kernel):
            assert [b for _, b in work.blocks] == cut.sum(0).tolist()
        else:
            # the last warp reaches the causal edge later than its block
            own = torch.arange(tile.rows) >= tile.rows - 32 * tile.row_tiles
            last = visible.unfold(0, high, high).unfold(1, wide, wide)[:, :, own].flatten(2)
            assert [b for _, b in work.blocks] == (last.any(-1) & ~last.all(-1)).sum(1).flip(0).tolist()


def test_blocks_go_to_the_first_free_multiprocessor(rows):
    price = 2 * 4 / 4 / rows.CLOCK
    even = rows.KernelWork([(10, 0)], 2, 4)
    assert rows.seconds(even, 160, 100.0, 0.0) == pytest.approx(1000 * price)
    assert rows.seconds(even, 161, 100.0, 0.0) == pytest.approx(2000 * price)
    mixed = rows.KernelWork([(0, 3), (1, 0)], 2, 4)
    assert rows.seconds(mixed, 80, 100.0, 200.0) == pytest.approx(600 * price)


def test_the_unfused_pipeline_until_it_does_not_fit(rows):
    setting = rows.Setting(4096, 64, False)
    assert rows.unfused_seconds("fwd", setting) == pytest.approx(6.5 * 4.295e9 / 900e9 + 0.5498e12 / 90e12, rel=1e-3)
    assert rows.unfused_seconds("fwd", rows.Setting(16384, 64, False)) is None


def test_an_encoder_layer(rows, monkeypatch):
    """The sizes by hand, in ms: 1.65 TFLOP of products and 1.34 GB of passes; attention as a number, so that a speed-up is known."""
    encoder = importlib.import_module("predict_volta_encoder")
    monkeypatch.setattr(encoder, "kernel_seconds", lambda kernel, setting: (1e-3, 2e-3))
    setting = rows.Setting(4096, 64, False, 0.0)
    plain, other = 1649.3 / 90 + 1.342 / 0.9, 4 * 4.295 / 0.9 + 549.8 / 90
    found = {name: [1e3 * x for x in times] for name, times in encoder.layers(setting).items()}
    assert found["volta"] == pytest.approx([plain + 1, plain + 2], rel=1e-3)
    assert found["PyTorch JIT"] == pytest.approx([plain + other] * 2, rel=1e-3)
    assert found["FasterTransformer"] == pytest.approx([1649.3 / 90 + other] * 2, rel=1e-3)
    assert encoder.layers(rows.Setting(16384, 64, False, 0.0))["PyTorch JIT"] is None
    table = encoder.rows()
    assert len(table) == 4 * 2 * 6
    assert all(row["note"].startswith("predicted") for row in table)
    row = next(r for r in table if (r["layer"], r["n"], r["D"]) == ("volta", "4096", "64"))
    assert float(row["speed-up_fast"]) == pytest.approx((plain + other) / (plain + 1), abs=0.006)


def test_the_committed_layers_are_of_these_kernels(rows):
    import csv

    if obstacles(70):
        pytest.skip(obstacles(70)[0])
    pytest.importorskip("triton")
    encoder = importlib.import_module("predict_volta_encoder")
    with open(BENCHMARKS / "results" / "predictions" / "volta_encoder.csv", newline="") as handle:
        committed = list(csv.DictReader(handle))
    assert len(committed) == 4 * 2 * 6
    encoder.grid = lambda dropout_p: [encoder.Setting(2048, 128, False, dropout_p)]
    for row in encoder.rows():
        assert any(row.items() <= one.items() for one in committed)


def test_the_committed_rows_are_of_these_kernels(rows):
    """Counting again takes half a minute: one row of each kernel is enough to see a change."""
    import csv

    if obstacles(70):
        pytest.skip(obstacles(70)[0])
    pytest.importorskip("triton")
    with open(BENCHMARKS / "results" / "predictions" / "volta.csv", newline="") as handle:
        committed = list(csv.DictReader(handle))
    assert len(committed) == 4 * 24
    rows.grid = lambda: [rows.Setting(2048, 128, True)]
    for row in rows.rows():
        assert any(row.items() <= one.items() for one in committed)
