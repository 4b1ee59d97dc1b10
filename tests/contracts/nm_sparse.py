"""The contract of every backend of `nm_sparse_attention` with kernels. The test of a backend inherits `NMSparseContract` and
names the backend."""

from __future__ import annotations

import math
import mmap
from dataclasses import replace

import pytest
import torch
from contracts.exact import DEVICE, DTYPES, named

import saccade
from saccade.nm_sparse import op as ops_nm_sparse
from saccade.nm_sparse.args import NMSparseArgs
from saccade.nm_sparse.bits import recompute_selection, words_of
from saccade.nm_sparse.problem import NMSparseProblem, describe_nm_sparse
from saccade.nm_sparse.reference import padded_group
from saccade.nm_sparse.testing.cases import NM_SPARSE
from saccade.nm_sparse.testing.check import check_nm_sparse, public_call, selection_of
from saccade.nm_sparse.testing.inputs import block_mask_of, make_nm_sparse, make_ties
from saccade.operations import find
from saccade.testing.baseline import differentiate
from saccade.testing.inputs import time_first
from saccade.testing.judge import report

QUICK = [c for c in NM_SPARSE if "quick" in c.tags]
PLAIN = NM_SPARSE[0]
# what a mask of queries or heads may be, and what may stand beside it: (view of a mask [B, H, Tq, Tk], options of the case)
QUERY_MASKS = {
    "full": (lambda mask: mask, {}),
    "rank 2": (lambda mask: mask[0, 0], {}),
    "a batch row's": (lambda mask: mask[:, :1], {}),
    "a head's keys": (lambda mask: mask[:1, :, :1], {}),
    "a query's": (lambda mask: mask[..., 3:4], {}),
    "columns first": (lambda mask: mask.mT.contiguous().mT, {}),
    "expanded": (lambda mask: mask[:1, :1].expand(mask.shape), {}),
    "window": (lambda mask: torch.ones_like(mask[0, 0]).tril(40).triu(-40), {}),
    "lengths": (lambda mask: mask, {"lengths": True}),
    "lengths, causal": (lambda mask: None, {"lengths": True, "is_causal": True}),
    "blocks": (lambda mask: mask, {"blocks": True}),
    "dropout": (lambda mask: mask, {"dropout_p": 0.3}),
    "everything": (lambda mask: None, {"lengths": True, "is_causal": True, "blocks": True, "dropout_p": 0.3}),
}

# what a bias may be, and what may stand beside it: (view of a bias [B, H, Tq, Tk], options of the case)
BIASES = {
    "full": (lambda bias: bias, {}),
    "float32": (lambda bias: bias.float(), {}),
    "rank 2": (lambda bias: bias[0, 0], {}),
    "a batch row's": (lambda bias: bias[:, :1], {}),
    "a head's": (lambda bias: bias[:1], {}),
    "keys": (lambda bias: bias[:, :1, 1:2], {}),
    "keys of heads, float32": (lambda bias: bias[:1, :, 1:2].float(), {}),
    "a query's": (lambda bias: bias[..., 3:4], {}),
    "columns first": (lambda bias: bias.mT.contiguous().mT, {}),
    "whole sixteens": (lambda bias: bias[:, :, :320, :448], {"q_len": 320, "kv_len": 448}),
    "lengths": (lambda bias: bias, {"lengths": True}),
    "blocks": (lambda bias: bias, {"blocks": True}),
    "dropout": (lambda bias: bias, {"dropout_p": 0.3}),
    "everything": (lambda bias: bias, {"lengths": True, "blocks": True, "dropout_p": 0.3}),
}


def problem_of(case, inputs) -> NMSparseProblem:
    """The call of a case, described."""
    return describe_nm_sparse(
        inputs.query, inputs.key, inputs.value, inputs.attn_mask, case.dropout_p, case.is_causal, None, case.heads != case.kv_heads,
        case.pattern, block_mask_of(case, inputs.query.device), inputs.lengths, True, True,
        case.dense_first, case.dense_recent,
    )  # fmt: skip


