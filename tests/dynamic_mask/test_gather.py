"""Gathered blocks against dense attention under the brute-force mask: outputs, lse and every gradient."""

from __future__ import annotations

import functools
import sys
from dataclasses import replace

import pytest
import torch
from contracts.dynamic_mask import CASES, IN_CPP, DynamicMaskContract
from contracts.exact import DEVICE
from contracts.opt_outs import opted_out

import saccade
from saccade.dynamic_mask.gather import launchers
from saccade.dynamic_mask.gather import torch_blocks as gather_torch
from saccade.dynamic_mask.gather.backend import GATHER
from saccade.dynamic_mask.gather.sm90 import backward as backward_sm90
from saccade.dynamic_mask.gather.sm90 import forward as forward_sm90
from saccade.dynamic_mask.problem import DynamicMaskProblem
from saccade.dynamic_mask.testing.cases import DYNAMIC_MASK
from saccade.dynamic_mask.testing.check import check_dynamic_mask, differentiate, public_call
from saccade.dynamic_mask.testing.inputs import make_dynamic_mask
from saccade.testing.judge import report


def problem(keep=12, q_len=150, lengths=None):
    torch.manual_seed(0)
    batch, heads, kv_len, dim = 3, 2, 150, 8
    leaves = [torch.randn(batch, heads, t, dim, dtype=torch.float64, requires_grad=True) for t in (q_len, kv_len, kv_len)]
    leaves.append(torch.randn(batch, heads, kv_len, dtype=torch.float64, requires_grad=True))
    return leaves, {"keep": keep, "lengths": None if lengths is None else torch.tensor(lengths)}


@pytest.mark.parametrize("case", [c for c in CASES if c.head_dim == 16], ids=str)
def test_blocks_of_any_size_in_float64(monkeypatch, case):
    inputs = make_dynamic_mask(case, torch.float64, "cpu")
    theirs = differentiate(public_call(case, "reference", True), inputs, True)
    for block in (1, 16, 128):
        monkeypatch.setattr(gather_torch, "BLOCK", block)
        ours = differentiate(public_call(case, "gather_torch", True), inputs, True)
        torch.testing.assert_close(ours, theirs, msg=lambda text, block=block: f"blocks of {block}: {text}")


class TestGather(DynamicMaskContract):
    backend = "gather"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("case", [c for c in CASES if c.head_dim == 16], ids=str)
def test_budget_at_the_tuned_head_dims(case, dim, dtype):
    """The CUDA C++ kernels on sm_90, Triton's elsewhere: blocks of several tiles, and several blocks per program."""
    longer = replace(
        case, head_dim=dim, q_len=case.q_len * 4 + 3 if case.q_len > 1 else 1, kv_len=case.kv_len * 4 + 3, keep=case.keep * 9
    )
    inputs = make_dynamic_mask(longer, dtype, DEVICE)
    tensors, on_sm90 = (inputs.query, inputs.key, inputs.value), torch.cuda.get_device_capability() == (9, 0)
    assert forward_sm90.takes(*tensors) == backward_sm90.takes(*tensors) == on_sm90
    results = check_dynamic_mask(longer, dtype, DEVICE, "gather")
    assert all(r.ok for r in results), report(longer, results)


@pytest.mark.gpu
def test_the_forward_gives_the_same_bits_again():
    inputs = make_dynamic_mask(replace(CASES[0], q_len=3000, kv_len=3000, head_dim=128, keep=500), torch.bfloat16, DEVICE)
    call = (inputs.query, inputs.key, inputs.value, inputs.key_scores)
    first = saccade.dynamic_mask_attention(*call, keep=500, backend="gather")
    assert all(torch.equal(first, saccade.dynamic_mask_attention(*call, keep=500, backend="gather")) for _ in range(20))


@pytest.mark.gpu
@pytest.mark.unpoisoned
def test_runs_inside_a_cuda_graph():
    inputs = make_dynamic_mask(replace(CASES[0], q_len=600, kv_len=600, head_dim=64, keep=100), torch.bfloat16, DEVICE)
    leaves = [x.clone() for x in (inputs.query, inputs.key, inputs.value, inputs.key_scores)]
    attend = functools.partial(saccade.dynamic_mask_attention, keep=100, backend="gather")
    attend(*leaves)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(*leaves)
    for leaf in leaves:
        leaf.copy_(torch.randn_like(leaf))
    graph.replay()
    assert torch.equal(out, attend(*leaves))


class TestGatherTorch(DynamicMaskContract):
    backend = "gather_torch"

    def test_bfloat16(self):
        results = check_dynamic_mask(DYNAMIC_MASK[0], torch.bfloat16, DEVICE, self.backend)
        assert all(r.ok for r in results), report(DYNAMIC_MASK[0], results)


