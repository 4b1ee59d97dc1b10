"""Calls of `nm_sparse_attention` without a gradient that C++ replays: the launches of Python, with the tensors of each call in their places."""

from __future__ import annotations

import pytest
import torch

import saccade
from saccade import native
from saccade.engine import switch
from saccade.errors import CompilerUnavailable
from saccade.launch import disabled
from saccade.nm_sparse import op
from saccade.nm_sparse.fused import launchers

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are stubs on a CPU")


def tensors(tokens=256, dim=64, heads=4, kv_heads=4, batch=2):
    rows = ((heads, tokens), (kv_heads, tokens), (kv_heads, tokens))
    return [torch.randn(batch, n, h, dim).bfloat16().transpose(1, 2) for h, n in rows]


def named(launches, given, results):
    """The launches with names in the place of addresses."""
    names = {x.data_ptr(): name for name, x in given.items()} | {x.data_ptr(): name for name, x in results.items()}

    def told(x):
        if isinstance(x, tuple | list):
            return [told(y) for y in x]
        return names.get(x, "unknown" if isinstance(x, int) and x > 2**32 else x)

    return told(launches)


CALLS = {
    "plain": {},
    "causal 1:2": {"is_causal": True, "pattern": "1:2"},
    "a scale, with its lse": {"scale": 0.25, "return_lse": True},
    "blocks": {"block_mask": torch.ones(1, 4, 4, 4, dtype=torch.bool).tril()},
}


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("kind", CALLS)
def test_a_repeated_call(nm_launches, kind, dim, monkeypatch):
    launches, options = [], CALLS[kind]
    for times in range(4):
        if times == 2:
            monkeypatch.setattr(op, "_forward", lambda *given: pytest.fail("Python makes the call"))
            monkeypatch.setattr("saccade.nm_sparse.api.forward", lambda *given: pytest.fail("Python makes the call"))
        given = dict(zip(("query", "key", "value"), tensors(dim=dim), strict=True))
        mine = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        before = len(nm_launches)
        found = saccade.nm_sparse_attention(*given.values(), backend="mma_sp", **mine)
        assert isinstance(found, tuple) == ("return_lse" in options)
        results = dict(zip(("out", "lse"), found if isinstance(found, tuple) else (found,), strict=False))
        assert results["out"].stride() == given["query"].stride()
        masks = {name: x for name, x in mine.items() if isinstance(x, torch.Tensor)}
        launches.append(named(nm_launches[before:], given | masks, results))
    assert len(native.calls) == 1
    assert len(launches[0]) == 1
    assert all(x == launches[0] for x in launches)
    (launch,) = launches[0]
    assert [x[0] for x in launch[4]] == ["query", "key", "key", "value"]
    assert [len(x[1]) for x in launch[4]] == [4, 5, 4, 4]
    assert launch[5][0] == "out"


def test_blocks_that_are_split(nm_launches):
    """The parts of the last wave are memory of the call, and a second kernel adds them up."""
    kinds = []
    for _ in range(3):
        before, given = len(nm_launches), tensors(4096, 128, 17, 17, 1)
        out = saccade.nm_sparse_attention(*given, backend="mma_sp")
        kinds.append(named(nm_launches[before:], dict(zip(("query", "key", "value"), given, strict=True)), {"out": out}))
    assert len(native.calls) == 1
    assert [x[0] for x in kinds[0]] == [sum(b"fused_sm90"), sum(b"combine")]
    assert kinds[0] == kinds[1] == kinds[2]


def test_a_backend_that_fails_after_a_launch(nm_launches, monkeypatch):
    """C++ replays only the launches of the backend that took its place."""

    def fails(*given):
        raise CompilerUnavailable("no compiler")

    monkeypatch.setattr(launchers.last_wave, "combine", fails)
    monkeypatch.setattr(disabled, "_disabled", {})
    monkeypatch.setattr(disabled, "_warned", set())
    given = tensors(4096, 128, 17, 17, 1)
    with pytest.warns(RuntimeWarning, match="backend 'masked' computes instead"):
        saccade.nm_sparse_attention(*given)
    assert len(nm_launches) == 2
    assert len(native.calls) == 1
    before = len(nm_launches)
    saccade.nm_sparse_attention(*given)
    assert len(nm_launches) == before + 1


