"""The prediction counts the loop that it means: exactly the products of one tile of one warp."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from saccade.kernels.volta import launchers
from saccade.kernels.volta.config import OWNED_KEYS, backward_tile, forward_tile
from saccade.kernels.volta.launchers import Features
from saccade.nvrtc import obstacles

FILE = Path(__file__).parents[2] / "benchmarks" / "predict_volta.py"


@pytest.fixture
def predict():
    spec = importlib.util.spec_from_file_location("predict_volta", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("dim", [64, 128])
def test_the_products_of_a_tile(predict, dim):
    pytest.importorskip("triton")
    if obstacles(70):
        pytest.skip(obstacles(70)[0])
    x, rows = torch.empty(1, 1, 4096, dim, dtype=torch.float16), torch.empty(1, 1, 4096)
    operands, features = (x, x, x, None, None, None), Features(False, 0.0, 0.125)
    tile = forward_tile(dim, 4096, False, 70)
    found = predict.counts(launchers.forward_call(*operands, x, rows, features, 70))
    # a product of a warp is 32 rows, 8 columns, 4 deep, in four instructions
    assert found["HMMA"] == 4 * 2 * tile.row_tiles * (tile.keys // 8) * (dim // 4)
    assert predict.clocks(found)["tensor"] == 2 * found["HMMA"]
    tile = backward_tile(dim, 70)
    call = launchers.backward_call(*operands, x, rows, rows, torch.empty(1, 1, 4096, dim), x, x, features, 70)
    assert predict.counts(call)["HMMA"] == 4 * 5 * (tile.rows // 32) * (OWNED_KEYS // 8) * (dim // 4) // tile.warps