def check_query_mask(kind: str, pattern: str, head_dim: int, dtype: torch.dtype) -> None:
    """Backend `mma_sp` against float64 on several blocks and tiles with a mask of `QUERY_MASKS`, forward and backward."""
    view, options = QUERY_MASKS[kind]
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "q_len": 333, "kv_len": 451, "head_dim": head_dim}
    case = replace(PLAIN, name=kind, pattern=pattern, **sizes, **options)
    inputs = make_nm_sparse(case, dtype, DEVICE)
    mask = torch.rand(2, 4, 333, 451, generator=torch.Generator().manual_seed(0)) < 0.6
    mask[:, :, 100], mask[..., 5], mask[1, 2], mask[0, :, 64:128, 64:256] = False, False, False, False
    inputs = replace(inputs, mask=view(mask.to(DEVICE)))
    reasons = find("nm_sparse_attention", "mma_sp").why_not(problem_of(case, inputs))
    if reasons:
        pytest.skip("; ".join(reasons))
    results = check_nm_sparse(case, dtype, DEVICE, "mma_sp", inputs=inputs)
    assert all(r.ok for r in results), report(case, results)


def check_bias(kind: str, pattern: str, head_dim: int, dtype: torch.dtype) -> None:
    """Backend `mma_sp` against float64 on several blocks and tiles with a bias of `BIASES`, forward and backward."""
    view, options = BIASES[kind]
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "q_len": 333, "kv_len": 451, "head_dim": head_dim}
    bias = torch.randn(2, 4, 333, 451, generator=torch.Generator().manual_seed(0))
    bias[:, :, 100], bias[..., 5], bias[1, 2, 3:], bias[0, :, 64:128, 64:256] = -torch.inf, -torch.inf, -torch.inf, -torch.inf
    bias = view(bias.to(dtype).to(DEVICE))
    case = replace(PLAIN, name=kind, pattern=pattern, bias=tuple(bias.shape), **{**sizes, **options})
    inputs = replace(make_nm_sparse(case, dtype, DEVICE), bias=bias)
    reasons = find("nm_sparse_attention", "mma_sp").why_not(problem_of(case, inputs))
    if reasons:
        pytest.skip("; ".join(reasons))
    results = check_nm_sparse(case, dtype, DEVICE, "mma_sp", inputs=inputs)
    assert {"selection", "out", "lse", "dq", "dk", "dv", "dbias"} <= {r.name for r in results}
    assert all(r.ok for r in results), report(case, results)


