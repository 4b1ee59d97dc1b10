"""The part that is read from a kernel of torch: the loop over tiles, followed along the cheapest path that makes every product."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MODULES = ("volta_peer", "predict_volta_peer", "predict_volta", "predict_volta_rows", "volta_clocks", "volta_common")


@pytest.fixture
def peer(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS.parent / "experiments" / "volta"))
    yield importlib.import_module("volta_peer")
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
def predict(peer):
    return importlib.import_module("predict_volta_peer")


def assembly(*lines: str) -> str:
    """Instructions at addresses, and labels."""
    return "\n".join(f"{x}" if x.startswith(".L") else f"        /*{16 * i:04x}*/      {x} ;" for i, x in enumerate(lines))


PRODUCT = ["HMMA.884.F32.F32.STEP0 R0, R0, R0, R0"] * 128
KERNEL = assembly(
    "MOV R1, c[0x0][0x28]",
    ".L_tiles:",
    "IADD3 R0, R0, 0x1, RZ",
    "@!P0 BRA `(.L_product)",
    *["FADD R0, R0, R0"] * 9,  # a bias: not on the cheapest path
    ".L_product:",
    "LDS.U.128 R0, [R0]",
    *PRODUCT,
    "@P1 BRA `(.L_product)",
    "@!P2 BRA `(.L_end)",  # past the second product: cheaper, but it makes too few
    ".L_column:",
    "STS.64 [R0], R2",
    ".L_second:",
    *PRODUCT,
    "@P1 BRA `(.L_second)",
    "@P3 BRA `(.L_column)",
    ".L_end:",
    "@P4 BRA `(.L_tiles)",
    "EXIT",
)


def tile(peer, rows: int, keys: int, trips: tuple[int, ...]):
    return peer.Peer("forward", 64, "made up", rows, keys, 1, trips)


def test_the_cheapest_path_that_makes_every_product(peer):
    # 64 rows, 32 keys and D = 64: four products of 32 x 32 x 32, of each of the two
    found = peer.counts(KERNEL, tile(peer, 64, 32, (4, 2)))
    assert found == Counter({"HMMA": 8 * 128, "LDS.128": 4, "STS.64": 2, "IADD3": 1, "BRA": 1 + 4 + 1 + 4 + 2 + 1})


def test_a_tile_that_the_code_cannot_make(peer):
    with pytest.raises(ValueError, match="no path makes 8 products"):
        peer.counts(KERNEL, tile(peer, 64, 32, (3, 2)))


def test_the_counts_that_were_read(peer, predict):
    """The products of each kernel are those of its tile, and nothing but exponentials of its scores is there twice."""
    found = predict.read()
    assert [(x.direction, x.dim, x.rows, x.keys, x.warps) for x in found] == [
        (x.direction, x.dim, x.rows, x.keys, x.warps) for x in peer.PEERS
    ]
    for known, (kernel, instructions) in zip(peer.PEERS, found.items(), strict=True):
        assert instructions["HMMA"] == peer.PRODUCT * known.products
        assert instructions["MUFU"] == kernel.rows * kernel.keys // kernel.warps // 32


def test_tiles_of_the_peer(predict):
    forward, backward = predict.Kernel("forward", 64, 64, 128, 4, 168), predict.Kernel("backward", 64, 128, 64, 8, 240)
    full, causal = (predict.Setting(512, 64, x) for x in (False, True))
    assert predict.tiles(forward, full) == [4] * 8
    assert predict.tiles(forward, causal) == [1, 1, 2, 2, 3, 3, 4, 4]
    assert predict.tiles(backward, full) == [4] * 8
    assert predict.tiles(backward, causal) == [4, 4, 3, 3, 2, 2, 1, 1]
    # one head: q, k, v, out, dout, dq, dk, dv; sums of dQ by 32 tiles, but for a read and a write; lse and delta
    assert predict.bytes_of(backward, full, 1) == (8 * 2 + 2 * 4 * 8 - 8) * 512 * 64 + 8 * 512


def test_the_rows_that_were_written(predict):
    """Those of the peer, from its counts."""
    with open(BENCHMARKS / "results" / "predictions" / "volta_peer_rows.csv") as handle:
        written = [x for x in predict.csv.DictReader(handle) if x["n"] == "1024"]
    for row in written:
        setting = predict.Setting(1024, int(row["D"]), row["causal"] == "yes", 0.0)
        kernel, found = next(x for x in predict.read().items() if (x[0].direction, x[0].dim) == (row["direction"], setting.dim))
        times = predict.peer_seconds(kernel, found, setting, setting.shape[0] * setting.shape[1])
        assert [row[f"peer_ms_{figure}"] for figure in predict.FIGURES] == [f"{1e3 * x:.2f}" for x in times]
    assert len(written) == 8
