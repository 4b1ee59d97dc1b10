"""Forward with a gradient and backward of `nm_sparse_attention` that C++ replays: Python's launches, and on a GPU their bits."""

from __future__ import annotations

import pytest
import torch

import saccade
from saccade import native
from saccade.nm_sparse import op
from saccade.nm_sparse.backward_sm90 import one_pass
from saccade.recorder import ACTIVE

on_a_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are stubs on a CPU")
KERNELS = ["fused_sm90", "_delta_kernel", "backward_dq_sm90", "backward_dkv_sm90"]


def leaves(tokens=256, dim=64, heads=4, kv_heads=4, batch=2, device="cpu"):
    rows = ((heads, tokens), (kv_heads, tokens), (kv_heads, tokens))
    made = [torch.randn(batch, n, h, dim, device=device).bfloat16().transpose(1, 2) for h, n in rows]
    return [x.requires_grad_() for x in made]


def named(launches, **known):
    """The launches with names in the place of addresses; memory that no name has is numbered as it appears."""
    names, others = {x.data_ptr(): name for name, x in known.items()}, {}

    def told(x):
        if isinstance(x, tuple | list):
            return [told(y) for y in x]
        if x in names or not isinstance(x, int) or x < 2**32:
            return names.get(x, x)
        return others.setdefault(x, f"memory {len(others)}")

    return told(launches)


def stays_with_cpp(monkeypatch):
    monkeypatch.setattr(op, "launchers", lambda backend: pytest.fail("Python makes the call"))


OPTIONS = {
    "plain": {},
    "causal 1:2": {"is_causal": True, "pattern": "1:2"},
    "a scale, with the gradient of its lse": {"scale": 0.25, "return_lse": True},
    "dropout": {"dropout_p": 0.25},
    "blocks": {"block_mask": torch.ones(1, 4, 4, 4, dtype=torch.bool).tril()},
}


@on_a_cpu
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("kind", OPTIONS)
def test_a_repeated_step(nm_launches, kind, dim, monkeypatch):
    launches, options = [], dict(OPTIONS[kind])
    for times in range(4):
        if times == 2 and kind != "blocks":
            stays_with_cpp(monkeypatch)
        given, before = leaves(dim=dim), len(nm_launches)
        found = saccade.nm_sparse_attention(*given, backend="mma_sp", **options)
        out, *lse = found if isinstance(found, tuple) else (found,)
        incoming = [torch.randn_like(out), *map(torch.randn_like, lse)]
        gradients = torch.autograd.grad([out, *lse], given, incoming)
        assert [x.stride() for x in gradients] == [x.stride() for x in given]
        names = dict(zip(("query", "key", "value", "dquery", "dkey", "dvalue"), (*given, *gradients), strict=True))
        launches.append(named(nm_launches[before:], out=out, dout=incoming[0], **names))
    assert [launch[0] for launch in launches[0]] == [sum(name.encode()) for name in KERNELS]
    # Python makes backward with blocks, whose transpose torch makes for the kernel of keys
    assert len(native.calls) == (1 if kind == "blocks" else 2)
    assert all(x == launches[0] for x in launches)


@on_a_cpu
@pytest.mark.parametrize("backend", ["mma_sp", "masked"])
def test_the_selection_begins_as_zeros(nm_launches, backend, monkeypatch):
    """Kernels leave the words of tiles that no query sees as they are."""
    query, key, value = leaves(1024)
    call = (query.detach(), key.detach(), value.detach(), None, None, None, None, 2, 4, 0.0, True, 0.125)
    for times in range(4):
        if times:
            stays_with_cpp(monkeypatch)
        dirty = [torch.full((2, 4, 1024, 32), -1, dtype=torch.int32) for _ in range(4)]
        del dirty  # the allocator gives this memory again
        kept = op._forward(*call, True, backend, 0, 0)[2]
        assert kept.shape == (2, 4, 1024, 32)
        assert not kept.any()


