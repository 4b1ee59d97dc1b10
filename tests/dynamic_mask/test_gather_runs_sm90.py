"""Runs of adjacent keys, which the forward for sm_90a fetches with the copy engine: on a GPU bitwise the same as with one copy
per key."""

from __future__ import annotations

import importlib
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from contracts.dynamic_mask import PLAIN

import saccade
from saccade.dynamic_mask.gather.sm90 import forward as forward_sm90
from saccade.dynamic_mask.testing.check import compare_dynamic_mask, public_call
from saccade.dynamic_mask.testing.inputs import make_dynamic_mask
from saccade.engine import prepare
from saccade.errors import SaccadeError
from saccade.launch.cuda import CudaLaunch
from saccade.nvrtc import build, obstacles
from saccade.nvrtc.tensor_map import AnyRows
from tools.cubin import disassemble, resource_usage

KEPT = 300
LONG = replace(PLAIN, batch=2, heads=8, kv_heads=2, q_len=1101, kv_len=1101, keep=KEPT, head_dim=128)


def rising(length: int, *dropped: int) -> torch.Tensor:
    """Scores of a sliding window without some of its keys."""
    scores = 0.01 * torch.arange(length)
    scores[list(dropped)] -= 1e3
    return scores


SCORES = {
    "window": rising(1101),
    # at every place of a tile, as the window moves on
    "one of 47 missing": rising(1101, *range(3, 1101, 47)),
    "a row missing in each warp of a tile": rising(1101, *range(400, 1101, 35)),
    "sinks": rising(1101) + 12.0 * (torch.arange(1101) < 5),
    "pieces": 4.0 * (torch.arange(1101) // 40 % 3 == 0) + rising(1101),
    "falling": -rising(1101),
}


@pytest.fixture
def forgetful(monkeypatch):
    """Forget launches, so that they are made again."""

    def forget(allowed: bool | None = None) -> None:
        if allowed is not None:
            monkeypatch.setattr(AnyRows, "allowed", lambda rows: allowed)
        forward_sm90.launch.cache_clear()
        prepare.forget()

    yield forget
    forward_sm90.launch.cache_clear()


def assert_same_bits(call, forgetful):
    forgetful(True)
    found = call()
    forgetful(False)
    assert all(torch.equal(x, y) for x, y in zip(found, call(), strict=True))
    return found


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "heads", "kv_heads"), [(128, 8, 2), (128, 2, 2), (128, 6, 2), (64, 8, 1), (64, 3, 3)])
@pytest.mark.parametrize("kind", SCORES)
def test_the_same_bits_as_key_by_key(kind, head_dim, heads, kv_heads, forgetful):
    case = replace(LONG, head_dim=head_dim, heads=heads, kv_heads=kv_heads)
    inputs = make_dynamic_mask(case, torch.bfloat16, "cuda")
    inputs = replace(inputs, key_scores=SCORES[kind].cuda().expand(2, kv_heads, -1).contiguous())
    with torch.no_grad():
        out, lse = assert_same_bits(lambda: public_call(case, "gather", True)(inputs), forgetful)
    results = compare_dynamic_mask(case, inputs, {"out": out, "lse": lse})
    assert all(r.ok for r in results), results


@pytest.mark.gpu
@pytest.mark.parametrize("keep", [1, 63, 64, 65, 100, 129])
def test_ends_of_lists(keep, forgetful):
    case = replace(LONG, keep=keep)
    inputs = make_dynamic_mask(case, torch.float16, "cuda")
    inputs = replace(inputs, key_scores=SCORES["window"].cuda().expand(2, 2, -1).contiguous())
    with torch.no_grad():
        assert_same_bits(lambda: public_call(case, "gather", True)(inputs), forgetful)


def attend(key, value, scores, query, **options):
    return saccade.dynamic_mask_attention(query, key, value, scores, keep=KEPT, enable_gqa=True, return_lse=True, backend="gather", **options)  # fmt: skip


