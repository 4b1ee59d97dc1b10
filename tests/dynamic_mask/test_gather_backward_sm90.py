"""The backward for sm_90a: on a GPU within the error budget for special groups, addresses and additions; everywhere its
binaries."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import pytest
import torch
from contracts.dynamic_mask import PLAIN, watch_takes

import saccade
from saccade.dynamic_mask.gather.sm90 import backward as backward_sm90
from saccade.dynamic_mask.gather.sm90.backward import CONFIGS, BackwardConfig
from saccade.dynamic_mask.reference import kept
from saccade.dynamic_mask.testing.check import compare_dynamic_mask, differentiate, public_call
from saccade.dynamic_mask.testing.inputs import make_dynamic_mask
from saccade.nvrtc import build, obstacles
from saccade.testing.inputs import time_first
from tools.cubin import disassemble, resource_usage


@pytest.fixture
def taken(monkeypatch):
    return watch_takes(monkeypatch, backward_sm90)


def judge(case, inputs, taken):
    outputs = differentiate(public_call(case, "gather", True), inputs, True)
    assert taken == [True]
    taken.clear()
    results = compare_dynamic_mask(case, inputs, {name: x for name, x in outputs.items() if name.startswith("d")})
    assert [r.name for r in results] == ["dq", "dk", "dv", *(["dscores"] if case.add_scores else [])]
    assert all(r.ok for r in results), results


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "q_len"), [(7, 1, 500), (64, 1, 50), (32, 1, 333), (32, 8, 1), (2, 2, 700), (16, 2, 129)]
)
def test_groups(heads, kv_heads, q_len, dtype, taken):
    for dim in (64, 128):
        case = replace(PLAIN, heads=heads, kv_heads=kv_heads, q_len=q_len, head_dim=dim)
        judge(case, make_dynamic_mask(case, dtype, "cuda"), taken)


@pytest.mark.gpu
def test_strides(taken):
    inputs = make_dynamic_mask(PLAIN, torch.bfloat16, "cuda")
    wide = torch.randn(2, 700, 2, 3 * 128 + 8, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    odd = torch.randn(2, 700, 4, 131, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    for given in (
        {n: time_first(getattr(inputs, n)) for n in ("query", "key", "value", "dout")},
        {"query": inputs.query.contiguous(), "key": inputs.key.contiguous(), "dout": inputs.dout.contiguous()},
        {"key": wide[..., 8:136], "value": wide[..., 264:392]},
        {"key": inputs.key[:1].expand(2, -1, -1, -1)},
        {"query": odd[..., 1:129]},  # copied
        {"dout": odd[..., :128]},  # copied
        {"dout": inputs.dout[..., :1].expand(-1, -1, -1, 128)},  # copied
        {"dout": inputs.dout[:, :, :1].expand(-1, -1, 700, -1)},
    ):
        judge(PLAIN, replace(inputs, **given), taken)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_many_blocks_a_program_and_many_additions_a_key(head_dim, taken):
    """Every query keeps the same few keys besides its newest, so that thousands of additions go to their rows."""
    # 160 blocks, more than there are multiprocessors
    length = 2500 if head_dim == 128 else 5000
    case = replace(PLAIN, batch=1, heads=8, kv_heads=8, q_len=length, kv_len=length, head_dim=head_dim, keep=70)
    inputs = make_dynamic_mask(case, torch.bfloat16, "cuda")
    scores = inputs.key_scores.clone()
    scores[..., :60] += 10
    judge(case, replace(inputs, key_scores=scores), taken)


@pytest.mark.gpu
def test_keys_that_nobody_keeps_get_exactly_no_gradient(taken):
    inputs = make_dynamic_mask(replace(PLAIN, keep=3), torch.bfloat16, "cuda")
    outputs = differentiate(public_call(replace(PLAIN, keep=3), "gather", True), inputs, True)
    nobody = ~kept(inputs.key_scores, 3, 700).any(2)
    assert taken == [True]
    assert nobody.any()
    for name in ("dk", "dv", "dscores"):
        assert (outputs[name][nobody] == 0).all()
        assert (outputs[name][~nobody] != 0).any()


@pytest.mark.gpu
def test_deterministic_algorithms_run_elsewhere(taken):
    inputs = make_dynamic_mask(PLAIN, torch.bfloat16, "cuda")
    torch.use_deterministic_algorithms(True)
    try:
        found = [differentiate(public_call(PLAIN, "gather", True), inputs, True) for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert taken == []
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.gpu
@pytest.mark.unpoisoned
def test_runs_inside_a_cuda_graph(taken):
    inputs = make_dynamic_mask(PLAIN, torch.bfloat16, "cuda")
    leaves = [x.clone().requires_grad_() for x in (inputs.query, inputs.key, inputs.value, inputs.key_scores)]

    def gradients():
        out = saccade.dynamic_mask_attention(*leaves, keep=100, enable_gqa=True, backend="gather")
        return torch.autograd.grad(out, leaves, inputs.dout)

    gradients()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients()
    for leaf in leaves:
        leaf.data.copy_(torch.randn_like(leaf))
    graph.replay()
    wanted = gradients()
    # not bitwise equal, because the order of additions varies
    for x, y in zip(captured, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)


def products_of(code):
    """How often each kind of product occurs: (columns, whether the first operand is in registers, whether it is transposed,
    whether the second is)."""
    found = re.findall(r"\bHGMMA\.64x(\d+)x16\.F32\.?\w* R\d+, (R\d+|gdesc\S+?), ([^;]*)", code)
    return Counter((int(n), first[0] == "R", "tnspA" in first + rest, "tnspB" in first + rest) for n, first, rest in found)


def expected_products(head_dim, has_scores):
    """The products of two warpgroups, each with two tiles in the code, the next one and the last; and scores for rows whose lse is too coarse."""
    if head_dim == 128:
        wide = {
            (64, False, False, False): 2 * 2 * 2 * 8 + 2 * 8,
            (128, False, False, True): 2 * 2 * 4,
            (128, False, True, True): 2 * 2 * 8,
        }
        return Counter(wide | ({(8, False, True, False): 2 * 8} if has_scores else {}))
    # and with two parts in each: S and dP, dQ, dV and dK (the one with sums as columns beside it)
    expected = Counter({(64, False, False, False): 4 * 2 * 2 * 4 + 4 * 4, (64, True, False, True): 4 * 2 * 4})
    expected[64, False, False, True] += 4 * 8
    expected[72 if has_scores else 64, False, False, True] += 4 * 8
    return expected


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("has_scores", [True, False], ids=["bias", "ranking-only"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_binaries(head_dim, has_scores, dtype):
    if obstacles("90a"):
        pytest.skip(obstacles("90a")[0])
    pytest.importorskip("triton")
    built = build(backward_sm90.BACKWARD, "90a", backward_sm90.backward_options(head_dim, dtype, has_scores, CONFIGS[head_dim]))
    (usage,) = resource_usage(built.cubin).values()
    code = disassemble(built.cubin)
    assert usage.stack == 0
    # for 384 threads, redistributed by `setmaxnreg`
    assert usage.registers == 168
    assert products_of(code) == expected_products(head_dim, has_scores)
    assert ("BF16" in code) == (dtype == torch.bfloat16)
    # products wait for each other only where the source requires it
    assert "serialized" not in built.log
    assert len(re.findall(r"WARPGROUP\.DEPBAR", code)) <= (24 if head_dim == 64 else 14)
    # rows of both gradients are added by the copy engine
    assert len(re.findall(r"UBLKRED\.G\.S\.ADD\.F32", code)) == 2 * 16  # a warp's rows in a row, for each gradient
    assert bool(re.search(r"\bREDG\.E\.ADD\.F32", code)) == has_scores


def test_the_launch_gives_strides_and_sizes():
    names = ("query", "key", "value", "dout", "out", "dquery")
    strides = tuple((1000 * n + 8, 1000 * n + 16, 1000 * n + 24, 1) for n in range(1, 7))
    layout = backward_sm90.Layout((2, 8, 100, 128), (2, 2, 120, 128), *strides)
    call = backward_sm90.backward_call(layout, torch.bfloat16, True, 64, 0.1, CONFIGS[128], 132)
    named = call.arguments
    for name, of_tensor in zip(names, strides, strict=True):
        assert [named[f"{name}_{dim}"] for dim in ("batch", "head")] == list(of_tensor[:2])
        assert named[f"{name}_row"] == of_tensor[2] * (2 if name in ("key", "value") else 1)
    assert (named["kv_heads"], named["q_len"], named["kv_len"]) == (2, 100, 120)
    assert (named["longest"], named["blocks"], named["owners"], named["total"]) == (64, 4, 4, 16)
    assert (named["group"], named["group_shift"]) == (4, 2)
    assert call.grid == (16, 1)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_shared_memory(stages):
    """As cuda/backward_sm90.cu lays it out."""
    for head_dim, rows, pairs, ones in ((64, 256, 4, 2048), (128, 128, 1, 1024)):
        ring = stages * (2 * 64 * head_dim * 2 + 4 * 64 * 4 + 16)
        areas = 8 * 16 * (4 * head_dim + 32)
        expected = 1024 + 4 * rows * head_dim + pairs * 128 * 128 + ones + ring + areas + 4 * rows + 8 * 17
        assert BackwardConfig(stages).shared_bytes(head_dim) == expected
    for head_dim, config in CONFIGS.items():
        assert config.shared_bytes(head_dim) <= 227 * 1024 < BackwardConfig(config.stages + 1).shared_bytes(head_dim)


def test_rows_of_an_accumulator_reach_different_banks():
    """Stores of 8 bytes, half a warp at a time: lane 4g + t writes columns 2t and 2t + 1 of row g. And the copy engine wants 16
    bytes."""
    for head_dim in (64, 128):
        line = 4 * head_dim + 32
        assert line % 16 == 0
        for half in (0, 4):
            banks = [(g * line + t * 8 + 4 * b) // 4 % 32 for g in range(half, half + 4) for t in range(4) for b in range(2)]
            assert len(set(banks)) == 32


def test_where_the_pairs_lie():
    """The addresses of P and dS at D = 128, lane by lane, against rows of 64 keys whose 16 bytes change places by the row's
    number."""
    filled = {}
    for thread in range(256):
        half, warp, lane = thread // 128, thread // 32 % 4, thread % 32
        row = 64 * half + 16 * warp + lane % 16
        to = row * 128 + (lane // 16 ^ lane & 7) * 16
        for i in range(4):
            # lanes 8m .. 8m + 7 say where the rows of matrix m go: registers (column group, h) of an accumulator, in its order
            group, h = 2 * i + lane // 16, lane // 8 % 2
            assert row == 64 * half + 16 * warp + 8 * h + lane % 8
            filled[to ^ 32 * i] = (row, group)
    assert filled == {row * 128 + (group ^ row % 8) * 16: (row, group) for row in range(128) for group in range(8)}


def test_where_the_turned_pairs_lie():
    """At D = 64: keys as rows of 128 bytes, the 64 rows of each warpgroup in a column block, 16 bytes moved by the key's
    number."""
    filled = {}
    for thread in range(256):
        half, warp, lane = thread // 128, thread // 32 % 4, thread % 32
        corner = half * 8192 + lane // 16 * 1024 + lane % 8 * 128 + ((2 * warp + lane // 8 % 2) ^ (lane & 7)) * 16
        for i in range(4):
            # lanes 8m .. 8m + 7 say where the columns of matrix m go, which holds column group 2 i + m / 2 and rows of h = m % 2
            key, first_row = 8 * (2 * i + lane // 16) + lane % 8, 64 * half + 16 * warp + 8 * (lane // 8 % 2)
            filled[corner + 2048 * i] = (key, first_row)
    assert filled == {
        row // 64 * 8192 + key * 128 + (row % 64 // 8 ^ key % 8) * 16: (key, row) for key in range(64) for row in range(0, 128, 8)
    }
