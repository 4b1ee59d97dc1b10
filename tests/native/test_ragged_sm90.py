"""Packed batches beyond the tiles on the kernels of sm90: C++ passes to them what Python passed, for other numbers of tokens and sequences too."""

from __future__ import annotations

import pytest
import torch
from packed_made import named_call
from recorded_cuda import NUMBERS, bound_of_long, bound_of_tokens
from recorded_triton import number_of, recording

import saccade
from saccade import native
from saccade.exact.long import config, sm90
from saccade.exact.ragged import launchers, token_launches, tokens_sm90
from saccade.exact.ragged.call import RaggedCall, every_sequence
from saccade.native.recording import Recorder

HEADS = 3
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are stubs on a CPU")


@pytest.fixture
def seen(monkeypatch):
    made = recording(monkeypatch, with_cuda=True)
    found = next(made)
    monkeypatch.setattr(launchers, "forward_by_cuda", lambda call, out: True)
    monkeypatch.setattr(launchers, "backward_by_cuda", lambda call, dout, out, gradients: True)
    monkeypatch.setattr(sm90, "_launch", bound_of_long(found))
    monkeypatch.setattr(sm90, "multiprocessors", lambda device: 132)
    yield found
    next(made, None)


def batch(lengths, dim, packed):
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    shape = (sum(lengths) + 1, *[3] * packed, HEADS, dim)
    return [torch.randn(shape).half().requires_grad_() for _ in range(1 if packed else 3)], ends, max(lengths)


def run_by_python(seen, given, **options):
    """The same without C++, as Python launches a call that is recorded: for batches of any size."""
    calls, native.calls = native.calls, None
    try:
        with Recorder():
            return run(seen, given, **options)
    finally:
        native.calls = calls


def run(seen, given, **options):
    """The launches of a call and of its gradient, with names in the place of addresses."""
    (leaves, ends, longest), before = given, len(seen)
    names = named_call(leaves, (ends, ends), (longest, longest), **options)
    if "window" not in options:  # whose parts are listed at each call
        names |= dict(zip(("members", "count"), every_sequence(ends, len(ends) - 1), strict=True))
    known = {x.data_ptr(): name for name, x in names.items()}
    return [told(x, known) for x in seen[before:]]


def told(x, known):
    if isinstance(x, tuple | list):
        return [told(y, known) for y in x]
    return known.get(x, "scratch" if x > 2**24 else x)


@pytest.mark.parametrize("packed", [False, True], ids=["separate", "packed"])
@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.2}], ids=["plain", "dropout"])
@pytest.mark.parametrize("dim", [64, 128])
def test_another_batch_of_the_kind(seen, dim, options, packed, monkeypatch):
    run(seen, batch([140, 9], dim, packed), **options)
    run(seen, batch([150, 20, 3], dim, packed), **options)  # its backward is Python's, and is told to C++
    assert len(native.calls) == 1
    kernels = ["forward", "clear_kernel", *["delta_kernel"] * (dim == 128), "backward", "clear_kernel"]
    kind = "_dropout" * bool(options) + "_packed"
    for lengths in ([5, 250, 130, 1], [129], [200] * 9):
        given = batch(lengths, dim, packed)
        with monkeypatch.context() as patch:
            patch.setattr("saccade.exact.varlen.api._prepare", lambda *given: pytest.fail("Python makes the call"))
            patch.setattr(launchers, "backward", lambda *given: pytest.fail("Python makes the gradient"))
            by_cpp = run(seen, given, **options)
        assert [x[0] for x in by_cpp] == [number_of(name if "_" in name else name + kind) for name in kernels]
        assert by_cpp == run_by_python(seen, given, **options)
    tokens = sum(lengths) + 1
    maps, arguments = by_cpp[0][4:]
    assert [x[0] for x in maps] == ["q", "k", "v", "out"]
    assert {x[1][2] for x in maps} == {tokens}
    assert arguments[:5] == ["ends", "ends", "members", "count", "out"]
    assert arguments[6:11] == [len(lengths), tokens, tokens, 200, 200]