@pytest.mark.gpu
def test_keys_that_are_not_listed_are_not_read():
    """NaN in keys that no query keeps, between those of a window, and after the end."""
    scores = SCORES["one of 47 missing"].cuda().expand(2, 2, -1).contiguous()
    query, key, value = (torch.randn(2, h, 1101, 128, device="cuda", dtype=torch.bfloat16) for h in (8, 2, 2))
    lengths = torch.tensor([1101, 900], device="cuda")
    at = torch.arange(1101, device="cuda")
    never = (saccade.expiry(scores, KEPT) <= at) | (at >= lengths[:, None, None])
    assert never[0].any()
    spoiled = (x.masked_fill(never[..., None], float("nan")) for x in (key, value))
    clean, found = attend(key, value, scores, query, lengths=lengths), attend(*spoiled, scores, query, lengths=lengths)
    assert all(torch.equal(x, y) for x, y in zip(clean, found, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("shift", [0, 16, 512, 8192])
def test_rows_on_both_sides_of_4_gib(shift):
    """The copy engine gets an address as two coordinates; a run continues where the lower one wraps around."""
    if torch.cuda.mem_get_info()[0] < 6 * 2**30:
        pytest.skip("needs 6 GiB of memory")
    memory = torch.empty(2**31 + 2**21, device="cuda", dtype=torch.bfloat16)
    length, wide = 1101, 512
    boundary = -(-(memory.data_ptr() + 2**20) // 2**32) * 2**32
    first = (boundary - length // 2 * wide * 2 - shift - memory.data_ptr()) // 2
    both = memory[first : first + length * wide].view(1, length, 2, 256).transpose(1, 2)
    both.copy_(torch.randn(both.shape, device="cuda"))
    key, value = both[..., :128], both[..., 128:]
    assert key.data_ptr() >> 32 != key[0, 1, -1].data_ptr() >> 32
    query = torch.randn(1, 8, length, 128, device="cuda", dtype=torch.bfloat16)
    scores = SCORES["window"].cuda().expand(1, 2, -1).contiguous()
    found, expected = (attend(k, v, scores, query) for k, v in ((key, value), (key.contiguous(), value.contiguous())))
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.gpu
def test_views(forgetful):
    """Different strides in K and V, batches that share keys, and rows that all share memory."""
    query = torch.randn(2, 8, 1101, 128, device="cuda", dtype=torch.bfloat16)
    wide = torch.randn(2, 1101, 2, 392, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    dense = torch.randn(2, 2, 1101, 128, device="cuda", dtype=torch.bfloat16)
    scores = SCORES["window"].cuda().expand(2, 2, -1).contiguous()
    one = dense[:, :, :1].expand(-1, -1, 1101, -1)
    for key, value in ((wide[..., 8:136], wide[..., 264:]), (wide[..., 8:136], dense), (dense[:1].expand(2, -1, -1, -1), dense)):
        found = assert_same_bits(lambda key=key, value=value: attend(key, value, scores, query), forgetful)
        expected = attend(key.contiguous(), value.contiguous(), scores, query)
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    forgetful()
    found, expected = attend(dense, one, scores, query), attend(dense, one.contiguous(), scores, query)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def layout() -> forward_sm90.Layout:
    query, key = (1, 8, 300, 128), (1, 2, 300, 128)
    query_strides, key_strides = (8 * 300 * 128, 300 * 128, 128, 1), (2 * 300 * 128, 300 * 128, 128, 1)
    return forward_sm90.Layout(query, query_strides, key, key_strides, key_strides, query_strides)


@pytest.mark.parametrize("allowed", [True, False])
def test_a_driver_that_refuses_the_maps(allowed, monkeypatch, forgetful):
    """Then rows are copied one by one: the launch has no maps, which is no error."""

    def encode(*shape):
        if not allowed:
            raise SaccadeError("the driver refuses")
        return bytes(128)

    maps = importlib.import_module("saccade.nvrtc.tensor_map")  # the package has a function of this name
    monkeypatch.setattr(maps, "_encode", encode)
    maps.tensor_map.cache_clear()
    monkeypatch.setattr(forward_sm90, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(CudaLaunch, "ready", lambda call, device: SimpleNamespace(call=call))
    forgetful()
    call = forward_sm90.launch(layout(), torch.bfloat16, True, 64, 0.1, torch.device("cuda", 0)).call
    maps.tensor_map.cache_clear()
    assert ("RUNS", str(int(allowed))) in call.options.defines
    assert len(call.parameters.maps) == 2 * allowed


def test_without_maps_the_copy_engine_is_not_used():
    if obstacles("90a"):
        pytest.skip(obstacles("90a")[0])
    pytest.importorskip("triton")
    options = forward_sm90.forward_options(128, 4, torch.bfloat16, True, forward_sm90.CONFIGS[128], runs=False)
    built = build(forward_sm90.FORWARD, "90a", options)
    (usage,) = resource_usage(built.cubin).values()
    assert usage.stack == 0
    assert not re.findall(r"\bUTMALDG", disassemble(built.cubin))