@opted_out("dynamic_mask/test_gather.py::TestReference")
class TestReference(DynamicMaskContract):
    backend = "reference"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("deterministic", [False, True], ids=["atomic", "deterministic"])
@pytest.mark.parametrize("case", [c for c in CASES if c.head_dim == 16], ids=str)
def test_triton_kernels_in_small_tiles(monkeypatch, case, deterministic):
    """Force many tiles and many stretches of sorted keys, which the configuration chosen for these sizes does not give."""
    monkeypatch.setattr(launchers, "pick", lambda *shape: launchers.Config(16, 16, (4, 1), 4))
    monkeypatch.setattr(launchers, "GRAIN", 16)
    few = replace(case, batch=min(case.batch, 2), q_len=min(case.q_len, 44), kv_len=min(case.kv_len, 44), keep=min(case.keep, 50))
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic)
    try:
        results = check_dynamic_mask(few, torch.float32, DEVICE, "gather")
    finally:
        torch.use_deterministic_algorithms(before)
    assert all(r.ok for r in results), report(few, results)


@pytest.mark.parametrize("deterministic", [False, True], ids=["atomic", "deterministic"])
def test_gradients_beside_large_scores_of_several_keys(deterministic):
    """Scores of 4,096, beside which lse has lost the logarithm of the sum: delta is divided by it as the incoming gradient is."""
    query, key, value, dout = (torch.randn(1, 2, 20, 16, device=DEVICE) for _ in range(4))
    scores = torch.full((1, 2, 20), 4096.0, device=DEVICE)

    def gradients_of(backend, dtype):
        leaves = [x.to(dtype).requires_grad_() for x in (query, key, value, scores)]
        out = saccade.dynamic_mask_attention(*leaves, keep=20, backend=backend)
        return torch.autograd.grad(out, leaves, dout.to(dtype))

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic)
    try:
        found = gradients_of("gather", torch.float32)
    finally:
        torch.use_deterministic_algorithms(before)
    for x, y in zip(found, gradients_of("reference", torch.float64), strict=True):
        torch.testing.assert_close(x.double(), y, rtol=0, atol=0.01)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dim", [16, 64, 128, 200, 256])
@pytest.mark.parametrize("group", [1, 3, 4, 8, 32])
def test_tiles_are_smaller_where_shared_memory_is(group, dim, size):
    """Compiled for sm_86, backward uses at most six times the bytes of its rows: 65 of 99 KiB at D = 256 in float32."""
    for arch, limit in ((86, 16), (80, 32), (90, 32)):
        config = launchers.pick(group, dim, size, arch)
        rows = config.block_q * launchers.pow2(group)
        assert 16 <= rows <= 128
        assert rows * launchers.pow2(dim) * size <= max(limit * 1024, 32 * launchers.pow2(dim) * size)


@pytest.mark.parametrize("backend", ["gather", IN_CPP, "gather_torch"])
@pytest.mark.parametrize("kind", [torch.float16, torch.float64], ids=str)
def test_scores_of_another_dtype(kind, backend):
    """Mixed dtypes; on sm_90 the copies of the kernels do not convert."""
    query, key, value = (torch.randn(1, 2, 70, 64, device=DEVICE, dtype=torch.float16, requires_grad=True) for _ in "qkv")
    scores = torch.randn(1, 2, 70, device=DEVICE).half()  # the same numbers in every dtype
    given, wide = scores.to(kind).requires_grad_(), scores.float().requires_grad_()
    outs = [saccade.dynamic_mask_attention(query, key, value, s, keep=9, backend=backend) for s in (given, wide)]
    torch.testing.assert_close(outs[0], outs[1], rtol=2e-3, atol=2e-3)
    grads = [torch.autograd.grad(o.float().square().sum(), s)[0] for o, s in zip(outs, (given, wide), strict=True)]
    assert grads[0].dtype == kind
    torch.testing.assert_close(grads[0].float(), grads[1], rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("backend", [IN_CPP, "gather_torch", "reference"])
def test_autocast_casts_query_key_and_value_alone(backend):
    query, key, value = (torch.randn(1, 2, 30, 16, device=DEVICE) for _ in "qkv")
    scores = torch.randn(1, 2, 30, device=DEVICE)
    leaves = [x.bfloat16().requires_grad_() for x in (query, key, value)]
    expected = saccade.dynamic_mask_attention(*leaves, scores, keep=9, backend=backend)
    wanted = torch.autograd.grad(expected, leaves, torch.ones_like(expected))
    with torch.autocast(DEVICE, torch.bfloat16):
        out = saccade.dynamic_mask_attention(query, key.bfloat16(), value, scores, keep=9, backend=backend)
        again = saccade.dynamic_mask_attention(*leaves, scores, keep=9, backend=backend)
        # torch differentiates the reference and casts here
        if backend == "gather_torch":
            found = torch.autograd.grad(again, leaves, torch.ones_like(again))
            assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, expected)


