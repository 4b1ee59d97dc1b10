"""Sliding windows on a GPU, packed and dense, eager and captured: outputs, lse and gradients against the reference in float64."""

from __future__ import annotations

import itertools

import pytest
import torch

import saccade
from saccade.engine import prepare
from saccade.exact.long import config

pytestmark = pytest.mark.gpu
LENGTHS = (5, 300, 0, 70, 1, 129, 1200)
WINDOWS = [(0, 0), (64, 64), (None, 3), (100, None), (17, 0), (1000, 1000)]
LIMITS = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@pytest.fixture(params=[0, 128], ids=["token-tiles", "chunks"])
def kernels(request, monkeypatch):
    """Packed 16-bit calls by token tiles alone, or by the kernels of sm_90 where these take them."""
    monkeypatch.setattr(config, "TIMED_WINDOWS", request.param)
    prepare.forget()  # C++ replays the launches that it was told of
    yield
    prepare.forget()


def differentiated(out, lse, tensors):
    dlse = torch.where(lse.isinf(), 0.0, lse.detach().double().cos()).to(lse.dtype)
    dout = torch.linspace(-1, 1, out.numel(), device="cuda", dtype=torch.float64).view(out.shape).to(out.dtype)
    return out, lse, *torch.autograd.grad((out, lse), tensors, (dout, dlse))


def agree(found, expected, dtype):
    for got, want in zip(found, expected, strict=True):
        finite = ~want.isinf()
        assert torch.equal(got.isinf(), want.isinf())
        assert (got.double() - want)[finite].norm() <= LIMITS[dtype] * want[finite].norm() + 1e-12


def made(dim, dtype, *shape):
    generator = torch.Generator("cuda").manual_seed(0)
    return torch.randn(*shape, dim, device="cuda", dtype=torch.float64, generator=generator).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", list(LIMITS), ids=str)
@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"dropout_p": 0.2}], ids=str)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.usefixtures("kernels")
def test_packed(window, options, dim, dtype):
    ends = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32, device="cuda")
    tokens, longest = sum(LENGTHS), max(LENGTHS)
    tensors = [made(dim, dtype, tokens, heads) for heads in (4, 2, 2)]
    exact = [x.detach().double().requires_grad_() for x in tensors]

    def call(given, backend):
        torch.manual_seed(1)
        named = {"window": window, "return_lse": True, "enable_gqa": True, "backend": backend, **options}
        return differentiated(*saccade.attention_varlen(*given, ends, ends, longest, longest, **named), given)

    agree(call(tensors, "ragged"), call(exact, "reference"), dtype)


@pytest.mark.parametrize("dtype", list(LIMITS), ids=str)
@pytest.mark.parametrize("lengths", [None, (300, 40)], ids=["whole", "lengths"])
@pytest.mark.parametrize("backend", ["auto", "ragged", "long"])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_dense(window, backend, lengths, dtype):
    if backend == "long" and (dtype == torch.float32 or saccade.hardware.arch_of(torch.device("cuda")) != 90):
        pytest.skip("its kernels are of sm_90 and 16 bits")
    if backend == "ragged" and lengths is not None:
        pytest.skip("its tiles take no lengths of dense rows with a window")
    tensors = [made(64, dtype, 2, heads, 300) for heads in (4, 2, 2)]
    exact = [x.detach().double().requires_grad_() for x in tensors]
    named = {"window": window, "return_lse": True, "enable_gqa": True}
    named["lengths"] = None if lengths is None else torch.tensor(lengths, device="cuda")
    found = differentiated(*saccade.attention(*tensors, backend=backend, **named), tensors)
    agree(found, differentiated(*saccade.attention(*exact, backend="reference", **named), exact), dtype)


@pytest.mark.usefixtures("kernels")
def test_captured_with_other_borders():
    """A replay with other lengths: nothing of the host's numbers is in the graph."""
    tokens = sum(LENGTHS)
    tensors = [made(64, torch.bfloat16, tokens, 4).detach() for _ in range(3)]
    orders = [torch.tensor([0, *itertools.accumulate(x)], dtype=torch.int32, device="cuda") for x in (LENGTHS, LENGTHS[::-1])]
    ends = orders[0].clone()

    def call(ends):
        return saccade.attention_varlen(*tensors, ends, ends, 1200, 1200, window=(20, 20))

    for _ in range(2):
        call(ends)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(ends)
    for order in orders:
        ends.copy_(order)
        graph.replay()
        exact = saccade.attention_varlen(
            *[x.double() for x in tensors], order, order, 1200, 1200, window=(20, 20), backend="reference"
        )
        agree([out], [exact], torch.bfloat16)
