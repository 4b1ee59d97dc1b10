"""Gathered blocks against dense attention under the brute-force mask: outputs, lse and every gradient in float64."""

from __future__ import annotations

import pytest
import torch
from contracts.attention import DEVICE

import saccade
from saccade.kernels.dynamic_mask import gather_torch, launchers
from saccade.reference.dynamic_mask import attend, kept

CASES = {
    "causal": {},
    "window of one": {"keep": 1},
    "everything kept": {"keep": 400},
    "ties": {"ties": True},
    "fewer queries": {"q_len": 37},
    "one query": {"q_len": 1},
    "grouped": {"heads": 4},
    "not causal": {"is_causal": False},
    "not causal, more queries": {"is_causal": False, "q_len": 170},
    "lengths": {"lengths": [150, 0, 77]},
    "documents": {"documents": True},
    "documents, lengths, grouped, ties": {"documents": True, "lengths": [150, 3, 77], "heads": 4, "ties": True},
    "ranking only": {"add_scores": False},
    "not causal documents": {"is_causal": False, "documents": True, "lengths": [150, 9, 100]},
}


def problem(keep=12, q_len=150, heads=2, is_causal=True, lengths=None, documents=False, add_scores=True, ties=False):
    torch.manual_seed(0)
    batch, kv_heads, kv_len, dim = 3, 2, 150, 8
    leaves = [
        torch.randn(batch, h, t, dim, dtype=torch.float64, requires_grad=True)
        for h, t in ((heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len))
    ]
    scores = torch.randn(batch, kv_heads, kv_len, dtype=torch.float64)
    leaves.append((scores.round() if ties else scores).requires_grad_())
    options = {
        "keep": keep,
        "is_causal": is_causal,
        "add_scores": add_scores,
        "enable_gqa": heads != kv_heads,
        "lengths": None if lengths is None else torch.tensor(lengths),
        "document_ids": torch.randint(0, 4, (batch, kv_len)).sort(-1).values if documents else None,
    }
    return leaves, options


def gradients(out, lse, leaves):
    torch.manual_seed(1)
    finite = lse.isfinite()
    dout, dlse = (torch.randn(x.shape, dtype=torch.float64).to(x) for x in (out, lse))  # the same numbers in every dtype
    loss = (out * dout).sum() + (lse.masked_fill(~finite, 0.0) * dlse).sum()
    return torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize("block", [1, 16, 128])
@pytest.mark.parametrize("name", CASES)
def test_against_dense_attention_under_the_brute_force_mask(monkeypatch, name, block):
    monkeypatch.setattr(gather_torch, "BLOCK", block)
    leaves, options = problem(**CASES[name])
    out, lse = saccade.dynamic_mask_attention(*leaves, **options, return_lse=True, backend="gather_torch")
    scores = leaves[3]
    mask = kept(scores, options["keep"], out.shape[2], options["is_causal"], options["lengths"], options["document_ids"])
    want, want_lse = attend(*leaves, mask, scale=8**-0.5, add_scores=options["add_scores"])
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)
    for ours, theirs in zip(gradients(out, lse, leaves), gradients(want, want_lse, leaves), strict=True):
        torch.testing.assert_close(ours, theirs)


def small(case, dtype):
    """The cases at a size for the interpreter: 44 tokens, in `dtype`."""
    leaves, options = problem(**case)
    q_len = {150: 44, 170: 50}.get(leaves[0].shape[2], leaves[0].shape[2])
    lengths = (q_len, 44, 44, 44)
    leaves = [x.detach()[:2, :, :n].to(dtype).requires_grad_() for x, n in zip(leaves, lengths, strict=True)]
    leaves[3] = leaves[3].detach().float().requires_grad_()
    if options["lengths"] is not None:
        options["lengths"] = options["lengths"][:2].clamp(max=44)
    if options["document_ids"] is not None:
        options["document_ids"] = options["document_ids"][:2, ::4][:, :37].repeat_interleave(2, 1)[:, :44].contiguous()
    options["keep"] = min(options["keep"], 7) if options["keep"] < 100 else options["keep"]
    return [x.to(DEVICE).detach().requires_grad_() for x in leaves], {
        name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in options.items()
    }