class NMSparseContract:
    """Inherit and set `backend`; `dtype` is used by single tests. Calls that the backend declines are skipped with its reasons;
    which calls these are has a test of its own."""

    backend: str
    dtype = torch.float32

    def taken(self, case, inputs):
        """The inputs; skips the test if the backend declines the call."""
        reasons = find("nm_sparse_attention", self.backend).why_not(problem_of(case, inputs))
        if reasons:
            pytest.skip("; ".join(reasons))
        return inputs

    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("dtype", DTYPES, ids=named)
    @pytest.mark.parametrize("case", NM_SPARSE, ids=str)
    def test_budget(self, case, dtype):
        self.taken(case, make_nm_sparse(case, dtype, DEVICE))
        results = check_nm_sparse(case, dtype, DEVICE, self.backend)
        assert {"selection", "out", "lse", "dq", "dk", "dv"} <= {r.name for r in results}
        assert all(r.ok for r in results), report(case, results)

    @pytest.mark.parametrize("dtype", DTYPES, ids=named)
    @pytest.mark.parametrize("case", QUICK, ids=str)
    def test_ties_go_to_the_lower_index(self, case, dtype):
        """Integer scores are exact, so the selection must equal the reference's, ties included."""
        if case.keys_hidden:
            pytest.skip("NaN has no ties")
        inputs = self.taken(case, make_ties(case, dtype, DEVICE))
        ours, theirs = (selection_of(case, inputs, b, 0.25) for b in (self.backend, "reference"))
        assert torch.equal(ours, theirs)

    @pytest.mark.parametrize("pattern", ["1:2", "2:4", "2:3"])
    def test_rows_that_are_all_equal(self, pattern):
        keep, group = map(int, pattern.split(":"))
        case = replace(PLAIN, pattern=pattern)
        inputs = self.taken(case, make_nm_sparse(case, self.dtype, DEVICE))
        inputs = replace(inputs, query=torch.zeros_like(inputs.query))
        kept = selection_of(case, inputs, self.backend)
        expected = torch.arange(case.kv_len, device=kept.device) % group < keep
        assert torch.equal(kept, expected.expand_as(kept))

    def test_a_row_without_a_visible_key(self):
        case = next(c for c in NM_SPARSE if c.name == "mask-full")
        inputs = self.taken(case, make_nm_sparse(case, self.dtype, DEVICE))
        blind = ~inputs.mask.any(-1)
        assert blind.any()
        found = differentiate(public_call(case, self.backend, True), inputs, 0, True)
        assert (found["out"][blind] == 0).all()
        assert (found["lse"][blind] == -torch.inf).all()
        assert (found["dq"][blind] == 0).all()
        assert not any(x.isnan().any() for x in found.values())

    @pytest.mark.parametrize("incoming", [math.nan, math.inf])
    def test_what_comes_back_to_the_lse_of_a_row_without_a_visible_key(self, incoming):
        case = replace(next(c for c in NM_SPARSE if c.name == "mask-full"), lse_grad=True)
        inputs = self.taken(case, make_nm_sparse(case, self.dtype, DEVICE))
        blind = ~inputs.mask.any(-1).expand(inputs.dlse.shape)
        assert blind.any()
        expected, found = (
            differentiate(public_call(case, self.backend, True), replace(inputs, dlse=inputs.dlse.masked_fill(blind, x)), 0, True)
            for x in (0.0, incoming)
        )
        for name, x in found.items():
            torch.testing.assert_close(x, expected[name], rtol=0, atol=0, msg=name)

    def test_nan_in_a_visible_key_propagates(self):
        inputs = make_nm_sparse(PLAIN, self.dtype, DEVICE)
        inputs.key[0, 0, 5] = float("nan")
        out, lse = public_call(PLAIN, self.backend, True)(inputs)
        assert out[0, 0].isnan().all()
        assert lse[0, 0].isnan().all()
        assert not out[1].isnan().any()

    def test_minus_infinity_in_a_bias_hides_a_key(self):
        case = next(c for c in NM_SPARSE if c.name == "bias-full")
        inputs = self.taken(case, make_nm_sparse(case, self.dtype, DEVICE))
        inputs.bias[..., ::3] = -torch.inf
        inputs.bias[..., 2, :] = -torch.inf
        results = check_nm_sparse(case, self.dtype, DEVICE, self.backend, inputs=inputs)
        assert all(r.ok for r in results), report(case, results)
        assert not selection_of(case, inputs, self.backend)[..., ::3].any()

    def test_dropout_is_replayed_and_follows_the_seed(self):
        case = next(c for c in NM_SPARSE if c.name == "dropout")
        inputs = self.taken(case, make_nm_sparse(case, self.dtype, DEVICE))
        run = public_call(case, self.backend, True)
        torch.manual_seed(3)
        first, again = run(inputs)[0], run(inputs)[0]
        torch.manual_seed(3)
        assert torch.equal(first, run(inputs)[0])
        assert not torch.equal(first, again)

    def test_out_has_the_layout_of_query(self):
        inputs = make_nm_sparse(PLAIN, self.dtype, DEVICE)
        q, k, v = inputs.query, inputs.key, inputs.value
        assert not q.is_contiguous()
        out = saccade.nm_sparse_attention(q, k, v, backend=self.backend)
        assert out.stride() == q.stride()
        same = saccade.nm_sparse_attention(q.contiguous(), k.contiguous(), v.contiguous(), backend=self.backend)
        assert same.is_contiguous()
        assert torch.equal(out, same)
        q, k, v = (time_first(x).requires_grad_() for x in (q, k, v))
        same = saccade.nm_sparse_attention(q, k, v, backend=self.backend)
        assert same.permute(2, 0, 1, 3).is_contiguous()
        assert torch.equal(out, same)
        for x in torch.autograd.grad(same, (q, k, v), inputs.dout):
            assert x.permute(2, 0, 1, 3).is_contiguous()

    def test_no_keys_and_no_queries(self):
        q = torch.randn(1, 1, 3, 16, device=DEVICE, dtype=self.dtype)
        none = torch.randn(1, 1, 0, 16, device=DEVICE, dtype=self.dtype, requires_grad=True)
        out, lse = saccade.nm_sparse_attention(q, none, none, return_lse=True, backend=self.backend)
        assert (out == 0).all()
        assert (lse == -torch.inf).all()
        out.sum().backward()
        assert saccade.nm_sparse_attention(none, q, q, backend=self.backend).shape == (1, 1, 0, 16)

    def test_backward_takes_the_selection_it_is_given(self):
        """Backward with the selection of another forward, here a fixed one that no scores would choose."""
        inputs = make_nm_sparse(PLAIN, torch.float32, DEVICE)
        q, k, v = inputs.query, inputs.key, inputs.value
        args = NMSparseArgs(q, k, v, None, None, None, None, 2, 4, 0.0, False, 0.25)
        kept = (torch.arange(PLAIN.kv_len, device=DEVICE) % 4 >= 2).expand(2, 2, PLAIN.q_len, PLAIN.kv_len)
        leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
        out, lse = saccade.attention(*leaves, kept, scale=0.25, return_lse=True, backend="reference")
        wanted = torch.autograd.grad(out, leaves, inputs.dout.double())
        bits = pack(kept, 4)
        found = ops_nm_sparse.backward(
            args, inputs.dout, None, out.float().detach(), lse.float().detach(), bits, False, self.backend
        )
        for ours, theirs in zip(found[:3], wanted, strict=True):
            torch.testing.assert_close(ours, theirs.float(), rtol=1e-4, atol=1e-5)

    def test_recomputed_selections_give_the_same_bits(self):
        case = next(c for c in NM_SPARSE if c.name == "grouped-everything")
        inputs = self.taken(case, make_nm_sparse(case, torch.float16, DEVICE))
        stored = differentiate(public_call(case, self.backend, True), inputs, 0, True)
        with recompute_selection():
            saved = []
            with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x.dtype), x)[1], lambda x: x):
                again = differentiate(public_call(case, self.backend, True), inputs, 0, True)
        assert torch.int32 not in saved
        assert all(torch.equal(x, again[name]) for name, x in stored.items())

    @pytest.mark.parametrize(
        "view",
        [((3, 1, 5, 16), (2**30, 80, 16, 1)), ((1, 3, 5, 16), (240, 2**30, 16, 1)), ((1, 1, 3, 16), (48, 48, 2**30, 1))],
        ids=["batch", "head", "row"],
    )
    def test_huge_strides(self, view):
        # each stride fits an int32, twice the stride does not; untouched pages cost nothing
        elements = 2**31 + 128
        if DEVICE == "cuda":
            block = torch.empty(elements, dtype=torch.float16, device=DEVICE)
        else:
            block = torch.frombuffer(mmap.mmap(-1, 2 * elements), dtype=torch.float16)
        far, near = block.as_strided(*view), torch.randn(view[0], device=DEVICE).half()
        far.copy_(near)
        query = torch.randn(view[0], device=DEVICE).half()
        results = []
        for key in (far, near):
            leaves = [x.requires_grad_() for x in (query.detach(), key.detach())]
            out = saccade.nm_sparse_attention(leaves[0], leaves[1], leaves[1], backend=self.backend)
            results.append((out, *torch.autograd.grad(out.sum(), leaves[:1])))
        assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))

    def test_second_derivatives_raise(self):
        q = make_nm_sparse(PLAIN, self.dtype, DEVICE).query.detach().requires_grad_()
        out = saccade.nm_sparse_attention(q, q, q, backend=self.backend)
        (gradient,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative"):
            gradient.sum().backward()


def pack(kept, group):
    """The inverse of `unpack_selection`, written independently of `pack_selection`."""
    keys = torch.arange(kept.shape[-1], device=kept.device)
    padded = padded_group(group)
    words = words_of(kept.shape[-1], group)
    slots = torch.zeros(*kept.shape[:-1], words * 32, dtype=torch.int64, device=kept.device)
    slots[..., keys // group * padded + keys % group] = kept.long()
    packed = (slots.unflatten(-1, (words, 32)) << torch.arange(32, device=kept.device)).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()
