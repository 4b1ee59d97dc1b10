"""Tiles of tokens in a CUDA graph: any batch that fits the captured number of tokens, as the reference computes it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import saccade
from saccade.exact.ragged import token_launches

pytestmark = [pytest.mark.gpu, pytest.mark.unpoisoned]


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
