"""A causal call on sm_90a in one go: where its launches find things (run by the emulator up to the attention), and on a GPU against the
same call step by step."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import emulator
import pytest
import torch

import saccade
from saccade import ops_dynamic_mask
from saccade.kernels.cuda_launch import Call
from saccade.kernels.dynamic_mask import expiry_cuda, hopper_causal, hopper_forward, lists_cuda
from saccade.kernels.dynamic_mask.gather_torch import attend_blocks
from saccade.nvrtc.tensor_map import AnyRows
from saccade.selection import block_lists, causal_intervals

B, H, HKV, N, KEEP = 2, 8, 2, 300, 40


def at(address: int, *shape: int) -> torch.Tensor:
    """A copy of the int32 numbers there."""
    count = torch.Size(shape).numel()
    return torch.frombuffer((ctypes.c_int32 * count).from_address(address), dtype=torch.int32).view(shape).clone()


@pytest.fixture
def made(monkeypatch):
    """Calls on the CPU: selection and lists by the emulator, and what the attention would be given."""
    if emulator.COMPILER is None:
        pytest.skip("needs g++")
    seen = SimpleNamespace(attention=[], strange=torch.zeros(1, dtype=torch.int32), recorded=[])

    def ready(call, device):
        if call.kernel != "forward_sm90":
            return emulator.ready(call, device)
        return SimpleNamespace(enqueue=lambda stream, pointers: seen.attention.append((call, stream, pointers, read(pointers))))

    def read(pointers):
        block = hopper_forward.CONFIGS[64].rows // 4
        shape = lists_cuda.shape_of(B * HKV, N, N, block, KEEP, torch.device("cpu"))
        keys, counts, wholes = pointers[6:9]
        return (
            at(keys, shape.rows, shape.blocks, shape.longest),
            at(counts, shape.rows, shape.blocks),
            at(wholes, shape.rows, shape.blocks),
        )

    flag = SimpleNamespace(address=seen.strange.data_ptr(), record=seen.recorded.append, read=lambda: bool(seen.strange))
    monkeypatch.setattr(Call, "ready", ready)
    monkeypatch.setattr(AnyRows, "allowed", lambda rows: True)  # asks the driver
    monkeypatch.setattr(hopper_causal, "borrow", lambda device: flag)
    monkeypatch.setattr(hopper_causal, "on_current_stream", lambda index, enqueue, *arguments: enqueue(77, *arguments))
    monkeypatch.setattr(expiry_cuda, "CHUNK", 64)
    monkeypatch.setattr(expiry_cuda, "SEARCHERS", 32)
    monkeypatch.setattr(lists_cuda, "THREADS", 64)
    caches = (expiry_cuda._launches, lists_cuda.writer, hopper_forward.launch)
    for cache in caches:
        cache.cache_clear()
    yield seen
    for cache in caches:
        cache.cache_clear()


def tensors(device="cpu", dim=64, dtype=torch.bfloat16):
    made = [torch.randn(B, N, h, dim, device=device, dtype=dtype).transpose(1, 2) for h in (H, HKV, HKV)]
    return *made, torch.randn(B, HKV, N, device=device)


@pytest.mark.parametrize("adds_scores", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_every_launch_is_given_its_own(made, adds_scores, padded):
    query, key, value, scores = tensors()
    lengths = torch.tensor([N, N // 3], dtype=torch.int32) if padded else None
    layout = hopper_forward.layout_of(query, key, value)
    shape = lists_cuda.shape_of(B * HKV, N, N, hopper_forward.block_of(layout), KEEP, query.device)
    call = hopper_causal.Causal(layout, query.dtype, KEEP, adds_scores, 0.1, shape, query.device)
    out, lse, intervals, faulty = call(query, key, value, scores, lengths)
    start, stop = causal_intervals(scores, KEEP, lengths, None)
    assert torch.equal(intervals, torch.stack((start, stop)))
    ((attention, stream, pointers, lists),) = made.attention
    assert made.recorded == [77]
    assert stream == 77
    assert not faulty()
    assert pointers[:3] == (query.data_ptr(), key.data_ptr(), value.data_ptr())
    assert pointers[3] == (scores.data_ptr() if adds_scores else 0)
    assert pointers[4:6] == (intervals[0].data_ptr(), intervals[1].data_ptr())
    assert pointers[9:] == (out.data_ptr(), lse.data_ptr())
    assert (out.shape, out.stride(), out.dtype) == (query.shape, query.stride(), query.dtype)
    assert (lse.shape, lse.dtype) == ((B, H, N), torch.float32)
    # what the search left of its trees has not been written over by the lists, nor these by it
    keys, counts, wholes = block_lists(start, stop, N, hopper_forward.block_of(layout))
    assert torch.equal(lists[1], counts.flatten(0, 1).int())
    assert torch.equal(lists[2], wholes.flatten(0, 1).int())
    listed = torch.arange(keys.shape[-1]) < counts.flatten(0, 1)[..., None]
    assert torch.equal(lists[0][..., : keys.shape[-1]][listed], keys.flatten(0, 1).int()[listed])
    kinds = [kind for kind, _ in attention.arguments]
    assert kinds.count("pointer") == len(pointers)


def test_scores_that_are_not_finite_are_told(made):
    query, key, value, scores = tensors()
    scores[1, 1, 250] = float("inf")
    layout = hopper_forward.layout_of(query, key, value)
    shape = lists_cuda.shape_of(B * HKV, N, N, hopper_forward.block_of(layout), KEEP, query.device)
    *_, faulty = hopper_causal.Causal(layout, query.dtype, KEEP, True, 0.1, shape, query.device)(query, key, value, scores, None)
    assert faulty()


@pytest.mark.parametrize("adds_scores", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_a_call_at_once_has_the_gradients_of_steps(monkeypatch, adds_scores, padded):
    """What the public function makes of such a call, whoever runs it."""
    leaves = [x.requires_grad_() for x in tensors(dtype=torch.float32)]
    lengths = torch.tensor([N, N // 3]) if padded else None
    options = {"keep": KEEP, "lengths": lengths, "add_scores": adds_scores, "enable_gqa": True, "return_lse": True}
    calls = []

    def at_once(query, key, value, key_scores, lengths):
        calls.append(lengths)
        scores = key_scores.detach()
        start, stop = causal_intervals(scores, KEEP, lengths, None)
        call = (query, key, value, scores if adds_scores else None, start, stop, KEEP, 64**-0.5)
        return *attend_blocks(*call), torch.stack((start, stop)), lambda: not scores.isfinite().all()

    def differentiated():
        out, lse = saccade.dynamic_mask_attention(*leaves, backend="gather_torch", **options)
        loss = out.square().sum() + lse.nan_to_num(neginf=0).sum()
        return out, lse, *torch.autograd.grad(loss, leaves[: 3 + adds_scores])

    wanted = differentiated()
    monkeypatch.setattr(ops_dynamic_mask, "causal_call", lambda *call: at_once)
    found = differentiated()
    with torch.no_grad():
        again = saccade.dynamic_mask_attention(*leaves, backend="gather_torch", **options)
    assert len(calls) == 2
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(again, wanted[:2], strict=True))
    assert again[0].grad_fn is None
    leaves[3].data[1, 0, 5] = float("inf")
    with pytest.raises(saccade.InvalidArgument, match="key_scores holds inf at"):
        differentiated()


on_hopper = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="these kernels are for sm_90"
)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("adds_scores", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_the_same_bits_as_step_by_step(monkeypatch, dim, adds_scores, padded):
    query, key, value, scores = tensors("cuda", dim)
    lengths = torch.tensor([N, N // 3], device="cuda") if padded else None
    options = {
        "keep": KEEP,
        "lengths": lengths,
        "add_scores": adds_scores,
        "enable_gqa": True,
        "return_lse": True,
        "backend": "gather",
    }
    leaves = [x.requires_grad_() for x in (query, key, value, scores)]
    calls = []
    monkeypatch.setattr(hopper_causal.Causal, "__call__", counted(hopper_causal.Causal.__call__, calls))
    found = saccade.dynamic_mask_attention(*leaves, **options)
    gradients = torch.autograd.grad(
        found[0].float().square().sum() + found[1].nan_to_num(neginf=0).sum(), leaves[: 3 + adds_scores]
    )
    with torch.no_grad():
        again = saccade.dynamic_mask_attention(*leaves, **options)
    assert len(calls) == 2
    monkeypatch.setattr(hopper_causal, "_PLANNED", dict.fromkeys(hopper_causal._PLANNED, (None,)))
    wanted = saccade.dynamic_mask_attention(*leaves, **options)
    wanted_gradients = torch.autograd.grad(
        wanted[0].float().square().sum() + wanted[1].nan_to_num(neginf=0).sum(), leaves[: 3 + adds_scores]
    )
    assert len(calls) == 2
    for x, y, z in zip(found, again, wanted, strict=True):
        assert torch.equal(x, z)
        assert torch.equal(y, z)
    for x, y in zip(gradients, wanted_gradients, strict=True):  # additions in any order
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)


def counted(call, calls):
    def run(self, *arguments):
        calls.append(self)
        return call(self, *arguments)

    return run


@pytest.mark.gpu
@on_hopper
def test_what_it_leaves_to_steps(monkeypatch):
    """Rows of another alignment under the same plan, documents, calls that are not causal; and wrong scores are named."""
    query, key, value, scores = tensors("cuda")
    calls: list[object] = []
    monkeypatch.setattr(hopper_causal.Causal, "__call__", counted(hopper_causal.Causal.__call__, calls))

    def run(*given, **options):
        return saccade.dynamic_mask_attention(*given, keep=KEEP, enable_gqa=True, backend="gather", **options)

    wanted = run(query, key, value, scores)
    assert len(calls) == 1
    odd = (
        torch.empty(query.numel() + 1, device="cuda", dtype=query.dtype)[1:].as_strided(query.shape, query.stride()).copy_(query)
    )
    torch.testing.assert_close(run(odd, key, value, scores), wanted)
    run(query, key, value, scores, is_causal=False)
    run(query, key, value, scores, document_ids=torch.zeros(B, N, dtype=torch.int64, device="cuda"))
    assert len(calls) == 1
    bad = scores.clone()
    bad[0, 1, 7] = float("nan")
    with pytest.raises(saccade.InvalidArgument, match="key_scores holds nan at"):
        run(query, key, value, bad)
    assert len(calls) == 2
    assert torch.equal(run(query, key, value, scores), wanted)


@pytest.mark.gpu
@on_hopper
def test_other_streams_and_threads():
    """Calls on a side stream beside calls on the first one: none reads what another is writing."""
    query, key, value, scores = tensors("cuda")
    options = {"keep": KEEP, "enable_gqa": True, "backend": "gather"}
    other = -scores
    wanted = [saccade.dynamic_mask_attention(query, key, value, s, **options) for s in (scores, other)]
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    for _ in range(30):
        here = saccade.dynamic_mask_attention(query, key, value, scores, **options)
        with torch.cuda.stream(side):
            there = saccade.dynamic_mask_attention(query, key, value, other, **options)
        torch.cuda.synchronize()
        assert torch.equal(here, wanted[0])
        assert torch.equal(there, wanted[1])