@pytest.mark.parametrize("window", [(64, 64), (3, None), (200, 5)], ids=str)
@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.2}, {"is_causal": True}], ids=["plain", "dropout", "causal"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("chunks", [True, False], ids=["chunks", "token-tiles"])
def test_another_batch_with_a_window(seen, chunks, dim, options, window, monkeypatch):
    monkeypatch.setattr(config, "TIMED_WINDOWS", 128 if chunks else 0)
    monkeypatch.setattr(sm90, "takes", lambda args, *others: True)
    options = options | {"window": window}
    run(seen, batch([140, 9], dim, False), **options)
    run(seen, batch([150, 20, 3], dim, False), **options)
    assert len(native.calls) == 1
    for lengths in ([5, 250, 130, 1], [129], [200] * 9):
        given = batch(lengths, dim, False)
        with monkeypatch.context() as patch:
            patch.setattr("saccade.exact.varlen.api._prepare", lambda *given: pytest.fail("Python makes the call"))
            patch.setattr(launchers, "backward", lambda *given: pytest.fail("Python makes the gradient"))
            by_cpp = run(seen, given, **options)
        assert by_cpp == run_by_python(seen, given, **options)
        if chunks:  # a list, the kernel, and what clears the tail; row sums beyond D = 64
            assert len(by_cpp) == 6 + (dim == 128)
        else:  # bounds, the draw of dropout, and the kernel
            assert len(by_cpp) == 4 + 2 * ("dropout_p" in options)
    others = options | {"window": (9, 9)}
    run(seen, batch([140, 9], dim, False), **others)
    assert len(native.calls) == 2


def test_a_single_token_is_left_to_python(seen):
    """Its map says nothing of the distance to the next token."""
    q, k, v = (torch.randn(n, HEADS, 64).half() for n in (1, 200, 200))
    ends_q, ends_k = (torch.tensor([0, n], dtype=torch.int32) for n in (1, 200))
    for _ in range(2):
        saccade.attention_varlen(q, k, v, ends_q, ends_k, 1, 200, backend="ragged")
    assert len(seen) == 4
    assert len(native.calls) == 0


@pytest.fixture
def tokens(monkeypatch):
    """Token tiles take every call, in CUDA C++."""
    made = recording(monkeypatch, with_cuda=True)
    found = next(made)
    monkeypatch.setattr(RaggedCall, "eager_tokens", property(lambda call: True))
    monkeypatch.setattr(tokens_sm90, "takes", lambda call, direction, *others: True)
    monkeypatch.setattr(tokens_sm90, "_launch", bound_of_tokens(found))
    token_launches._KNOWN.clear()
    yield found
    next(made, None)


@pytest.mark.parametrize("packed", [False, True], ids=["separate", "packed"])
@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.2}], ids=["plain", "dropout"])
def test_token_tiles(tokens, options, packed, monkeypatch):
    """Blocks follow from the tokens."""
    run(tokens, batch([5, 9, 1], 32, packed), **options)
    run(tokens, batch([5, 3, 2, 1], 32, packed), **options)
    assert len(native.calls) == 1
    kind, words = "_dropout" * bool(options), [1] * bool(options)
    for lengths in ([12, 3, 8, 16], [16] * 40, [1]):
        given = batch(lengths, 32, packed)
        with monkeypatch.context() as patch:
            patch.setattr("saccade.exact.varlen.api._prepare", lambda *given: pytest.fail("Python makes the call"))
            patch.setattr(launchers, "backward", lambda *given: pytest.fail("Python makes the gradient"))
            found = [x for x in run(tokens, given, **options) if len(x) == 6]  # those of CUDA C++
        total = sum(lengths) + 1
        assert [x[0] for x in found] == [number_of(f"tokens_{name}{kind}") for name in ("forward", "backward")]
        for name, (_, extents, threads, shared, maps, arguments) in zip(("forward", "backward"), found, strict=True):
            assert (extents, threads, shared) == ([-(-total // 64) * HEADS, 1, 1], 128, tokens_sm90.shared_bytes(name, 32))
            assert not maps
            assert arguments[:3] == ["q", "k", "v"]
            assert {"dout", "dq", "dk", "dv"} <= {*arguments} if name == "backward" else "out" in arguments
            assert arguments[3] == "ends"
            assert arguments[-len(NUMBERS) - 2 - len(words) :] == [total, len(lengths), *words, *NUMBERS]