def test_the_triton_kernel(nm_launches, monkeypatch):
    launches = []
    for times in range(3):
        if times == 2:
            monkeypatch.setattr("saccade.nm_sparse.api.forward", lambda *given: pytest.fail("Python makes the call"))
        given = dict(zip(("query", "key", "value"), tensors(100), strict=True))
        before = len(nm_launches)
        out, lse = saccade.nm_sparse_attention(*given.values(), backend="masked", return_lse=True)
        launches.append(named(nm_launches[before:], given, {"out": out, "lse": lse}))
    assert len(native.calls) == 1
    assert launches[0] == launches[1] == launches[2]
    assert "unknown" not in str(launches)


def test_masks_and_biases_stay_with_python(nm_launches):
    """torch takes values that they hide out of the way of NaN, in memory of its own."""
    given = tensors()
    for mask in (torch.randn(1, 4, 256, 256).bfloat16(), torch.rand(2, 1, 1, 256) > 0.3):
        for _ in range(3):
            saccade.nm_sparse_attention(*given, mask, backend="mma_sp")
    assert len(native.calls) == 0


def test_calls_that_stay_with_python(nm_launches):
    given = tensors()
    lengths = torch.tensor([256, 9])
    for options in ({"lengths": lengths}, {"dropout_p": 0.5}, {"dense_first": 4}, {"dense_recent": 8}):
        for _ in range(2):
            saccade.nm_sparse_attention(*given, **options, backend="reference")
    assert len(native.calls) == 0


def test_a_gradient_counts(nm_launches):
    leaves = [x.requires_grad_() for x in tensors()]
    assert saccade.nm_sparse_attention(*leaves, backend="mma_sp").grad_fn is not None
    assert len(native.calls) == 1
    with torch.no_grad():
        for _ in range(2):
            saccade.nm_sparse_attention(*leaves, backend="mma_sp")
    assert len(native.calls) == 2
    assert saccade.nm_sparse_attention(*leaves, backend="mma_sp").grad_fn is not None
    assert len(native.calls) == 2


def test_patterns_and_layouts_are_calls_of_their_own(nm_launches):
    given, wide = tensors(), [x.contiguous() for x in tensors()]
    for _ in range(2):
        saccade.nm_sparse_attention(*given, backend="mma_sp")
        saccade.nm_sparse_attention(*given, pattern="1:2", backend="mma_sp")
        saccade.nm_sparse_attention(*wide, backend="mma_sp")
    assert len(native.calls) == 3


def test_a_disabled_library_forgets_the_call(nm_launches):
    given = tensors()
    for _ in range(2):
        saccade.nm_sparse_attention(*given, backend="mma_sp")
    with saccade.disabled():
        assert len(native.calls) == 0


@pytest.mark.parametrize("backend", ["mma_sp", "auto"])
def test_tf32_counts(nm_launches, backend, monkeypatch):
    """Kernels that multiply TF32 run only while torch allows it."""
    given, made = [x.float() for x in tensors()], []
    forward = op.forward
    monkeypatch.setattr("saccade.nm_sparse.api.forward", lambda *given: made.append(given) or forward(*given))
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        for allowed, times in ((True, 1), (True, 1), (False, 2), (True, 2)):
            torch.backends.cuda.matmul.allow_tf32 = allowed
            saccade.nm_sparse_attention(*given, pattern="1:2", backend=backend)
            assert len(made) == times
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("option", ["dense_first", "dense_recent"])
def test_a_number_that_python_refuses(nm_launches, option):
    given = tensors()
    for _ in range(2):
        saccade.nm_sparse_attention(*given, backend="mma_sp", **{option: 0})
    assert len(native.calls) == 1
    with pytest.raises(saccade.InvalidArgument, match=f"{option} is 0.0"):
        saccade.nm_sparse_attention(*given, backend="mma_sp", **{option: 0.0})


def test_a_call_during_which_the_library_is_disabled(nm_launches, monkeypatch):
    """Another thread forgets all calls then, and this one must not be remembered after it."""
    forward = op.forward

    def disabling(*given):
        results = forward(*given)
        switch.change(1)
        return results

    monkeypatch.setattr("saccade.nm_sparse.api.forward", disabling)
    try:
        saccade.nm_sparse_attention(*tensors(), backend="mma_sp")
    finally:
        switch.change(-1)
    assert len(nm_launches) == 1
    assert len(native.calls) == 0
