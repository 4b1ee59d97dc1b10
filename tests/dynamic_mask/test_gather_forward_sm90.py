"""The forward of sm_90a: on a GPU under the budget, where its softmax, its groups and its addresses are special; everywhere the
binaries."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
import torch
from contracts.dynamic_mask import PLAIN, watch_takes

import saccade
from saccade.dynamic_mask.gather.sm90 import forward as forward_sm90
from saccade.dynamic_mask.testing.check import compare_dynamic_mask, public_call
from saccade.dynamic_mask.testing.inputs import make_dynamic_mask
from saccade.nvrtc import build, obstacles
from saccade.testing.inputs import time_first
from tools.cubin import disassemble, resource_usage


@pytest.fixture
def taken(monkeypatch):
    return watch_takes(monkeypatch, forward_sm90)


def judge(case, inputs, taken):
    with torch.no_grad():
        out, lse = public_call(case, "gather", True)(inputs)
    assert taken
    assert all(taken)
    results = compare_dynamic_mask(case, inputs, {"out": out, "lse": lse})
    assert all(r.ok for r in results), results


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "q_len"), [(7, 1, 500), (64, 1, 50), (32, 1, 333), (32, 8, 1), (2, 2, 700)])
def test_groups(heads, kv_heads, q_len, dtype, taken):
    for dim in (64, 128):
        case = replace(PLAIN, heads=heads, kv_heads=kv_heads, q_len=q_len, head_dim=dim)
        judge(case, make_dynamic_mask(case, dtype, "cuda"), taken)
        taken.clear()


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "factor", "slope"), [
    (torch.bfloat16, 12, 0), (torch.float16, 12, 0), (torch.float16, 30, 0), (torch.bfloat16, 1, 0.5), (torch.bfloat16, 1, -0.5), (torch.float16, 1, 20),
])  # fmt: skip
def test_references_that_rise(dtype, factor, slope, taken):
    """Logits of a hundred, or rising along the keys, for which weights relative to the largest score of the first tile would
    overflow."""
    for dim in (64, 128):
        case = replace(PLAIN, head_dim=dim)
        inputs = make_dynamic_mask(case, dtype, "cuda")
        ramp = slope * torch.arange(PLAIN.kv_len, device="cuda")
        judge(case, replace(inputs, query=inputs.query * factor, key_scores=inputs.key_scores + ramp), taken)
        taken.clear()


@pytest.mark.gpu
@pytest.mark.parametrize("shift", [-300, -80, -12, -1, 5, 30, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_references_that_are_0(dtype, shift, taken):
    """Scores so far from 0 that weights relative to 0 would underflow or overflow, in one format or in both; and some that are
    not."""
    for dim in (64, 128):
        case = replace(PLAIN, head_dim=dim)
        inputs = make_dynamic_mask(case, dtype, "cuda")
        judge(case, replace(inputs, key_scores=inputs.key_scores + shift), taken)
        taken.clear()


@pytest.mark.gpu
@pytest.mark.parametrize("keep", [1, 2, 31, 33, 64, 65, 96, 97, 128])
def test_ends_of_tiles(keep, taken):
    """The keys that all queries of a block see end a tile; the others take one tile of 32, one of 64, or several."""
    for dim in (64, 128):
        for heads, kv_heads in ((8, 1), (2, 2)):
            case = replace(PLAIN, heads=heads, kv_heads=kv_heads, keep=keep, head_dim=dim)
            judge(case, make_dynamic_mask(case, torch.float16, "cuda"), taken)
            taken.clear()


@pytest.mark.gpu
def test_strides(taken):
    inputs = make_dynamic_mask(PLAIN, torch.bfloat16, "cuda")
    wide = torch.randn(2, 700, 2, 3 * 128 + 8, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    odd = torch.randn(2, 700, 4, 131, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    for given in (
        {n: time_first(getattr(inputs, n)) for n in ("query", "key", "value")},
        {"query": inputs.query.contiguous(), "key": inputs.key.contiguous()},
        {"key": wide[..., 8:136], "value": wide[..., 264:392]},
        {"key": inputs.key[:1].expand(2, -1, -1, -1)},
        {"query": odd[..., 1:129]},  # copied
    ):
        judge(PLAIN, replace(inputs, **given), taken)
        taken.clear()


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_nan_reaches_whom_it_is_visible_to(head_dim, taken):
    case = replace(PLAIN, batch=1, kv_heads=1, q_len=400, kv_len=400, keep=50, head_dim=head_dim)
    inputs = make_dynamic_mask(case, torch.bfloat16, "cuda")
    inputs.key_scores[0, 0, 300] = 3.0
    key = inputs.key.clone()
    key[0, 0, 300, 5] = float("nan")
    clean, dirty = (saccade.dynamic_mask_attention(
        inputs.query, k, inputs.value, inputs.key_scores, keep=50, enable_gqa=True, return_lse=True, backend="gather"
    ) for k in (inputs.key, key))  # fmt: skip
    seen = torch.arange(400, device="cuda") >= 300
    seen &= torch.arange(400, device="cuda") < saccade.expiry(inputs.key_scores, 50)[0, 0, 300]
    assert seen.any()
    block = torch.arange(400, device="cuda") // (forward_sm90.CONFIGS[head_dim].rows // 4)
    far = ~torch.isin(block, block[seen])
    assert far.any()
    for x, y in zip(clean, dirty, strict=True):
        assert torch.equal(x[:, :, far], y[:, :, far])
        # not bitwise equal: where one of a warp's 16 rows is NaN, the weights of all are recomputed with another reference
        torch.testing.assert_close(x[:, :, ~seen], y[:, :, ~seen], rtol=1e-2, atol=1e-2)
        assert y[:, :, seen].isnan().all()


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("has_scores", [True, False], ids=["bias", "ranking-only"])
@pytest.mark.parametrize("group", [1, 4, 7, 64])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_binaries(head_dim, group, has_scores, dtype):
    if obstacles("90a"):
        pytest.skip(obstacles("90a")[0])
    pytest.importorskip("triton")
    config = forward_sm90.CONFIGS[head_dim]
    built = build(forward_sm90.FORWARD, "90a", forward_sm90.forward_options(head_dim, group, dtype, has_scores, config))
    (usage,) = resource_usage(built.cubin).values()
    code = disassemble(built.cubin)
    assert usage.stack == 0
    # what a thread is launched with; those that multiply take some of the gatherer's
    assert usage.registers == {64: 96, 128: 128}[head_dim]
    multiplies, gathers = config.registers
    assert 128 * (config.warpgroups * multiplies + gathers) <= 128 * (config.warpgroups + 1) * usage.registers <= 65536
    assert all(
        f"USETMAXREG.{how}.CTAPOOL {to}" in code
        for how, to in (("TRY_ALLOC", f"UP0, {multiplies:#x}"), ("DEALLOC", f"{gathers:#x}"))
    )
    # S of the first tile, of whole tiles, of masked tiles, of masked tiles of 32 keys; P V of the last three and of the end of a
    # block
    scores, values = 4 * head_dim // 16, 4 * 64 // 16
    products = re.findall(r"\bHGMMA\.64x(\d+)x16\.F32([^;]*)", code)
    assert sum("tnspB" in rest for _, rest in products) == values
    assert len(products) == scores + values
    assert {int(n) for n, rest in products if "tnspB" in rest} == {head_dim}
    assert sorted(int(n) for n, rest in products if "tnspB" not in rest) == [32] * (head_dim // 16) + [64] * (3 * head_dim // 16)
    assert ("BF16" in code) == (dtype == torch.bfloat16)
    # products wait for each other only where the source requires it
    assert "serialized" not in built.log
    assert len(re.findall(r"WARPGROUP\.DEPBAR", code)) == 5
    # O leaves by 16 bytes a lane, 16 rows a warp, at D = 64 by way of shared memory; beside it one number of lse a row
    assert len(re.findall(r"\bSTSM\.16\.M88\.4 ", code)) == (4 if config.query_places == 2 else 0)
    assert len(re.findall(r"\bSTG\.E\.128 ", code)) == 2 * head_dim // 32
    assert len(re.findall(r"\bSTG\.", code)) == 2 * head_dim // 32 + 2
    # tiles arrive by copies of 16 bytes that pass L1 by, or, where keys follow each other, by the copy engine, 64 columns of K or
    # V each
    assert "LDGSTS.E.BYPASS.LTC128B.128" in code
    assert len(re.findall(r"\bUTMALDG\.4D", code)) == 2 * head_dim // 64


def test_the_launch_gives_strides_and_sizes():
    query_strides, key_strides, value_strides, out_strides = (
        (1008, 1016, 1024, 1),
        (2008, 2016, 2024, 1),
        (3008, 3016, 3024, 1),
        (4008, 4016, 4024, 1),
    )
    layout = forward_sm90.Layout((2, 8, 100, 128), query_strides, (2, 2, 120, 128), key_strides, value_strides, out_strides)
    call = forward_sm90.forward_call(layout, torch.bfloat16, True, 64, 0.1, forward_sm90.CONFIGS[128], 132)
    named = dict(call.arguments)
    assert (named.pop("key_map"), named.pop("value_map")) == ((2 * 2024, 128, 16), (2 * 3024, 128, 16))
    plain = forward_sm90.forward_call(layout, torch.bfloat16, True, 64, 0.1, forward_sm90.CONFIGS[128], 132, runs=False)
    assert plain.arguments == named
    for name, strides in (("query", query_strides), ("key", key_strides), ("value", value_strides), ("out", out_strides)):
        assert [named[f"{name}_{dim}"] for dim in ("batch", "head")] == list(strides[:2])
        assert named[f"{name}_row"] == strides[2] * (2 if name in ("key", "value") else 1)
    assert (named["kv_heads"], named["q_len"], named["kv_len"]) == (2, 100, 120)
    assert (named["longest"], named["blocks"], named["owners"]) == (64, 3, 4)
    assert call.grid == (12, 1)


@pytest.mark.parametrize(("head_dim", "rows"), [(64, 256), (128, 192)])
def test_shared_memory(head_dim, rows):
    config = forward_sm90.CONFIGS[head_dim]
    assert config.rows == rows
    ring = config.stages * (2 * 64 * head_dim * 2 + 3 * 64 * 4 + 16)
    assert config.shared_bytes(head_dim) == 1024 + config.query_places * rows * head_dim * 2 + ring <= 227 * 1024


def test_where_the_consumers_put_q():
    """Rows of Q by the addresses of `copy_query`: one swizzle a thread, since its rows are 8 or 16 apart."""
    for head_dim in (64, 128):
        across, filled = head_dim // 8, set()
        for thread, i in itertools.product(range(128), range(0, 64, 128 // across)):
            chunk, own = thread % across, thread // across
            row = own + i
            address = chunk // 8 * 8192 + own * 128 + ((chunk ^ own) & 7) * 16 + i * 128
            assert address == chunk // 8 * 8192 + row * 128 + ((chunk ^ row) & 7) * 16
            filled.add(address)
        assert filled == set(range(0, 64 * head_dim * 2, 16))


@pytest.mark.parametrize("group", [1, 2, 4, 8, 16, 32, 64])
def test_whose_a_row_is(group):
    """Steps from a row to others of the same lane: of Q (16 or 8 rows, in 64), from g to g + 8, of O (4 rows, in 16)."""
    for within, below, step in ((64, 16, 16), (64, 8, 8), (16, 8, 8), (16, 4, 4)):
        for row, i in itertools.product(range(256), range(0, within, step)):
            if row % within < below:
                assert (row % group + i % group, row // group + i // group) == ((row + i) % group, (row + i) // group)


def test_how_rows_of_o_pass_through_shared_memory():
    """`store_rows`: 8 x 8 matrices where the products left them, read as rows; each 16 bytes once, eight lanes in different
    banks."""
    holds = {}
    for i, lane in itertools.product(range(0, 8, 2), range(32)):
        matrix, row = lane // 8, lane % 8
        address = lane % 16 * 128 + ((i + lane // 16) ^ (lane & 7)) * 16
        holds[address] = (row + 8 * (matrix % 2), i + matrix // 2)
    assert set(holds) == set(range(0, 2048, 16))
    for i, lane in itertools.product(range(0, 16, 4), range(32)):
        own = lane // 8
        address = ((own * 128 + ((lane ^ own) & 7) * 16) ^ (i % 8 * 16)) + i * 128
        assert holds[address] == (own + i, lane % 8)
    for i, first in itertools.product(range(0, 8, 2), range(0, 32, 8)):
        assert len({((i + lane // 16) ^ (lane & 7)) for lane in range(first, first + 8)}) == 8


def test_where_numbers_of_keys_lie():
    """`note_at` of cuda/gather.cuh: 16 bytes for a lane are its columns of two eights, 8i + 2t + {0, 1}."""

    def note_at(row):
        return row // 16 * 16 + row % 8 // 2 * 4 + row // 8 % 2 * 2 + row % 2

    assert sorted(map(note_at, range(64))) == list(range(64))
    for t, i, b in itertools.product(range(4), range(8), range(2)):
        assert 4 * t + note_at(8 * i) + b == note_at(8 * i + 2 * t + b)


def unmasked(count, whole):
    """The keys that are read without a mask, as in cuda/gather.cuh."""
    tail, others = whole % 64, count - whole
    return whole - tail if (others + tail + 31) // 32 - (others + 31) // 32 <= 1 else whole


def cost(count, wholes):
    """Halves of tiles that are multiplied."""
    return 2 * (-(-wholes // 64)) + -(-(count - wholes) // 32)


def test_tiles_of_a_list():
    """`Tiles` of cuda/gather.cuh, which the gatherer walks, against the loops of `attend`: the same number, each key once, in
    order."""
    for count, listed in ((c, w) for c in (0, 1, 31, 32, 33, 64, 65, 96, 97, 128, 161, 200) for w in range(c + 1)):
        wholes = unmasked(count, listed)
        assert wholes in (listed, listed // 64 * 64)
        assert cost(count, wholes) <= cost(count, listed)
        whole_tiles = (wholes + 63) // 64
        total = whole_tiles + (count - wholes + 63) // 64
        keys = []
        for tile in range(total):
            first = 64 * tile + (0 if tile < whole_tiles else wholes - 64 * whole_tiles)
            end = wholes if tile < whole_tiles else count
            assert first < end
            keys += range(first, min(end, first + 64))
        assert keys == list(range(count))
        consumed = []  # keys of each tile that are multiplied
        if count:
            rest = count - wholes - (64 if wholes == 0 else 0)
            consumed = [64] * (1 + max(0, (wholes - 1) // 64))
            while rest > 32:
                consumed.append(64)
                rest -= 64
            consumed += [32] * (rest > 0)
        assert len(consumed) == total
        assert all(size == 64 or count - wholes - 64 * (n - whole_tiles) <= 32 for n, size in enumerate(consumed))


def test_from_block_to_block():
    """`Block::after`: the blocks that index, index + grid, index + 2 grid divide into, by additions."""
    for kv_heads, batches, grid, total in (
        (2, 1, 132, 1024),
        (8, 3, 132, 2000),
        (16, 4, 132, 9000),
        (1, 1, 5, 20),
        (3, 5, 7, 200),
    ):

        def divided(index, kv_heads=kv_heads, batches=batches):
            return index % kv_heads, index // kv_heads % batches, index // kv_heads // batches

        step = divided(grid)
        for first in range(min(grid, 4)):
            block = divided(first)
            for index in range(first, total, grid):
                assert block == divided(index)
                head, batch, number = (x + y for x, y in zip(block, step, strict=True))
                if head >= kv_heads:
                    head, batch = head - kv_heads, batch + 1
                if batch >= batches:
                    batch, number = batch - batches, number + 1
                block = head, batch, number


def test_lanes_exchange_what_they_store():
    """`quad_transpose` of launch/cuda/numbers.cuh: lane t of four holds columns 2t of four groups of 8, and stores all 8 columns
    of group t."""
    words = [[(lane, j) for j in range(4)] for lane in range(4)]
    for bit in (1, 2):
        for i in range(2):
            low = 2 * i if bit == 1 else i
            sent = [w[low] if t & bit else w[low + bit] for t, w in enumerate(words)]
            for t, w in enumerate(words):
                w[low if t & bit else low + bit] = sent[t ^ bit]
    assert words == [[(j, lane) for j in range(4)] for lane in range(4)]


@pytest.mark.parametrize("warps", [2, 4])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_where_the_gatherer_puts_rows(head_dim, warps):
    """The addresses of cuda/gather.cuh, lane by lane, against the layout of the products: 16 bytes of 8 rows change places."""
    block_n = 64
    rows, across = block_n // warps, head_dim // 8
    filled = set()
    for thread in range(32 * warps):
        lane, first_row = thread % 32, thread // 32 * rows
        row, chunk = lane // across, lane % across
        corner = chunk // 8 * block_n * 128 + (first_row + row) * 128 + (chunk % 8 ^ row) * 16
        for step in range(0, rows, 32 // across):
            key = first_row + step + lane // across
            address = (corner ^ step % 8 * 16) + step * 128
            assert address == chunk // 8 * block_n * 128 + key * 128 + (chunk % 8 ^ key % 8) * 16
            filled.add(address)
    assert filled == set(range(0, block_n * head_dim * 2, 16))


@pytest.mark.parametrize(
    ("view", "answer"),
    [
        (lambda x: x, True),
        (lambda x: x.transpose(1, 2), True),
        (lambda x: x[..., 8:], True),
        (lambda x: x[..., 4:], False),
        (lambda x: x[:, :, :1].expand(-1, -1, 9, -1), True),
        (lambda x: torch.empty(2, 3, 8, 36, dtype=x.dtype)[..., :32], False),
        (lambda x: torch.empty_strided((1, 1, 2, 32), (0, 0, 2**31, 1), dtype=x.dtype, device="meta"), False),
    ],
)
def test_alignment(view, answer):
    assert forward_sm90.aligned(view(torch.empty(2, 3, 8, 32, dtype=torch.bfloat16))) == answer
