"""The table of N:M inside BigBird's blocks: its mask, its share, what FlexAttention is given, and the table itself on a CPU."""

from __future__ import annotations

import csv
import functools
import importlib
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_mask, flex_attention

from saccade.testing.timing import Timing, measure

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def table(monkeypatch):
    """The table on the CPU, tiny."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    module = importlib.import_module("tables.nm_blocks")
    monkeypatch.setattr(module, "DEVICE", "cpu")
    monkeypatch.setattr(module, "CHECKED", 640)
    monkeypatch.setattr(module, "SETTINGS", [Tiny(512, 16, False)])
    monkeypatch.setattr(module, "compiled_flex", lambda: flex)
    monkeypatch.setattr(module, "in_turn", in_turn)
    yield module
    for name in set(sys.modules) - before:
        if str(BENCHMARKS) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


class Tiny:
    """The interface of `nm_fused.Setting`, for one batch row of two heads."""

    def __init__(self, length, dim, is_causal):
        self.length, self.dim, self.is_causal = length, dim, is_causal
        self.sizes, self.flops = (1, length, 2, dim), 4.0 * 2 * length**2 * dim

    def __str__(self):
        return f"nm_sparse(B=1 H=2 Tq={self.length} Tk={self.length} D={self.dim} bf16)"


def flex(query, key, value, block_mask):
    """FlexAttention by its mask function, since it has no backward on a CPU."""
    pairs = create_mask(block_mask.mask_mod, 1, 1, query.shape[2], key.shape[2], device="cpu")
    return F.scaled_dot_product_attention(query, key, value, pairs)


def in_turn(calls, repeat_ms):
    return {name: measure(call, "cpu", repeat_ms=repeat_ms) for name, call in calls.items()}


def rows_of(table, path):
    rows = importlib.import_module("rows")
    table.run(rows.Writer(path, dict.fromkeys(("gpu", "torch", "date"), "x")), 1)
    with open(path, newline="") as handle:
        return list(csv.DictReader(handle))


def test_the_mask_has_a_window_global_blocks_and_random_ones(table):
    count = 20
    seen = table.BigBird(window=5, global_blocks=2, random_blocks=3).mask(64 * count)
    assert seen.shape == (1, 1, count, count)
    assert seen.dtype == torch.bool
    rows = seen[0, 0].tolist()
    for i in range(count):
        fixed = {j for j in range(count) if abs(i - j) <= 2 or i < 2 or j < 2}
        visible = {j for j in range(count) if rows[i][j]}
        assert fixed <= visible
        assert len(visible - fixed) == (0 if i < 2 else 3)


def test_the_seed_fixes_the_random_blocks(table):
    mask = table.BIGBIRD.mask(4096)
    torch.rand(7)  # the global generator has no part in it
    assert torch.equal(mask, table.BIGBIRD.mask(4096))
    other = table.BigBird(seed=1).mask(4096)
    assert not torch.equal(mask, other)
    assert mask.sum() == other.sum()
    # rows draw apart: blocks right and left of the window are not the same ones everywhere
    away = [tuple(row.nonzero().flatten().tolist()) for row in mask[0, 0, 40:50, 1:30]]
    assert len(set(away)) > 5


def test_few_blocks_are_all_visible(table):
    assert table.BigBird(window=1, global_blocks=0, random_blocks=9).mask(256).all()


@pytest.mark.parametrize("length", [4096, 16384])
def test_the_share_of_what_is_measured(table, length):
    """A row in the middle has 1 global block, 3 of the window and 3 random ones; the first row is global, the second and the last
    have a block less in the window (the global block is one of the second row's)."""
    count = length // 64
    expected = (count + 7 * (count - 3) + 6 * 2) / count**2
    assert table.visible_share(table.BIGBIRD.mask(length)) == pytest.approx(expected, rel=1e-12)


def test_the_share_is_that_of_pairs(table):
    blocks = torch.tensor([[True, False, False], [True, True, False], [False, False, True]])[None, None]
    pairs = F.interpolate(blocks.double(), scale_factor=64.0)
    assert table.visible_share(blocks) == pytest.approx(pairs.mean().item()) == pytest.approx(4 / 9)


@pytest.mark.parametrize("tile", [64, 128])
def test_flex_attention_is_given_the_same_blocks(table, tile):
    blocks = table.BIGBIRD.mask(768)
    given = table.flex_blocks(blocks, tile)
    parts = F.max_pool2d(blocks.float(), tile // 64) > 0
    assert torch.equal(given.to_dense() != 0, parts)  # what its kernels visit, forward ...
    visited = torch.zeros_like(parts)
    for counts, indices in ((given.q_num_blocks, given.q_indices), (given.full_q_num_blocks, given.full_q_indices)):
        for key in range(parts.shape[-1]):
            visited[0, 0, indices[0, 0, key, : counts[0, 0, key]].long(), key] = True
    assert torch.equal(visited, parts)  # ... and backward
    # tiles that are listed as whole are not masked inside, and a tile in both lists would be added twice
    whole = -F.max_pool2d(-blocks.float(), tile // 64) > 0
    assert torch.equal(given.full_kv_num_blocks, whole.sum(-1, dtype=torch.int32))
    assert torch.equal(given.kv_num_blocks, (parts & ~whole).sum(-1, dtype=torch.int32))
    q, k, v = torch.randn(3, 1, 2, 768, 16).unbind(0)
    pairs = blocks.repeat_interleave(64, 2).repeat_interleave(64, 3)
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=given), F.scaled_dot_product_attention(q, k, v, pairs))


def test_the_calls_that_are_timed(table):
    """Ours by the reference under a mask of pairs; FlexAttention sees the same pairs."""
    leaves, dout = table._leaves(table.SETTINGS[0])
    blocks = table.BIGBIRD.mask(512)
    pairs = blocks.repeat_interleave(64, 2).repeat_interleave(64, 3)
    calls, _ = table._calls(leaves, dout, blocks)
    for pattern in ("2:4", "1:2"):
        for kind, mask in (("unmasked", None), ("hybrid", pairs)):
            expected = table.saccade.nm_sparse_attention(*leaves, mask, pattern=pattern, backend="reference")
            torch.testing.assert_close(calls[f"{kind} {pattern}"](), expected)
    torch.testing.assert_close(calls["flex"](), F.scaled_dot_product_attention(*leaves, pairs))
    torch.testing.assert_close(calls["sdpa_flash"](), F.scaled_dot_product_attention(*leaves), atol=1e-2, rtol=1e-2)


def test_the_table_on_a_cpu(table, tmp_path, capsys):
    rows = rows_of(table, tmp_path / "nm_blocks.csv")
    ours = [f"{kind} {pattern}" for kind in ("unmasked", "hybrid") for pattern in ("2:4", "1:2")]
    found = {(r["backend"], r["direction"]): r for r in rows}
    assert len(found) == len(rows)
    assert {(name, way) for name in (*ours, "sdpa_flash", "flex") for way in ("fwd", "fwd+bwd")} <= set(found)
    share = table.visible_share(table.BIGBIRD.mask(512))
    assert 0.5 < share < 1
    assert all(f"blocks=8 window=3 global=1 random=3 seed=0 visible={share:.4f}" in r["problem"] for r in rows)
    for way in ("fwd", "fwd+bwd"):
        for pattern in ("2:4", "1:2"):
            hybrid, unmasked = found[f"hybrid {pattern}", way], found[f"unmasked {pattern}", way]
            assert unmasked["note"] == "auto takes reference"
            assert hybrid["note"].startswith(f"auto takes reference, visible {share:.4f}, ")
            assert 0 < float(hybrid["error_ratio"]) <= 1
            assert unmasked["error_ratio"] == ""
            # roofs count the visible tiles
            assert float(hybrid["roof_ms"]) == pytest.approx(share * float(unmasked["roof_ms"]), rel=2e-3)
        assert found["flex", way]["note"] == "dense within the blocks, its tiles 64"
        dense, flex = (float(found[name, way]["roof_ms"]) for name in ("sdpa_flash", "flex"))
        assert flex == pytest.approx(share * dense, rel=2e-3)
        assert float(found["hybrid 2:4", way]["roof_ms"]) < flex
    assert "hybrid 2:4" in capsys.readouterr().out
    # its CSV is read as a table, and no plot of it is drawn
    assert importlib.import_module("plot").draw(tmp_path / "nm_blocks.csv") == []


@pytest.mark.parametrize(
    ("hybrid", "said"),
    [(1.14, "1.14 of that share of unmasked, within 1.15"), (1.2, "1.20 of that share of unmasked, over 1.15")],
)
def test_a_note_says_whether_hidden_tiles_cost(table, hybrid, said):
    blocks = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    blocks[..., 1] = False
    times = {"unmasked 2:4": Timing(8.0, 7.0, 9.0), "hybrid 2:4": Timing(6.0 * hybrid, 1.0, 9.0)}
    leaves = [torch.randn(1, 2, 256, 16).bfloat16() for _ in "qkv"]
    notes = table._notes("2:4", leaves, blocks, "fwd", times)
    assert notes["hybrid 2:4"] == f"auto takes reference, visible 0.7500, {said}"


def test_flex_attention_that_takes_no_tiles_of_64_gets_larger_ones(table, monkeypatch):
    def refuses(query, key, value, block_mask):
        if block_mask.BLOCK_SIZE[0] < 128:
            raise ValueError("Q and KV block size must be divisible by BLOCK_M and BLOCK_N")
        return flex(query, key, value, block_mask)

    leaves, dout = table._leaves(table.SETTINGS[0])
    blocks = table.BIGBIRD.mask(512)
    monkeypatch.setattr(table, "compiled_flex", lambda: refuses)
    calls, notes = table._calls(leaves, dout, blocks)
    assert "flex" in calls
    assert notes["flex"] == "dense within the blocks, its tiles 128"
    monkeypatch.setattr(table, "compiled_flex", lambda: functools.partial(F.scaled_dot_product_attention, wrong=1))
    assert "flex" not in table._calls(leaves, dout, blocks)[0]


@pytest.mark.parametrize("wrong", ["no blocks", "other blocks", "other pattern", "gradient"])
def test_wrong_results_end_the_table(table, monkeypatch, tmp_path, wrong):
    right = table.saccade.nm_sparse_attention

    def attend(query, key, value, *, pattern, block_mask, return_lse, backend):
        if backend == "reference":
            return right(query, key, value, pattern=pattern, block_mask=block_mask, return_lse=return_lse, backend=backend)
        given = {"no blocks": None, "other blocks": table.BigBird(seed=1).mask(table.CHECKED)}.get(wrong, block_mask)
        out, lse = right(
            query, key, value, pattern={"other pattern": "1:4"}.get(wrong, pattern), block_mask=given, return_lse=return_lse
        )
        if wrong == "gradient":
            out = out + 0.02 * (query - query.detach())
        return out, lse

    assert all(result.ok for result in table.judged("2:4", 16))
    monkeypatch.setattr(table.saccade, "nm_sparse_attention", attend)
    with pytest.raises(SystemExit, match=r"hybrid 2:4 at D = 16 differs from float64, nothing is timed: .*FAILED"):
        rows_of(table, tmp_path / "nm_blocks.csv")
    assert not (tmp_path / "nm_blocks.csv").exists()
