"""A causal call on sm_90a as a whole, and its backward: the addresses that launches use (run by the emulator up to the
attention), and on a GPU against the same call step by step."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import emulator
import pytest
import torch

import saccade
from saccade.dynamic_mask import op as ops_dynamic_mask
from saccade.dynamic_mask.gather.sm90 import backward as backward_sm90
from saccade.dynamic_mask.gather.sm90 import forward as forward_sm90
from saccade.dynamic_mask.gather.sm90 import one_call
from saccade.dynamic_mask.gather.torch_blocks import attend_blocks, attend_blocks_backward
from saccade.dynamic_mask.selection import expiry_cuda, lists, lists_cuda
from saccade.dynamic_mask.selection.intervals import block_lists, causal_intervals
from saccade.launch.cuda import CudaLaunch
from saccade.nvrtc.tensor_map import AnyRows

B, H, HKV, N, KEEP = 2, 8, 2, 300, 40


def at(address: int, *shape: int) -> torch.Tensor:
    """A copy of the int32 numbers at an address."""
    count = torch.Size(shape).numel()
    return torch.frombuffer((ctypes.c_int32 * count).from_address(address), dtype=torch.int32).view(shape).clone()


@pytest.fixture
def made(monkeypatch):
    """Calls on the CPU: the emulator runs selection and lists, and the arguments of the attention kernel are recorded."""
    if emulator.COMPILER is None:
        pytest.skip("needs g++")
    seen = SimpleNamespace(attention=[], backward=[], strange=torch.zeros(1, dtype=torch.int32), recorded=[])

    def ready(call, device):
        if call.kernel == "forward_sm90":
            block = forward_sm90.CONFIGS[64].rows // 4
            return SimpleNamespace(
                enqueue=lambda stream, pointers: seen.attention.append((call, stream, pointers, read(pointers, block)))
            )
        if call.kernel == "backward_sm90":
            block = backward_sm90.rows_of(64) // 4
            return lambda *pointers: seen.backward.append((call, pointers, read(pointers, block)))
        return emulator.ready(call, device)

    def read(pointers, block):
        shape = lists_cuda.shape_of(B * HKV, N, N, block, KEEP, torch.device("cpu"))
        keys, counts, wholes = pointers[6:9]
        return (
            at(keys, shape.rows, shape.blocks, shape.longest),
            at(counts, shape.rows, shape.blocks),
            at(wholes, shape.rows, shape.blocks),
        )

    flag = SimpleNamespace(address=seen.strange.data_ptr(), record=seen.recorded.append, read=lambda: bool(seen.strange))
    monkeypatch.setattr(CudaLaunch, "ready", ready)
    monkeypatch.setattr(AnyRows, "allowed", lambda rows: True)  # the original asks the driver
    monkeypatch.setattr(one_call, "borrow", lambda device: flag)
    monkeypatch.setattr(one_call, "on_current_stream", lambda index, enqueue, *arguments: enqueue(77, *arguments))
    monkeypatch.setattr(backward_sm90, "takes", lambda *tensors: True)  # the original asks the device
    monkeypatch.setattr(lists, "cuda_shape", lists_cuda.shape_of)
    monkeypatch.setattr(expiry_cuda, "CHUNK", 64)
    monkeypatch.setattr(expiry_cuda, "SEARCHERS", 32)
    monkeypatch.setattr(lists_cuda, "THREADS", 64)
    caches = (expiry_cuda._launches, lists_cuda.writer, forward_sm90.launch, backward_sm90._backward)
    for cache in caches:
        cache.cache_clear()
    yield seen
    for cache in caches:
        cache.cache_clear()


def tensors(device="cpu", dim=64, dtype=torch.bfloat16):
    made = [torch.randn(B, N, h, dim, device=device, dtype=dtype).transpose(1, 2) for h in (H, HKV, HKV)]
    return *made, torch.randn(B, HKV, N, device=device)


def causal(query, key, value, adds_scores=True):
    layout = forward_sm90.layout_of(query, key, value)
    shape = lists_cuda.shape_of(B * HKV, N, N, forward_sm90.block_of(layout), KEEP, query.device)
    return one_call.Causal(layout, query.dtype, KEEP, adds_scores, 0.1, shape, query.device)


def assert_lists(found, intervals, block):
    """Compare the lists that a kernel was given with those of plain torch."""
    keys, counts, wholes = block_lists(*intervals, N, block)
    assert torch.equal(found[1], counts.flatten(0, 1).int())
    assert torch.equal(found[2], wholes.flatten(0, 1).int())
    listed = torch.arange(keys.shape[-1]) < counts.flatten(0, 1)[..., None]
    assert torch.equal(found[0][..., : keys.shape[-1]][listed], keys.flatten(0, 1).int()[listed])


@pytest.mark.parametrize("adds_scores", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_every_launch_is_given_its_own(made, adds_scores, padded):
    query, key, value, scores = tensors()
    lengths = torch.tensor([N, N // 3], dtype=torch.int32) if padded else None
    call = causal(query, key, value, adds_scores)
    out, lse, intervals, faulty = call(query, key, value, scores, lengths)
    start, stop = causal_intervals(scores, KEEP, lengths, None)
    assert torch.equal(intervals, torch.stack((start, stop)))
    ((attention, stream, pointers, listed),) = made.attention
    assert made.recorded == [77]
    assert stream == 77
    assert not faulty()
    assert pointers[:3] == (query.data_ptr(), key.data_ptr(), value.data_ptr())
    assert pointers[3] == (scores.data_ptr() if adds_scores else 0)
    assert pointers[4:6] == (intervals[0].data_ptr(), intervals[1].data_ptr())
    assert pointers[9:] == (out.data_ptr(), lse.data_ptr())
    assert (out.shape, out.stride(), out.dtype) == (query.shape, query.stride(), query.dtype)
    assert (lse.shape, lse.dtype) == ((B, H, N), torch.float32)
    # neither have the lists overwritten the trees of the search, nor the search the lists
    assert_lists(listed, intervals, forward_sm90.block_of(call.layout))
    assert len(attention.parameters.pointers) == len(pointers)


def test_scores_that_are_not_finite_are_told(made):
    query, key, value, scores = tensors()
    scores[1, 1, 250] = float("inf")
    *_, faulty = causal(query, key, value)(query, key, value, scores, None)
    assert faulty()


@pytest.mark.parametrize("adds_scores", [True, False])
@pytest.mark.parametrize("with_dlse", [True, False])
def test_backward_is_given_its_own(made, adds_scores, with_dlse):
    query, key, value, scores = tensors()
    call = causal(query, key, value, adds_scores)
    out, lse, intervals, _ = call(query, key, value, scores, None)
    dout, dlse = torch.randn(B, H, N, 64, dtype=query.dtype), torch.randn(B, H, N) if with_dlse else None
    # converted to float32, and returned in the original dtype
    added = scores.double() if adds_scores else None
    dq, dk, dv, dscores = call.backward(dout, dlse, out, lse, query, key, value, added, intervals)
    ((launch, pointers, listed),) = made.backward
    assert pointers[:3] == (query.data_ptr(), key.data_ptr(), value.data_ptr())
    assert (pointers[3] != 0) == adds_scores
    assert pointers[4:6] == (intervals[0].data_ptr(), intervals[1].data_ptr())
    assert_lists(listed, intervals, backward_sm90.rows_of(64) // 4)
    assert pointers[9:12] == (dout.data_ptr(), out.data_ptr(), lse.data_ptr())
    assert pointers[12] == (dlse.data_ptr() if with_dlse else 0)
    assert pointers[13] == dq.data_ptr()
    assert pointers[15] - pointers[14] == 4 * key.numel()
    assert (dq.shape, dq.stride(), dq.dtype) == (query.shape, query.stride(), query.dtype)
    assert dscores.dtype == (torch.float64 if adds_scores else torch.float32)
    for gradient, tensor in ((dk, key), (dv, value), (dscores, scores)):
        assert gradient.shape == tensor.shape
        # zeros that the launch of the lists wrote, to which nothing was added
        assert not gradient.any()
    assert strides_given(launch) == strides_of(query, key, value, dout, out, dq)


def strides_given(launch):
    kinds = launch.parameters.kinds
    return tuple([launch.arguments[name] for name in kinds if kinds[name] == kind] for kind in ("int64", "uint32"))


def strides_of(query, key, value, dout, out, dq):
    """As the kernel takes them: those of rows of keys and values in bytes."""
    outer = [*query.stride()[:3], *key.stride()[:2], *value.stride()[:2], *dout.stride()[:3], *out.stride()[:3], *dq.stride()[:3]]
    return outer, [2 * key.stride(2), 2 * value.stride(2)]


def test_backward_sees_how_tensors_lie(made):
    """dout may have any layout, and saved-tensor hooks may return tensors with another layout than they were given."""
    query, key, value, scores = tensors()
    call = causal(query, key, value)
    out, lse, intervals, _ = call(query, key, value, scores, None)
    douts = torch.randn(B, N, H, 64, dtype=query.dtype).transpose(1, 2), torch.randn(B, H, N, 64, dtype=query.dtype)
    for dout in (*douts, *douts):
        assert call.backward(dout, None, out, lse, query, key, value, scores, intervals) is not None
        assert strides_given(made.backward[-1][0]) == strides_of(query, key, value, dout, out, query)
    assert made.backward[0][0] is made.backward[2][0]
    unpacked = [x.contiguous() for x in (out, lse, query, key, value, scores, intervals)]
    dq, *_ = call.backward(douts[0], None, *unpacked)
    assert strides_given(made.backward[-1][0]) == strides_of(*unpacked[2:5], douts[0], unpacked[0], dq)


def test_backward_leaves_to_steps_what_they_do_otherwise(made):
    query, key, value, scores = tensors()
    call = causal(query, key, value)
    out, lse, intervals, _ = call(query, key, value, scores, None)
    dout = torch.randn_like(out)
    rest = (None, out, lse, query, key, value, scores, intervals)
    odd = torch.randn(dout.numel() + 1, dtype=dout.dtype)[1:].view(dout.shape)
    assert call.backward(odd, *rest) is None  # does not begin at a multiple of 16 bytes
    assert call.backward(torch.randn(B, H, N, 65, dtype=dout.dtype)[..., :64], *rest) is None  # its rows do not
    assert call.backward(dout[..., :1].expand(-1, -1, -1, 64), *rest) is None
    torch.use_deterministic_algorithms(True)
    try:
        assert call.backward(dout, *rest) is None
    finally:
        torch.use_deterministic_algorithms(False)
    assert not made.backward
    assert call.backward(dout, *rest) is not None


class AtOnce:
    """Such a call in plain torch; its backward too, or left to steps."""

    def __init__(self, adds_scores, own_backward):
        self.adds_scores, self.own_backward = adds_scores, own_backward
        self.calls: list[object] = []
        self.backwards: list[object] = []

    def __call__(self, query, key, value, key_scores, lengths):
        self.calls.append(lengths)
        scores = key_scores.detach()
        start, stop = causal_intervals(scores, KEEP, lengths, None)
        call = (query, key, value, scores if self.adds_scores else None, start, stop, KEEP, 64**-0.5)
        return *attend_blocks(*call), torch.stack((start, stop)), lambda: not scores.isfinite().all()

    def backward(self, dout, dlse, out, lse, query, key, value, key_scores, intervals):
        self.backwards.append(dout)
        if self.own_backward:
            return attend_blocks_backward(dout, dlse, out, lse, query, key, value, key_scores, *intervals, KEEP, 64**-0.5)
        return None


@pytest.mark.parametrize("own_backward", [True, False])
@pytest.mark.parametrize("adds_scores", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_a_call_at_once_has_the_gradients_of_steps(monkeypatch, adds_scores, padded, own_backward):
    """The results of the public function for such a call, whichever kernel runs it."""
    leaves = [x.requires_grad_() for x in tensors(dtype=torch.float32)]
    lengths = torch.tensor([N, N // 3]) if padded else None
    options = {"keep": KEEP, "lengths": lengths, "add_scores": adds_scores, "enable_gqa": True, "return_lse": True}
    at_once = AtOnce(adds_scores, own_backward)

    def differentiated():
        out, lse = saccade.dynamic_mask_attention(*leaves, backend="gather_torch", **options)
        loss = out.square().sum() + lse.nan_to_num(neginf=0).sum()
        return out, lse, *torch.autograd.grad(loss, leaves[: 3 + adds_scores])

    wanted = differentiated()
    monkeypatch.setattr(ops_dynamic_mask, "causal_call", lambda *call: at_once)
    found = differentiated()
    with torch.no_grad():
        again = saccade.dynamic_mask_attention(*leaves, backend="gather_torch", **options)
    assert (len(at_once.calls), len(at_once.backwards)) == (2, 1)
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(again, wanted[:2], strict=True))
    assert again[0].grad_fn is None
    _, lse = saccade.dynamic_mask_attention(*leaves, backend="gather_torch", **options)
    assert torch.autograd.grad(lse.nan_to_num(neginf=0).sum(), leaves[0])[0].any()
    # a gradient of only lse is computed step by step
    assert len(at_once.backwards) == 1
    leaves[3].data[1, 0, 5] = float("inf")
    with pytest.raises(saccade.InvalidArgument, match="key_scores holds inf at"):
        differentiated()


@pytest.mark.sm90
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
    monkeypatch.setattr(one_call.Causal, "__call__", counted(one_call.Causal.__call__, calls))
    found = saccade.dynamic_mask_attention(*leaves, **options)
    gradients = torch.autograd.grad(
        found[0].float().square().sum() + found[1].nan_to_num(neginf=0).sum(), leaves[: 3 + adds_scores]
    )
    with torch.no_grad():
        again = saccade.dynamic_mask_attention(*leaves, **options)
    assert len(calls) == 2
    monkeypatch.setattr(ops_dynamic_mask, "causal_call", lambda *call: None)
    wanted = saccade.dynamic_mask_attention(*leaves, **options)
    wanted_gradients = torch.autograd.grad(
        wanted[0].float().square().sum() + wanted[1].nan_to_num(neginf=0).sum(), leaves[: 3 + adds_scores]
    )
    assert len(calls) == 2
    for x, y, z in zip(found, again, wanted, strict=True):
        assert torch.equal(x, z)
        assert torch.equal(y, z)
    for x, y in zip(gradients, wanted_gradients, strict=True):  # the order of additions varies
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)


@pytest.mark.sm90
def test_backward_of_tensors_that_were_kept_elsewhere(monkeypatch):
    """Hooks return tensors contiguous; also under deterministic algorithms, which use another kernel."""
    leaves = [x.requires_grad_() for x in tensors("cuda")]
    calls: list[object] = []
    monkeypatch.setattr(backward_sm90.Backward, "__call__", counted(backward_sm90.Backward.__call__, calls))

    def gradients():
        out = saccade.dynamic_mask_attention(*leaves, keep=KEEP, enable_gqa=True, backend="gather")
        return torch.autograd.grad(out, leaves, out.detach())

    wanted = gradients()
    with torch.autograd.graph.save_on_cpu():
        elsewhere = gradients()
    assert len(calls) == 2
    torch.use_deterministic_algorithms(True)
    try:
        certain = gradients()
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(calls) == 2
    for found in (elsewhere, certain):
        for x, y in zip(found, wanted, strict=True):
            torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)


def counted(call, calls):
    def run(self, *arguments):
        calls.append(self)
        return call(self, *arguments)

    return run


@pytest.mark.sm90
def test_what_it_leaves_to_steps(monkeypatch):
    """Rows with another alignment under the same plan, documents, calls that are not causal; and invalid scores are named."""
    query, key, value, scores = tensors("cuda")
    calls: list[object] = []
    monkeypatch.setattr(one_call.Causal, "__call__", counted(one_call.Causal.__call__, calls))

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


@pytest.mark.sm90
def test_other_streams_and_threads():
    """Concurrent calls on two streams: none reads what another is writing."""
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