@on_a_cpu
def test_what_stays_with_python(nm_launches):
    """torch makes tensors for these calls, to which launches of another call must not be bound."""
    given, mask = leaves(), torch.rand(2, 1, 1, 256) > 0.3
    for attn_mask in (mask, torch.randn(1, 4, 256, 256).bfloat16()):
        for _ in range(2):
            saccade.nm_sparse_attention(*given, attn_mask, backend="mma_sp").backward(torch.randn_like(given[0]))
    assert len(native.calls) == 0
    for _ in range(2):  # of a sum, whose gradient is one number for all
        saccade.nm_sparse_attention(*given, backend="mma_sp").sum().backward()
    assert len(native.calls) == 1


@on_a_cpu
def test_calls_of_their_own(nm_launches):
    given = leaves()

    def step(**options):
        out = saccade.nm_sparse_attention(*given, backend="mma_sp", **options)
        torch.autograd.grad(out, given, torch.randn_like(out))
        return len(native.calls)

    assert step() == step() == 2
    assert step(pattern="1:2") == 4
    assert step(scale=0.3) == 6
    assert step(dense_first=4) == 8
    assert step(dense_recent=4) == 10
    with saccade.nm_sparse.unordered_gradients():
        assert step() == 11  # the same forward
    with saccade.nm_sparse.recompute_selection():
        # without the selection, then with it, which is known
        assert step() == step() == 12


@on_a_cpu
def test_an_op_within_a_call_that_is_recorded(nm_launches):
    """C++ knows the op, as compiled programs call it. The recorder of the call has to see its launches all the same."""
    given = [x.detach() for x in leaves()]
    for _ in range(2):
        op._forward(*given, None, None, None, None, 2, 4, 0.0, False, 0.125, False, "mma_sp", 0, 0)
    assert len(native.calls) == 1
    launches = []
    for _ in range(3):
        before = len(nm_launches)
        out = saccade.nm_sparse_attention(*given, backend="mma_sp")
        launches.append(named(nm_launches[before:], query=given[0], key=given[1], value=given[2], out=out))
    assert len(native.calls) == 2
    assert len(launches[0]) == 1
    assert launches[0] == launches[1] == launches[2]
    assert ACTIVE.recorder is None


@pytest.mark.gpu
@pytest.mark.unpoisoned
@pytest.mark.parametrize("backend", ["mma_sp", "masked"])
@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize(("tokens", "dim", "kv_heads"), [(64, 64, 4), (200, 64, 2), (1000, 128, 1), (2500, 128, 4)])
def test_on_a_gpu(tokens, dim, kv_heads, kind, backend, calls, monkeypatch):
    """Steps from C++ have the bits of Python's, whatever the memory of their results held before."""
    options, tiles = dict(OPTIONS[kind]), -(-tokens // 64)
    # torch makes the transpose of blocks, and the zeros with which one pass over long causal rows begins
    with_torch = kind == "blocks" or (options.get("is_causal") and tokens >= one_pass.FEW)
    if kind == "blocks":
        options["block_mask"] = torch.rand(1, 4, tiles, tiles, device="cuda") > 0.4

    def step(given, incoming):
        torch.manual_seed(3)  # of dropout
        found = saccade.nm_sparse_attention(*given, enable_gqa=True, backend=backend, **options)
        found = found if isinstance(found, tuple) else (found,)
        return *found, *torch.autograd.grad(found, given, incoming[: len(found)])

    for times in range(4):
        given = leaves(tokens, dim, 4, kv_heads, 2, "cuda")
        incoming = [torch.randn_like(given[0]), torch.randn(2, 4, tokens, device="cuda")]
        dirty = [torch.full((2, 4, tokens, 4096), -1, dtype=torch.int8, device="cuda") for _ in range(2)]
        del dirty
        found = step(given, incoming)
        assert len(calls) >= (1 if with_torch else 2)
        with monkeypatch.context() as patch:
            patch.setattr(native, "calls", None)
            expected = step(given, incoming)
        for x, y in zip(found, expected, strict=True):
            assert torch.equal(x, y), times
            assert x.stride() == y.stride()
    with monkeypatch.context() as patch:
        if not with_torch:
            stays_with_cpp(patch)
        step(given, incoming)
