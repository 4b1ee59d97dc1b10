"""The source of the backward for sm_90a on a CPU, against the reference in float32: ordinary rows, and rows whose log-sum-exp is so far from 0 that
float32 has lost the logarithm of the sum."""

from __future__ import annotations

import emulator
import pytest
import torch

import saccade
from saccade.dynamic_mask.gather.sm90 import backward as backward_sm90
from saccade.dynamic_mask.selection import lists, lists_cuda
from saccade.dynamic_mask.selection.intervals import causal_intervals
from saccade.launch.cuda import CudaLaunch

LEAST, MOST = torch.finfo(torch.float32).min, torch.finfo(torch.float32).max


@pytest.fixture
def emulated(monkeypatch):
    if emulator.COMPILER is None:
        pytest.skip("needs g++")
    monkeypatch.setattr(CudaLaunch, "ready", emulator.ready)
    monkeypatch.setattr(lists, "cuda_shape", lists_cuda.shape_of)
    monkeypatch.setattr(lists_cuda, "THREADS", 64)
    monkeypatch.setattr(backward_sm90, "multiprocessors", lambda device: 2)  # programs, which walk over several blocks each
    caches = (lists_cuda.writer, backward_sm90._backward)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def inputs_of(heads, kv_heads, length, dim, dtype):
    query, dout = (torch.randn(2, heads, length, dim).to(dtype) for _ in range(2))
    key, value = (torch.randn(2, kv_heads, length, dim).to(dtype) for _ in range(2))
    return query, key, value, torch.randn(2, kv_heads, length), dout


def check(query, key, value, scores, dout, keep, *, add_scores=True, tolerance=0.015):
    """dq, dk, dv and dscores, relative to the largest of each: the kernel rounds weights and their gradients to 16 bits. Returns the lse."""
    leaves = [x.detach().float().requires_grad_() for x in (query, key, value, scores)]
    out, lse = saccade.dynamic_mask_attention(
        *leaves, keep=keep, add_scores=add_scores, enable_gqa=True, return_lse=True, backend="reference"
    )
    dlse = torch.full_like(lse, 0.25)
    expected = torch.autograd.grad((out, lse), leaves, (dout.float(), dlse), allow_unused=True)
    start, stop = (x.contiguous() for x in causal_intervals(scores, keep))
    found = backward_sm90.backward(
        dout, dlse, out.detach().to(query.dtype), lse.detach(), query, key, value, scores if add_scores else None, start, stop, keep,
        query.shape[3] ** -0.5,
    )  # fmt: skip
    for name, x, y in zip(("dq", "dk", "dv", "dscores"), found, expected, strict=True):
        if y is not None:
            bound = tolerance * y.abs().amax().item()
            torch.testing.assert_close(x.float(), y, rtol=0, atol=bound, msg=lambda text, n=name: f"{n}: {text}")
    return lse.detach()


@pytest.mark.parametrize("add_scores", [True, False], ids=["bias", "ranking-only"])
@pytest.mark.parametrize("dim", [64, 128])
def test_ordinary_rows(emulated, dim, add_scores):
    check(*inputs_of(4, 2, 150, dim, torch.bfloat16), 40, add_scores=add_scores)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("score", [LEAST, -1e9, 1e9, MOST])
@pytest.mark.parametrize("dim", [64, 128])
def test_far_rows(emulated, dim, score, dtype):
    """The first keys have far scores: the first blocks have far rows alone, one has both, and later ones none unless the scores are large."""
    query, key, value, scores, dout = inputs_of(2, 1, 200, dim, dtype)
    scores[..., :80] = score
    lse = check(query, key, value, scores, dout, 40)
    assert (lse.abs() > 2**23).any()


@pytest.mark.parametrize("score", [-65504.0, 1e6])
def test_far_scores_among_others(emulated, score):
    """At 1e6 scores are a multiple of a sixteenth, in base 2 of an eighth, so weights differ by up to 9 %."""
    query, key, value, scores, dout = inputs_of(3, 1, 150, 64, torch.bfloat16)
    scores[..., ::2], scores[..., 1::2] = score, -score / 3
    check(query, key, value, scores, dout, 30, tolerance=0.15 if score == 1e6 else 0.015)


@pytest.mark.parametrize("dim", [64, 128])
def test_far_products_without_scores(emulated, dim):
    """Every other query has far products; keys stand in pairs, so that the largest weight is a half."""
    query, key, value, scores, dout = inputs_of(2, 2, 100, dim, torch.bfloat16)
    query[:, :, ::2] *= 8000
    key[:, :, 1::2] = key[:, :, ::2]
    lse = check(query, key, value, scores, dout, 30, add_scores=False)
    assert (lse.abs() > 2**13).any()
    assert (lse.abs() < 8).any()


def test_far_rows_behind_ordinary_ones_of_many_blocks(emulated):
    """Programs take ordinary and far blocks in turn: the ring goes on where it was."""
    query, key, value, scores, dout = inputs_of(1, 1, 700, 64, torch.bfloat16)
    scores[0, :, 300:400] = MOST
    scores[1, :, :200] = LEAST
    check(query, key, value, scores, dout, 5)
