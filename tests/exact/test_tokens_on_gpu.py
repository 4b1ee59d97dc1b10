"""Tiles of tokens in a CUDA graph: any batch that fits the captured number of tokens, as the reference computes it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import saccade
from saccade import native
from saccade.engine import prepare
from saccade.exact.ragged import token_launches

pytestmark = [pytest.mark.gpu, pytest.mark.unpoisoned]


@pytest.fixture(autouse=True)
def nothing_is_known():
    """A replay that another test recorded would run in place of the form that this one asks for."""
    prepare.forget()


def ends_of(lengths, sequences):
    ends = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()
    return torch.cat((ends, ends[-1:].expand(sequences + 1 - len(ends)))).cuda()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [32, 40, 64])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, (20, 9)], ids=str)
def test_one_graph_serves_every_batch(dtype, dim, causal, window, monkeypatch):
    seen = []
    forward = token_launches.forward
    monkeypatch.setattr(token_launches, "forward", lambda *given: (seen.append(1), forward(*given)))
    tokens, heads, sequences = 300, 4, 20
    q, k, v, dout = (torch.randn(tokens, heads, dim, device="cuda", dtype=dtype) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    ends = ends_of([100, 150, 3], sequences)

    def step():
        out = saccade.attention_varlen(*leaves, ends, ends, 150, 150, is_causal=causal, window=window, backend="ragged")
        return out, *torch.autograd.grad(out, leaves, dout)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    assert seen
    for lengths in ([100, 150, 3], [5] * 20, [64, 64, 64, 64], [1], [33, 0, 90, 0, 150]):
        ends.copy_(ends_of(lengths, sequences))
        graph.replay()
        exact = [x.detach().double().requires_grad_() for x in leaves]
        out = saccade.attention_varlen(*exact, ends, ends, 150, 150, is_causal=causal, window=window, backend="reference")
        expected = (out, *torch.autograd.grad(out, exact, dout.double()))
        for got, want in zip(found, expected, strict=True):
            # of a single key dq and dk are 0, and the kernel's are what rounding left
            error = (got.double() - want).norm() / want.norm().clamp(min=1.0)
            assert error < (1e-5 if dtype == torch.float32 else 6e-3), (lengths, error)
            assert (got[sum(lengths) :] == 0).all()


@pytest.mark.parametrize("form", ["token tiles", "buckets of lengths"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("dim", "kv_heads"), [(32, 4), (40, 2), (64, 4)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_eager_batches(dtype, dim, kv_heads, causal, dropout_p, form, monkeypatch):
    """Batches of one kind, of which Python runs the first and C++ the others; buckets of lengths stay with Python."""
    if form != "token tiles":
        monkeypatch.setattr(token_launches, "MOST_EAGER", 0)
    launched = []
    for name in ("forward", "backward"):
        made = getattr(token_launches, name)
        monkeypatch.setattr(token_launches, name, lambda *given, made=made, name=name: (launched.append(name), made(*given)))
    for number, lengths in enumerate(([100, 28, 3], [5] * 20, [64, 64, 64, 128], [1], [33, 0, 90, 0, 128], [17] * 900)):
        tokens = sum(lengths) + (5 if number % 2 else 0)
        heads = (4, kv_heads, kv_heads, 4)
        q, k, v, dout = (torch.randn(tokens, n, dim, device="cuda", dtype=dtype) for n in heads)
        leaves, ends = [x.requires_grad_() for x in (q, k, v)], ends_of(lengths, len(lengths))
        longest, grouped = max(lengths), kv_heads != 4
        options = {"is_causal": causal, "enable_gqa": grouped, "dropout_p": dropout_p}
        torch.manual_seed(number)
        out = saccade.attention_varlen(*leaves, ends, ends, longest, longest, backend="ragged", **options)
        found = (out, *torch.autograd.grad(out, leaves, dout))
        exact = [x.detach().double().requires_grad_() for x in leaves]
        torch.manual_seed(number)
        out = saccade.attention_varlen(*exact, ends, ends, longest, longest, backend="reference", **options)
        expected = (out, *torch.autograd.grad(out, exact, dout.double()))
        for got, want in zip(found, expected, strict=True):
            # of a single key dq and dk are 0, and the kernel's are what rounding out left: some 2^-9 of the sums that cancel, as large as dv
            error = (got.double() - want).norm() / want.norm().clamp(min=expected[-1].norm())
            assert error < 6e-3, (lengths, error)
            assert (got[sum(lengths) :] == 0).all()
    assert bool(launched) == (form == "token tiles")


@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
def test_cpp_replays_token_tiles(dropout_p, monkeypatch):
    """A batch of another number of tokens and sequences, without Python's launchers."""
    if native.calls is None:
        pytest.skip("C++ is not compiled here")

    def made(lengths):
        torch.manual_seed(0)
        q, k, v, dout = (torch.randn(sum(lengths), 3, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        leaves, ends = [x.requires_grad_() for x in (q, k, v)], ends_of(lengths, len(lengths))
        torch.manual_seed(1)
        out = saccade.attention_varlen(*leaves, ends, ends, 128, 128, dropout_p, backend="ragged")
        return out, *torch.autograd.grad(out, leaves, dout)

    lengths = [70, 3, 120, 1, 64] * 7
    for _ in range(2):
        expected = made(lengths)
    made([100, 28, 3])
    for name in ("forward", "backward"):
        monkeypatch.setattr(token_launches, name, lambda *given: pytest.fail("Python launches it"))
    for got, want in zip(made(lengths), expected, strict=True):
        assert torch.equal(got, want)
