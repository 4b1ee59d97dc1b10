"""Expiry in CUDA C++: its source run on a CPU by the emulator, its binaries, and the kernel on a GPU; bit for bit equal to
`selection`."""

from __future__ import annotations

from types import SimpleNamespace

import emulator
import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from contracts.exact import DEVICE

import saccade
from saccade.dynamic_mask.selection import expiry, expiry_cuda, expiry_triton
from saccade.dynamic_mask.selection.intervals import causal_expiry
from saccade.launch import flag
from saccade.launch.cuda import CudaLaunch
from saccade.nvrtc import compile_cubin
from tools.cubin import resource_usage

needs_emulator = pytest.mark.skipif(emulator.COMPILER is None, reason="needs g++")


@pytest.fixture
def emulated(monkeypatch):
    """Launches run on the CPU, with chunks so small that a few dozen keys make many."""

    monkeypatch.setattr(CudaLaunch, "ready", emulator.ready)
    monkeypatch.setattr(expiry_cuda, "CHUNK", 64)
    monkeypatch.setattr(expiry_cuda, "SEARCHERS", 32)


def scores_of(kind: str, *shape: int) -> torch.Tensor:
    scores = torch.randn(*shape)
    if kind == "ties":
        return scores.round()
    if kind == "local":
        return scores * 0.1 + torch.arange(shape[-1]) * 0.05
    if kind == "falling":
        return -torch.arange(float(shape[-1])).expand(shape).contiguous()
    return torch.where(torch.rand(shape) < 0.1, 100 * scores, scores) if kind == "hitters" else scores


KINDS = ["random", "ties", "local", "falling", "hitters"]


@needs_emulator
@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kv_len", [1, 63, 64, 130, 600])
def test_source_gives_the_expiry(emulated, kind, kv_len):
    torch.manual_seed(0)
    scores = scores_of(kind, 2, 2, kv_len)
    for keep in (1, 3, 64, 100, 700):
        for lengths in (None, torch.tensor([kv_len // 2, 0])):
            start, stop = expiry_cuda.causal_intervals(scores, keep, lengths)
            assert torch.equal(stop, causal_expiry(scores, keep, lengths)), (keep, lengths)
            assert torch.equal(start, torch.arange(kv_len).int().expand(start.shape))


@needs_emulator
@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture], max_examples=30, deadline=None)
@hypothesis.given(st.integers(1, 200), st.integers(1, 120), st.lists(st.integers(-3, 3), min_size=200, max_size=200))
def test_source_on_few_values(emulated, kv_len, keep, values):
    scores = torch.tensor(values[:kv_len]).float().view(1, 1, kv_len)
    assert torch.equal(expiry_cuda.causal_intervals(scores, keep)[1], causal_expiry(scores, keep))


@needs_emulator
def test_scores_that_are_no_numbers_hurt_nobody(emulated):
    """The caller learns of invalid scores later; until then no write may go outside its row."""
    scores = torch.full((1, 1, 130), float("nan"))
    scores.view(torch.int32)[..., ::3] = -1  # the bits that rank lowest
    _, found = expiry_cuda.causal_intervals(scores, 5)
    assert ((found >= 0) & (found <= 130)).all()


@needs_emulator
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_the_source_tells_of_scores_that_are_not_finite(emulated, value):
    strange = torch.zeros(1, dtype=torch.int32)
    for at in (0, 70, 199):
        scores = torch.zeros(2, 1, 200)
        scores[1, 0, at] = value
        for lengths in (None, torch.tensor([200, 50])):
            strange.zero_()
            recorded: list[int] = []
            watch = SimpleNamespace(address=strange.data_ptr(), record=lambda: recorded.append(strange.item()))  # noqa: B023
            expiry_cuda.causal_intervals(scores, 5, lengths, watch)
            assert recorded == [strange.item()]  # the first launch tells
            assert strange.item() == (not torch.tensor(value).isfinite())


@pytest.mark.gpu
def test_flags_are_read_once_and_used_again():
    device = torch.device("cuda", torch.cuda.current_device())
    good = torch.randn(1, 2, 5000, device=device)
    bad = good.clone()
    bad[0, 1, 4999] = float("nan")
    for scores in (good, bad, good, bad, bad, good):
        before = sum(map(len, flag._free.values()))
        _, stop, faulty = expiry.watched_intervals(scores, 100)
        assert faulty() == (scores is bad)
        assert sum(map(len, flag._free.values())) == max(1, before)
        assert torch.equal(stop, expiry.causal_intervals(scores, 100)[1])
    query = torch.randn(1, 2, 5000, 64, device=device, dtype=torch.bfloat16)
    with pytest.raises(saccade.InvalidArgument, match="key_scores holds nan at"):
        saccade.dynamic_mask_attention(query, query, query, bad, keep=100)


@pytest.mark.parametrize("architecture", [80, 90, 100, 120])
def test_binaries_spill_nothing(architecture):
    pytest.importorskip("cuda.bindings")
    shape = expiry_cuda.Shape(8, 8, 4096, 1024, expiry_cuda.CHUNK, expiry_cuda.SEARCHERS)
    used = resource_usage(compile_cubin(expiry_cuda.SOURCE, architecture, shape.options()))
    assert set(used) == {"expiry_sort", "expiry_find"}
    assert all(x.stack == 0 and x.registers <= 64 for x in used.values())


@pytest.mark.gpu
@pytest.mark.parametrize("module", [expiry_triton, expiry_cuda], ids=["triton", "cuda"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kv_len", [100, 2048, 9000, 20000])
def test_on_a_gpu(module, kind, kv_len):
    torch.manual_seed(0)
    scores = scores_of(kind, 2, 3, kv_len)
    # Triton's leave more than 8,192 kept keys to torch
    for keep in (1, 100, 2000, 8000) if module is expiry_triton else (1, 100, 2000, 8000, 12000):
        for lengths in (None, torch.tensor([kv_len // 3, kv_len])):
            there = None if lengths is None else lengths.to(DEVICE)
            start, stop = module.causal_intervals(scores.to(DEVICE), keep, there)
            assert torch.equal(stop.cpu(), causal_expiry(scores, keep, lengths)), (keep, lengths)
            assert torch.equal(start.cpu(), torch.arange(kv_len).int().expand(start.shape))
