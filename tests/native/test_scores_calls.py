"""Calls of `dynamic_mask_scores` without a gradient that C++ replays, as decoding makes one for each token."""

from __future__ import annotations

import inspect

import pytest
import torch
from recorded_triton import recording

import saccade
from saccade import native
from saccade.dynamic_mask.scores import op
from saccade.dynamic_mask.scores.kernels import scores_kernel

HEADS, DIM = 4, 16
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are stubs on a CPU")


@pytest.fixture
def seen(monkeypatch):
    """Launches so far: (kernel, programs, [argument, ...])."""
    made = recording(monkeypatch)
    found = next(made)
    monkeypatch.setattr("saccade.engine.op_replay.may_record", lambda *given: True)
    yield found
    next(made, None)


def tensors(tokens=1, biased=True, beside=True):
    """values, weight, A and bias; beside: the heads of a token lie side by side."""
    shape = (2, tokens, HEADS, DIM) if beside else (2, HEADS, tokens, DIM)
    values = torch.randn(shape).half()
    values = values.transpose(1, 2) if beside else values
    bias = torch.randn(HEADS) if biased else None
    return values, torch.randn(HEADS, HEADS * DIM).half(), torch.randn(HEADS), bias


def scored(given, **options):
    values, weight, A, bias = given
    return saccade.dynamic_mask_scores(values, weight, A, bias=bias, **options)


def named(launch, given, scores):
    """The arguments of a launch, with names in the place of addresses."""
    places = dict(zip(("values", "weight", "A", "bias"), given, strict=True)) | {"scores": scores}
    names = {x.data_ptr(): name for name, x in places.items() if x is not None}
    function, programs, values = launch
    return function, programs, [names.get(x, "unknown" if x > 2**24 else x) for x in values]


@pytest.mark.parametrize("tokens", [1, 16])
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("beside", [True, False], ids=["side by side", "by head"])
def test_a_repeated_call(seen, tokens, biased, beside, monkeypatch):
    launches = []
    for times in range(4):
        if times == 2:
            monkeypatch.setattr(op, "forward", lambda *given: pytest.fail("Python makes the call"))
        given = tensors(tokens, biased, beside)
        found = scored(given)
        assert (found.shape, found.dtype, found.is_contiguous()) == ((2, HEADS, tokens), torch.float32, True)
        launches.append(named(seen[-1], given, found))
        assert len(seen) == times + 1
    assert len(native.calls) == 1
    assert all(x == launches[0] for x in launches)
    names = dict(zip(inspect.signature(scores_kernel.fn).parameters, launches[0][2], strict=False))
    assert [names[x] for x in ("values", "weight", "factors", "bias", "scores")] == [
        "values", "weight", "A", "bias" if biased else "A", "scores"
    ]  # fmt: skip
    assert names["tokens"] == tokens


def test_options_and_layouts_are_calls_of_their_own(seen):
    given, wide = tensors(), tensors(beside=False)
    for _ in range(2):
        for kind in ({}, {"form": "linear"}, {"backend": "fused"}):
            scored(given, **kind)
        scored(wide)
    assert len(native.calls) == 4


def test_calls_that_stay_with_python(seen):
    """More tokens than a step of decoding has, gradients, and parameters that have to be copied."""
    values, weight, A, bias = tensors()
    for _ in range(2):
        scored(tensors(17))
        scored((values, weight.mT.contiguous().mT, A, bias))
        leaf = weight.detach().requires_grad_()
        assert scored((values, leaf, A, bias)).grad_fn is not None
    assert len(native.calls) == 0
    with torch.no_grad():
        for _ in range(2):
            scored((values, leaf, A, bias))
    assert len(native.calls) == 1
    assert scored((values, leaf, A, bias)).grad_fn is not None


def test_a_disabled_library_forgets_the_call(seen):
    given = tensors()
    for _ in range(2):
        scored(given)
    count = len(seen)
    with saccade.disabled():
        scored(given)
    assert len(seen) == count
    assert len(native.calls) == 0
