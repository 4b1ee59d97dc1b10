"""Calls of `attention` without a gradient that return the log-sum-exp: C++ replays them, and Python makes those with a gradient."""

from __future__ import annotations

import pytest
import torch
from recorded_triton import recording

import saccade
from saccade import native
from saccade.exact.op import OPS
from saccade.exact.recorded import begin_recording

BATCH, WINDOWS, HEADS, LENGTH, DIM = 2, 3, 2, 40, 16


@pytest.fixture
def seen(monkeypatch):
    """Launches so far: (kernel, programs, [argument, ...])."""
    monkeypatch.setattr("saccade.exact.api.begin", begin_recording)
    yield from recording(monkeypatch)


def made(kind: str, requires_grad: bool = False, device: str = "cpu"):
    """The tensors of a call, and the call."""
    if kind == "packed":
        qkv = torch.randn(BATCH, LENGTH, 3, HEADS, DIM, dtype=torch.float16, device=device, requires_grad=requires_grad)
        return [qkv], saccade.attention_qkvpacked, (qkv,), {}
    batch = (BATCH, WINDOWS) if kind == "windows" else (BATCH,)
    rows = [torch.randn(*batch, LENGTH, HEADS, DIM, dtype=torch.float16, device=device).transpose(-3, -2) for _ in range(3)]
    rows = [x.requires_grad_(requires_grad) for x in rows]
    if kind == "lengths":
        return rows, saccade.attention, rows, {"lengths": torch.tensor([LENGTH, 7], dtype=torch.int32, device=device)}
    bias = [torch.randn(WINDOWS, HEADS, LENGTH, LENGTH, dtype=torch.float16, device=device)] if kind == "windows" else []
    return [*rows, *bias], saccade.attention, (*rows, *bias), {"is_causal": kind == "causal"}


def named(launch, tensors, out, lse):
    """The launch with names in the place of the addresses of the call's tensors and results."""
    names = {x.data_ptr(): i for i, x in enumerate(tensors)} | {out.data_ptr(): "out", lse.data_ptr(): "lse"}
    kernel, programs, values = launch
    return kernel, programs, [names.get(v, "other" if v > 2**20 else v) for v in values]


KINDS = ["plain", "causal", "packed", "windows", "lengths"]
on_a_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are stubs on a CPU")


@on_a_cpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_repeated_call(seen, kind, monkeypatch):
    launches, lengths = [], made("lengths")[3]
    native.calls.checked(lengths["lengths"], LENGTH)  # Python tells it of tensors on a GPU alone
    for times in range(3):
        tensors, call, given, options = made(kind)
        options |= lengths if "lengths" in options else {}
        if times:
            monkeypatch.setattr(OPS, "run", lambda *given: pytest.fail("Python makes the call"))
        out, lse = call(*given, **options, backend="short", return_lse=True)
        if kind == "packed":
            assert out.is_contiguous()
            assert out.shape == (BATCH, LENGTH, HEADS, DIM)
        else:
            assert (out.shape, out.stride()) == (given[0].shape, given[0].stride())
        assert lse.shape == ((BATCH, WINDOWS, HEADS, LENGTH) if kind == "windows" else (BATCH, HEADS, LENGTH))
        assert lse.dtype == torch.float32
        launches.append(named(seen[-1], tensors, out, lse))
    assert len(native.calls) == 1
    assert len(seen) == 3
    assert launches[0] == launches[1] == launches[2]
    assert {"out", "lse"} <= set(launches[0][2])


@on_a_cpu
def test_without_the_lse_it_is_another_call(seen):
    _, call, given, _ = made("plain")
    for _ in range(2):
        assert isinstance(call(*given, backend="short", return_lse=True), tuple)
        assert isinstance(call(*given, backend="short"), torch.Tensor)
    assert len(native.calls) == 2


@on_a_cpu
@pytest.mark.parametrize("kind", ["plain", "packed"])
def test_a_gradient_stays_with_python(seen, kind):
    """The lse has a gradient of its own, which C++'s node does not hand on."""
    _, call, given, _ = made(kind, requires_grad=True)
    for _ in range(2):
        out, lse = call(*given, backend="short", return_lse=True)
        assert out.requires_grad
        assert lse.requires_grad
    assert len(native.calls) == 0
    with torch.no_grad():
        for _ in range(2):
            assert not any(x.requires_grad for x in call(*given, backend="short", return_lse=True))
    assert len(native.calls) == 1
    assert call(*given, backend="short", return_lse=True)[1].grad_fn is not None


@pytest.mark.gpu
@pytest.mark.unpoisoned
@pytest.mark.parametrize("backend", ["short", "long", "auto"])
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu(kind, backend, calls, monkeypatch):
    """The bits of Python's launches, from C++."""
    lengths = made("lengths", device="cuda")[3]
    for times in range(3):
        _, call, given, options = made(kind, device="cuda")
        options |= lengths if "lengths" in options else {}
        try:
            found = call(*given, **options, backend=backend, return_lse=True)
        except saccade.UnsupportedProblem as refusal:
            pytest.skip(str(refusal).splitlines()[-1])
        with monkeypatch.context() as patch:
            patch.setattr(native, "calls", None)
            expected = call(*given, **options, backend=backend, return_lse=True)
        for x, y in zip(found, expected, strict=True):
            assert torch.equal(x, y), times
            assert x.stride() == y.stride()
    assert len(calls) == 1
    with monkeypatch.context() as patch:
        patch.setattr(OPS, "run", lambda *given: pytest.fail("Python makes the call"))
        call(*given, **options, backend=backend, return_lse=True)