def test_what_the_triton_kernels_decline():
    leaves, options = problem()
    with pytest.raises(saccade.UnsupportedProblem, match=r"needs bfloat16, float16 or float32, got torch\.float64"):
        saccade.dynamic_mask_attention(*leaves, **options, backend="gather")


def test_a_future_token_changes_nothing_before_it():
    leaves, options = problem()
    before = saccade.dynamic_mask_attention(*leaves, **options)
    changed = [x.detach().clone() for x in leaves]
    for x in changed[1:3]:
        x[:, :, 100:] = 7.0
    changed[3][:, :, 100:] = 50.0
    after = saccade.dynamic_mask_attention(*changed, **options)
    # not bitwise equal: a block's products are summed over a list that may contain later, masked keys
    torch.testing.assert_close(before[:, :, :100], after[:, :, :100], rtol=1e-13, atol=1e-13)
    assert (before[:, :, 100:] - after[:, :, 100:]).abs().amax() > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_working_dtypes(dtype):
    leaves, options = problem()
    exact = saccade.dynamic_mask_attention(*leaves, **options)
    low = [x.detach().to(dtype).requires_grad_() for x in leaves[:3]]
    out = saccade.dynamic_mask_attention(*low, leaves[3].detach().float(), **options)
    assert out.dtype == dtype
    error = (out.double() - exact).norm() / exact.norm()
    assert error < 4 * torch.finfo(dtype).eps
    assert all(g.dtype == dtype for g in torch.autograd.grad(out.float().square().sum(), low))


@pytest.mark.parametrize("backend", ["gather", IN_CPP, "gather_torch", "reference"])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("keep", [sys.maxsize, 2**70])
def test_any_number_to_keep(keep, is_causal, backend):
    query, key, value = (torch.randn(2, 2, 20, 16, device=DEVICE) for _ in "qkv")
    scores = torch.randn(2, 2, 20, device=DEVICE)
    ids = torch.tensor([0] * 7 + [1] * 13, device=DEVICE).expand(2, -1)
    for options in ({}, {"document_ids": ids}, {"lengths": torch.tensor([20, 4], device=DEVICE)}):
        options |= {"is_causal": is_causal, "backend": backend}
        expected = saccade.dynamic_mask_attention(query, key, value, scores, keep=20, **options)
        assert torch.equal(saccade.dynamic_mask_attention(query, key, value, scores, keep=keep, **options), expected)
    assert torch.equal(saccade.expiry(scores, keep, document_ids=ids), saccade.expiry(scores, 20, document_ids=ids))


SIZES = {"batch": 2, "heads": 4, "kv_heads": 2, "q_len": 5, "kv_len": 7, "dim": 16, "width": 16}
EMPTY = [
    {"batch": 0}, {"q_len": 0}, {"heads": 0, "kv_heads": 0}, {"width": 0}, {"q_len": 0, "kv_len": 0}, {"dim": 0},
    {"is_causal": False, "kv_len": 0}, {"batch": 0, "documents": True}, {"batch": 0, "lengths": True}, {"q_len": 0, "lengths": True},
]  # fmt: skip


@pytest.mark.parametrize("backend", ["auto", "gather", IN_CPP, "gather_torch", "reference"])
@pytest.mark.parametrize("changes", EMPTY, ids=str)
def test_empty_tensors(changes, backend):
    sizes = SIZES | changes
    batch, kv_len = sizes["batch"], sizes["kv_len"]
    if backend == "gather" and (sizes["width"] != sizes["dim"] or not sizes["dim"]):
        pytest.skip("declined")
    query = torch.randn(batch, sizes["heads"], sizes["q_len"], sizes["dim"], device=DEVICE)
    key = torch.randn(batch, sizes["kv_heads"], kv_len, sizes["dim"], device=DEVICE)
    value = torch.randn(batch, sizes["kv_heads"], kv_len, sizes["width"], device=DEVICE)
    leaves = [x.requires_grad_() for x in (query, key, value, torch.randn(key.shape[:3], device=DEVICE))]
    options = {"keep": 3, "enable_gqa": True, "backend": backend, "is_causal": sizes.get("is_causal", True)}
    if "documents" in sizes:
        options["document_ids"] = torch.zeros(batch, kv_len, dtype=torch.int64, device=DEVICE)
    if "lengths" in sizes:
        options["lengths"] = torch.full((batch,), kv_len, device=DEVICE)
    out, lse = saccade.dynamic_mask_attention(*leaves, return_lse=True, **options)
    assert out.shape == (*query.shape[:3], sizes["width"])
    assert lse.shape == query.shape[:3]
    if sizes["kv_len"] == 0:
        assert (out == 0).all()
        assert (lse == -torch.inf).all()
    else:
        assert lse.isfinite().all()
    grads = torch.autograd.grad((out.sum() + lse.nan_to_num(neginf=0.0).sum()), leaves)
    assert all(g.shape == x.shape and g.isfinite().all() for g, x in zip(grads, leaves, strict=True))
    with torch.no_grad():
        assert saccade.dynamic_mask_attention(*leaves, **options).shape == out.shape
        assert saccade.expiry(leaves[3], 3).shape == key.shape[:3]