@pytest.mark.parametrize("deterministic", [False, True], ids=["atomic", "deterministic"])
@pytest.mark.parametrize("name", CASES)
def test_triton_kernels_against_the_reference(monkeypatch, name, deterministic):
    monkeypatch.setattr(launchers, "pick", lambda group, dim: launchers.Config(16, 16, 4, 1))
    monkeypatch.setattr(launchers, "GRAIN", 16)
    leaves, options = small(CASES[name], torch.float32)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic)
    try:
        out, lse = saccade.dynamic_mask_attention(*leaves, **options, return_lse=True, backend="gather")
        ours = gradients(out, lse, leaves)
    finally:
        torch.use_deterministic_algorithms(before)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    want, want_lse = saccade.dynamic_mask_attention(*wide, **options, return_lse=True, backend="reference")
    torch.testing.assert_close(out.double(), want, rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(lse.double(), want_lse, rtol=2e-5, atol=2e-6)
    for mine, theirs in zip(ours, gradients(want, want_lse, wide), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=2e-4, atol=2e-5)


def test_triton_kernels_as_they_are_chosen():
    leaves, options = small({"heads": 4, "documents": True}, torch.float16)
    out, lse = saccade.dynamic_mask_attention(*leaves, **options, return_lse=True, backend="gather")
    wide = [x.detach().double().requires_grad_() for x in leaves]
    want, want_lse = saccade.dynamic_mask_attention(*wide, **options, return_lse=True, backend="reference")
    assert (out.double() - want).norm() / want.norm() < 2e-3
    for mine, theirs in zip(gradients(out, lse, leaves), gradients(want, want_lse, wide), strict=True):
        assert (mine.double() - theirs).norm() / theirs.norm() < 4e-3


def test_what_the_triton_kernels_decline():
    leaves, options = problem()
    with pytest.raises(saccade.UnsupportedProblem, match=r"needs bfloat16, float16 or float32, got torch\.float64"):
        saccade.dynamic_mask_attention(*leaves, **options, backend="gather")


def test_keys_that_nobody_keeps_get_exactly_no_gradient():
    leaves, options = problem(keep=3)
    out = saccade.dynamic_mask_attention(*leaves, **options)
    nobody = ~kept(leaves[3], 3, 150).any(2)
    assert nobody.any()
    _, dk, dv, dscores = torch.autograd.grad(out.square().sum(), leaves)
    assert (dk[nobody] == 0).all()
    assert (dv[nobody] == 0).all()
    assert (dscores[nobody] == 0).all()
    assert (dscores[~nobody] != 0).any()


def test_a_future_token_changes_nothing_before_it():
    leaves, options = problem()
    before = saccade.dynamic_mask_attention(*leaves, **options)
    changed = [x.detach().clone() for x in leaves]
    for x in changed[1:3]:
        x[:, :, 100:] = 7.0
    changed[3][:, :, 100:] = 50.0
    after = saccade.dynamic_mask_attention(*changed, **options)
    # not the same bits: a block's products are summed over a list that later keys may join, masked
    torch.testing.assert_close(before[:, :, :100], after[:, :, :100], rtol=1e-13, atol=1e-13)
    assert (before[:, :, 100:] - after[:, :, 100:]).abs().amax() > 0.1


def test_padding_may_hold_anything():
    leaves, options = problem(lengths=[150, 20, 77])
    dirty = [x.detach().clone() for x in leaves]
    for b, length in enumerate([150, 20, 77]):
        dirty[1][b, :, length:] = float("nan")
        dirty[2][b, :, length:] = float("nan")
    expected, out = (saccade.dynamic_mask_attention(*x, **options) for x in (leaves, dirty))
    assert torch.equal(expected, out)


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
        start, stop = saccade.selection.intervals(scores[..., :length], 64, length, True, None, None)
        keys, *_ = saccade.selection.block_lists(start, stop, length, 128)
        sizes.append(keys.numel())
    assert sizes[2] <= 2.2 * sizes[1] <= 2.2 * 2.2 * sizes[0]
