"""Calls that are traced instead of run: torch.compile with dynamic sizes, fake and meta tensors, make_fx, torch.jit.trace.

`test_compile.py` tests each feature of a kernel; this file tests each operation, each backend in plain torch, and each argument
that may be computed from sizes.
"""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import saccade

pytestmark = pytest.mark.unpoisoned
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def qkv(heads=2, kv_heads=2, grad=False, device=DEVICE):
    return [torch.randn(2, h, 6, 16, device=device, requires_grad=grad) for h in (heads, kv_heads, kv_heads)]


def grouped(grad=False, device=DEVICE):
    return qkv(4, 2, grad, device)


def scored(grad=False, device=DEVICE):
    return [*qkv(grad=grad, device=device), torch.randn(2, 2, 6, device=device)]


def padded(make, grad=False, device=DEVICE):
    return [*make(grad=grad, device=device), torch.tensor([3, 6], device=device)]


def attention(**options):
    return lambda q, k, v: saccade.attention(q, k, v, **options)


def dynamic(**options):
    return lambda q, k, v, s: saccade.dynamic_mask_attention(q, k, v, s, keep=3, **options)


PROGRAMS = {
    "attention": (attention(), qkv),
    "reference": (attention(backend="reference", is_causal=True), qkv),
    "lse": (attention(return_lse=True), qkv),
    "lse-grouped-causal": (attention(return_lse=True, enable_gqa=True, is_causal=True), grouped),
    "lse-mask": (lambda q, k, v: saccade.attention(q, k, v, q[:1, :, :, :1] > 0, return_lse=True), qkv),
    "lse-bias": (lambda q, k, v: saccade.attention(q, k, v, k.sum(-1)[:, :, None], return_lse=True), qkv),
    "grouped": (attention(enable_gqa=True), grouped),
    "grouped-if-needed": (lambda q, k, v: saccade.attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1]), grouped),
    "scale-of-sizes": (lambda q, k, v: saccade.attention(q, k, v, scale=q.shape[-1] ** -0.5), qkv),
    "lengths": (lambda q, k, v, n: saccade.attention(q, k, v, lengths=n), lambda **o: padded(qkv, **o)),
    "packed": (
        lambda x: saccade.attention_qkvpacked(x),
        lambda grad=False, device=DEVICE: [torch.randn(2, 6, 3, 2, 16, device=device, requires_grad=grad)],
    ),
    "dynamic": (dynamic(), scored),
    "dynamic-reference": (dynamic(backend="reference", return_lse=True), scored),
    "dynamic-not-causal": (dynamic(is_causal=False, backend="gather_torch"), scored),
    "dynamic-lengths": (
        lambda q, k, v, s, n: saccade.dynamic_mask_attention(q, k, v, s, keep=3, lengths=n),
        lambda **o: padded(scored, **o),
    ),
    "dynamic-documents": (
        lambda q, k, v, s, d: saccade.dynamic_mask_attention(q, k, v, s, keep=3, document_ids=d),
        lambda **o: [*scored(**o), torch.zeros(2, 6, dtype=torch.int64, device=o.get("device", DEVICE))],
    ),
    "expiry": (lambda q, k, v, s: saccade.expiry(s, 3), scored),
    "expiry-lengths": (lambda q, k, v, s, n: saccade.expiry(s, 3, lengths=n), lambda **o: padded(scored, **o)),
    "nm_sparse": (lambda q, k, v: saccade.nm_sparse_attention(q, k, v), qkv),
    "nm_sparse-reference": (
        lambda q, k, v: saccade.nm_sparse_attention(q, k, v, enable_gqa=True, return_lse=True, backend="reference"),
        grouped,
    ),
    "staged": (lambda q, k, v: saccade.nm_sparse.scores(q, k, pattern="1:2", backend="reference").values, qkv),
}
COMPILED = sorted(set(PROGRAMS) - {"staged"})
every = pytest.mark.parametrize("name", PROGRAMS)


def results(call, arguments, grad=False):
    out = call(*arguments)
    outputs = [*out] if isinstance(out, tuple) else [out]
    if grad and any(x.requires_grad for x in outputs):
        leaves = [x for x in arguments if x.requires_grad]
        outputs += torch.autograd.grad(sum(x.square().sum() for x in outputs), leaves)
    return [x.detach() for x in outputs]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dynamic_shapes", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", COMPILED)
def test_one_graph(name, dynamic_shapes):
    torch._dynamo.reset()
    call, make = PROGRAMS[name]
    arguments = make(grad=True)
    run = torch.compile(call, fullgraph=True, dynamic=dynamic_shapes, backend="aot_eager")
    torch.testing.assert_close(results(run, arguments, True), results(call, arguments, True))
    torch._dynamo.reset()


@every
def test_fake_tensors(name):
    call, make = PROGRAMS[name]
    arguments = make()
    expected = results(call, arguments)
    with FakeTensorMode() as mode:
        found = results(call, [mode.from_tensor(x) for x in arguments])
    assert [(x.shape, x.dtype, x.stride()) for x in found] == [(x.shape, x.dtype, x.stride()) for x in expected]
    torch.testing.assert_close(results(call, arguments), expected)  # nothing fake was remembered


@every
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx(mode, name):
    call, make = PROGRAMS[name]
    arguments, others = make(), make()
    graph = make_fx(lambda *x: results(call, x), tracing_mode=mode)(*arguments)
    torch.testing.assert_close(graph(*others), results(call, others))


@every
@pytest.mark.parametrize("grad", [False, True])
def test_meta_tensors(name, grad):
    call, make = PROGRAMS[name]
    if grad and name == "staged":
        pytest.skip("has no gradient")
    found, expected = (results(call, make(grad=grad, device=device), grad) for device in ("meta", DEVICE))
    assert all(x.is_meta for x in found)
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in expected]


@every
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_jit_trace(name):
    call, make = PROGRAMS[name]
    arguments, others = make(), make()
    trace = torch.jit.trace(call, tuple(arguments), check_trace=False)
    torch.testing.assert_close(results(trace, others), results(call, others))
    assert "repeat_interleave" not in str(trace.graph)  # torch traces its index on the CPU, so a call on a GPU raised


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_trace_warns_of_a_scale_that_it_holds():
    q, k, v = qkv()
    with pytest.warns(torch.jit.TracerWarning, match="constant"):
        torch.jit.trace(lambda q, k, v, s: saccade.attention(q, k, v, scale=s), (q, k, v, torch.tensor(0.5)), check_trace=False)
    learned = torch.nn.Parameter(torch.tensor(0.5))
    with pytest.raises(saccade.InvalidArgument, match="multiply query by it"):
        torch.jit.trace(lambda q, k, v: saccade.attention(q, k, v, scale=learned), (q, k, v), check_trace=False)


def test_dropout_of_a_reference_is_traced():
    """The key of dropout stays a tensor, and its value is never read."""
    q, k, v = qkv()
    for call in (
        lambda q, k, v: saccade.attention(q, k, v, dropout_p=0.3, backend="reference"),
        lambda q, k, v: saccade.nm_sparse_attention(q, k, v, dropout_p=0.3, backend="reference"),
    ):
        graph = make_fx(call)(q, k, v)
        for seed in (1, 2):
            torch.manual_seed(seed)
            expected = call(q, k, v)
            torch.manual_seed(seed)
            torch.testing.assert_close(graph(q, k, v), expected)