def test_gradcheck():
    leaves, _ = problem(keep=5, q_len=9)
    small = [x.detach()[:1, :, -n:].clone().requires_grad_() for x, n in zip(leaves, (9, 20, 20, 20), strict=True)]
    for backend in ("gather_torch", "reference"):
        assert torch.autograd.gradcheck(
            lambda *x, b=backend: saccade.dynamic_mask_attention(*x, keep=5, return_lse=True, backend=b), small
        )


def test_memory_of_lists_is_linear():
    scores = torch.randn(1, 1, 4096)
    sizes = []
    for length in (1024, 2048, 4096):
        start, stop = saccade.dynamic_mask.selection.intervals.intervals(scores[..., :length], 64, length, True, None, None)
        keys, *_ = saccade.dynamic_mask.selection.intervals.block_lists(start, stop, length, 128)
        sizes.append(keys.numel())
    assert sizes[2] <= 2.2 * sizes[1] <= 2.2 * 2.2 * sizes[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("bad", "fault"), [(float("nan"), "nan"), (float("-inf"), "-inf"), (None, None)], ids=str)
def test_scores_are_checked_wherever_they_lie(bad, fault, dtype):
    # on a GPU the result of the check reaches the host after the call: invalid scores must still raise, the largest finite ones
    # must not
    query, key, value = (torch.randn(1, 2, 300, 16, device=DEVICE) for _ in range(3))
    scores = torch.full((1, 2, 300), torch.finfo(dtype).max, dtype=dtype, device=DEVICE)
    if bad is None:
        saccade.dynamic_mask_attention(query, key, value, scores, keep=8, add_scores=False)
        return
    scores[0, 1, 299] = bad
    with pytest.raises(saccade.InvalidArgument, match=rf"key_scores holds {fault} at \[0, 1, 299\]"):
        saccade.dynamic_mask_attention(query, key, value, scores, keep=8, add_scores=False)


@pytest.mark.gpu
def test_the_host_does_not_wait_for_the_attention():
    # forward returns while it runs, because the work queued after the check takes longer than the call
    query, key, value = (torch.randn(1, 8, 65536, 128, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    scores = torch.randn(1, 8, 65536, device="cuda")
    for _ in range(2):
        saccade.dynamic_mask_attention(query, key, value, scores, keep=2048)
    torch.cuda.synchronize()
    saccade.dynamic_mask_attention(query, key, value, scores, keep=2048)
    done = torch.cuda.Event()
    done.record()
    assert not done.query()


def test_explain_says_which_kernels_run(monkeypatch):
    def config(**change):
        known = {"batch": 1, "heads": 8, "kv_heads": 2, "q_len": 64, "kv_len": 64, "head_dim": 128, "value_dim": 128, "keep": 9}
        known |= {"dtype": torch.bfloat16, "device_type": "cuda", "arch": 90, "scale": 0.1, "is_causal": True, "lengths": False}
        known |= {"documents": False, "add_scores": True, "needs_grad": False, "last_strides": (1, 1, 1), **change}
        return GATHER.form(DynamicMaskProblem(**known))

    monkeypatch.setattr("saccade.nvrtc.obstacles", lambda architecture: ())
    assert config() == "CUDA C++ for sm_90a"
    assert config(arch=80) == config(dtype=torch.float32) == config(head_dim=96) == "Triton"
    monkeypatch.setattr("saccade.nvrtc.obstacles", lambda architecture: ("no NVRTC; pip install saccade-attention[cu12]",))
    assert (
        config()
        == "Triton, two to three times slower than the kernels in CUDA C++: no NVRTC; pip install saccade-attention[cu12]"
    )
